"""A worker: it trains its share of an epoch from the state that it pulled, and returns the result.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 2.3, 3.3.

A worker has no memory: its result depends on the pulled state, its optimizer's state, its number
and the number of its share alone. So a share that was lost with its worker is done again to the
same bits, and engines agree. The server keeps each worker's optimizer state between its shares
beside the weights, and the buffers of a loss that is a module with them. Buffers of a model that
are not saved start anew with each share. A forward must keep nothing elsewhere.
"""

import copy
import inspect
import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from repro.dualbatch.checks import NonFiniteError, function, not_finite, whole
from repro.dualbatch.functions import Parts, Seen, differing
from repro.dualbatch.plan import FACTORS, DualBatchPlan
from repro.dualbatch.progressive import EpochSetting, dropout_rates, set_dropout
from repro.dualbatch.unsaved import UnsavedBuffers
from repro.measure import accelerator

Batches = Iterable[tuple[Tensor, Tensor]]
ASPECTS = ("keep", "squash")
OPTIMIZER_STATES = ("kept", "restarted")
OptimizerState = dict[int, dict[str, Any]]  # by parameter, then by name, as torch's optimizers have
Options = dict[tuple[int, str], str]  # of an optimizer, by group and name
_LARGEST_SEED = 2**64 - 1  # torch's
_AT_ONCE = ("cpu",)  # where a loss is there as soon as it is computed
_LOSS = -1  # in an optimizer's state, which goes where the loss's buffers have to go
_made: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # by all recipes of this process


@dataclass(frozen=True)
class Share:
    """What a worker trains in one go: a part of one shuffled pass over the data.

    Its mini-batches have `batch_size` samples each, and the last one what is left: with 25 samples
    and batches of 10 they have 10, 10 and 5.

    Attributes:
        indices: int64, (d_S,) or (d_L,): which samples, in order.
        batch_size: B_S or B_L.
        resolution: Side of the images in pixels, of their short side where they are no squares;
            None for their own.
        seed: Of augmentation and dropout; another one for each share of each worker.
    """

    indices: Tensor
    batch_size: int
    resolution: int | None
    seed: int


Data = tuple[Tensor, Tensor] | Callable[[Share], Batches]
Loss = Callable[[Tensor, Tensor], Tensor]
Passes = Callable[[nn.Module, Loss], Callable[[Tensor, Tensor], Tensor | float]]


