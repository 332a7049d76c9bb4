"""BatchNorm with running statistics of the mini-batch, not of its micro-batches."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from repro.mbs.errors import MicroBatchError

# count of values per channel, their mean and their summed squared deviation, each (channels,)
Moments = tuple[int, torch.Tensor, torch.Tensor]


class DeferredBatchNorm:
    """Gather BatchNorm's statistics over several forward passes, update them once.

    Inside the ``with`` block each training BatchNorm normalises by its micro-batch as always (the
    paper's behaviour), but does not update `running_mean` and `running_var`; the moments of its
    inputs are pooled. `update()` then moves the running statistics once, by the pooled mean and the
    pooled unbiased variance, as one forward pass over all the samples would; for a layer that is
    called several times in a forward pass, once for each call.

    The pooled moments equal the undivided mini-batch's for a layer with no other training BatchNorm
    before it: an earlier one normalises by micro-batch statistics, and so changes the later inputs.

    Differs from the paper: Micro-Batch Streaming (section 4.2.2) leaves BatchNorm unchanged, so
    that the running statistics move once per micro-batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
        ]
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self._layers):
            raise ValueError(
                "batchnorm='deferred' cannot gather the statistics of a SyncBatchNorm layer; use "
                "batchnorm='micro', or ordinary BatchNorm layers"
            )
        self.moments: dict[tuple[_BatchNorm, int], Moments] = {}  # by layer and number of the call
        self._calls: dict[_BatchNorm, int] = {}  # in this forward pass
        self._handles: list[RemovableHandle] = []
        self._before: dict[nn.Module, torch.Tensor] = {}

    def __enter__(self) -> "DeferredBatchNorm":
        hook = self._model.register_forward_pre_hook(lambda *_: self._calls.clear())
        self._handles.append(hook)
        for layer in self._layers:
            layer.track_running_stats = False  # the layer then passes no running statistics
            self._handles.append(layer.register_forward_pre_hook(self._gather))
            if "forward" in vars(layer) or type(layer).forward is not _BatchNorm.forward:
                if layer.running_mean is not None:
                    self._before[layer] = layer.running_mean.clone()
                self._handles.append(layer.register_forward_hook(self._check_held_back))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for layer in self._layers:
            layer.track_running_stats = True

    @torch.no_grad()
    def _gather(self, layer: _BatchNorm, inputs: tuple[Any, ...]) -> None:
        if not layer.training:  # a check evaluates the model
            return
        values = inputs[0].detach()  # (samples, channels, ...)
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        axes = [axis for axis in range(values.dim()) if axis != 1]
        count = values.numel() // values.shape[1]
        variance, mean = torch.var_mean(values, dim=axes, correction=0)
        self._calls[layer] = self._calls.get(layer, 0) + 1
        key = layer, self._calls[layer]
        self.moments[key] = _pool(self.moments.get(key), (count, mean, variance * count))

    def _check_held_back(self, layer: nn.Module, _: Any, __: Any) -> None:
        before = self._before.pop(layer, None)  # a copy: kernels leave the tensor's version as is
        if before is not None and not torch.equal(before, layer.get_buffer("running_mean")):
            raise MicroBatchError(
                f"batchnorm='deferred' cannot hold back {type(layer).__name__}, which updates its "
                f"running statistics in a forward of its own; use batchnorm='micro', or torch's "
                f"BatchNorm layers"
            )

    @torch.no_grad()
    def update(self) -> None:
        """Move each layer's running statistics once, by the pooled moments."""
        for (layer, _), (count, mean, deviation) in self.moments.items():
            if layer.running_mean is None or layer.running_var is None:
                continue
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
            if layer.momentum is None:  # a cumulative average
                seen: Any = layer.num_batches_tracked
                momentum: Any = seen.to(layer.running_mean.dtype).reciprocal()
            else:
                momentum = layer.momentum
            variance = deviation / max(1, count - 1)
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
            layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)
        self.moments.clear()


def _pool(first: Moments | None, second: Moments) -> Moments:
    # Chan, Golub and LeVeque's update: no difference of large sums.
    if first is None:
        return second
    (n, mean_n, deviation_n), (m, mean_m, deviation_m) = first, second
    total, shift = n + m, mean_m - mean_n
    deviation = deviation_n + deviation_m + shift.square() * (n * m / total)
    return total, mean_n + shift * (m / total), deviation
