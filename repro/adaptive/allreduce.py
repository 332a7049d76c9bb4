"""Gradients averaged by torch's DistributedDataParallel, and the time of the communication."""

import inspect
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from repro.adaptive.averaging import StepTiming


class Allreduce:
    """A model in DistributedDataParallel, `network` to call, with timed collectives."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int) -> None:
        self._group = group
        self._spans: list[tuple[float, float]] = []
        self._last_start = self._blocked_s = 0.0
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        # torch 2.13 has renamed this option.
        name = "forward_sync_buffers"
        name = name if name in known else "broadcast_buffers"
        options: dict[str, Any] = {name: False, "bucket_cap_mb": max(bucket_bytes, 1) / 2**20}
        options["init_sync"] = False  # done before; torch's fails on expanded buffers
        self.network = DistributedDataParallel(model, process_group=group, **options)
        self.network.register_comm_hook(None, self._timed_allreduce)

    def end(self) -> None:
        """Note the end of a mini-batch's backward passes, which wait for the last bucket."""
        self._blocked_s = time.perf_counter() - self._last_start

    def take_timing(self, total_s: float) -> StepTiming:
        """Return the times since the last call, `total_s` in total."""
        communication, end = 0.0, 0.0
        for first, last in sorted(self._spans):  # spans of several buckets overlap
            communication += max(0.0, last - max(first, end))
            end = max(end, last)
        self._spans.clear()
        return StepTiming(total_s, communication, 0.0, self._blocked_s)

    def _timed_allreduce(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket as DistributedDataParallel does, and note the time."""
        start = self._last_start = time.perf_counter()
        flat = bucket.buffer().div_(dist.get_world_size(self._group))
        future = dist.all_reduce(flat, group=self._group, async_op=True).get_future()

        def done(ended: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._spans.append((start, time.perf_counter()))
            return ended.value()[0]

        averaged: torch.futures.Future[Tensor] = future.then(done)
        return averaged