@dataclass(frozen=True)
class Recipe:
    """How every worker trains, whichever the engine. What crosses processes has to be picklable.

    Attributes:
        model_fn: Makes a model, another one each time; its weights are those of the server.
        data: Inputs (N, ...) and targets (N, ...) on one device, or a function from a `Share` to
            its mini-batches, such as one that augments: as many pairs of inputs (B, ...) and
            targets (B, ...), and of the sizes, that `Share` says. Tensors of images (N, C, H, W)
            are resized bilinearly where a schedule has resolutions, their targets are not; a
            function resizes its images itself. The generators of torch, NumPy and Python are
            seeded while it runs; whatever else is random in it has to follow `Share.seed`.
        loss_fn: Mean loss of (outputs, targets). Of a module with buffers each worker has a copy,
            whose buffers are kept from share to share. Nothing in it is trained.
        optimizer_fn: Given the list of parameters and a learning rate, makes the optimizer of a
            share, of all parameters that require gradients.
        factor: Scheme of the model-update factor, a key of `FACTORS`.
        seed: Of the initial weights, the order of the data and all else.
        device: Where to train.
        autocast: `torch.bfloat16` in the forward pass; None for none. float16 is refused: it needs
            its loss scaled.
        channels_last: Lay images and weights out with channels last.
        aspect: Of images that are no squares, where a schedule has resolutions: ``keep`` resizes
            the short side to the resolution and the other one in proportion, ``squash`` both to
            the resolution; None refuses them.
        allow_enlarging: Resize images to resolutions above their own, too.
        passes_fn: Given a worker's model and `loss_fn`, makes the forward and backward pass: a
            function of inputs and targets on the device that leaves the gradients of the mean loss
            in the model, which has none before, and returns that loss. So workers stream
            micro-batches, or replay a captured graph. None for the ordinary passes. What it keeps
            must not change what a share comes to; `autocast` is its own matter and refused here.
        optimizer_state: ``kept``, each worker goes on with the momentum, or what else the optimizer
            keeps, of its own share before; or ``restarted``, it begins from nothing in each share.

    Raises:
        ValueError: One of them is something else.
    """

    model_fn: Callable[[], nn.Module]
    data: Data
    loss_fn: Loss = functional.cross_entropy
    optimizer_fn: Callable[[Any, float], torch.optim.Optimizer] | None = None
    factor: str = "linear"
    seed: int = 0
    device: str = "cpu"
    autocast: torch.dtype | None = None
    channels_last: bool = False
    aspect: str | None = None
    allow_enlarging: bool = False
    passes_fn: Passes | None = None
    optimizer_state: str = "kept"

    def __post_init__(self) -> None:
        function("model_fn", self.model_fn)
        function("loss_fn", self.loss_fn)
        function("optimizer_fn", self.optimizer_fn, optional=True)
        function("passes_fn", self.passes_fn, optional=True)
        if trainable := Seen("loss_fn", self.loss_fn).trainable:
            raise ValueError(
                f"loss_fn has tensors that require gradients ({', '.join(trainable[:5])}), which "
                "no worker trains; make them part of the model of model_fn, whose outputs loss_fn "
                "gets, or freeze them by requires_grad_(False)"
            )
        if self.factor not in FACTORS:
            raise ValueError(f"factor is {self.factor!r}; choose among {', '.join(FACTORS)}")
        if self.aspect not in (None, *ASPECTS):
            raise ValueError(
                f"aspect is {self.aspect!r}; choose among {', '.join(ASPECTS)} and None"
            )
        if self.optimizer_state not in OPTIMIZER_STATES:
            raise ValueError(
                f"optimizer_state is {self.optimizer_state!r}; choose among "
                f"{', '.join(OPTIMIZER_STATES)}"
            )
        object.__setattr__(self, "seed", whole("seed", self.seed, 0, _LARGEST_SEED))
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast is {self.autocast}; give torch.bfloat16 or None (float16 would need its "
                "loss scaled)"
            )
        if self.passes_fn is not None and self.autocast is not None:
            raise ValueError(
                f"autocast is {self.autocast} and there is a passes_fn, which makes the forward "
                "pass itself; enter torch.autocast there and leave autocast out"
            )

    def make_model(self) -> nn.Module:
        """Return a model with the initial weights, on the device.

        Raises:
            ValueError: `model_fn` makes something else, a model without anything to train, or one
                that shares tensors with another that is still there.
        """
        with seeded(self.device, self.seed):
            model = self.model_fn()
        if not isinstance(model, nn.Module):
            raise ValueError(f"model_fn returns {type(model).__name__}; give a function to a model")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"model_fn makes a {type(model).__name__} that has no parameter to train; leave "
                "requires_grad of some as it is"
            )
        mine = _storages(model)
        if model in _made or any(mine & _storages(other) for other in _made):
            raise ValueError(
                "model_fn returns a model that shares tensors with one that it or another run's "
                "made before, so that one training would change the other; have it make a new one "
                "each time, such as by lambda: copy.deepcopy(model)"
            )
        model = model.to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        _made.add(model)
        return model

    def parts(self, loss_fn: Loss | None = None) -> Parts:
        """Return what can be seen of the functions, with another `loss_fn` in the place of its own.

        Of a data function that is an object its class alone.
        """
        functions = ("loss_fn", loss_fn or self.loss_fn), ("optimizer_fn", self.optimizer_fn)
        parts = {k: v for name, f in functions for k, v in Seen(name, f).parts.items()}
        if callable(self.data):
            parts |= Seen("data", self.data, objects=False).parts
        return parts


def _storages(model: nn.Module) -> set[int]:
    """Return which memory the tensors of a model's state have."""
    tensors = (t for t in model.state_dict().values() if isinstance(t, Tensor))
    kept = (t for t in tensors if not nn.parameter.is_lazy(t) and t.layout is torch.strided)
    # Not by address: out-of-core training moves what nobody has the address of, and would see it.
    with torch._C.DisableTorchFunction():
        return {t.untyped_storage()._cdata for t in kept}


@dataclass(frozen=True)
class Trained:
    """A share's result, finite.

    Attributes:
        state: To push.
        factor: Its model-update factor.
        loss: Mean training loss, ().
        optimizer: The optimizer's state for the worker's next share, and under -1 the buffers of
            a loss that has some; None where there is neither, or the optimizer restarts.
    """

    state: dict[str, Tensor]
    factor: float
    loss: Tensor
    optimizer: OptimizerState | None = None


