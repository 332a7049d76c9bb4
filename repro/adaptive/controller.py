"""θ-adaptive batch size and learning rate: Lee et al., equation 4, Algorithm 1, section III-E."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from repro.adaptive.distance import StartingPoint
from repro.measure.checks import is_number, whole


class DivergedError(ValueError):
    """Training has diverged to numbers that are not finite."""


class DivergenceWarning(UserWarning):
    """Training makes no progress, or loses its progress."""


@dataclass(frozen=True)
class Step:
    """A controller's setting of one epoch."""

    epoch: int  # to train next, from 1
    batch_size: int  # samples of its mini-batches, over all processes
    lr: float  # its learning rate μ; during a warm-up the rate at the epoch's end
    theta: float | None  # θ of the parameters just observed; None for w_0 (0 / 0)
    interval: int | None  # K, None until it is found (∞ in Algorithm 1)
    lr_before: float | None = None  # at the start of an epoch of warm-up; None outside a warm-up
    diverging: bool = False  # the cost's fall has been lost; see `ThetaController`

    def lr_at(self, done: float) -> float:
        """Return the rate after a share of the epoch, `done` = (i + 1) / n for mini-batch i of n.

        A gradual warm-up raises it with every mini-batch (Goyal et al., section 2.2).
        """
        if self.lr_before is None:
            return self.lr
        return self.lr_before + (self.lr - self.lr_before) * done


@dataclass(frozen=True)
class Saturation:
    """The criterion for a saturated training cost, which section III-E leaves open."""

    patience: int = 10  # consecutive epochs without a lower cost
    threshold: float = 0.01  # share below the lowest so far from which a cost counts as lower

    def __post_init__(self) -> None:
        whole("patience", self.patience, 1)
        checked_number("threshold", self.threshold, lambda x: 0 <= x < 1, "from 0 to below 1")


