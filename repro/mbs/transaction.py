"""All-or-nothing gradients: what lets a mini-batch be tried again after it ran out of memory."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.weak import TensorWeakRef

from repro.mbs.randomness import Randomness


@dataclass(eq=False)
class Transaction:
    """Run a backward pass so that it either happens whole or leaves no trace.

    On entry the gradients are set aside and new ones start from None, so that nothing is copied
    when they are None already; `include` does so for one more tensor. Leaving normally adds the new
    gradients to those set aside, in place. Leaving by an exception puts back the gradients (the
    very tensors), the buffers (BatchNorm's running statistics among them; the very tensors, where a
    module replaces its own) and the random number generators.

    A `torch.amp.GradScaler` needs nothing put back: scaling a loss does not change its state.

    Attributes:
        parameters: Those known to accumulate gradients, each once.
        buffers: Those that a forward pass may change.
        randomness: The random number generators.
        leaves: Other tensors known to accumulate gradients.
        active: The transactions that are under way, outermost first, of which this becomes one.
        keep: Whether leaving normally keeps the gradients; a probe puts everything back.
        copy_gradients: Whether copies are set aside, as the backward pass writes the gradients'
            memory (views of `DistributedDataParallel`'s buckets).
    """

    parameters: Sequence[nn.Parameter]
    buffers: "Buffers"
    randomness: Randomness
    leaves: Sequence[TensorWeakRef]
    active: list["Transaction"]
    keep: bool = True
    copy_gradients: bool = False

    def __enter__(self) -> "Transaction":
        # First what may run out of memory, while nothing has changed yet.
        self._saved_buffers = self.buffers.copies()
        self._gradients = [(p, self._gradient(p)) for p in self.parameters]
        self._states = self.randomness.get()
        self._included: list[tuple[TensorWeakRef, torch.Tensor | None]] = []
        for parameter in self.parameters:
            parameter.grad = None
        for reference in self.leaves:
            if (leaf := reference()) is not None:
                self.include(leaf)
        self.active.append(self)
        return self

    def changed_buffers(self) -> list[str]:
        """Return the names of buffers outside batch normalisation that have changed since entry."""
        return self.buffers.changed(self._saved_buffers)

    def include(self, leaf: torch.Tensor) -> None:
        """Set aside the gradient of one more tensor, before the first backward pass adds to it."""
        # Weakly: what a forward pass makes for itself is to be freed with its graph.
        self._included.append((TensorWeakRef(leaf), self._gradient(leaf)))
        leaf.grad = None

    def _gradient(self, leaf: torch.Tensor) -> torch.Tensor | None:
        return leaf.grad.clone() if self.copy_gradients and leaf.grad is not None else leaf.grad

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.active.remove(self)
        kept = kind is None and self.keep
        sums, terms = [], []
        leaves: list[tuple[torch.Tensor, torch.Tensor | None]] = [*self._gradients]
        leaves += [
            (leaf, g) for reference, g in self._included if (leaf := reference()) is not None
        ]
        for leaf, before in leaves:
            if kept and before is None:
                continue
            if kept and before is not None and leaf.grad is not None:
                sums.append(before)
                terms.append(leaf.grad)
            leaf.grad = before
        if sums:
            torch._foreach_add_(sums, terms)
        if not kept:
            self.buffers.write(self._saved_buffers)
            self.randomness.set(self._states)
        del self._gradients, self._saved_buffers, self._included


class Ledger:
    """The tensors that backward passes add gradients to, and the transactions under way."""

    def __init__(self, randomness: Randomness, copy_gradients: bool, gathered: bool) -> None:
        self._randomness, self._copy, self._gathered = randomness, copy_gradients, gathered
        self._active: list[Transaction] = []
        self.begin([])

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Start a mini-batch: parameters and buffers are those of these modules as they are now."""
        self.parameters, self.buffers = parameters_of(modules), Buffers(modules)
        self._others: list[TensorWeakRef] = []  # that no module has as a parameter

    def end(self) -> None:
        """Forget the tensors that no module has as a parameter."""
        self._others = []

    def transaction(self, keep: bool = True) -> Transaction:
        """Return a transaction on all tensors that are known now."""
        given = self.parameters, self.buffers, self._randomness, self._others, self._active
        return Transaction(*given, keep, self._copy)

    def meet(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves of a backward pass; those not known yet join all transactions."""
        if self._gathered:
            return []  # the leaves are parts that a fully sharded model has gathered
        self._others = [reference for reference in self._others if reference() is not None]
        known = {id(leaf) for leaf in self.parameters} | {id(leaf()) for leaf in self._others}
        leaves = leaves_of_graph(tensors)
        for leaf in leaves:
            if id(leaf) not in known:
                known.add(id(leaf))
                self._others.append(TensorWeakRef(leaf))
                for transaction in self._active:
                    transaction.include(leaf)
        return leaves

    def divide(self, divisor: float | torch.Tensor) -> None:
        """Divide all gradients."""
        others = [leaf for reference in self._others if (leaf := reference()) is not None]
        gradients = [g.grad for g in (*self.parameters, *others) if g.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, divisor)

    def touched(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient."""
        return [p for p in self.parameters if isinstance(p.grad, torch.Tensor)]

    def changed_buffers(self) -> list[str]:
        """Return the names of what has changed since the outermost transaction began."""
        return self._active[0].changed_buffers()


class Buffers:
    """The buffers of modules as they are now, which a forward pass may write or replace.

    Of each module its own, without those of modules within.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._held = [(module, dict(module._buffers.items())) for module in modules]
        every = (buffer for _, held in self._held for buffer in held.values())
        self._tensors = list({id(b): b for b in every if b is not None}.values())
        self._versions = {id(tensor): version_of(tensor) for tensor in self._tensors}
        self._frozen = [
            (module, name, parameter, parameter.detach(), version_of(parameter))
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]
        self._numbers = [(module, _numbers_of(module)) for module in modules]

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the values."""
        return copy_tensors(self._tensors)

    def write(self, copies: Sequence[torch.Tensor]) -> None:
        """Put back the buffers of before, with these values."""
        for module, held in self._held:
            for name in set(module._buffers.keys()) - held.keys():
                del module._buffers[name]
            for name, buffer in held.items():
                if name not in module._buffers or module._buffers[name] is not buffer:
                    module._buffers[name] = buffer
        write_tensors(self._tensors, copies)

    def changed(self, copies: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of buffers outside BatchNorm that differ from `copies`.

        Also those of frozen parameters and of numbers in attributes that have changed. Waits for
        the device only where a buffer was written.
        """
        values = dict(zip(self._versions, copies, strict=True))
        changed = []
        for module, held in self._held:
            for name, before in held.items():
                now = dict(module._buffers.items()).get(name)  # a script module has no get
                if before is None or now is None or isinstance(module, _NormBase):
                    continue
                written = now is not before or version_of(now) != self._versions[id(before)]
                if written and not _equal(now, values[id(before)]):
                    changed.append(f"{name} of {type(module).__name__}")
        changed += self.changed_frozen()
        for module, numbers in self._numbers:
            new = _numbers_of(module)
            names = (name for name, number in numbers.items() if new.get(name, number) != number)
            changed += [f"{name} of {type(module).__name__}" for name in names]
        return changed

    def changed_frozen(self) -> list[str]:
        """Return which parameters that are not trained were written."""
        return [
            f"{name} of {type(module).__name__}"
            for module, name, parameter, memory, version in self._frozen
            if version_of(parameter) != version or not same_memory(parameter, memory)
        ]


def _numbers_of(module: nn.Module) -> dict[str, int | float]:
    if type(module).__module__.startswith("torch."):
        return {}
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share memory; no address is read, which would be noticed."""
    torchs: Any = torch._C
    return bool(torchs._is_alias_of(one, other))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(one, other)


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change in place; 0 where torch counts none."""
    return 0 if tensor.is_inference() else tensor._version


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters to train of these modules themselves, tied ones once.

    Several times faster than walking the module tree, and done for each mini-batch.
    """
    parameters = (p for module in modules for p in module._parameters.values())
    return list({id(p): p for p in parameters if p is not None and p.requires_grad}.values())


def leaves_of_graph(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors to which a backward pass from `tensors` adds a gradient."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, leaves = set(waiting), []
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        for function, _ in following:
            if function is not None and function not in seen:
                seen.add(function)
                waiting.append(function)
        if not following and isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            leaves.append(leaf)
    return leaves


def copy_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies, made by a few kernels however many tensors there are."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    write_tensors(copies, tensors)
    return copies


@torch.no_grad()
def write_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy `sources` into `targets`."""
    # One call per kind of tensor: a mixed list is copied tensor by tensor.
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
    alike = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        group = alike[target.device, target.dtype]
        group[0].append(target)
        group[1].append(source)
    for group in alike.values():
        torch._foreach_copy_(*group)
