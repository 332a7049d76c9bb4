"""The convolutions that a model runs, recorded in one pass of a sample without side effects."""

from collections.abc import Callable, Iterator
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
from repro.measure.batches import call_model, leaves_of
from repro.measure.untouched import untouched
from repro.microconv.conv import is_plain, is_replaced, signature
from repro.microconv.kernels import KINDS, Kernel
from repro.microconv.tuned_kernel import Signature, kernels_of

_WAITING = (nn.parallel.DistributedDataParallel, nn.SyncBatchNorm)


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


def _add_bytes(
    others: dict[str, int], name: str, module: nn.Module, args: Any, kwargs: Any, mode: Any
) -> None:
    """Note the bytes that a call's passes allocate besides their results, the most by name."""
    tensors = _tensors_in((args, kwargs))

    def forward() -> Any:
        return module.forward(*args, **kwargs)

    def add(pass_: str, run: Callable[[], Any]) -> None:
        own, returned = f"{name} {pass_}", sum(t.nbytes for t in _tensors_in(run()))
        taken = peak_allocation(run, tensors[0].device) - returned
        others[own] = max(taken, others.get(own, 0))

    with mode:  # the autocast of the call
        with torch.no_grad():
            add("forward", forward)
        if backward := _backward(module, tensors, forward(), again=True):
            add("backward", backward)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


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
    model: nn.Module, sample_input: Any, training: bool, strict: bool = False
) -> tuple[list[Call], dict[str, str], dict[str, int]]:
    """Run the sample; return eligible calls, and the reasons against other layers.

    If `strict`, also the temporary bytes of the other layers' passes, by name. The model is
    restored afterwards; see `undisturbed`. `training` includes the backward pass.
    """
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise NotTunableError("the model has lazy layers; run it once with a sample, then tune it")
    calls: dict[tuple[str, Signature], Call] = {}
    skipped: dict[str, str] = {}
    untunable: dict[Any, tuple[Any, ...]] = {}
    others: dict[str, int] = {}
    hidden: list[str] = []
    # What torch.compile runs calls no hooks once it is compiled.
    wrapped = (m for m in model.modules() if "_orig_mod" in m._modules or m._compiled_call_impl)
    compiled = {part for module in wrapped for part in module.modules()}
    names = {m: name or "(model)" for name, m in model.named_modules() if isinstance(m, _ConvNd)}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = names[module]  # type: ignore[index]
        images = args[0] if args else kwargs.get("input")
        if (reason := _reason(module, images)) is not None:
            if not any(called == name for called, _ in calls):
                skipped[name] = reason
            tensors = _tensors_in((args, kwargs))
            if strict and tensors and (kind := tensors[0].device.type) != "meta":
                cast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
                how = args, kwargs, torch.autocast(kind, *cast)
                untunable[name, *(t.shape for t in tensors)] = module, *how
            return
        assert isinstance(module, nn.Conv2d) and isinstance(images, torch.Tensor)
        skipped.pop(name, None)
        call = signature(images, module.weight)
        wanted, graph = module.weight.requires_grad, training and torch.is_grad_enabled()
        hidden.extend([name] * (training and wanted and not graph))
        kinds = ["forward", *["backward_data"] * (graph and images.requires_grad)]
        kinds += ["backward_filter"] * (graph and wanted)
        before = calls.get((name, call), Call(name, module, call, 0, ()))
        merged = tuple(kind for kind in KINDS if kind in (*kinds, *before.kinds))
        batch = max(len(images), before.batch)
        calls[name, call] = Call(name, module, call, batch, merged)

    for name, script in model.named_modules():
        if getattr(script, "original_name", "").startswith("Conv"):
            skipped[name] = "it is scripted; tune first, script then"
    with undisturbed(model, sample_input), torch.set_grad_enabled(training):  # removes the hooks
        for module, name in names.items():
            skipped[name] = _ineligible(module) or "the sample did not reach it"
            if module in compiled:
                skipped[name] = "it is compiled: torch's own runs, without the limit"
            else:
                module.register_forward_pre_hook(note, with_kwargs=True)
        call_model(model, sample_input)
        if hidden:  # by no_grad, as a checkpoint does whose backward pass runs them again
            training_step(model, sample_input, training)
        for (name, *_), call in [*untunable.items()]:
            _add_bytes(others, name, *call)
    return list(calls.values()), skipped, others


def training_step(model: nn.Module, sample_input: Any, training: bool) -> None:
    """Run a forward pass, and in training a backward pass; no gradient is kept."""
    torch.clear_autocast_cache()  # of weights that a step has changed
    with torch.set_grad_enabled(training):
        returned = call_model(model, sample_input)
    backward = _backward(model, _tensors_in(sample_input), returned) if training else None
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
    module: nn.Module, inputs: list[torch.Tensor], returned: Any, again: bool = False
) -> Callable[[], tuple[torch.Tensor | None, ...]] | None:
    """The backward pass of a call, which may run `again`; None if there is no such pass."""
    outputs = [t for t in _tensors_in(returned) if t.requires_grad]
    wanted = [t for t in (*module.parameters(), *inputs) if t.requires_grad]
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

    Besides `untouched`: the sample, ``requires_grad`` and the default data type. Not: a function's
    cache or a file.
    """
    leaves = [t for t in (*model.parameters(), *_tensors_in(sample)) if t.is_leaf]
    flags = [tensor.requires_grad for tensor in leaves]
    dtype = torch.get_default_dtype()
    with untouched(model, _Sample(sample), everything=True):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            for tensor, flag in zip(leaves, flags, strict=True):
                if tensor.requires_grad != flag:
                    tensor.requires_grad_(flag)


class _Sample(nn.Module):
    """Holds a sample, so that it is saved like the attributes of a model."""

    def __init__(self, sample: Any) -> None:
        super().__init__()
        self.leaves = tree_leaves(sample)