class BatchController:
    """The base of all strategies: epochs, θ, warm-up, decay, saving.

    Call `observe` before training, and after each epoch. All processes observe the same values and
    so decide the same.

    Args:
        initial_batch: B_s, samples of a mini-batch, over all processes.
        max_batch: B_m.
        initial_lr: μ_0.
        growth: Factor by which the batch grows.
        lr_exponent: The rate grows by the batch's factor to this power: 1 keeps the noise scale
            μN/B (equation 2), 0.5 is root scaling (equation 3), 0 keeps the rate.
        decay: β.
        decay_at: Numbers of epochs after which the rate decays, such as (80, 120); or a rule that
            detects a saturated cost.
        warmup: Epochs in which the rate rises to `initial_lr`.
        warmup_from: Rate at the start of the warm-up.
    """

    def __init__(
        self,
        initial_batch: int,
        max_batch: int,
        initial_lr: float,
        growth: float = 2,
        *,
        lr_exponent: float = 1.0,
        decay: float = 0.1,
        decay_at: Sequence[int] | Saturation = (),
        warmup: int = 0,
        warmup_from: float = 0.0,
    ) -> None:
        # Python's numbers, also for numpy's, which no checkpoint takes.
        self.initial_batch = whole("initial_batch", initial_batch, 1)
        self.max_batch = whole("max_batch", max_batch, self.initial_batch)
        self.warmup = whole("warmup", warmup, 0)
        self.initial_lr = checked_number("initial_lr", initial_lr, lambda x: x > 0, "above 0")
        self.growth = checked_number("growth", growth, lambda x: x > 1, "above 1")
        self.lr_exponent = checked_number(
            "lr_exponent", lr_exponent, lambda x: x >= 0, "at least 0"
        )
        self.decay = checked_number("decay", decay, lambda x: 0 < x <= 1, "above 0 and at most 1")
        least = f"0 to initial_lr, {initial_lr:g}"
        self.warmup_from = checked_number(
            "warmup_from", warmup_from, lambda x: 0 <= x <= initial_lr, least
        )
        if not isinstance(decay_at, Saturation):
            if not isinstance(decay_at, Sequence) or list(decay_at) != sorted(set(decay_at)):
                raise ValueError(
                    f"decay_at is {decay_at!r}; give epochs that rise, such as (80, 120), or a "
                    "Saturation"
                )
            decay_at = tuple(whole("decay_at", epoch, 1) for epoch in decay_at)
        self.decay_at = decay_at
        self.interval: int | None = None
        self._start: StartingPoint | None = None
        self._epochs = 0  # completed
        self._batch = self.initial_batch
        self._rate = self.initial_lr  # without warm-up
        self._decays = 0
        self._first_cost = float("nan")
        self._theta: float | None = None
        self._lowest: float | None = None
        self._waited = 0
        self._diverging = False

    def observe(self, epoch_cost: float, parameters: Iterable[Tensor]) -> Step:
        """Take the cost F(w) and the parameters w after an epoch; return the next epoch's setting.

        The first call is for w_0, before any training. The caller chooses F, the same throughout:
        the mean over the epoch's mini-batches, which costs nothing, or the cost of the whole
        training set at w, see `repro.adaptive.full_cost`. For w_0 both are the cost before the
        first update.

        Args:
            epoch_cost: F(w_0), later F(w_i).
            parameters: w, such as ``model.parameters()``; only w_0 is kept.

        Raises:
            DivergedError: The cost or the parameters are not finite.
            ValueError: The parameters are not those of w_0. After an error all is as it was.
        """
        cost, first = float(epoch_cost), self._start is None
        start = self._start or StartingPoint(parameters)
        distance = start.distance(start.tensors if first else parameters)
        if not math.isfinite(cost) or not math.isfinite(distance):
            raise DivergedError(
                f"the cost of epoch {self._epochs + (not first)} is {cost}, and the distance of "
                f"the parameters from w_0 {distance}: training has diverged; lower initial_lr, or "
                "max_batch with it"
            )
        if first:
            self._start, self._first_cost = start, cost
            return self.setting
        # Equation 4. Without a move of the parameters θ is undefined.
        theta = (self._first_cost - cost) / distance if distance > 0 else None
        before = dict(vars(self))
        try:
            batch = min(self._next_batch(self._epochs + 1, theta, cost), self.max_batch)
        except BaseException:  # such as a warning that is an error
            vars(self).update(before)
            raise
        self._epochs += 1
        self._theta = theta
        # By the batch's actual factor, which B_m may have reduced.
        self._rate *= (batch / self._batch) ** self.lr_exponent
        self._batch = batch
        if self._decays_now(cost):
            # Section III-E: first back to μ_0 and times β; from then on only times β.
            self._rate = (self._rate if self._decays else self.initial_lr) * self.decay
            self._decays += 1
        return self.setting

    @property
    def setting(self) -> Step:
        """The setting of the next epoch."""
        number = self._epochs + 1
        given = number, self._batch, self._rate, self._theta, self.interval
        step = Step(*given, diverging=self._diverging)
        if number > self.warmup:
            return step
        climb = (self._rate - self.warmup_from) / self.warmup
        before, after = (self.warmup_from + climb * n for n in (number - 1, number))
        return replace(step, lr=after, lr_before=before)

    def _next_batch(self, n: int, theta: float | None, cost: float) -> int:  # noqa: ARG002 (subclasses use them)
        """Return the batch size after epoch n, before the bound `max_batch`."""
        return self._batch

    def _grown(self) -> int:
        return max(self._batch + 1, round(self._batch * self.growth))

    def _decays_now(self, cost: float) -> bool:
        rule = self.decay_at
        if not isinstance(rule, Saturation):
            return self._epochs in rule
        if self._lowest is None or cost < self._lowest - rule.threshold * abs(self._lowest):
            self._lowest, self._waited = cost, 0
            return False
        self._waited += 1
        if self._waited < rule.patience:
            return False
        self._waited = 0
        return True

    _SETTINGS: ClassVar[tuple[str, ...]] = (
        "initial_batch", "max_batch", "initial_lr", "growth", "lr_exponent", "decay", "warmup",
        "warmup_from",
    )  # fmt: skip
    _STATE: ClassVar[tuple[str, ...]] = (
        "interval", "_epochs", "_batch", "_rate", "_decays", "_first_cost", "_theta", "_lowest",
        "_waited",
    )  # fmt: skip

    def _settings(self) -> dict[str, Any]:
        rule = self.decay_at
        settings: dict[str, Any] = {name: getattr(self, name) for name in self._SETTINGS}
        listed = [rule.patience, rule.threshold] if isinstance(rule, Saturation) else list(rule)
        kinds = {"kind": type(self).__name__, "rule": type(rule).__name__}
        return settings | kinds | {"decay_at": listed}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, including w_0; tensors are not copied."""
        return {
            "settings": self._settings(),
            "state": {name: getattr(self, name) for name in self._STATE},
            "start": None if self._start is None else list(self._start.tensors),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of a controller with the same settings; others are refused."""
        ours, saved = self._settings(), state["settings"]
        # An earlier version's state lacks some settings.
        if names := [name for name in saved if ours.get(name) != saved[name]]:
            differing = (f"{name} {saved[name]!r}, here {ours.get(name)!r}" for name in names)
            raise ValueError(
                f"the saved state is of other settings ({', '.join(differing)}); make the "
                "controller with the saved ones, or start anew"
            )
        for name in self._STATE:
            setattr(self, name, state["state"][name])
        start = state["start"]
        self._start = None if start is None else StartingPoint(start)


