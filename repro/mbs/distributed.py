"""Agreement among processes that each stream their share of a mini-batch."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from repro.mbs.errors import DistributedModelError
from repro.measure.loss_parts import is_sharded


class Processes:
    """The processes of a distributed model; this process alone for any other model.

    Under `DistributedDataParallel` each process accumulates the gradient of its own samples without
    the wrapper, which averages gradients once, at the end of the mini-batch. Fully sharded models
    (`FullyShardedDataParallel`, `fully_shard`) exchange parameters and gradients with every
    micro-batch, so that all processes need the same number of micro-batches. All processes call the
    methods, which exchange a few numbers, in the same order. `module` is the model to call.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self.module, self._device = model, model, device
        self.replicated = isinstance(model, DistributedDataParallel)
        self.sharded = is_sharded(model)
        self.several = self.replicated or self.sharded
        self._group: dist.ProcessGroup | None = None
        if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
            raise DistributedModelError(
                "torch.compile around DistributedDataParallel synchronises with each micro-batch, "
                "of which processes may have unequally many; compile the module within: "
                "DistributedDataParallel(torch.compile(model))"
            )
        if isinstance(model, DistributedDataParallel):
            self.module, self._group = model.module, model.process_group
            if model.static_graph:
                raise DistributedModelError(
                    "DistributedDataParallel(static_graph=True) synchronises gradients in each "
                    "backward pass, and micro-batches do so once for all; wrap the model with "
                    "static_graph=False (and find_unused_parameters=True where some are not used)"
                )
            if getattr(model, "mixed_precision", None) is not None:
                raise DistributedModelError(
                    "DistributedDataParallel(mixed_precision=) casts in the wrapper, without which "
                    "micro-batches are computed; give autocast= to MicroBatchStreamer instead"
                )
        elif self.sharded:
            self._group = _group_of(model)
        else:
            _warn_if_alone(model)
        self.gradients_are_views = bool(getattr(model, "gradient_as_bucket_view", False))

    def mean_weight(self, weight: float) -> float | torch.Tensor:
        """Return the divisor for which the mean over processes is the mean over all samples."""
        return self.sum(weight) / dist.get_world_size(self._group) if self.several else weight

    def sum(self, value: float | torch.Tensor) -> float | torch.Tensor:
        """Return the sum over the processes; an infinity or NaN, as of a loss, reaches all."""
        if not self.several:
            return value
        # A kernel fills it: a copy from the host would wait for the device.
        total = torch.zeros((), device=self._device, dtype=torch.float64) + value
        dist.all_reduce(total, group=self._group)
        return total

    def reshard(self) -> None:
        """Let a fully sharded model hold its parts, where an evaluation has left them gathered."""
        for module in self._model.modules() if self.sharded else ():
            getattr(module, "reshard", lambda: None)()

    def most(self, *numbers: float) -> list[float]:
        """Return each number's maximum over the processes; waits for them."""
        values = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values.tolist()

    def agreed_count(self, count: int, room: int) -> int:
        """Return every process's number of micro-batches; this one can make at most `room`."""
        most, negative = self.most(count, -room)
        if most > -negative:
            raise DistributedModelError(
                f"a process can make {int(-negative)} micro-batches of its samples, another has "
                f"{int(most)}; a fully sharded model computes as many in each: give each process "
                f"as many samples"
            )
        return int(most)

    def agreed_size(self, size: int, num_samples: int, problem: Exception | None) -> int:
        """Return the smallest size of all processes that must divide their samples.

        `problem` is this process's error, if any; one error makes all processes raise.
        """
        bound = -float("inf") if size >= num_samples else -float(size)
        failed, negative, most = self.most(problem is not None, bound, num_samples)
        if failed:
            raise problem or error_of_a_peer(False)
        return int(min(-negative, most))

    def least(self, number: int) -> int:
        """Return the smallest of a number over the processes of a fully sharded model."""
        return -int(self.most(-number)[0]) if self.sharded else number

    def synchronize(self) -> None:
        """Average accumulated gradients by a backward pass of zeros.

        `DistributedDataParallel` averages during a backward pass, with its communication hook.
        """
        model = self._model
        assert isinstance(model, DistributedDataParallel)
        module, partial = model._modules["module"], model.find_unused_parameters
        trained = [p for p in self.module.parameters() if p.requires_grad]
        touched = [p for p in trained if p.grad is not None or not partial]
        model._modules["module"] = _Zero(self.module, touched or trained[:1])
        try:
            with torch.enable_grad():
                loss = model()
        finally:
            model._modules["module"] = module
        loss.backward()


class _Zero(nn.Module):
    """Computes 0 of some parameters of a module, which `DistributedDataParallel` takes it for."""

    def __init__(self, module: nn.Module, touched: list[nn.Parameter]) -> None:
        super().__init__()
        kinds = nn.Embedding | nn.EmbeddingBag  # whose gradients are expected to be sparse
        self._tables = [m.weight for m in module.modules() if isinstance(m, kinds) and m.sparse]
        self._touched = touched  # a list is not registered
        vars(self)["named_buffers"] = module.named_buffers  # which are sent

    def forward(self) -> torch.Tensor:
        # A sum's gradient is one expanded number, even for a large parameter.
        return torch.stack([self._part(p).sum().float() * 0 for p in self._touched]).sum()

    def _part(self, parameter: nn.Parameter) -> torch.Tensor:
        if not any(parameter is table for table in self._tables):
            return parameter
        none = torch.zeros(0, dtype=torch.long, device=parameter.device)
        return F.embedding(none, parameter, sparse=True)


def error_of_a_peer(memory: bool) -> Exception:
    """Return the error to raise for another process's: out of memory (`memory`), or any other."""
    if memory:
        return torch.OutOfMemoryError("another process ran out of memory")
    return DistributedModelError("another process failed; its own error says why")


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group over which gradients are averaged, None for all processes."""
    meshes = {p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}
    if any(mesh.ndim > 1 for mesh in meshes) or len(meshes) > 1:
        raise DistributedModelError(
            "the model's parameters are spread over a mesh of more than one dimension (hybrid "
            "sharding or tensor parallelism), whose gradient average is not known here; shard it "
            "over one, or use DistributedDataParallel"
        )
    return next(iter(meshes)).get_group() if meshes else getattr(model, "process_group", None)


def _warn_if_alone(model: nn.Module) -> None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()) or any(
        isinstance(module, DistributedDataParallel) for module in model.modules()
    ):
        return  # distributed by other means, or a part of it is wrapped
    warnings.warn(
        f"{dist.get_world_size()} processes are joined, but the model given to MicroBatchStreamer "
        f"is not wrapped: each process computes the gradient of its own samples alone. Wrap it in "
        f"DistributedDataParallel first, or average gradients yourself",
        RuntimeWarning,
        stacklevel=4,
    )
