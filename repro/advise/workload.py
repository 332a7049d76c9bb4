"""Training steps of any batch size, of shapes alone or of real tensors."""

import copy
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from repro.advise.iterations import FEW, Iteration, Step, recorded
from repro.measure.batches import call_model, leaves_of, map_leaves, to_device
from repro.measure.checks import is_whole
from repro.measure.fake_tensors import imagined

_KNOWN_NUMBERS = 1 << 24  # of a tensor whose values are known
_MAKES = "a function of parameters, such as lambda parameters: SGD(parameters, lr=0.1)"
Blocks = Iterable[str] | Callable[[nn.Module], None]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


class AdviceError(ValueError):
    """Nothing can be predicted of the arguments; the text says what to give."""


@dataclass(frozen=True)
class Workload:
    """A training step of any batch size; see `Workload.of`."""

    name: str  # for texts
    model: nn.Module  # of which copies without content are made
    make: Callable[[], nn.Module]  # returns the model anew, to be run
    samples: Callable[[int], tuple[Any, Any]]  # returns inputs and targets of a batch size
    loss_fn: Callable[..., Tensor]  # called with outputs and targets
    optimizer: Callable[..., torch.optim.Optimizer]  # makes the optimizer of some parameters
    blocks: Blocks  # classes that checkpointing recomputes, or a function that makes a model do so
    foreach: bool = False  # whether torch's optimizers update lists of tensors, as by accelerators
    batch: int | None = None  # a size that is recorded, beside small ones

    @classmethod
    def of(
        cls,
        model: nn.Module | str,
        *,
        example: tuple[Any, Any] | None = None,
        image: int | tuple[int, int] = 224,
        loss_fn: Callable[..., Tensor] = functional.cross_entropy,
        optimizer: str | Callable[..., torch.optim.Optimizer] = "sgd",
        blocks: Blocks | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> "Workload":
        """A workload from a model or its name.

        Args:
            model: A model, or its name, as of `repro.models.build`. It is neither changed nor run:
                a copy without content is, and for probes a copy.
            example: (inputs, targets) of one or more samples, samples first, as the model is called
                and the loss takes them. Left out, images of `image` pixels with 3 channels, and a
                class for each output; losses of several outputs, such as those of auxiliary
                classifiers, are added. A model may ask for values of its whole numbers and masks,
                such as whether all of a mask is true: a batch has those of the example, over and
                over. It must not ask for other values.
            image: Height and width of the images, where `example` is left out.
            loss_fn: Called with outputs and targets.
            optimizer: ``"sgd"`` (with momentum), ``"adam"``, ``"adamw"``, or a function that makes
                one of parameters.
            blocks: Names of the classes of modules that checkpointing recomputes, or a function
                that makes a model recompute, in place; left out, the outermost classes that the
                model has more than once.
            options: Of a named model, such as `num_classes`.

        Raises:
            AdviceError: The arguments cannot be trained, such as a model without an example that
                does not take images.
        """
        if isinstance(optimizer, str):
            if optimizer not in OPTIMIZERS:
                known = ", ".join(OPTIMIZERS)
                raise AdviceError(f"optimizer is {optimizer!r}: choose {known}, or give a function")
            optimizer = OPTIMIZERS[optimizer]
        elif not callable(optimizer):
            raise AdviceError(f"optimizer is of {type(optimizer)}: give a name, or {_MAKES}")
        if isinstance(model, str):
            from repro.models import build

            name, make = model, partial(build, model, **dict(options or {}))
            try:
                with torch.inference_mode(False), torch.random.fork_rng([]):
                    model = _without_weights(make)
            except (ValueError, TypeError, RuntimeError) as error:  # its texts say what there is
                raise AdviceError(str(error).partition("\n")[0]) from error
        elif isinstance(model, nn.Module):
            name, make = type(model).__name__, partial(copy.deepcopy, model)
        else:
            raise AdviceError(f"{model!r} is a {type(model).__name__}: give a model, or its name")
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise AdviceError("the model has scripted modules: give those that were scripted")
        if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
            raise AdviceError("the model has lazy parameters: run it once before")
        if example is None:
            samples, loss_fn = _images(model, image, loss_fn)
        else:
            samples = partial(_resized, example)
        if blocks is None:
            blocks = repeated_blocks(model)
        elif not callable(blocks):
            blocks = (blocks,) if isinstance(blocks, str) else tuple(blocks)
        return cls(name, model, make, samples, loss_fn, optimizer, blocks)

    @cached_property
    def on_accelerator(self) -> "Workload":
        """The workload as accelerators compute it."""
        return self if self.foreach else replace(self, foreach=True)

    @cached_property
    def plain(self) -> Iteration:
        """The undivided step, recorded."""
        return self._recorded(False)

    @cached_property
    def checkpointed(self) -> Iteration | str:
        """The step with its blocks recomputed; where it cannot be, a text that says why."""
        if not self.blocks:
            return "the model has no class of blocks more than once: name some by blocks="
        try:
            return self._recorded(True)
        except AdviceError as error:  # such as of blocks that change what they are given
            return f"recomputing blocks failed ({error}): name others by blocks="

    def _recorded(self, checkpointing: bool, as_exported: bool = False) -> Iteration:
        hf = sys.modules.get("transformers.utils.import_utils")
        # Else it makes a causal mask, as for an export, where training has none.
        as_trained = hasattr(hf, "is_fake_tensor") and not as_exported
        told = mock.patch.object(hf, "is_fake_tensor", lambda _: False) if as_trained else None
        try:
            with _imagined_with_values(), told or nullcontext():
                parts = self.built(FEW, checkpointing=checkpointing)
                parts.step()  # only parameters with a gradient get a state
                parts.clear()

                def step_of(batch: int) -> Step:
                    parts.inputs, parts.targets = given = self.samples(batch)

                    def step() -> None:
                        parts.step()
                        parts.clear()

                    return step, [x for x in leaves_of(given) if isinstance(x, Tensor)]

                return recorded(step_of, self.batch, in_place=self.foreach)
        except AdviceError:
            raise
        except Exception as error:
            if as_trained:  # a mask's values may be unknown
                return self._recorded(checkpointing, as_exported=True)
            if self.foreach:  # which takes no rate that is a tensor, for example
                return replace(self, foreach=False)._recorded(checkpointing)
            raise AdviceError(
                f"a training step of {self.name} on tensors without content failed{_place(error)} "
                f"({type(error).__name__}: {error}): the example must be what model and loss take, "
                "and the step must not depend on values, except in conditions on whole numbers "
                "and masks of the example. Steps of torch's Adafactor, ASGD and LBFGS depend on "
                "values: give another optimizer"
            ) from error

    def built(
        self, batch: int, device: str | torch.device | None = None, checkpointing: bool = False
    ) -> "Parts":
        """Make model, optimizer and batch.

        `device` is None in a context that makes tensors without content.
        """
        copied = _twin if device is None else copy.deepcopy
        model = (_twin(self.model) if device is None else self.make()).train()
        if checkpointing:
            if callable(self.blocks):
                self.blocks(model)
            else:
                checkpoint_blocks(model, self.blocks)
        loss_fn = copied(self.loss_fn) if isinstance(self.loss_fn, nn.Module) else self.loss_fn
        inputs, targets = self.samples(batch)
        if device is not None:
            model = model.to(device)
            loss_fn = loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn
            inputs, targets = to_device((inputs, targets), torch.device(device))
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        steps = [p for g in getattr(optimizer, "param_groups", ()) for p in g["params"]]
        if device is None and not all(isinstance(p, FakeTensor) for p in steps):
            raise AdviceError(
                "optimizer= made an optimizer of other parameters than those that it was given, "
                f"which are a copy's: give {_MAKES}; parameters of the loss have to be the model's"
            )
        for group in optimizer.param_groups if self.foreach and device is None else ():
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # which lists take memory for
        return Parts(model, loss_fn, optimizer, inputs, targets)


@dataclass
class Parts:
    """A model in training mode, its loss, its optimizer and one batch."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    inputs: Any
    targets: Any

    def forward(self) -> Tensor:
        """Loss of the batch, ()."""
        return self.loss_fn(call_model(self.model, self.inputs), self.targets)

    def clear(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Train one step."""
        self.clear()
        self.forward().backward()
        self.optimizer.step()


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """The outermost classes that a model has more than once, containers of torch left out.

    Where there is none, `nn.Sequential` where the model consists of such.
    """
    counts = Counter(type(module).__name__ for module in model.modules() if _is_block(module))
    outermost = _outermost(model, lambda m: _is_block(m) and counts[type(m).__name__] > 1)
    names = dict.fromkeys(type(module).__name__ for module in outermost)
    if not names and any(type(m) is nn.Sequential and len(m) > 1 for m in model.children()):
        return ("Sequential",)
    return tuple(names)


def _outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        if wanted(child):
            yield child
        else:
            yield from _outermost(child, wanted)


def _is_block(module: nn.Module) -> bool:
    inside = sum(1 for part in module.modules() if not list(part.children()))
    # Attention is a layer of torch's, whatever it consists of. What inherits from a container, as
    # torchvision's blocks do, may be a block.
    none = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.MultiheadAttention)
    return type(module) not in none and inside > 1


