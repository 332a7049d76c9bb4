"""Data-parallel training under torchrun: a fixed number of processes, a batch that grows.

Source: Lee et al., section IV. Every process is given the same mini-batch and takes its share of
it, so that the batch size is the whole one, whatever the number of processes.
"""

import inspect
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from repro.adaptive.averaging import (
    METHODS,
    Method,
    OverlappedAverager,
    PeerError,
    StepTiming,
    lost_peer,
    no_gradient,
)

LossFunction = Callable[[Tensor, Tensor], Tensor]


def join_processes(device: torch.device | str = "cpu", timeout_s: float = 120.0) -> tuple[int, int]:
    """Join the other processes that torchrun started; return rank and number of processes.

    Without torchrun there is one process, and nothing to join. gloo connects CPUs, NCCL GPUs, each
    process with its own.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        timeout_s: After which a communication that another process does not answer fails.
    """
    if "RANK" not in os.environ:
        return 0, 1
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if kind == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def leave_processes() -> None:
    """Wait for the other processes and part from them; nothing to do where there are none."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # one that parts early takes its connections with it
        dist.destroy_process_group()


def share(samples: int, rank: int, processes: int) -> slice:
    """Return the samples of a mini-batch that a process takes; shares differ by at most one.

    Raises:
        ValueError: There is no such rank.
    """
    if samples < 0 or processes < 1 or not 0 <= rank < processes:
        raise ValueError(
            f"{samples} samples, rank {rank} of {processes}; ranks are 0 to {processes - 1}"
        )
    each, rest = divmod(samples, processes)
    start = rank * each + min(rank, rest)
    return slice(start, start + each + (rank < rest))


class DataParallel:
    """One training step over all processes, with gradients averaged in one of three ways.

    - ``"allreduce"``: torch's DistributedDataParallel.
    - ``"all_to_all"``: the paper's: all-to-all, local sum, allgather (section IV-B).
    - ``"reduce_scatter"``: the same with a reduce-scatter in the place of the first two.

    The latter two finish an update during the next forward pass, layer by layer; whoever reads
    parameters elsewhere, saves or measures them, calls `finish` first, and a layer's parameters are
    used in its own forward pass alone: what another layer reads of them before may be a step old.
    All give the same weights. The gradient is that of the mean loss over the whole mini-batch, also
    where shares differ. BatchNorm sees each process's share alone, as in DistributedDataParallel; a
    process that has no share of a mini-batch computes its first sample with a gradient of zero.
    With NCCL a peer that hangs is found by torch's watchdog.

    Differs from the paper: gradients are averaged per bucket, not per layer, and the thread that
    communicates is not pinned to a core.

    Args:
        model: On its device. Parameters and buffers become those of rank 0.
        loss_fn: Mean loss over the samples it is given.
        optimizer: Of the model's parameters.
        averaging: The way.
        micro_batch: Most samples that a process computes at a time; a larger share is computed in
            pieces whose gradients add up. None for no limit.
        bucket_bytes: Gradients that are communicated together.
        overlap: Whether updates may end in the next forward pass; False ends them in `step`.
        timeout_s: After which a process that does not answer counts as lost.

    Attributes:
        rank: This process, from 0.
        processes: How many there are; 1 without torchrun.
        timings: One `StepTiming` for each step on a CPU; clear it when you like. On a GPU there
            are none: the host's clock says nothing of what its streams do.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        averaging: Method = "all_to_all",
        *,
        micro_batch: int | None = None,
        bucket_bytes: int = 2**20,
        overlap: bool = True,
        timeout_s: float = 120.0,
    ) -> None:
        if averaging not in METHODS:
            raise ValueError(f"averaging is {averaging!r}; choose {', '.join(METHODS)}")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}; give at least 1, or None")
        if bucket_bytes < 0 or timeout_s <= 0:
            raise ValueError(
                f"bucket_bytes is {bucket_bytes} and timeout_s {timeout_s}; give at least 0 and "
                "more than 0"
            )
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.averaging, self.micro_batch, self.overlap = averaging, micro_batch, overlap
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.processes = dist.get_world_size() if joined else 1
        self.timings: list[StepTiming] = []
        self._averager: OverlappedAverager | None = None
        self._ddp: DistributedDataParallel | None = None
        self._group: dist.ProcessGroup | None = None
        self._spans: list[tuple[float, float]] = []
        self._last_bucket = 0.0
        self._closed = False
        self._first = self.processes > 1
        if self.processes == 1:
            return
        # A group of their own: the averager's thread would else meet the caller's collectives.
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0, group=group)
        if averaging == "allreduce":
            known = inspect.signature(DistributedDataParallel.__init__).parameters
            # torch 2.13 has renamed it.
            name = "forward_sync_buffers"
            name = name if name in known else "broadcast_buffers"
            options: dict[str, Any] = {name: False, "bucket_cap_mb": max(bucket_bytes, 1) / 2**20}
            self._ddp = DistributedDataParallel(model, process_group=group, **options)
            self._ddp.register_comm_hook(None, self._timed_allreduce)
        else:
            self._averager = OverlappedAverager(
                model, optimizer, averaging, group, bucket_bytes, timeout_s
            )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on one mini-batch and return this process's part of its mean loss.

        The mean over processes of what is returned is the mini-batch's mean loss, see `mean`.

        Args:
            inputs: The whole mini-batch, (B, ...), the same in every process.
            targets: Likewise, (B, ...).

        Raises:
            PeerError: Another process was lost.
            ValueError: The mini-batch is empty, has not a target for each input, is another in
                another process (asked in the first step), or gave a parameter no gradient.
            RuntimeError: `close` was called.
        """
        if not len(inputs):
            raise ValueError("the mini-batch is empty; give at least one sample")
        if self._closed:
            raise RuntimeError("this DataParallel is closed; make another one to go on")
        if len(targets) != len(inputs):
            raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets; give one for each")
        if self._first:
            self._check_same(len(inputs))
        start = time.perf_counter()
        if self._averager is not None:
            self._averager.begin()
        mine = share(len(inputs), self.rank, self.processes)
        x, y = inputs[mine], targets[mine]
        weight = len(x) * self.processes / len(inputs)
        if not len(x):  # takes part all the same, with a gradient of zero
            x, y = inputs[:1], targets[:1]
        size = self.micro_batch or len(x)
        losses = []
        try:
            self.optimizer.zero_grad(set_to_none=True)
            pieces = list(zip(x.split(size), y.split(size), strict=True))
            for number, (a, b) in enumerate(pieces):
                part = weight * len(a) / len(x)
                losses.append(self._pass(a, b, part, number == len(pieces) - 1))
            blocked = time.perf_counter() - self._last_bucket if self._ddp else 0.0
            if self._ddp is not None:
                self._check_gradients()
            if self._averager is not None:
                self._averager.step()
                if not self.overlap:
                    self._averager.finish()
            else:
                self.optimizer.step()
        except Exception as error:
            lost = isinstance(error, PeerError) or _is_of_a_peer(error)
            if self._averager is not None and not lost:
                self._averager.abandon()
            if isinstance(error, PeerError) or not lost:
                raise
            raise PeerError(lost_peer(len(self.timings) + 1, error)) from error
        timing = self._timing(time.perf_counter() - start, blocked)
        if x.device.type == "cpu":
            self.timings.append(timing)
        return torch.stack(losses).sum()

    def _check_same(self, samples: int) -> None:
        """Refuse mini-batches that differ between processes; asked once, since it takes time."""
        sizes = torch.tensor([samples, -samples], dtype=torch.float64)
        sizes = sizes.to(next(self.model.parameters()).device)
        self._collective(sizes, dist.ReduceOp.MAX)
        most, least = int(sizes[0]), -int(sizes[1])
        if most != least:
            raise ValueError(
                f"mini-batches have {least} to {most} samples, {samples} in rank {self.rank}; give "
                "the whole mini-batch, the same in every process, which takes its own share"
            )
        self._first = False

    def _check_gradients(self) -> None:
        lacking = [
            name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None
        ]
        if lacking:
            raise ValueError(no_gradient(lacking))

    def _pass(self, inputs: Tensor, targets: Tensor, weight: float, last: bool) -> Tensor:
        network = self._ddp or self.model
        with nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            loss = self.loss_fn(network(inputs), targets) * weight
            if self._averager is not None:
                self._averager.check_applied()
                self._averager.gathering = last
            loss.backward()
        return loss.detach()

    def _timing(self, total_s: float, blocked_s: float) -> StepTiming:
        if self._averager is not None:
            # Communications that ended within this step: mostly those of the step before.
            averager = self._averager
            timing = StepTiming(
                total_s, averager.communication_s, averager.summation_s, averager.blocked_s
            )
            averager.communication_s = averager.summation_s = 0.0
            return timing
        communication, end = 0.0, 0.0
        for first, last in sorted(self._spans):  # those of several buckets overlap
            communication += max(0.0, last - max(first, end))
            end = max(end, last)
        self._spans.clear()
        return StepTiming(total_s, communication, 0.0, blocked_s)

    def _timed_allreduce(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket as DistributedDataParallel does, and note when."""
        start = self._last_bucket = time.perf_counter()
        flat = bucket.buffer().div_(self.processes)
        future = dist.all_reduce(flat, group=self._group, async_op=True).get_future()

        def done(ended: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._spans.append((start, time.perf_counter()))
            return ended.value()[0]

        return future.then(done)

    def finish(self) -> None:
        """Wait until the parameters are those after the last step.

        Raises:
            PeerError: Another process was lost.
        """
        averager = self._averager
        if averager is None or not any(bucket.pending for bucket in averager.buckets):
            return
        start, blocked = time.perf_counter(), averager.blocked_s
        averager.finish()
        if self.timings:
            last = self.timings[-1]
            self.timings[-1] = replace(
                last,
                total_s=last.total_s + time.perf_counter() - start,
                communication_s=last.communication_s + averager.communication_s,
                summation_s=last.summation_s + averager.summation_s,
                blocked_s=last.blocked_s + averager.blocked_s - blocked,
            )
        averager.communication_s = averager.summation_s = averager.blocked_s = 0.0

    def mean(self, value: float | Tensor) -> float:
        """Return the mean of a number over all processes; each must call it.

        Raises:
            PeerError: Another process was lost.
        """
        self.finish()
        number = torch.as_tensor(value, dtype=torch.float64)
        if self._group is None:
            return float(number)
        device = next(self.model.parameters()).device
        number = number.detach().to(device, copy=True)
        self._collective(number)
        return float(number) / self.processes

    def average_buffers(self) -> None:
        """Make floating-point buffers, such as BatchNorm's statistics, the mean over processes.

        Each process sees its share alone; call this before evaluating or saving.

        Raises:
            PeerError: Another process was lost.
        """
        self.finish()
        for buffer in self.model.buffers():
            if self._group is not None and buffer.is_floating_point():
                self._collective(buffer)
                buffer /= self.processes

    def _collective(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        try:
            dist.all_reduce(tensor, op, group=self._group)
        except RuntimeError as error:
            raise PeerError(lost_peer(len(self.timings), error)) from error

    def close(self) -> None:
        """Finish, and give the model back without hooks, also where finishing fails.

        Raises:
            PeerError: Another process is lost, and no call has said so yet.
        """
        self._closed = True
        try:
            if self._averager is None or not self._averager.lost:
                self.finish()
        finally:
            if self._averager is not None:
                self._averager.close()
            self._averager = self._ddp = None


def _is_of_a_peer(error: Exception) -> bool:
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
