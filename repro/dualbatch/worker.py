"""A worker, which trains its share of an epoch from a pulled state.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 2.1
(equation 1), 2.3, 3.3.

A worker keeps no state: its result depends only on the pulled state, its optimizer's state, its
number and the number of its share. So a share that was lost with its worker is repeated bit for
bit, and engines agree. The server keeps the rest between shares: see `Trained`.
"""

import copy
import math
import random
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from repro.dualbatch import checks
from repro.dualbatch.checks import NonFiniteError, not_finite
from repro.dualbatch.functions import Parts, Seen, differing
from repro.dualbatch.plan import FACTORS, DualBatchPlan
from repro.dualbatch.progressive import EpochSetting, dropout_rates, set_dropout
from repro.dualbatch.shares import Data, batches_of, share_of
from repro.measure.checks import choice, whole
from repro.measure.loss_parts import known_loss
from repro.measure.untouched import random_numbers

OptimizerState = dict[int, dict[str, Any]]  # by parameter, then by name, as torch's optimizers have
Loss = Callable[[Tensor, Tensor], Tensor]
Passes = Callable[[nn.Module, Loss], Callable[[Tensor, Tensor], Tensor | float]]
_NUMBER = re.compile(r"-?(\d[\d.e+-]*|inf|nan)|True|False")
_LOSS = -1  # in an optimizer's state, the key of the loss's buffers
_made: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models of all recipes of this process


@dataclass(frozen=True)
class Recipe:
    """Training options of every worker, on any engine. Objects that cross processes are pickled.

    Attributes:
        model_fn: Makes a model, a new one each time; it gets the server's weights.
        data: Inputs (N, ...) and targets (N, ...) on one device, or a function from a `Share` to
            its mini-batches, for example with augmentation: pairs of inputs (B, ...) and targets
            (B, ...) of exactly its samples. Tensors of square images (N, C, H, W) are resized
            bilinearly to a schedule's lower resolutions, and targets are not; a function resizes
            its images itself. The generators of torch, NumPy and Python are seeded while it runs;
            other random numbers must be seeded by `Share.seed`.
        loss_fn: Mean loss of (outputs, targets). If it is a module with buffers, each worker has a
            copy and keeps its buffers from share to share. Its parameters are not trained.
        optimizer_fn: Given the list of parameters and a learning rate, makes the optimizer of a
            share, of all parameters that require gradients; by default SGD with momentum 0.9 and
            weight decay 5e-4.
        factor: Scheme of the model-update factor, a key of `FACTORS` (section 3.4).
        seed: Seed of the initial weights, the order of the data, augmentation and dropout.
        device: The device that trains.
        autocast: `torch.bfloat16` in the forward pass; None for no autocast. float16 is refused,
            since it needs loss scaling.
        channels_last: Store images and weights with channels last.
        passes_fn: Given a worker's model and `loss_fn`, makes the forward and backward pass: a
            function of inputs and targets on the device that leaves the gradients of the mean loss
            in the model, which has none before, and returns that loss. So workers stream
            micro-batches, or replay a captured graph. State that it keeps must not change the
            result of a share; `autocast` is refused with it.
        optimizer_state: ``kept``, each worker keeps its optimizer's state, such as the momentum,
            from share to share; or ``restarted``, each share begins with a new state.

    Raises:
        ValueError: An argument is invalid.
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
    passes_fn: Passes | None = None
    optimizer_state: str = "kept"

    def __post_init__(self) -> None:
        if trainable := Seen("loss_fn", self.loss_fn).trainable:
            raise ValueError(
                f"loss_fn has tensors that require gradients ({', '.join(trainable[:5])}), which "
                "no worker trains; make them part of model_fn's model, or freeze them by "
                "requires_grad_(False), or give a function that holds none"
            )
        known = known_loss(self.loss_fn) if self.passes_fn is None else None
        if known is not None and known.reduction == "sum":
            raise ValueError(
                "loss_fn sums over samples: steps grow with the batch; give reduction='mean'"
            )
        choice("factor", self.factor, FACTORS)
        choice("optimizer_state", self.optimizer_state, ("kept", "restarted"))
        object.__setattr__(self, "seed", whole("seed", self.seed, 0, 2**64 - 1))  # torch's limit
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast is {self.autocast}; give torch.bfloat16 or None")
        if self.passes_fn is not None and self.autocast is not None:
            raise ValueError("autocast has no effect on a passes_fn; enter torch.autocast there")

    def make_model(self) -> nn.Module:
        """A new model with the initial weights, on the device.

        Raises:
            ValueError: It shares tensors with another model, has none to train, or has lazy layers
                without a shape.
        """
        with seeded(self.device, self.seed):
            model = self.model_fn()
        checks.check_initialized(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("model_fn's model has no weight to train: set requires_grad of some")
        mine = checks.storages(model)
        if model in _made or any(mine & checks.storages(other) for other in _made):
            raise ValueError(
                "model_fn returns a model that shares tensors with another that was made before; "
                "have it make a new one each time, such as by lambda: copy.deepcopy(model)"
            )
        model = model.to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        _made.add(model)
        return model

    def parts(self, loss_fn: Loss | None = None) -> Parts:
        """Visible parts of functions and data, of a data function that is an object its class."""
        return (
            Seen("loss_fn", self.loss_fn if loss_fn is None else loss_fn).parts
            | Seen("optimizer_fn", self.optimizer_fn).parts
            | Seen("data", self.data, objects=False).parts
        )


class UnsavedBuffers:
    """The initial values of a model's buffers registered with ``persistent=False``.

    A state does not contain them: a worker that kept their changes by forward passes would train
    differently from its replacement.
    """

    def __init__(self, model: nn.Module) -> None:
        self._initial: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module in model.modules():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(name)
                if buffer is not None:  # else the forward pass makes it
                    # An expanded buffer cannot be written.
                    module._buffers[name] = buffer = buffer.contiguous()
                    self._initial.append((module, name, buffer, buffer.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the initial values in place, since captured graphs refer to these tensors."""
        for module, name, buffer, initial in self._initial:
            buffer.resize_(initial.shape).copy_(initial)
            module._buffers[name] = buffer


