"""The convolutions that a model runs, recorded in one pass of a sample without side effects."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from repro.measure.allocations import peak_allocation
from repro.measure.batches import leaves_of
from repro.measure.untouched import untouched
from repro.microconv.conv import is_plain, is_replaced, signature
from repro.microconv.kernels import KINDS, Kernel
from repro.microconv.tuned_kernel import Signature, kernels_of

_WAITING = (nn.parallel.DistributedDataParallel, nn.SyncBatchNorm)
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


class NotTunableError(ValueError):
    """`tune` got no model or no valid sample, or runs in a mode in which times would be wrong."""


def check_model(model: Any, function: str) -> None:
    """Refuse anything but a module by NotTunableError."""
    if not isinstance(model, nn.Module):
        kind = getattr(model, "__name__", type(model).__name__)
        raise NotTunableError(
            f"{function}() was given {kind}, which is no module but a class, a function or another "
            "method's object: tune the model first, and give that to whatever trains it"
        )


def check_tunable(model: Any) -> None:
    """Refuse anything but a module, and modes that would change the convolutions' times."""
    check_model(model, "tune")
    if modes := _get_current_dispatch_mode_stack():
        inside = ", ".join(dict.fromkeys(type(mode).__module__ for mode in modes))
        raise NotTunableError(
            f"tune() is called where every operation is watched ({inside}), which takes longer "
            "than a small convolution: its times would be wrong, and kept. Call tune() before, "
            "outside of OutOfCore, MemoryBudget or another mode; the tuned model runs inside"
        )
    sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if sharded or (together and any(isinstance(m, _WAITING) for m in model.modules())):
        raise NotTunableError(
            "the model waits for other processes, which try it another number of times; tune it "
            "before it is sharded, given SyncBatchNorm or wrapped in DistributedDataParallel"
        )


@dataclass(frozen=True)
class Call:
    """A convolution called by the sample: each layer and shape once, at its largest batch."""

    name: str
    module: nn.Conv2d
    signature: Signature
    batch: int
    kinds: tuple[str, ...]

    def kernels(self) -> list[Kernel]:
        """The needed kernels, in the order of `kinds`."""
        by_kind = kernels_of(self.module, self.signature)
        return [by_kind[kind] for kind in self.kinds]


