"""The parameter server's core: pull, push, merge, and synchronisation of workers.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 2.3, 2.4
and 3.4; the merge rules, which the papers leave open, are those of the authors' code for the
journal's version and the conference's.

The core has no clock, no threads and no network: an engine decides when a worker calls it.
"""

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from repro.dualbatch.checks import NonFiniteError, not_finite, positive
from repro.measure import CheckpointError
from repro.measure.checks import choice, whole

State = Mapping[str, Tensor]
SYNCS = ("bsp", "asp", "ssp")
MERGES = ("average", "journal", "conference", "delta")


def merge_tensor(rule: str, w: Tensor, w_i: Tensor, p_i: Tensor, f: float) -> Tensor:
    """Merge one worker's tensor into the server's.

    The rules are ``journal`` (the authors' later code), ``conference`` (their earlier code),
    ``delta`` (a stale worker's starting weights do not remain, but n workers make n steps) and
    ``average``, for which w begins at 0 and f is the worker's share of all factors. w_i is the
    worker's tensor after its share, p_i the one that it pulled, f its model-update factor.
    """
    if w.dtype == torch.bool:
        return w_i.clone()
    if not w.is_floating_point():  # a counter
        return w + (w_i - p_i)
    if rule == "average":
        return w.add(w_i, alpha=f)  # w ← Σ f_i w_i / Σ f_i
    if rule == "delta":
        return w.add(w_i - p_i, alpha=f)  # w ← w + f (w_i - p_i)
    if rule == "journal":
        return w.lerp(w_i, f / (1 + f))  # w ← (w + f w_i) / (1 + f)
    return w.lerp(w_i, f / 2)  # w ← ((2 - f) w + f w_i) / 2


class ServerError(RuntimeError):
    """A worker called the server out of turn."""


@dataclass(frozen=True)
class Pull:
    """The global state that a worker receives for its next share."""

    worker: int
    iteration: int  # number of its next share, from 0
    version: int  # commits merged into `state` so far
    state: dict[str, Tensor]  # copies of the server's tensors


@dataclass(frozen=True)
class Commit:
    """One entry of the commit log."""

    number: int  # position in the log, from 0
    worker: int
    iteration: int  # number of that worker's share, from 0
    pulled: int  # version that the worker started from
    staleness: int  # commits of others merged between its pull and its own merge
    factor: float  # model-update factor
    time_s: float  # by the engine's clock
    loss: float  # mean training loss of the share


