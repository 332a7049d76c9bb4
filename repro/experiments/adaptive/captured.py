"""A training step that a GPU replays: one CUDA graph for each batch size."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LossFunction = Callable[[Tensor, Tensor], Tensor]
WARMUP = 3  # steps before a capture, in which libraries choose algorithms and allocate


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    loss: Tensor
    gradients: list[Tensor | None]


class CapturedStep:
    """Forward and backward pass as a graph per batch size; the update is one fused call.

    A small network on a large GPU is bound by the launching of its kernels; a graph launches them
    all at once. On a CPU, or without `captured`, it is the ordinary step. The result of a call, and
    the gradients, are valid until the next, which has to be made on the same stream: all graphs
    keep what they do not return in one memory, the largest's.

    Args:
        model: On its device, in training mode whenever a step is made.
        loss_fn: Mean loss over a mini-batch.
        optimizer: Made with ``fused=True`` on a GPU.
        autocast: Type of the forward pass under autocast; None for none.
        captured: Whether to capture; False makes ordinary steps.
        channels_last: Layout of the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        autocast: torch.dtype | None = None,
        captured: bool = True,
        channels_last: bool = False,
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._parameters = list(model.parameters())
        self._autocast = autocast
        self._device = self._parameters[0].device
        self._captured = captured and self._device.type == "cuda"
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._graphs: dict[tuple[torch.Size, torch.Size], _Graph] = {}
        self._pool: Any = None  # of memory, made by the first graph

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on one mini-batch and return its mean loss, on the device."""
        inputs = inputs.to(self._device, memory_format=self._layout, non_blocking=True)
        targets = targets.to(self._device, non_blocking=True)
        if not self._captured:
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._passes(inputs, targets)
            self._optimizer.step()
            return loss
        key = (inputs.shape, targets.shape)
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs, targets)
        own = self._graphs[key]
        own.inputs.copy_(inputs)
        own.targets.copy_(targets)
        for p, gradient in zip(self._parameters, own.gradients, strict=True):
            p.grad = gradient
        own.graph.replay()
        self._optimizer.step()
        return own.loss

    def _passes(self, inputs: Tensor, targets: Tensor) -> Tensor:
        kind = self._device.type
        with torch.autocast(kind, self._autocast) if self._autocast else nullcontext():
            loss = self._loss_fn(self._model(inputs), targets)
        loss.backward()
        return loss.detach()

    def _capture(self, inputs: Tensor, targets: Tensor) -> _Graph:
        inputs, targets = inputs.clone(), targets.clone()
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self._optimizer.zero_grad(set_to_none=True)
                self._passes(inputs, targets)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # Graphs may share a pool, whatever the order that they are replayed in, where none runs
        # beside another, and none reads what another one leaves behind ("Graph memory management"
        # in torch's notes on CUDA).
        with torch.cuda.graph(graph, pool=self._pool):
            loss = self._passes(inputs, targets)
        self._pool = self._pool or graph.pool()
        with torch.no_grad():
            for buffer, saved in buffers:  # the warm-up is no training
                buffer.copy_(saved)
        return _Graph(graph, inputs, targets, loss, [p.grad for p in self._parameters])