class Worker:
    """Trains shares, one after the other, for any worker of a plan.

    Args:
        recipe: How to train.
        plan: Used where a setting has none of its own.
    """

    def __init__(self, recipe: Recipe, plan: DualBatchPlan) -> None:
        self.recipe, self.plan = recipe, plan
        self.model = recipe.make_model()
        self._optimizer_fn = recipe.optimizer_fn or sgd
        self._dropout = dropout_rates(self.model)
        self._unsaved = UnsavedBuffers(self.model)
        self._loss_fn: Loss = recipe.loss_fn
        if isinstance(self._loss_fn, nn.Module) and _buffers(self._loss_fn):
            self._loss_fn = copy.deepcopy(self._loss_fn)
        self._loss_state = self._of_loss()
        self._parts = self.parts()
        self._first_rates: tuple[float, list[str]] | None = None
        self._last: weakref.ref[torch.optim.Optimizer] | None = None
        self.warned: list[str] = []
        if recipe.passes_fn is None:
            self._passes = self._ordinary
        else:
            self._own_passes = recipe.passes_fn(self.model, self._loss_fn)
            function("what passes_fn returns", self._own_passes)
            self._passes = self._own

    def _of_loss(self) -> dict[str, Tensor]:
        loss = self._loss_fn
        return _buffers(loss) if isinstance(loss, nn.Module) else {}

    def parts(self) -> Parts:
        """Return what can be seen of the functions, but for what is kept from share to share."""
        kept = {f"loss_fn.{name}" for name in self._loss_state}
        parts = self.recipe.parts(self._loss_fn)
        return {path: part for path, part in parts.items() if path not in kept}

    def changed(self) -> str | None:
        """Return what has changed in the functions since the worker was made, in words."""
        return in_words(differing(self._parts, self.parts()))

    def warn(self, text: str) -> None:
        """Warn, of each thing once."""
        if text not in self.warned:
            self.warned.append(text)
            warnings.warn(text, stacklevel=4)

    def _ordinary(self, inputs: Tensor, targets: Tensor) -> Tensor:
        recipe = self.recipe
        kind, low = torch.device(recipe.device).type, recipe.autocast
        with torch.autocast(kind, low) if low is not None else nullcontext():
            loss = self._loss_fn(self.model(inputs), targets)
        check_loss(loss)
        loss.backward()
        return loss.detach()

    def _own(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self._own_passes(inputs, targets)
        if isinstance(loss, Tensor):
            loss = loss.detach().clone()  # a graph's is another one after its next replay
        elif isinstance(loss, float):
            loss = torch.tensor(loss, device=self.recipe.device)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            raise ValueError(
                f"what passes_fn made returns {_got(loss)}; give the mini-batch's mean loss"
            )
        return loss

    def _check_gradients(self) -> None:
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise ValueError(
                "loss_fn returns a loss that depends on no weight of the model which is trained; "
                "leave detach() and other models out of it"
                if self.recipe.passes_fn is None
                else "what passes_fn made leaves no gradient in the model; call backward() in it, "
                "or give loss_fn alone"
            )

    def load(self, state: dict[str, Tensor]) -> None:
        """Make the model that of a state: its weights, and its unsaved buffers as at first."""
        self.model.load_state_dict(state)
        self._unsaved.restore()

    def train(
        self,
        worker: int,
        iteration: int,
        state: dict[str, Tensor],
        setting: EpochSetting,
        optimizer_state: OptimizerState | None = None,
    ) -> Trained:
        """Train one share from a pulled state and the optimizer's, which are left as they are.

        Without an `optimizer_state`, as before a worker's first share, the optimizer begins from
        nothing. Its rate is always the setting's.

        The returned state is the model's own: push it before training the next share. Where
        nothing runs beside the host, a loss that is not finite ends the share at once, elsewhere
        after its last step: looking at it would make the host wait at each.

        Raises:
            NonFiniteError: A loss, or a tensor of the trained state, is infinite or NaN.
            ValueError: The data function does not give the share's mini-batches, the loss is not
                one number that depends on the weights, the optimizer is not one of the weights,
                batch normalization meets a single sample, or there is no such worker.
        """
        recipe, model = self.recipe, self.model
        number = whole("worker", worker, 0, (setting.plan or self.plan).n - 1)
        self.load(state)
        model.train()
        if setting.dropout is not None:
            set_dropout(model, setting.dropout)
        else:
            for layer, rate in self._dropout.items():  # a setting before may have changed it
                layer.p = rate
        share = share_of(setting.plan or self.plan, worker, iteration, setting, recipe.seed)
        optimizer = self._make_optimizer(setting.lr, optimizer_state)
        options = _options(optimizer)
        kind = torch.device(recipe.device).type
        total, samples = torch.zeros((), device=recipe.device), 0
        losses: list[Tensor] = []
        epoch = f"epoch {setting.epoch}"

        def diverged(what: str, step: int) -> NonFiniteError:
            return NonFiniteError(what, number, setting.epoch, step, setting.lr)

        with seeded(recipe.device, share.seed), torch.enable_grad():
            for inputs, targets in batches_of(recipe, share, f"worker {number}, {epoch}"):
                inputs = inputs.to(recipe.device, non_blocking=True)
                targets = targets.to(recipe.device, non_blocking=True)
                if recipe.channels_last and inputs.dim() == 4:
                    inputs = inputs.contiguous(memory_format=torch.channels_last)
                optimizer.zero_grad(set_to_none=True)
                with _named(share, len(inputs), f"worker {number}, {epoch}"):
                    losses.append(self._passes(inputs, targets))
                if not samples:
                    self._check_gradients()
                if kind in _AT_ONCE and not math.isfinite(losses[-1]):
                    raise diverged(f"the loss is {float(losses[-1])}", len(losses))
                optimizer.step()
                # Kept on the device: reading it would wait for every step. A half-precision
                # product would overflow long before the loss.
                wide = torch.promote_types(losses[-1].dtype, total.dtype)
                total += losses[-1].to(wide) * len(inputs)
                samples += len(inputs)
        if not math.isfinite(total):
            finite = torch.stack(losses).isfinite().tolist()
            first = finite.index(False) if False in finite else len(losses) - 1
            raise diverged(f"the loss is {float(losses[first])}", first + 1)
        state = dict(model.state_dict())
        if (name := not_finite(state)) is not None:
            raise diverged(f"{name!r} is not finite after the step's update", len(losses))
        if (name := self._unsaved.not_a_number()) is not None:
            raise diverged(f"the unsaved buffer {name!r} is NaN after the step", len(losses))
        plan = setting.plan or self.plan
        factor = plan.factor_of(plan.kinds[worker], recipe.factor)
        left = self._left_by(optimizer, options)
        return Trained(state, factor, total / samples, left)

    def _make_optimizer(self, lr: float, left: OptimizerState | None) -> torch.optim.Optimizer:
        """Make a share's optimizer, and go on with what the share before left, the loss's too."""
        optimizer = self._optimizer_fn(list(self.model.parameters()), lr)
        check_optimizer(optimizer, self.model)
        if self._last is not None and self._last() is optimizer:
            raise ValueError(
                "optimizer_fn returns the same optimizer again, which would take the state of one "
                "worker to another; have it make a new one each time"
            )
        self._last = weakref.ref(optimizer)
        self._check_rates(optimizer, lr)
        # torch does not copy what it loads, and steps change it.
        state = copy.deepcopy(left) or {}
        if self._loss_state and isinstance(self._loss_fn, nn.Module):
            self._loss_fn.load_state_dict(state.pop(_LOSS, self._loss_state), strict=False)
        if self.recipe.optimizer_state == "kept" and left is not None:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        return optimizer

    def _left_by(self, optimizer: torch.optim.Optimizer, options: Options) -> OptimizerState | None:
        """Return what a share leaves to the next one; its optimizer had these options at first."""
        left = None
        if self.recipe.optimizer_state == "kept":
            left = optimizer.state_dict()["state"]
            if moved := {name for (_, name), _ in _options(optimizer).items() ^ options.items()}:
                self.warn(
                    f"{type(optimizer).__name__} changes its own options as it steps "
                    f"({', '.join(sorted(moved))}), and these begin anew in each share: only what "
                    "it keeps by parameter goes on; take another optimizer, or "
                    "optimizer_state='restarted', which says so"
                )
        loss_state = self._of_loss()
        if wrong := [n for n, t in self._loss_state.items() if loss_state[n].shape != t.shape]:
            raise ValueError(
                f"loss_fn changes the shape of its buffer {wrong[0]!r}, which cannot be kept; make "
                "it as large from the beginning"
            )
        return (left or {}) | {_LOSS: loss_state} if loss_state else left

    def _check_rates(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        rates = [str(group.get("lr")) for group in optimizer.param_groups]
        if self._first_rates is None:
            self._first_rates = lr, rates
        if lr != self._first_rates[0] and rates == self._first_rates[1]:
            self.warn(
                f"optimizer_fn makes the same learning rate ({', '.join(rates)}) of the "
                f"schedule's {self._first_rates[0]:g} and {lr:g}, which therefore change nothing; "
                "use the rate that it is given, or give one rate to all stages"
            )


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that a module's state has."""
    own = {name for name, _ in module.named_buffers()} & module.state_dict().keys()
    return {n: b.detach().clone() for n, b in module.named_buffers() if n in own}


def _options(optimizer: torch.optim.Optimizer) -> Options:
    groups = enumerate(optimizer.param_groups)
    return {(i, k): repr(v) for i, group in groups for k, v in group.items() if k != "params"}


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise a ValueError where an optimizer is not one of all weights of a model to be trained."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not hasattr(optimizer, "step"):
        raise ValueError(
            f"optimizer_fn returns {type(optimizer).__name__}; give one optimizer, such as "
            "torch.optim.SGD(parameters, lr)"
        )
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    if taken - {id(parameter) for parameter in model.parameters()}:
        raise ValueError(
            f"optimizer_fn makes {type(optimizer).__name__} of parameters that are not the "
            "worker's; give it those that optimizer_fn is called with"
        )
    named = model.named_parameters()
    if left_out := [name for name, p in named if p.requires_grad and id(p) not in taken]:
        raise ValueError(
            f"optimizer_fn leaves parameters out that require gradients "
            f"({', '.join(left_out[:5])}); give the optimizer all that it is called with, or have "
            "model_fn freeze those by requires_grad_(False)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer_fn makes {type(optimizer).__name__}, whose step() needs a closure, which "
            "workers have not; take one that steps without"
        )
    if any("initial_lr" in group for group in groups):
        raise ValueError(
            "optimizer_fn attaches a learning-rate scheduler, which nobody steps; leave it out: "
            "the rates are those of the schedule (Stage, warmup_epochs)"
        )


def in_words(changed: Sequence[str]) -> str | None:
    """Say what changed in users' functions as they were used, and what to do; None for nothing."""
    if not changed:
        return None
    return (
        f"{', '.join(changed[:5])} changed as the training went on, which is kept neither by "
        "worker nor in a checkpoint; keep what a loss remembers in buffers of a module that is "
        "loss_fn itself, draw what is random by Share.seed, and log to lists, which may grow"
    )


def check_loss(loss: Any) -> None:
    """Raise a ValueError where a loss is not one real number that depends on the weights."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise ValueError(
            f"loss_fn returns {_got(loss)}; give the mean over the samples, one number as a "
            "floating tensor of shape (), such as with reduction='mean' or .mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returns a loss that depends on no weight which is trained; leave detach(), "
            "item() and no_grad() out of forward and loss"
        )


def _got(loss: Any) -> str:
    return f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else str(type(loss))


@contextmanager
def _named(share: Share, count: int, whose: str) -> Iterator[None]:
    """Say by name that batch normalization cannot train on a single sample."""
    try:
        yield
    except ValueError as error:
        # With several values of each channel, as of images, a single sample is trained on.
        if count != 1 or "more than 1 value per channel" not in str(error):
            raise
        samples, batch = len(share.indices), share.batch_size
        fitting = [size for size in range(2, samples + 1) if samples % size != 1]
        near = sorted(sorted(fitting, key=lambda size: abs(size - batch))[:3])
        raise ValueError(
            f"a share of {samples} samples in batches of {batch} ({whose}) has a batch of one "
            "sample, on which batch normalization cannot train; give a plan with another batch "
            f"size ({', '.join(map(str, near)) or 'and more samples'} would do) or other shares"
        ) from error


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return SGD with momentum 0.9 and weight decay 5e-4, the default of a recipe."""
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4)


def share_of(
    plan: DualBatchPlan, worker: int, iteration: int, setting: EpochSetting, seed: int
) -> Share:
    """Return a worker's part of the shuffled pass number `iteration` (equation 6).

    The shares of a pass follow each other in one permutation, so that together they are the data,
    each sample once: d = n_L d_L + n_S d_S but for rounding. Differs from the authors' code, where
    each worker draws from a shuffle of its own.
    """
    kind = plan.kinds[worker]
    start = sum(plan.share_of(other) for other in plan.kinds[:worker])
    order = torch.randperm(plan.samples, generator=_generator(seed, iteration))
    # Rounding up may ask for a few more samples than there are.
    places = (start + torch.arange(plan.share_of(kind))) % plan.samples
    own_seed = int(np.random.SeedSequence([seed, iteration, worker]).generate_state(1)[0])
    return Share(order[places], plan.batch_of(kind), setting.resolution, own_seed)


def batches_of(
    recipe: Recipe, share: Share, whose: str = "some worker"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the mini-batches of a share; messages of errors say whose it is.

    Raises:
        ValueError: They are not the share's, or images cannot become what it asks for.
    """
    if callable(recipe.data):
        yield from _checked(recipe.data(share), share, whose)
        return
    inputs, targets = recipe.data
    size = resized(inputs.shape, share.resolution, recipe.aspect, recipe.allow_enlarging)
    for index in share.indices.to(inputs.device).split(share.batch_size):
        batch = inputs[index]
        if size is not None and batch.shape[2:] != size:
            batch = functional.interpolate(
                batch, size, mode="bilinear", antialias=True, align_corners=False
            )
        yield batch, targets[index]


def _checked(batches: Any, share: Share, whose: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Pass a data function's mini-batches on while they are what the share asks for."""
    left, side, step = len(share.indices), share.resolution, 0
    asked = f"a share of {left} samples in batches of {share.batch_size} ({whose})"
    if not isinstance(batches, Iterable):
        raise ValueError(
            f"the data function gives {type(batches).__name__} for {asked}; give mini-batches, "
            "such as by yield"
        )
    for step, batch in enumerate(batches, 1):
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            kind = f"{len(batch)} things" if isinstance(batch, tuple | list) else type(batch)
            raise ValueError(
                f"the data function gives {kind} at step {step} of {asked}; give pairs of tensors, "
                "inputs and targets"
            )
        inputs, targets = batch
        for what, value in (("inputs", inputs), ("targets", targets)):
            if not isinstance(value, Tensor) or not value.dim():
                kind = "a single number" if isinstance(value, Tensor) else type(value)
                raise ValueError(
                    f"the data function gives {kind} as {what} at step {step} of {asked}; give one "
                    "tensor (B, ...), such as by torch.as_tensor, with the samples first"
                )
        wanted = min(share.batch_size, left)
        if not len(inputs) == len(targets) == wanted or not wanted:
            due = f"{wanted} of each are due there" if wanted else "the share has ended before"
            raise ValueError(
                f"the data function gives {len(inputs)} inputs and {len(targets)} targets at step "
                f"{step} of {asked}: {due}; give the samples of share.indices, share.batch_size at "
                "a time, and the rest last (what changes the batch size goes around the training: "
                "a plan for each size)"
            )
        if side is not None and inputs.dim() == 4 and side != min(inputs.shape[2:]):
            raise ValueError(
                f"the data function gives inputs of shape {tuple(inputs.shape)} at step {step} of "
                f"{asked}, which asks for {side} pixels; resize the short side to share.resolution"
            )
        left -= wanted
        yield inputs, targets
    if left:
        raise ValueError(
            f"the data function ends after step {step} of {asked}, {left} samples too early; give "
            "all samples of share.indices"
        )


def resized(
    shape: Sequence[int], side: int | None, aspect: str | None, allow_enlarging: bool
) -> tuple[int, int] | None:
    """Return height and width of images at a resolution; None leaves them as they are.

    Args:
        shape: Of the images, (N, C, H, W).
        side: The resolution, None for their own.
        aspect: See `Recipe`.
        allow_enlarging: See `Recipe`.

    Raises:
        ValueError: They are no images, are no squares and `aspect` is None, or would be enlarged
            unasked.
    """
    if side is None:
        return None
    if len(shape) != 4:
        raise ValueError(
            f"the schedule has resolution {side}, and the inputs {tuple(shape)} are no images "
            "(N, C, H, W); leave resolution=None, or give a function as data"
        )
    height, width = shape[2:]
    if height != width and aspect is None:
        raise ValueError(
            f"the schedule has resolution {side}, and the images of {height}x{width} pixels are no "
            "squares; give aspect='keep' (their short side becomes the resolution) or 'squash'"
        )
    short = min(height, width)
    if side > short and not allow_enlarging:
        raise ValueError(
            f"the schedule has resolution {side}, and the images have {height}x{width} pixels; "
            "give lower resolutions, larger images, or allow_enlarging=True"
        )
    if aspect == "squash":
        return side, side
    return max(side, round(height * side / short)), max(side, round(width * side / short))


@contextmanager
def seeded(device: str, seed: int) -> Iterator[None]:
    """Seed all generators of a process inside a ``with`` block, and put them back as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with accelerator.forked_rng(device):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def _generator(seed: int, iteration: int) -> torch.Generator:
    state = np.random.SeedSequence([seed, iteration]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))