def checkpoint_blocks(model: nn.Module, blocks: Iterable[str]) -> None:
    """Have a model recompute its outermost modules of some classes in the backward pass.

    By torch's `checkpoint`, without reentry. BatchNorm then updates its running statistics twice.
    The model is changed in place; its parameters keep their names.

    Raises:
        AdviceError: The model has no module of such a class.
    """
    names = {blocks} if isinstance(blocks, str) else set(blocks)
    found = list(_outermost(model, lambda module: type(module).__name__ in names))
    if not found:
        inside = sorted({type(part).__name__ for part in model.modules() if part is not model})
        raise AdviceError(
            f"the model has no module of {', '.join(sorted(names))}: choose of {', '.join(inside)}"
        )
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class _Constants(TorchDispatchMode):
    """Knows values where torch does not: of views, and of constructors such as arange."""

    MADE = frozenset({"arange", "zeros", "ones", "full"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = next(iter(args), None) if func._schema.is_mutable else None
        trains = torch.is_grad_enabled() and func._opname != "detach"
        for x in tree_leaves((args, kwargs)):
            foreign = isinstance(x, Tensor) and not isinstance(x, FakeTensor)
            if foreign and (x is changed or (trains and x.requires_grad)):
                raise ValueError("it trains or changes tensors that the model does not have")
        value = getattr(args[0], "constant", None) if func.is_view else None
        if value is not None:
            args[0].constant = None  # or the view would have a storage of its own
        result = func(*args, **kwargs)
        if value is not None:
            args[0].constant = value
            args = value, *args[1:]
        elif func._opname not in self.MADE or result.is_floating_point():
            return result
        with _disable_current_modes():
            values = func(*args, **kwargs)
            for fake, of in zip(tree_leaves(result), tree_leaves(values), strict=True):
                _know(fake, of)
        return result


def _know(fake: FakeTensor, value: Tensor) -> None:
    """Have torch compute with the values of a tensor without content, as far as it has such."""
    fake.constant = value
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


@contextmanager
def _imagined_with_values() -> Iterator[None]:
    """As `imagined`, but a step may ask for values computed from whole numbers of its example.

    Whatever the caller has set: a default device, `no_grad` or `inference_mode`.
    """
    # torch knows values of single numbers only, unless it is told otherwise.
    limit = mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", _KNOWN_NUMBERS)
    quiet = mock.patch.object(fake_tensor.log, "disabled", True)  # the error has its text
    cpu, normal = torch.device("cpu"), torch.inference_mode(False)
    with cpu, normal, _autocast_on_the_cpu(), imagined(ones=False), limit, quiet, _Constants():
        # Losses have tensors of their own, such as class weights, and models have some in lists.
        torch.empty(0).fake_mode.allow_non_fake_inputs = True  # type: ignore[attr-defined]
        yield


@contextmanager
def _autocast_on_the_cpu() -> Iterator[None]:
    """Have autocast that this thread enters for a device act on the CPU's tensors."""
    own = threading.get_ident()

    def on_cpu(owner: Any, name: str, place: int) -> Any:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != own:
                return function(*args, **kwargs)
            if name == "is_autocast_enabled" and not args:
                args = ("cpu",)
            if args[place : place + 1] and isinstance(args[place], str):
                args = (*args[:place], "cpu", *args[place + 1 :])
            if "device_type" in kwargs:
                kwargs["device_type"] = "cpu"
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    names = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled")
    with ExitStack() as stack:
        here = torch.accelerator.current_accelerator()
        if here is not None and torch.is_autocast_enabled(here.type):  # the caller's
            stack.enter_context(torch.autocast("cpu", torch.get_autocast_dtype(here.type)))
        for name in (*names, "set_autocast_dtype"):
            stack.enter_context(on_cpu(torch, name, 0))
        stack.enter_context(on_cpu(torch.autocast, "__init__", 1))
        yield


def _place(error: Exception) -> str:
    """The line in the code of a model or a loss where an error began, in words."""
    package = Path(__file__).parents[1]
    ours = (str(package / name) for name in ("advise", "measure", "outofcore"))
    inside = (str(Path(torch.__file__).parent), *ours)
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(inside)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""


def _twin(module: nn.Module) -> nn.Module:
    """A copy on the CPU, in a context that makes tensors without content."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(value, Tensor):
                if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
                    kind = f"a {type(value).__name__} of layout {value.layout}"
                    raise ValueError(f"the model has {kind}, whose memory is not foretold")
                empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                trained = isinstance(value, nn.Parameter)
                memo[id(value)] = nn.Parameter(empty, value.requires_grad) if trained else empty
    return copy.deepcopy(module, memo)


def _without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """A named model without content, or whole where its constructor needs values, as RegNet's."""
    try:
        with torch.device("meta"):
            return make()
    except NotImplementedError:
        with torch.device("cpu"):
            return make()


def _images(
    model: nn.Module, image: int | tuple[int, int], loss_fn: Callable[..., Tensor]
) -> tuple[Callable[[int], tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """A function from a batch size to images and classes, and a loss of all of the outputs."""
    sides = (image, image) if isinstance(image, int) else tuple(image)
    if len(sides) != 2 or not all(is_whole(side, 1) for side in sides):
        raise AdviceError(f"image is {image!r}: give pixels, or height and width")
    try:
        with _imagined_with_values(), torch.no_grad():
            outputs = _twin(model).train()(torch.empty(2, 3, *sides))
        ((_, classes, *places),) = {tuple(output.shape) for output in leaves_of(outputs)}
    except Exception as error:
        raise AdviceError(
            f"{type(model).__name__} does not make class scores of images of 3×{sides[0]}×"
            f"{sides[1]} ({type(error).__name__}: {error}): give image= of another size, or "
            "example=(inputs, targets) and loss_fn="
        ) from error

    def make(batch: int) -> tuple[Tensor, Tensor]:
        return torch.rand(batch, 3, *sides), torch.randint(classes, (batch, *places))

    return make, loss_fn if isinstance(outputs, Tensor) else _OfEach(loss_fn)


class _OfEach(nn.Module):
    """The sum of the losses of several outputs: a module, since the loss may have tensors."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, outputs: Any, targets: Any) -> Any:
        return sum(self.loss_fn(output, targets) for output in leaves_of(outputs))


def _resized(example: tuple[Any, Any], batch: int) -> tuple[Any, Any]:
    """A batch of so many samples, an example's over and over."""
    counts = {len(leaf) for leaf in leaves_of(example) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(counts) != 1 or 0 in counts:
        raise AdviceError(
            f"the example's tensors have {sorted(counts)} samples: give inputs and targets of as "
            "many, at least 1, samples first; lists of a tensor for each sample are not taken"
        )

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with _disable_current_modes():
            rows = torch.arange(batch, device=leaf.device)
            values = leaf[rows % len(leaf)] if leaf.dim() else leaf
        empty = torch.empty(values.shape, dtype=leaf.dtype)
        if not isinstance(empty, FakeTensor):
            return values
        if not leaf.is_floating_point():
            with _disable_current_modes():
                _know(empty, values.cpu())
        return empty

    both: tuple[Any, Any] = map_leaves(resize, example)
    return both
