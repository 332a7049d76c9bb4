"""All-or-nothing gradients, buffers and random numbers: a mini-batch can be tried again."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import TensorWeakRef

from repro.measure.loss_parts import leaves_of_graph
from repro.measure.untouched import stored

_SetAside = tuple[TensorWeakRef, torch.Tensor | None]  # a leaf, and its earlier gradient


class Ledger:
    """The tensors that accumulate gradients, and the open transactions.

    `random_state` returns a function that puts back the present random number generators.
    `copy_gradients`: copies are set aside, because the backward pass writes the gradients' memory
    (views of `DistributedDataParallel`'s buckets). `gathered`: the leaves of graphs are parts that
    a fully sharded model has gathered.
    """

    def __init__(
        self, random_state: Callable[[], Callable[[], None]], copy_gradients: bool, gathered: bool
    ) -> None:
        self.random_state, self._copy, self._gathered = random_state, copy_gradients, gathered
        # Per open transaction, outermost first: copies of buffers, and gradients set aside.
        self._active: list[tuple[list[torch.Tensor], list[_SetAside]]] = []
        self.begin([])

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Start a mini-batch with the current parameters and buffers of these modules."""
        self.parameters, self.buffers = parameters_of(modules), Buffers(modules)
        self._others: list[TensorWeakRef] = []  # leaves that are no module's parameter

    @contextmanager
    def transaction(self, keep: bool = True) -> Iterator[None]:
        """Run a backward pass that either completes or changes nothing.

        On entry the gradients are set aside and new gradients start from None, so that nothing is
        copied if all are None already. A normal exit adds the new gradients in place to the old,
        unless `keep` is False. An exception restores gradients, buffers (the same tensor objects)
        and random number generators.
        """
        # Copies may run out of memory, and come first, while nothing has changed yet.
        copies, put_back = self.buffers.copies(), self.random_state()
        aside = [self._aside(leaf) for leaf in self._leaves()]
        for leaf in self._leaves():
            leaf.grad = None
        self._active.append((copies, aside))
        kept = False
        try:
            yield
            kept = keep
        finally:
            self._active.pop()
            sums, terms = [], []
            for reference, before in aside:
                if (leaf := reference()) is None or (kept and before is None):
                    continue
                if kept and before is not None and leaf.grad is not None:
                    if before.is_sparse and not leaf.grad.is_sparse:  # as torch adds them
                        before = leaf.grad + before
                    else:
                        sums.append(before)
                        terms.append(leaf.grad)
                leaf.grad = before
            if sums:
                torch._foreach_add_(sums, terms)
            if not kept:
                self.buffers.write(copies)
                put_back()

    def _leaves(self) -> list[torch.Tensor]:
        others = (reference() for reference in self._others)
        return [*self.parameters, *(leaf for leaf in others if leaf is not None)]

    def _aside(self, leaf: torch.Tensor) -> "_SetAside":
        gradient = leaf.grad.clone() if self._copy and leaf.grad is not None else leaf.grad
        # Weakly: a leaf made inside a forward pass is to be freed with its graph.
        return TensorWeakRef(leaf), gradient

    def meet(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the unknown leaves of a backward pass to all open transactions."""
        if self._gathered:
            return
        known = {id(leaf) for leaf in self._leaves()}
        for leaf in leaves_of_graph(tensors):
            if id(leaf) not in known:
                known.add(id(leaf))
                self._others.append(TensorWeakRef(leaf))
                for _, aside in self._active:
                    aside.append(self._aside(leaf))
                    leaf.grad = None

    def divide(self, divisor: float | torch.Tensor) -> None:
        """Divide all gradients."""
        gradients = [leaf.grad for leaf in self._leaves() if leaf.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, divisor)

    def touched(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient."""
        return [p for p in self.parameters if isinstance(p.grad, torch.Tensor)]

    def changed_buffers(self) -> list[str]:
        """Return the names of state that changed since the outermost transaction began."""
        return self.buffers.changed(self._active[0][0])


class Buffers:
    """The modules' own current buffers, which a forward pass may write or replace."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._held = [(module, dict(module._buffers.items())) for module in modules]
        every = (b for _, held in self._held for b in held.values() if b is not None)
        # Others, such as a sparse adjacency matrix, can be replaced, but hardly be written.
        dense = {id(b): b for b in every if b.layout is torch.strided and not b.is_inference()}
        self._versions = {key: version_of(buffer) for key, buffer in dense.items()}
        # Of an expanded buffer, which cannot be written, its distinct values.
        self._tensors = [stored(b) for b in dense.values()]
        self._frozen = [
            (module, name, parameter, parameter.detach(), version_of(parameter))
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]
        self._numbers = [(module, _numbers_of(module)) for module in modules]

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the values."""
        return [tensor.clone() for tensor in self._tensors]

    def write(self, copies: Sequence[torch.Tensor]) -> None:
        """Restore the recorded buffers, with these values."""
        for (module, held), (_, numbers) in zip(self._held, self._numbers, strict=True):
            if new := set(module._buffers.keys()) - held.keys():
                vars(module).update(numbers)  # such as a flag that says that they are there
            for name in new:
                del module._buffers[name]
            for name, buffer in held.items():
                if name not in module._buffers or module._buffers[name] is not buffer:
                    module._buffers[name] = buffer
        groups = defaultdict[Any, list[Any]](list)  # torch would copy mixed types one by one
        with torch.no_grad():
            for tensor, value in zip(self._tensors, copies, strict=True):
                if tensor.shape != value.shape:  # a forward pass gave it another size
                    tensor.resize_(value.shape)
                groups[tensor.device, tensor.dtype].append((tensor, value))
            for pairs in groups.values():
                tensors, values = (list(each) for each in zip(*pairs, strict=True))
                torch._foreach_copy_(tensors, values)

    def changed(self, copies: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of buffers outside BatchNorm that differ from `copies`.

        Also the names of changed frozen parameters and of changed numbers in attributes. Waits for
        the device only if a buffer was written.
        """
        values = dict(zip(self._versions, copies, strict=True))
        changed = []
        for module, held in self._held:
            for name, before in held.items():
                now = dict(module._buffers.items()).get(name)  # a script module has no get
                if id(before) not in values or now is None or isinstance(module, _BatchNorm):
                    continue
                written = now is not before or version_of(now) != self._versions[id(before)]
                value = values[id(before)]
                same = (now.dtype, now.device) == (value.dtype, value.device)
                if written and not (same and torch.equal(stored(now), value)):
                    changed.append(f"{name} of {type(module).__name__}")
        changed += self.changed_frozen()
        for (module, numbers), (_, held) in zip(self._numbers, self._held, strict=True):
            if module._buffers.keys() - held.keys():  # made by the first call, and undone by checks
                continue
            new = _numbers_of(module)
            names = (name for name, was in numbers.items() if new.get(name, was) not in (was,))
            changed += [f"{name} of {type(module).__name__}" for name in names]  # nor is NaN new
        return changed

    def changed_frozen(self) -> list[str]:
        """Return the names of frozen parameters that were written."""
        return [
            f"{name} of {type(module).__name__}"
            for module, name, parameter, memory, version in self._frozen
            if version_of(parameter) != version or not same_memory(parameter, memory)
        ]


def _numbers_of(module: nn.Module) -> dict[str, int | float]:
    if type(module).__module__.startswith("torch."):
        return {}
    torchs = ("training", "track_running_stats")  # which checks and `DeferredBatchNorm` set
    every = ((name, value) for name, value in vars(module).items() if name not in torchs)
    return {name: value for name, value in every if type(value) in (bool, int, float)}


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory; reads no address, which a swapper would observe."""
    torchs: Any = torch._C
    return bool(torchs._is_alias_of(one, other))


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change in place; 0 if torch keeps no count."""
    return 0 if tensor.is_inference() else tensor._version


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return these modules' own trainable parameters, tied ones once; walking a tree is slower."""
    parameters = (p for module in modules for p in module._parameters.values())
    return list({id(p): p for p in parameters if p is not None and p.requires_grad}.values())
