"""That model and optimizer stay as they were when the averaging of their gradients was set up."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from repro.adaptive.optimizers import check_optimizer


class ModelGuard:
    """The layers and parameters of a model and its optimizer; a later `check` refuses others."""

    def __init__(
        self, model: nn.Module, names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer
    ) -> None:
        self._names = names
        # Quicker to compare in each step than `model.parameters()` is to walk through.
        self._parts: list[tuple[dict[str, Any], str, list[Any]]] = [
            (vars(module), name, list(getattr(module, name).values()))
            for module in model.modules()
            for name in ("_parameters", "_modules")
        ]
        self._trainable = [p.requires_grad for p in names]
        self._types = [(p.dtype, p.device) for p in names]
        self._nodes: list[Any] | None = None
        self._held = _count(optimizer)

    def note_nodes(self) -> None:
        """Note the nodes that accumulate gradients, which DistributedDataParallel hooks."""
        self._nodes = _gradient_nodes(self._names)

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a model and an optimizer that have changed since this was made.

        Raises:
            ValueError: The model has other layers or parameters, or parameters were frozen,
                unfrozen, moved or given another type; or the optimizer has others.
        """
        # Not by `values` of its own, which would finish updates.
        now = (([*dict.values(home[name])], known) for home, name, known in self._parts)
        if any(len(a) != len(b) or any(map(operator.is_not, a, b)) for a, b in now):
            raise ValueError(
                "the model has other layers or parameters than when this DataParallel was made, "
                "which would not be averaged: call close, make the optimizer of them, and another "
                "DataParallel"
            )
        trainable = [p.requires_grad for p in self._names]
        if trainable != self._trainable:
            changed = [
                name
                for (p, name), was in zip(self._names.items(), self._trainable, strict=True)
                if p.requires_grad != was
            ]
            raise ValueError(
                f"requires_grad of {', '.join(changed[:5])} has changed since this DataParallel "
                "was made, which averages the parameters that required a gradient then: call close "
                "and make another DataParallel after freezing or unfreezing"
            )
        types = [(p.dtype, p.device) for p in self._names]
        # DistributedDataParallel hooks the nodes, which torch makes anew with a parameter's type.
        known = self._nodes is None or all(
            map(operator.is_, _gradient_nodes(self._names), self._nodes)
        )
        if types != self._types or not known:
            raise ValueError(
                "the model's parameters were moved or given another type since this DataParallel "
                "was made, even if they were taken back: call close, make the optimizer of them, "
                "and another DataParallel"
            )
        if _count(optimizer) != self._held:
            check_optimizer(optimizer, model)
            self._held = _count(optimizer)


def check_layers(model: nn.Module) -> None:
    """Refuse what cannot be the same in all processes.

    Raises:
        ValueError: An embedding has a `max_norm`: it changes its parameters in the forward pass,
            by its samples; or a parameter or a buffer is sparse or quantised.
    """
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
    """Refuse a model whose lazy layers are not made yet, or with `trained` nothing to train.

    Raises:
        ValueError: It is one of these.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise ValueError(
            f"{', '.join(lazy[:5])} of the model have no shape yet, since a lazy layer makes them "
            "in its first call: call the model with a mini-batch first, and make the optimizer then"
        )
    if trained and not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient; nothing is trained")


def _gradient_nodes(parameters: Iterable[Tensor]) -> list[Any]:
    """Return what accumulates the gradient of each parameter that requires one."""
    return [get_gradient_edge(p).node for p in parameters if p.requires_grad]


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