class ThetaController(BatchController):
    """Algorithm 1 with the learning rate of section III-E.

    K is the first epoch after which θ has changed by at most `tolerance` since the epoch before.
    From then on the batch size and the rate grow together after every K-th epoch, K itself
    included, until the batch size is B_m. The first decay resets the rate to μ_0 and multiplies it
    by β; later decays multiply it by β.

    Differs from the paper: line 9 finds K during training, whereas the paper reads it off a plotted
    curve; and only while training makes progress, since without progress θ does not change either.
    K is found after an epoch with the lowest cost so far, while costs have been falling since w_0.
    A growth is postponed to the next multiple of K unless costs have been falling since the growth
    before (or over the last ten epochs, if that is fewer), a cost since then is below the level
    at that growth, and the last cost is below F(w_0). Falling costs are detected by Mann and
    Kendall's test of a trend. If half of the cost's fall is lost in two consecutive epochs, after
    the fourth, by more than the costs' scatter, the step's `diverging` is set and a
    `DivergenceWarning` is given, once until there is progress again. While costs fall, the
    algorithm is the printed one.

    If an epoch ends with both a growth and a decay, the growth comes first. A batch size that is
    below B_m at the first decay keeps growing, as in line 11.

    Args:
        initial_batch: B_s; `max_stable_batch` finds one.
        max_batch: B_m.
        initial_lr: μ_0, the rate for B_s.
        growth: Factor by which batch size and rate grow.
        tolerance: Largest relative change of a saturated θ.
        interval: K, if known; None finds it.
        **options: `decay`, `decay_at`, `warmup`, `warmup_from`, `lr_exponent`, see
            `BatchController`. K is not sought during a warm-up: the small rate keeps w close to
            w_0, and θ high.
    """

    _SETTINGS = (*BatchController._SETTINGS, "tolerance", "fixed_interval")
    _STATE = (
        *BatchController._STATE, "_least_cost", "_least_since", "_grown_at", "_grown_in", "_costs",
        "_losing", "_diverging",
    )  # fmt: skip

    def __init__(
        self,
        initial_batch: int,
        max_batch: int,
        initial_lr: float,
        growth: float = 2,
        tolerance: float = 0.10,
        *,
        interval: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(initial_batch, max_batch, initial_lr, growth, **options)
        self.tolerance = checked_number("tolerance", tolerance, lambda x: x >= 0, "at least 0")
        self.interval = None if interval is None else whole("interval", interval, 1)
        self.fixed_interval = self.interval
        # Costs: the least, the least since the batch grew, and the level at which it grew.
        self._least_cost = self._least_since = self._grown_at = math.inf
        self._costs: list[float] = []
        self._grown_in = self._losing = 0  # the epoch in which the batch grew; epochs of losses

    def _next_batch(self, n: int, theta: float | None, cost: float) -> int:
        """Algorithm 1, lines 7 to 12, after epoch n; `observe` computes θ (line 8, equation 4)."""
        first, before = self._first_cost, self._theta
        lowest = min(first, self._least_cost)
        progress = cost < lowest
        self._least_cost, self._least_since = min(cost, lowest), min(cost, self._least_since)
        # A new list, since checkpoints hold the old one.
        self._costs = [*(self._costs or [first]), cost]
        # Lines 7 and 9: K is not found yet, and θ has not changed by more than 10 %.
        if self.interval is None and n > self.warmup and before is not None and theta is not None:
            saturated = abs(theta - before) <= self.tolerance * abs(before)
            if saturated and progress and _is_falling(self._costs):
                self.interval = n  # line 10
        # Line 11: n mod K = 0 and B < B_m; and training makes progress.
        due = self.interval is not None and n % self.interval == 0 and self._batch < self.max_batch
        recent = self._costs[-max(_RECENT, n + 1 - self._grown_in) :]
        grows = due and cost < first and self._least_since < self._grown_at and _is_falling(recent)
        self._look_for_divergence(n, cost, progress or grows)
        if not grows:
            return self._batch
        # The level, since a later cost would hardly fall below one that is low by chance.
        self._grown_at, self._least_since, self._grown_in = max(cost, _level(recent)), math.inf, n
        return self._grown()  # line 12; `observe` has the rate grow by the same factor

    def _look_for_divergence(self, n: int, cost: float, progress: bool) -> None:
        """Warn if half of the cost's fall is lost, once until there is progress again."""
        first, least = self._first_cost, self._least_cost
        lost = first - cost <= (first - least) / 2 and cost - least >= 5 * _scatter(self._costs)
        self._losing = self._losing + 1 if lost and n > self.warmup + 3 else 0
        diverging = self._losing > 1
        if diverging and not self._diverging:
            warnings.warn(
                f"the cost of epoch {n} is {cost:g}, that of w_0 was {first:g} and the lowest "
                f"{least:g}: training makes no progress or diverges; lower initial_lr where that "
                "goes on",
                DivergenceWarning,
                stacklevel=4,
            )
        self._diverging = diverging or (self._diverging and not progress)


_RECENT = 10  # least number of costs tested for a trend


def _is_falling(costs: Sequence[float]) -> bool:
    """Whether costs fall: up to four at every step, more by Mann and Kendall's test at 99 %."""
    number = len(costs)
    balance = sum((a > b) - (a < b) for a, b in itertools.combinations(costs, 2))
    if number < 5:
        return number > 1 and balance == number * (number - 1) // 2
    return balance >= 2.4 * math.sqrt(number * (number - 1) * (2 * number + 5) / 18)


def _level(costs: Sequence[float]) -> float:
    """Return the value of a straight line through costs at the last one."""
    return float(np.polyval(np.polyfit(range(len(costs)), costs, 1), len(costs) - 1))


def _scatter(costs: Sequence[float]) -> float:
    """Return the standard deviation of costs without their steady rise or fall."""

    def of(costs: Sequence[float]) -> float:
        steps = [b - a for a, b in itertools.pairwise(costs)]
        rise, fall = (sum(max(0.0, sign * step) for step in steps) for sign in (1, -1))
        # For independent costs each mean is 1 / sqrt(pi) of their standard deviation.
        return min(rise, fall) / len(steps) * math.sqrt(math.pi)

    return max(of(costs), of(costs[-_RECENT - 1 :]))


def checked_number(name: str, value: float, allowed: Callable[[float], bool], what: str) -> float:
    """A finite and `allowed` number as a float; else a ValueError, which names the range."""
    if not is_number(value) or not allowed(value):
        raise ValueError(f"{name} is {value!r}; give a number {what}")
    return float(value)
