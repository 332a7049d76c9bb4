"""Guards against models that cannot be trained in several processes, or that change later."""

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from repro.adaptive.optimizers import check_optimizer


class ModelGuard:
    """The layers and parameters of a model and its optimizer; `check` refuses later changes.

    `by_nodes`: the nodes that accumulate gradients must stay, which DistributedDataParallel hooks;
    torch replaces them when a parameter's type changes.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, by_nodes: bool = False
    ) -> None:
        self._model, self._optimizer, self._by_nodes = model, optimizer, by_nodes
        self._parameters = list(model.parameters())
        # Comparing these in each step is faster than walking through `model.parameters()`.
        self._homes = [
            (vars(module), name)
            for module in model.modules()
            for name in ("_parameters", "_modules")
        ]
        self._before = self._now()
        self._held = _count(optimizer)

    def _now(self) -> tuple[list[Any], list[Any]]:
        """The current layers, parameters and nodes, and the parameters' settings."""
        # Not by the dictionary's own `values`, which would finish updates.
        members = [
            member
            for home, name in self._homes
            for member in (
                dict.values(home[name]) if isinstance(home[name], dict) else home[name].values()
            )
        ]
        if self._by_nodes:
            members += [get_gradient_edge(p).node for p in self._parameters if p.requires_grad]
        return members, [(p.requires_grad, p.dtype, p.device) for p in self._parameters]

    def check(self) -> None:
        """Refuse a model or an optimizer that has changed since this guard was made."""
        (members, kinds), (members_before, kinds_before) = self._now(), self._before
        if [*map(id, members)] != [*map(id, members_before)] or kinds != kinds_before:
            raise ValueError(
                "the model has changed since this DataParallel was made: a layer or parameter was "
                "added or replaced, frozen or unfrozen, moved or given another type, even if it "
                "was taken back; call close, make the optimizer of its parameters, and another "
                "DataParallel"
            )
        if _count(self._optimizer) != self._held:
            check_optimizer(self._optimizer, self._model)
            self._held = _count(self._optimizer)


def check_layers(model: nn.Module) -> None:
    """Refuse layers that cannot be kept equal in all processes."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(
                f"{name} is {tensor.layout}, {tensor.dtype}, which processes cannot make the same: "
                "keep it dense, or in an attribute that is no buffer"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"the embedding {name or type(module).__name__} has max_norm={module.max_norm}: it "
                "changes its parameters in the forward pass, in each process those of its own "
                "samples, so that they would differ; set max_norm to None, and scale rows of "
                "weight after finish(), in every process"
            )


def check_initialized(model: nn.Module, trained: bool = False) -> None:
    """Refuse uninitialised lazy layers or, if `trained`, a model without trainable parameters."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise ValueError(
            f"{', '.join(lazy[:5])} of the model have no shape yet, since a lazy layer makes them "
            "in its first call: call the model with a mini-batch first, and make the optimizer then"
        )
    if trained and not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "the model has no parameter that requires a gradient; call requires_grad_() on those "
            "that are to be trained"
        )


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
