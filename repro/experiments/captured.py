"""Training steps that a GPU replays: one CUDA graph for each shape of mini-batches."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repro import models

LossFunction = Callable[[Tensor, Tensor], Tensor]
WARMUP = 3  # steps before a capture, in which libraries choose algorithms and allocate


def low_precision(config: Mapping[str, Any]) -> torch.dtype | None:
    """The type of a configuration's forward pass under autocast, None for none."""
    name = config.get("autocast")
    return None if name is None else getattr(torch, name)


def lower(config: Mapping[str, Any], device: torch.device | str) -> torch.autocast:
    """Return autocast to a configuration's type on a device, to be entered or to decorate."""
    low = low_precision(config)
    return torch.autocast(torch.device(device).type, low, enabled=low is not None)


def model_of(config: Mapping[str, Any], device: torch.device | str, **options: Any) -> nn.Module:
    """A configuration's model with fresh weights, in training mode, on a device, in its layout."""
    layout = torch.channels_last if config.get("channels_last") else torch.contiguous_format
    model = models.build(**config["model"], **options)
    return model.to(device, memory_format=layout)  # type: ignore[call-overload]


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    loss: Tensor
    gradients: list[Tensor | None]


class CapturedPasses:
    """Forward and backward pass as a graph per shape of the mini-batch.

    A small network on a large GPU is bound by the launching of its kernels; a graph launches them
    all at once. On a CPU, or without `captured`, they are the ordinary passes. The result of a
    call, and the gradients, are valid until the next, which has to be made on the same stream: all
    graphs keep what they do not return in one memory, the largest's. A graph keeps the rates of
    dropout that it was captured with: other rates have a graph of their own.

    Args:
        model: On its device, in training mode whenever it is called.
        loss_fn: Mean loss over a mini-batch.
        autocast: Type of the forward pass under autocast; None for none.
        captured: Whether to capture; False makes ordinary passes.
        channels_last: Layout of the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        autocast: torch.dtype | None = None,
        captured: bool = True,
        channels_last: bool = False,
    ) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._parameters = list(model.parameters())
        self._dropouts = [
            m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)
        ]
        self._autocast = autocast
        self._device = self._parameters[0].device
        self.captured = captured and self._device.type == "cuda"
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._graphs: dict[Any, _Graph] = {}
        self._pool: Any = None  # of memory, made by the first graph

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a mini-batch, before which there are none; return its mean loss.

        The loss, (), is on the device.
        """
        inputs = inputs.to(self._device, memory_format=self._layout, non_blocking=True)
        targets = targets.to(self._device, non_blocking=True)
        if not self.captured:
            return self._passes(inputs, targets)
        key = (inputs.shape, targets.shape, *(layer.p for layer in self._dropouts))
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs, targets)
        capture = self._graphs[key]
        capture.inputs.copy_(inputs)
        capture.targets.copy_(targets)
        for p, gradient in zip(self._parameters, capture.gradients, strict=True):
            p.grad = gradient
        capture.graph.replay()
        return capture.loss

    def _passes(self, inputs: Tensor, targets: Tensor) -> Tensor:
        kind = self._device.type
        with torch.autocast(kind, self._autocast) if self._autocast else nullcontext():
            loss = self._loss_fn(self._model(inputs), targets)
        loss.backward()
        return loss.detach()

    def _capture(self, inputs: Tensor, targets: Tensor) -> _Graph:
        inputs, targets = inputs.clone(), targets.clone()
        # The warm-up is no training: buffers and random numbers go on as if it had not been.
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        random = torch.cuda.get_rng_state(self._device)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self._model.zero_grad(set_to_none=True)
                self._passes(inputs, targets)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._model.zero_grad(set_to_none=True)
        torch.cuda.set_rng_state(random, self._device)
        graph = torch.cuda.CUDAGraph()
        # Graphs may share a pool, whatever the order that they are replayed in, where none runs
        # beside another, and none reads what another one leaves behind ("Graph memory management"
        # in torch's notes on CUDA).
        with torch.cuda.graph(graph, pool=self._pool):
            loss = self._passes(inputs, targets)
        self._pool = self._pool or graph.pool()
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        return _Graph(graph, inputs, targets, loss, [p.grad for p in self._parameters])


def captured_step(
    passes: CapturedPasses, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a training step of `passes` and the optimizer's update, one fused call.

    It returns the mean loss of its mini-batch, (), on the device. The optimizer is made with
    ``fused=True`` on a GPU.
    """

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        if not passes.captured:
            optimizer.zero_grad(set_to_none=True)
        loss = passes(inputs, targets)
        optimizer.step()
        return loss

    return step