def _buffers_of(module: Any) -> dict[str, Tensor]:
    """Copies of the buffers in a module's state; empty for a function."""
    if not isinstance(module, nn.Module):
        return {}
    saved = module.state_dict()
    return {n: b.detach().clone() for n, b in module.named_buffers() if n in saved}


@dataclass(frozen=True)
class Trained:
    """A share's result, finite."""

    state: dict[str, Tensor]
    factor: float  # model-update factor of the worker
    loss: Tensor | float  # mean over the share, ()
    # State for the worker's next share, with the loss's buffers, if any, under -1; None without
    # both, or if the optimizer restarts.
    optimizer: OptimizerState | None = None


class Worker:
    """Trains shares, one after the other, for any worker; `plan` is for settings without one."""

    def __init__(self, recipe: Recipe, plan: DualBatchPlan) -> None:
        self.recipe, self.plan = recipe, plan
        self.model = recipe.make_model()
        self._dropout = dropout_rates(self.model)
        self._unsaved = UnsavedBuffers(self.model)
        self._loss_state = _buffers_of(recipe.loss_fn)
        self._loss_fn: Loss = copy.deepcopy(recipe.loss_fn) if self._loss_state else recipe.loss_fn
        self._last: weakref.ref[torch.optim.Optimizer] | None = None
        self._passes: Callable[[Tensor, Tensor], Any] = self._ordinary
        if recipe.passes_fn is not None:
            self._passes = recipe.passes_fn(self.model, self._loss_fn)
        self._parts = self.parts()

    def train(
        self,
        worker: int,
        iteration: int,
        state: dict[str, Tensor],
        setting: EpochSetting,
        optimizer_state: OptimizerState | None = None,
    ) -> Trained:
        """Train one share from a pulled state and an optimizer's state, which stay unchanged.

        None is a new optimizer's state, as for a worker's first share. The returned state is the
        model's own: push it before training the next share. A loss that is not finite is found
        after the last step, since reading each would make the host wait.

        Raises:
            NonFiniteError: A loss, or a tensor of the trained state, is infinite or NaN.
            ValueError: The data function does not give the share's mini-batches, the loss is not
                one number that depends on the weights, or the optimizer does not train them.
        """
        recipe, plan, device = self.recipe, setting.plan or self.plan, self.recipe.device
        whole("worker", worker, 0, plan.n - 1)
        # 1. The pulled weights, and the epoch's dropout and learning rate.
        self.model.load_state_dict(state)
        self._unsaved.restore()
        self.model.train()
        for layer, own in self._dropout.items():  # an earlier setting may have changed it
            layer.p = own
        if setting.dropout is not None:
            set_dropout(self.model, setting.dropout)
        optimizer = self._make_optimizer(setting.lr, optimizer_state)
        options = _options(optimizer)
        # 2. The worker's d_S or d_L samples of the pass, in mini-batches of B_S or B_L.
        share = share_of(plan, worker, iteration, setting, recipe.seed)
        batches = batches_of(recipe.data, share, f"worker {worker}, epoch {setting.epoch}")
        losses: list[Tensor] = []
        total = torch.zeros((), device=device)
        with seeded(device, share.seed), torch.enable_grad():
            for inputs, targets in batches:
                inputs = inputs.to(device, non_blocking=True)
                targets = targets.to(device, non_blocking=True)
                if recipe.channels_last and inputs.dim() == 4:
                    inputs = inputs.contiguous(memory_format=torch.channels_last)
                # 3. A step by the mean gradient of the mini-batch (equation 1).
                optimizer.zero_grad(set_to_none=True)
                loss = self._gradients(inputs, targets)
                optimizer.step()
                losses.append(loss)
                # Kept on the device: reading it would wait for every step. A half-precision
                # product would overflow long before the loss.
                total += loss.to(torch.promote_types(loss.dtype, total.dtype)) * len(inputs)
        # 4. The trained weights, to be pushed with the worker's model-update factor.
        trained, step, wrong = dict(self.model.state_dict()), len(losses), ""
        if not math.isfinite(total):
            step = next((n for n, loss in enumerate(losses, 1) if not loss.isfinite()), step)
            wrong = f"the loss is {float(losses[step - 1])}"
        elif (name := not_finite(trained)) is not None:
            wrong = f"{name!r} is not finite after the step's update"
        if wrong:
            raise NonFiniteError(wrong, worker, setting.epoch, step, setting.lr)
        factor, mean = plan.factor_of(plan.kinds[worker], recipe.factor), total / len(share.indices)
        return Trained(trained, factor, mean, self._left_by(optimizer, options))

    def parts(self) -> Parts:
        """Visible parts of the functions, and numbers of the model, without state that is kept."""
        kept = {f"loss_fn.{name}" for name in self._loss_state}
        for layer, own in self._dropout.items():  # which settings change
            layer.p = own
        model = Seen("[model]", self.model, tensors=False).parts  # where more may come
        parts = self.recipe.parts(self._loss_fn)
        parts |= {path: part for path, part in model.items() if _NUMBER.fullmatch(part)}
        return {path: part for path, part in parts.items() if path not in kept}

    def changed(self) -> str | None:
        """Name the parts of the functions that changed since the worker was made, or None."""
        now = self.parts()
        # A number of the model may become a tensor, such as its loss; tensors are not looked at.
        before = {p: v for p, v in self._parts.items() if p in now or not p.startswith("[model]")}
        if not (changed := differing(before, now)):
            return None
        return (
            f"{', '.join(changed[:5])} changed as the training went on, which is kept neither by "
            "worker nor in a checkpoint; keep what a model or a loss remembers in buffers of a "
            "module, make caches beforehand, draw what is random by Share.seed, and log to lists, "
            "which may grow"
        )

    def _ordinary(self, inputs: Tensor, targets: Tensor) -> Any:
        kind, low = torch.device(self.recipe.device).type, self.recipe.autocast
        with torch.autocast(kind, low) if low is not None else nullcontext():
            loss = self._loss_fn(self.model(inputs), targets)
        if isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
            loss.backward()
        return loss

    def _gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a mini-batch; return its mean loss, ()."""
        who = "loss_fn" if self.recipe.passes_fn is None else "what passes_fn made"
        torch.clear_autocast_cache()  # of a caller's autocast, with weights from before the step
        loss = self._passes(inputs, targets)
        if isinstance(loss, float):
            loss = torch.tensor(loss, device=self.recipe.device)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            kind = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
            raise ValueError(
                f"{who} returns {kind}; give the mean over the samples of the mini-batch, one "
                "floating number of shape (), such as by reduction='mean' or .mean()"
            )
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise ValueError(
                f"{who} leaves no gradient in the model; let its loss depend on trainable weights, "
                "without detach(), item() and no_grad(), and call backward() in your own passes"
            )
        return loss.detach().clone()  # the next replay of a graph overwrites its loss

    def _make_optimizer(self, lr: float, left: OptimizerState | None) -> torch.optim.Optimizer:
        """Make a share's optimizer; load its state and the loss's from the share before."""
        make = sgd if self.recipe.optimizer_fn is None else self.recipe.optimizer_fn
        optimizer = make(list(self.model.parameters()), lr)
        checks.check_optimizer(optimizer, self.model)
        if self._last is not None and self._last() is optimizer:
            raise ValueError(
                "optimizer_fn returns the same optimizer again, which would take the state of one "
                "worker to another; have it make a new one each time"
            )
        self._last = weakref.ref(optimizer)
        # torch does not copy the state that it loads, and steps change it.
        state = copy.deepcopy(left) or {}
        if self._loss_state and isinstance(self._loss_fn, nn.Module):
            self._loss_fn.load_state_dict(state.pop(_LOSS, self._loss_state), strict=False)
        if self.recipe.optimizer_state == "kept" and left is not None:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            loaded = optimizer.state_dict()["state"]  # cast to the weights' type: undone here
            for key, kept in state.items():
                for name in kept.keys() & loaded[key].keys() if isinstance(kept, dict) else ():
                    with suppress(ValueError):  # the optimizer itself loads it in another form
                        loaded[key][name] = tree_map(
                            _on_its_device, kept[name], loaded[key][name], is_leaf=_is_size
                        )
        return optimizer

    def _left_by(self, optimizer: torch.optim.Optimizer, options: Parts) -> OptimizerState | None:
        """State for the worker's next share; `options` are the optimizer's initial ones."""
        left = None
        if self.recipe.optimizer_state == "kept":
            if _options(optimizer) != options:
                raise ValueError(
                    f"{type(optimizer).__name__} changes options or attributes as it steps, which "
                    "a share loses; keep them in its state, or give optimizer_state='restarted'"
                )
            left = optimizer.state_dict()["state"]
        loss_state = _buffers_of(self._loss_fn)
        if wrong := [n for n, t in self._loss_state.items() if loss_state[n].shape != t.shape]:
            raise ValueError(
                f"loss_fn changes the shape of its buffer {wrong[0]!r}, which cannot be kept; make "
                "it as large from the beginning"
            )
        return (left or {}) | {_LOSS: loss_state} if loss_state else left


def _on_its_device(value: Any, cast: Any) -> Any:
    both = isinstance(value, Tensor) and isinstance(cast, Tensor)
    return value.to(cast.device) if both else cast


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)  # to tree_map a tuple


def _options(optimizer: torch.optim.Optimizer) -> Parts:
    """An optimizer's options and attributes: what it keeps beside its state."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    # Not such as "has warned", nor hooks, which may log.
    held = {k: v for k, v in own.items() if not isinstance(v, bool) and "hook" not in k}
    # What an optimizer within this one remembers is saved only by a method of the user's.
    within = [o for v in held.values() for o in (v if isinstance(v, list | tuple) else [v])]
    alone = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    states = [o.state for o in within if alone and isinstance(o, torch.optim.Optimizer)]
    return Seen("", (groups, held, states), tensors=False).parts


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9 and weight decay 5e-4, the default of a recipe."""
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4)


@contextmanager
def seeded(device: str, seed: int) -> Iterator[None]:
    """Seed all generators of a process inside a ``with`` block, and restore them at the end."""
    put_back = random_numbers([torch.device(device)])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        put_back()
