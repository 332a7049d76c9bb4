"""Which convolutions a model runs, and on what: one pass of a sample, which leaves no trace."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from repro.measure import accelerator
from repro.measure.allocations import peak_allocation
from repro.microconv.conv import TunedConv2d, signature
from repro.microconv.kernels import KINDS, Kernel
from repro.microconv.tuned_kernel import Signature, kernels_of


@dataclass(frozen=True)
class Call:
    """A convolution as the sample calls it: each layer and shape once, at its largest batch."""

    name: str
    module: nn.Conv2d
    signature: Signature
    batch: int
    kinds: tuple[str, ...]

    def kernels(self) -> list[Kernel]:
        """Return the kernels that are needed, in the order of `kinds`."""
        by_kind = kernels_of(self.module, self.signature)
        return [by_kind[kind] for kind in self.kinds]


@dataclass(frozen=True)
class Untunable:
    """A convolution that is called and left to torch, with what it was called with."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def temporary_bytes(self, training: bool) -> dict[str, int]:
        """Return what each pass allocates at most beside what it returns, measured.

        Args:
            training: Whether to look at the backward pass as well.

        Returns:
            Bytes of ``forward``, and of ``backward`` where there is one.
        """
        tensors = [t for t in tree_leaves((self.args, self.kwargs)) if _is_tensor(t)]
        if not tensors or tensors[0].device.type == "meta":
            return {}
        device = tensors[0].device

        def forward() -> Any:
            return type(self.module).forward(self.module, *self.args, **self.kwargs)

        with torch.no_grad():
            returned = _bytes_of(forward())
            taken = {"forward": peak_allocation(forward, device) - returned}
        if training and torch.is_grad_enabled():
            wanted = [p for p in self.module.parameters() if p.requires_grad]
            wanted += [t for t in tensors if t.requires_grad]
            outputs = [t for t in tree_leaves(forward()) if _is_tensor(t) and t.requires_grad]
            ones = [torch.ones_like(t) for t in outputs]

            def backward() -> Any:
                options = {"retain_graph": True, "allow_unused": True}
                return torch.autograd.grad(outputs, wanted, ones, **options)

            if outputs and wanted:
                returned = _bytes_of(backward())
                taken["backward"] = peak_allocation(backward, device) - returned
        return {name: max(0, count) for name, count in taken.items()}


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _bytes_of(values: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(values) if _is_tensor(t))


def _ineligible(module: nn.Module) -> str | None:
    if type(module) not in (nn.Conv2d, TunedConv2d):
        return f"it is a {type(module).__name__}; only nn.Conv2d itself is tuned"
    assert isinstance(module, nn.Conv2d)
    if module.padding_mode != "zeros":
        return f"its padding mode is {module.padding_mode!r}"
    return None


def record_calls(
    model: nn.Module, sample_input: Any, training: bool
) -> tuple[list[Call], dict[str, str], list[Untunable]]:
    """Run the sample; return calls of eligible convolutions, why others are left out, their calls.

    Args:
        model: Its buffers and torch's random state are put back afterwards.
        sample_input: A tensor, a tuple of positional or a dictionary of keyword arguments.
        training: Whether kernels of the backward pass are wanted as well.
    """
    calls: dict[tuple[str, Signature], Call] = {}
    skipped: dict[str, str] = {}
    untunable: dict[Any, Untunable] = {}
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
        kinds = ["forward"]
        if training and torch.is_grad_enabled():
            kinds += ["backward_data"] * images.requires_grad
            kinds += ["backward_filter"] * module.weight.requires_grad
        before = calls.get((name, call))
        merged = tuple(k for k in KINDS if k in kinds or (before and k in before.kinds))
        batch = max(len(images), before.batch if before else 0)
        calls[name, call] = Call(name, module, call, batch, merged)

    hooks = []
    for module, name in names.items():
        skipped[name] = _ineligible(module) or "the sample did not reach it"
        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with undisturbed(model), torch.set_grad_enabled(training):
            run_sample(model, sample_input)
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values()), skipped, list(untunable.values())


def run_sample(model: nn.Module, sample_input: Any) -> Any:
    """Call the model with a sample: a tensor, a tuple or a dictionary of arguments."""
    if isinstance(sample_input, Mapping):
        return model(**sample_input)
    if isinstance(sample_input, tuple | list):
        return model(*sample_input)
    return model(sample_input)


def training_step(model: nn.Module, sample_input: Any, training: bool) -> None:
    """Run a forward pass, and a backward one in training; no gradient is kept."""
    with torch.set_grad_enabled(training):
        returned = run_sample(model, sample_input)
    outputs = [t for t in tree_leaves(returned) if _is_tensor(t) and t.requires_grad]
    if not training or not outputs:
        return
    wanted = [p for p in model.parameters() if p.requires_grad]
    wanted += [t for t in tree_leaves(sample_input) if _is_tensor(t) and t.requires_grad]
    if wanted:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, wanted, ones, allow_unused=True)


def _reason(module: nn.Module, input: object) -> str | None:
    """Return why a call is left to torch, None where it can be tuned."""
    if reason := _ineligible(module):
        return reason
    if type(input) not in (torch.Tensor, nn.Parameter):
        return f"its input is a {type(input).__name__}; a plain tensor is needed"
    assert isinstance(input, torch.Tensor) and isinstance(module, nn.Conv2d)
    if input.dim() != 4 or not len(input):
        return f"its input has the shape {tuple(input.shape)}; a batch is needed"
    if input.device.type == "meta" or input.layout != torch.strided:
        return f"its input is {input.layout} on {input.device}, not strided and with memory"
    try:
        kernels_of(module, signature(input, module.weight))
    except ValueError as problem:
        return str(problem)
    return None


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put buffers and torch's random state back at the end."""
    saved = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    with ExitStack() as stack:
        for device in {p.device for p in model.parameters()} | {torch.device("cpu")}:
            stack.enter_context(accelerator.forked_rng(device))
        try:
            yield
        finally:
            for module, name, buffer, values in saved:
                module._buffers[name] = buffer
                if not torch.equal(buffer, values):
                    with torch.no_grad():
                        buffer.copy_(values)