class ParameterServer:
    """Global weights, merged from the weights that workers push after each share of data.

    `merge_tensor` has the merge rules. ``average`` is over all workers of a round, at the barrier
    of BSP: with equal factors and one step of SGD a round, this is data-parallel training. The
    other rules merge each commit. Buffers such as BatchNorm's statistics are merged like weights.
    Integer tensors, such as its counters, grow by the sum of all workers' increments; boolean
    tensors are the last worker's. States with NaN or an infinity, pushed or merged, are refused.

    Synchronisation (section 2.4): a worker may start its share t only while the slowest worker has
    committed at least t - s shares: s is 0 for ``bsp``, `staleness` for ``ssp``, infinite for
    ``asp``. (The paper suspends a worker when the gap reaches s; here it may still start at a gap
    of s, so that s = 0 is BSP, as the paper says.) BSP merges at the barrier, the others at each
    commit. SSP with s = 0 and BSP thus have the same order of commits, as have SSP with s infinite
    and ASP.

    A commit is identified by worker and iteration, and counts once. Each worker's optimizer state
    after its last commit is kept in `optimizers`, unmerged, so that another worker can replace it.

    Args:
        state: Initial weights and buffers, finite; copied.
        workers: Number of workers.
        sync: ``bsp``, ``asp`` or ``ssp``.
        staleness: s of SSP, an integer number of shares, at least 0; `math.inf` is ASP.
        merge: None is ``average`` for BSP and ``journal`` for the others.

    Raises:
        ValueError: An argument is out of range, ``average`` without BSP, or a state that cannot be
            merged: not finite, complex, or no tensors.
    """

    def __init__(
        self,
        state: State,
        workers: int,
        sync: str = "asp",
        staleness: float | None = None,
        merge: str | None = None,
    ) -> None:
        for name, tensor in state.items():
            kind: Any = type(tensor).__name__
            if isinstance(tensor, Tensor):
                kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            merged = isinstance(kind, torch.dtype) and not kind.is_complex
            if not merged or (kind.is_floating_point and kind.itemsize == 1):
                raise ValueError(
                    f"the state's {name!r} is of type {kind}, which cannot be merged; keep it out "
                    "of the model's state, such as by register_buffer(..., persistent=False)"
                )
        if (wrong := not_finite(state)) is not None:
            raise ValueError(
                f"the initial state's {wrong!r} is not finite, and cannot be merged; mend it, or "
                "keep a constant such as a mask out of the state by register_buffer(..., "
                "persistent=False)"
            )
        self.sync, self.staleness = sync, _bound(sync, staleness, merge)
        self.merge = merge or ("average" if sync == "bsp" else "journal")
        self.workers = whole("workers", workers, 1)
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}
        self.version = 0
        self.iterations = [0] * self.workers  # number of shares committed by each worker
        self.log: list[Commit] = []
        self.pulls: dict[int, Pull] = {}  # by worker, the unfinished share
        self.optimizers: dict[int, dict[int, dict[str, Any]]] = {}  # by worker
        # By worker, held back by BSP's barrier.
        self._round: dict[int, tuple[State, Commit]] = {}

    def may_start(self, worker: int) -> bool:
        """Whether a worker may start its next share now."""
        worker = whole("worker", worker, 0, self.workers - 1)
        return self.iterations[worker] - min(self.iterations) <= self.staleness

    def pull(self, worker: int) -> Pull:
        """Give a worker the global state for its next share; repeated calls give the same share.

        Raises:
            ServerError: The worker must wait for slower workers.
        """
        if not self.may_start(worker):
            raise ServerError(
                f"worker {worker} is to wait: it has committed {self.iterations[worker]} shares, "
                f"the slowest {min(self.iterations)}, the bound {self.staleness:g}; see may_start"
            )
        pull = Pull(int(worker), self.iterations[worker], self.version, self.state)
        self.pulls[pull.worker] = pull
        # A copy, since a worker may train it in place.
        return replace(pull, state={name: tensor.clone() for name, tensor in self.state.items()})

    @torch.no_grad()  # parameters, too, may be pushed
    def push(
        self,
        worker: int,
        iteration: int,
        state: State,
        factor: float = 1.0,
        *,
        time_s: float = 0.0,
        loss: float | None = None,
        optimizer: dict[int, dict[str, Any]] | None = None,
    ) -> Commit:
        """Merge a worker's trained state and return the log's entry.

        Args:
            worker: Number of the worker.
            iteration: Number in its `Pull`.
            state: Weights and buffers after the share; only read.
            factor: Model-update factor, above 0.
            time_s: Time for the log.
            loss: Loss for the log; None is NaN.
            optimizer: State of the worker's optimizer after the share; None for none.

        Raises:
            NonFiniteError: Loss, state or merged state is not finite. The server is unchanged.
            ServerError: The worker has not pulled this share, or has pushed it before.
            ValueError: The state has other names, shapes or types, or an argument is out of range.
        """
        worker = whole("worker", worker, 0, self.workers - 1)
        pull = self.pulls.get(worker)
        if pull is None or pull.iteration != iteration:
            raise ServerError(
                f"worker {worker} pushes share {iteration!r}, and has "
                f"{'pulled none' if pull is None else f'pulled share {pull.iteration}'} that is "
                "not pushed yet; pull each share, and push it once"
            )
        self._check_state(state)
        number, staleness = len(self.log), self.version - pull.version
        told = positive("factor", factor), float(time_s), math.nan if loss is None else float(loss)
        commit = Commit(number, worker, pull.iteration, pull.version, staleness, *told)

        def diverged(what: str) -> NonFiniteError:
            return NonFiniteError(what, worker, pull.iteration + 1, None)

        if loss is not None and not math.isfinite(commit.loss):
            raise diverged(f"the loss is {commit.loss}")
        if (name := not_finite(state)) is not None:
            raise diverged(f"{name!r} is not finite")
        waiting, merged, version = self._round | {worker: (state, commit)}, self.state, self.version
        if self.sync == "bsp" and len(waiting) < self.workers:
            kept = {n: state[n].to(tensor.device, copy=True) for n, tensor in self.state.items()}
            waiting[worker] = kept, commit
        else:  # of a round of BSP all have pulled the same state
            merged, version = self._merged(list(waiting.values()), pull.state), number + 1
            waiting = {}
            if (name := not_finite(merged)) is not None:
                raise diverged(f"merging makes {name!r} overflow")
            variances = (t for name, t in merged.items() if name.endswith("running_var"))
            if self.merge == "delta" and any(bool((t < 0).any()) for t in variances):
                text = "merging by 'delta' makes variances of BatchNorm negative: evaluation "
                # At the caller, beyond no_grad's frame.
                warnings.warn(f"{text}gives NaN; choose another rule or norm", stacklevel=3)
        # Nothing has changed so far, and nothing fails from here on.
        self.state, self.version, self._round = merged, version, waiting
        del self.pulls[worker]
        if optimizer is not None:
            self.optimizers[worker] = optimizer
        self.log.append(commit)
        self.iterations[worker] += 1
        return commit

    def _merged(self, pushed: list[tuple[State, Commit]], pulled: State) -> dict[str, Tensor]:
        """The server's tensors with pushed states, all trained from the pulled one."""
        averaged = self.merge == "average"
        total = sum(commit.factor for _, commit in pushed) if averaged else 1.0
        if averaged:  # in a fixed order, since sums depend on it
            pushed.sort(key=lambda one: one[1].worker)
        merged = {}
        for name, tensor in self.state.items():
            w = tensor
            if averaged and w.is_floating_point():
                if all(torch.equal(state[name], w) for state, _ in pushed):
                    merged[name] = w  # frozen: its average would drift by rounding
                    continue
                # Half precision would round, and drift, with each worker's part.
                w = torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for state, commit in pushed:
                one, f = state[name].to(w.device), commit.factor / total
                w = merge_tensor(self.merge, w, one, pulled[name], f)
            merged[name] = w.to(tensor.dtype)
        return merged

    def state_dict(self) -> dict[str, Any]:
        """The state from which a server resumes: plain values and tensors."""
        return {
            "state": {name: tensor.clone() for name, tensor in self.state.items()},
            "version": self.version,
            "iterations": list(self.iterations),
            "log": [asdict(commit) for commit in self.log],
            "pulls": [asdict(pull) for pull in self.pulls.values()],
            "round": [{"state": s, "commit": asdict(c)} for s, c in self._round.values()],
            "optimizers": copy.deepcopy(self.optimizers),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from `state_dict`, of as many workers, the same synchronisation and model."""
        if len(saved["iterations"]) != self.workers or (saved["round"] and self.sync != "bsp"):
            raise CheckpointError(
                f"the checkpoint is of {len(saved['iterations'])} workers, with "
                f"{len(saved['round'])} at a barrier, this server has {self.workers} and sync "
                f"{self.sync!r}; give the same, or start anew without it"
            )
        self._check_state(saved["state"])
        for entry in (saved, *saved["pulls"], *saved["round"]):
            if (name := not_finite(entry["state"])) is not None:
                raise CheckpointError(
                    f"the checkpoint has a {name!r} that is not finite: its training had diverged; "
                    "start anew without it, with a lower learning rate"
                )
        for name, tensor in self.state.items():
            tensor.copy_(saved["state"][name])
        self.version, self.iterations = saved["version"], list(saved["iterations"])
        self.log = [Commit(**entry) for entry in saved["log"]]
        self.pulls = {entry["worker"]: Pull(**entry) for entry in saved["pulls"]}
        self.optimizers = copy.deepcopy(saved["optimizers"])
        held = [(dict(entry["state"]), Commit(**entry["commit"])) for entry in saved["round"]]
        self._round = {commit.worker: (state, commit) for state, commit in held}

    def _check_state(self, state: State) -> None:
        """Raise a ValueError unless a state has the names, shapes and types of the server's."""
        ours, theirs = (
            {(name, tuple(tensor.shape), tensor.dtype) for name, tensor in one.items()}
            for one in (self.state, state)
        )
        if ours != theirs:
            raise ValueError(
                f"the state is not the server's: it has {sorted(theirs - ours)[:5]} and lacks "
                f"{sorted(ours - theirs)[:5]}; push what model.state_dict() gives for the model "
                "that was pulled"
            )


def _bound(sync: str, staleness: float | None, merge: str | None) -> float:
    """The shares by which a worker may lead the slowest; a ValueError for wrong arguments."""
    choice("sync", sync, SYNCS)
    choice("merge", merge, (*MERGES, None))
    if merge == "average" and sync != "bsp":
        raise ValueError(
            f"merge='average' is of a whole round and needs sync='bsp', not {sync!r}; choose "
            "'journal', 'conference' or 'delta'"
        )
    if sync == "ssp":
        return math.inf if staleness == math.inf else whole("staleness", staleness, 0)
    if staleness is not None:
        raise ValueError(f"staleness is {staleness!r} with sync={sync!r}; it is of 'ssp' alone")
    return 0.0 if sync == "bsp" else math.inf