@dataclass(frozen=True)
class Untunable:
    """A called convolution that is left to torch, with the arguments of the call."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def temporary_bytes(self, training: bool) -> dict[str, int]:
        """Bytes that ``forward`` and in training ``backward`` allocate besides their results."""
        tensors = [t for t in tree_leaves((self.args, self.kwargs)) if _is_tensor(t)]
        if not tensors or tensors[0].device.type == "meta":
            return {}
        device = tensors[0].device

        def forward() -> Any:
            return self.module.forward(*self.args, **self.kwargs)

        def taken_by(run: Callable[[], Any]) -> int:
            returned: int = sum(t.nbytes for t in tree_leaves(run()) if _is_tensor(t))
            return max(0, peak_allocation(run, device) - returned)

        with torch.no_grad():
            taken = {"forward": taken_by(forward)}
        if training and torch.is_grad_enabled():
            backward = _backward(self.module, tensors, forward(), again=True)
            if backward is not None:
                taken["backward"] = taken_by(backward)
        return taken


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _ineligible(module: nn.Module) -> str | None:
    """The reason why a layer is left to torch, None if it can be tuned."""
    if type(module) is not nn.Conv2d:
        name = type(module).__name__
        name = torch.typename(module) if name == "Conv2d" else name  # torch has other Conv2d
        return f"it is a {name}; only nn.Conv2d itself is tuned"
    if is_replaced(module):
        return "its forward pass was replaced by another; tune first, replace it then"
    if module.padding_mode != "zeros":
        return f"its padding mode is {module.padding_mode!r}"
    return None


def record_calls(
    model: nn.Module, sample_input: Any, training: bool
) -> tuple[list[Call], dict[str, str], list[Untunable]]:
    """Run the sample; return eligible calls, reasons against other layers, and their calls.

    The model is restored afterwards; see `undisturbed`. `training` includes the backward pass.
    """
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise NotTunableError("the model has lazy layers; run it once with a sample, then tune it")
    calls: dict[tuple[str, Signature], Call] = {}
    skipped: dict[str, str] = {}
    untunable: dict[Any, Untunable] = {}
    hidden: list[str] = []
    compiled = _compiled(model)
    names = {m: name or "(model)" for name, m in model.named_modules() if isinstance(m, _ConvNd)}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = names[module]  # type: ignore[index]
        images = args[0] if args else kwargs.get("input")
        if (reason := _reason(module, images)) is not None:
            if not any(called == name for called, _ in calls):
                skipped[name] = reason
            shapes = [t.shape for t in tree_leaves((args, kwargs)) if _is_tensor(t)]
            untunable[name, *shapes] = Untunable(name, module, args, kwargs)
            return
        assert isinstance(module, nn.Conv2d) and isinstance(images, torch.Tensor)
        skipped.pop(name, None)
        call = signature(images, module.weight)
        wanted, graph = module.weight.requires_grad, training and torch.is_grad_enabled()
        hidden.extend([name] * (training and wanted and not graph))
        kinds = ["forward", *["backward_data"] * (graph and images.requires_grad)]
        kinds += ["backward_filter"] * (graph and wanted)
        before = calls.get((name, call))
        merged = tuple(k for k in KINDS if k in kinds or (before and k in before.kinds))
        batch = max(len(images), before.batch if before else 0)
        calls[name, call] = Call(name, module, call, batch, merged)

    for name, script in model.named_modules():
        if getattr(script, "original_name", "").startswith("Conv"):
            skipped[name] = "it is scripted; tune first, script then"
    hooks = []
    for module, name in names.items():
        skipped[name] = _ineligible(module) or "the sample did not reach it"
        if module in compiled:
            skipped[name] = "it is compiled: torch's own runs, without the limit"
        else:
            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with undisturbed(model, sample_input), torch.set_grad_enabled(training):
            run_sample(model, sample_input)
            if hidden:  # by no_grad, as a checkpoint does whose backward pass runs them again
                training_step(model, sample_input, training)
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values()), skipped, list(untunable.values())


def _compiled(model: nn.Module) -> set[nn.Module]:
    """The modules that torch.compile runs, which call no hooks once they are compiled."""
    found = (m for m in model.modules() if "_orig_mod" in m._modules or m._compiled_call_impl)
    return {part for module in found for part in module.modules()}


def run_sample(model: nn.Module, sample_input: Any) -> Any:
    """Call the model with a sample: a tensor, a tuple or a dictionary of arguments."""
    if isinstance(sample_input, Mapping):
        return model(**sample_input)
    return model(*sample_input) if isinstance(sample_input, tuple | list) else model(sample_input)


def training_step(model: nn.Module, sample_input: Any, training: bool) -> None:
    """Run a forward pass, and in training a backward pass; no gradient is kept."""
    torch.clear_autocast_cache()  # of weights that a step has changed
    with torch.set_grad_enabled(training):
        returned = run_sample(model, sample_input)
    backward = _backward(model, tree_leaves(sample_input), returned) if training else None
    if backward is None:
        return
    try:
        backward()
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        told = "tune() asks for gradients, which checkpoint(use_reentrant=True) refuses; give False"
        raise NotTunableError(told) from error


def _backward(
    module: nn.Module, inputs: Iterable[Any], returned: Any, again: bool = False
) -> Callable[[], tuple[torch.Tensor | None, ...]] | None:
    """The backward pass of a call, which may run `again`; None if there is no such pass."""
    outputs = [t for t in leaves_of(returned) if _is_tensor(t) and t.requires_grad]
    wanted = [t for t in (*module.parameters(), *filter(_is_tensor, inputs)) if t.requires_grad]
    if not outputs or not wanted:
        return None
    ones = [torch.ones_like(t) for t in outputs]
    options = {"retain_graph": again, "allow_unused": True}
    return partial(torch.autograd.grad, outputs, wanted, ones, **options)


def _reason(module: nn.Module, input: Any) -> str | None:
    """The reason why a call is left to torch, None if it can be tuned."""
    if reason := _ineligible(module):
        return reason
    assert isinstance(module, nn.Conv2d)
    if not is_plain(input) or input.dim() != 4 or not len(input):
        return "its input is no batch of images in a plain, strided tensor"
    try:
        kernels_of(module, signature(input, module.weight))
    except ValueError as problem:
        return str(problem)
    return None


@contextmanager
def undisturbed(model: nn.Module, sample: Any) -> Iterator[None]:
    """Restore at the end all state that runs of the model may change, even after an error.

    Besides `untouched`: all attributes of modules, torch's own included, such as hooks; the sample;
    ``requires_grad``; the default data type. Not: a function's cache or a file.
    """
    held = _Sample(sample)
    kept = [
        (now, dict(now), {name: copy.copy(v) for name, v in now.items() if type(v) in _CONTAINERS})
        for now in map(vars, model.modules())
    ]
    leaves = [t for t in (*model.parameters(), *filter(_is_tensor, held.leaves)) if t.is_leaf]
    flags = [tensor.requires_grad for tensor in leaves]
    dtype = torch.get_default_dtype()
    with untouched(model, held):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            for now, attributes, containers in kept:
                now.clear()
                now.update(attributes)
                for name, elements in containers.items():
                    now[name].clear()
                    fill = "extend" if hasattr(now[name], "extend") else "update"
                    getattr(now[name], fill)(elements)
            for tensor, flag in zip(leaves, flags, strict=True):
                if tensor.requires_grad != flag:
                    tensor.requires_grad_(flag)


class _Sample(nn.Module):
    """Holds a sample, so that it is saved like the attributes of a model."""

    def __init__(self, sample: Any) -> None:
        super().__init__()
        self.leaves = tree_leaves(sample)
