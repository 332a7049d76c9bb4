"""Gradient averaging that overlaps both passes: section IV-B, with the thread of section IV-C.

An allreduce is broken into two communications. The first, an all-to-all with a local sum (or a
reduce-scatter), starts for a bucket of layers once its gradients are computed and overlaps the
rest of the backward pass; the second, an allgather, overlaps the next forward pass, in which each
layer waits only for its own gradients and is updated just before it computes.
"""

import inspect
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from repro.adaptive.optimizers import INDEPENDENT, is_dense, no_gradient
from repro.adaptive.processes import PeerError, lost_peer
from repro.adaptive.reading import Parameters, held_elsewhere, is_compiled
from repro.measure import accelerator
from repro.measure.precision import without_autocast

Method = Literal["allreduce", "all_to_all", "reduce_scatter"]
METHODS: tuple[Method, ...] = ("allreduce", "all_to_all", "reduce_scatter")
# Newer torches have other names for these.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class StepTiming:
    """Seconds of one training step in one process on a CPU (Figure 9)."""

    total_s: float  # from the call of `step` to its return
    communication_s: float
    summation_s: float  # of received gradients
    blocked_s: float  # in which the main thread only waited for gradients

    @property
    def computation_s(self) -> float:
        """Seconds in which the main thread computed: forward and backward pass, updates."""
        return self.total_s - self.blocked_s

    def __add__(self, other: "StepTiming") -> "StepTiming":
        return StepTiming(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def average(
    flat: Tensor, received: Tensor, part: Tensor, method: Method, group: dist.ProcessGroup
) -> tuple[float, float]:
    """Average gradients `flat` (P x n) in two communications, section IV-B.

    `received` (P x n) and `part` (n,) are buffers: this process's share from each process, and the
    averages of it. Returns seconds of communication and of the local sum.
    """
    start, processes = time.perf_counter(), len(flat) // len(part)
    if method == "all_to_all":
        dist.all_to_all_single(received, flat, group=group)
        came = time.perf_counter()
        torch.sum(received.view(processes, -1), 0, out=part)
    else:
        reduce_scatter(part, flat, group=group)
        came = time.perf_counter()
    part /= processes
    summed = time.perf_counter()
    all_gather(flat, part, group=group)
    return came - start + time.perf_counter() - summed, summed - came


class Allreduce:
    """A model in DistributedDataParallel, `network` to call, with timed collectives."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int) -> None:
        self._group = group
        self._spans: list[tuple[float, float]] = []
        self._last_start = self._blocked_s = 0.0
        self._averaged: set[Tensor] = set()
        self._under_way = False  # whether not all gradients of a mini-batch have come
        self.gathering = False  # whether the next backward pass is the last of its mini-batch
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        # torch 2.13 has renamed this option.
        name = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in known)
        # Made the same before; torch's own way fails on expanded buffers.
        options: dict[str, Any] = {name: False, "init_sync": False}
        options["bucket_cap_mb"] = max(bucket_bytes, 1) / 2**20
        self.network = DistributedDataParallel(model, process_group=group, **options)
        self.network.register_comm_hook(None, self._timed_allreduce)

    def begin(self) -> None:
        """Begin a mini-batch."""
        self._under_way = True

    def end(self) -> set[Tensor]:
        """End a mini-batch's backward passes; return the parameters of averaged gradients."""
        self._under_way = False
        self._blocked_s = time.perf_counter() - self._last_start
        averaged, self._averaged = self._averaged, set()
        return averaged

    def abandon(self) -> None:
        """Discard a failed mini-batch, alike in all processes, whichever micro-batch failed.

        Torch would average the gradients of the next micro-batch, whatever `no_sync` says.
        """
        if not self._under_way:
            return
        self.gathering = False
        self._averaged.clear()
        trained = [p for p in self.network.parameters() if p.requires_grad]
        with suppress(RuntimeError):  # some gradients have come: torch refuses the next step
            self.network.reducer.prepare_for_backward([])
            torch.autograd.backward(trained, [torch.zeros_like(p) for p in trained])

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
        if not self.gathering:  # called by `abandon`
            unchanged = torch.futures.Future[Tensor]()
            unchanged.set_result(bucket.buffer())
            return unchanged
        start = self._last_start = time.perf_counter()
        self._averaged.update(bucket.parameters())
        flat = bucket.buffer().div_(dist.get_world_size(self._group))
        future = dist.all_reduce(flat, group=self._group, async_op=True).get_future()

        def done(ended: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._spans.append((start, time.perf_counter()))
            return ended.value()[0]

        averaged: torch.futures.Future[Tensor] = future.then(done)
        return averaged


class Bucket:
    """Gradients averaged together, padded to a multiple of the number of processes."""

    def __init__(self, parameters: Sequence[nn.Parameter], processes: int) -> None:
        first, sizes = parameters[0], [p.numel() for p in parameters]
        padded = -(-sum(sizes) // processes) * processes
        self.flat = torch.zeros(padded, dtype=first.dtype, device=first.device)  # (P * n,)
        self.received = torch.empty_like(self.flat)  # n from each process
        self.part = self.flat.new_empty(padded // processes)  # (n,), this process's share
        pieces = self.flat[: sum(sizes)].split(sizes)
        # In the layout that torch gives gradients: fused optimizers go through memory in its order.
        self.views = {
            p: piece.as_strided(p.shape, p.stride()) if is_dense(p) else piece.view(p.shape)
            for piece, p in zip(pieces, parameters, strict=True)
        }
        self.missing = set(parameters)  # parameters without a gradient yet
        self.pending = False  # being averaged, or averaged and not applied yet
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.communication_s = self.summation_s = 0.0
        device = first.device
        self.filled, self.averaged = (accelerator.new_event(device) for _ in range(2))


def make_buckets(model: nn.Module, processes: int, bucket_bytes: int) -> list[Bucket]:
    """Group parameters from last to first, each group up to `bucket_bytes`."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for p in reversed([p for p in model.parameters() if p.requires_grad]):
        full = size + p.nbytes > bucket_bytes
        if not groups or full or (p.dtype, p.device) != (groups[-1][0].dtype, groups[-1][0].device):
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += p.nbytes
    return [Bucket(group, processes) for group in groups]


class OverlappedAverager:
    """Averages gradients of a model over processes, one step behind its forward passes."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._optimizer, self._method, self._group = optimizer, method, group
        self._timeout_s = timeout_s
        self.buckets = make_buckets(model, dist.get_world_size(group), bucket_bytes)
        self.communication_s = self.summation_s = self.blocked_s = 0.0
        self.lost = False  # whether another process is lost, so that waiting would hang
        self.gathering = False  # whether the next backward pass is the last of its mini-batch
        self._next = 0  # bucket to launch: all processes must communicate in one order
        self._steps = 0
        self._saved: list[dict[str, Any]] = []
        self._states = 0  # parameters that the optimizer has a state of
        self._behind = False  # whether this step's forward pass began with pending updates
        self._read: set[Any] = set()  # parameters read from their modules in this mini-batch
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._owner = {p: bucket for bucket in self.buckets for p in bucket.views}
        self._device = self.buckets[0].flat.device
        self._stream = accelerator.new_stream(self._device)
        compiled = {
            part for module in model.modules() if is_compiled(module) for part in module.modules()
        }
        self._watched = [
            m for m in model.modules() if m not in compiled and "_parameters" in vars(m)
        ]
        # Parameters that may be read unnoticed, whose updates must not be late.
        unseen = held_elsewhere(model)
        for module in set(model.modules()).difference(self._watched):
            unseen.update(module.parameters(recurse=False))
        self._at_once = {self._owner[p] for p in unseen if p in self._owner}
        for module in self._watched:
            vars(module)["_parameters"] = Parameters(module._parameters, self.update)
        self._handles = [p.register_post_accumulate_grad_hook(self.collect) for p in self._owner]
        # Only these are stepped late, so that their state may be behind; wrappers may lack hooks.
        if type(optimizer) in INDEPENDENT:
            for register in (
                optimizer.register_state_dict_pre_hook,
                optimizer.register_load_state_dict_pre_hook,
            ):
                self._handles.append(register(lambda *_: self.finish()))
        self._queue: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._communicate, name="averaging", daemon=True)
        self._thread.start()

    def collect(self, parameter: nn.Parameter) -> None:
        """Move a parameter's computed gradient into its bucket."""
        if not self.gathering:
            return  # before the last micro-batch, gradients add up
        bucket = self._owner[parameter]
        assert parameter.grad is not None
        if parameter.grad.layout is not torch.strided or parameter not in bucket.missing:
            raise ValueError(
                f"the gradient of {self._names[parameter]} is sparse or comes in several parts, as "
                "of a layer in two reentrant checkpoints: give sparse=False, use_reentrant=False, "
                "or averaging='allreduce'"
            )
        bucket.views[parameter].copy_(parameter.grad)
        parameter.grad = None
        bucket.missing.remove(parameter)
        self._launch()

    def update(self, parameters: Iterable[Any]) -> None:
        """Apply the updates of parameters that are about to be read."""
        for p in parameters:
            bucket = None if p is None else self._owner.get(p)
            if bucket is None:
                continue
            self._read.add(p)
            if bucket.pending and not self.gathering:
                _check_computing(self._names[p])
                self._apply(bucket)

    def _launch(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            bucket = self.buckets[self._next]
            bucket.ready.clear()
            bucket.pending = True
            bucket.filled.record(accelerator.current_stream(self._device))
            self._queue.put(bucket)
            self._next += 1

    def _communicate(self) -> None:
        """Average buckets in the order of their arrival; runs in the communication thread."""
        while (bucket := self._queue.get()) is not None:
            try:
                with accelerator.on(self._device), accelerator.use_stream(self._stream):
                    self._stream.wait_event(bucket.filled)
                    seconds = average(
                        bucket.flat, bucket.received, bucket.part, self._method, self._group
                    )
                    bucket.communication_s, bucket.summation_s = seconds
                    bucket.averaged.record(self._stream)
            except Exception as error:
                bucket.error = error
            bucket.ready.set()

    def begin(self) -> None:
        """Begin a mini-batch."""
        self.blocked_s = 0.0
        self._read.clear()
        self._behind = any(bucket.pending for bucket in self.buckets)

    def end(self) -> None:
        """End a mini-batch, all gradients of which have been queued."""
        lacking = [p for b in self.buckets[self._next :] for p in b.views if p in b.missing]
        if lacking:
            raise ValueError(no_gradient([self._names[p] for p in lacking]))
        self._steps += 1
        self.gathering = False
        self._next = 0
        for bucket in self.buckets:
            bucket.missing.update(bucket.views)

    def gather(self) -> None:
        """Wait for all gradients and assign them to the parameters."""
        for bucket in reversed(self.buckets):
            self._wait(bucket)
            for p in bucket.views:  # its own memory: the bucket's is written again
                assert p.grad is not None
                p.grad = p.grad.clone()
            bucket.pending = False

    def defer(self) -> None:
        """Apply the updates that must not be late, and leave the others for later."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask
        # Until then the caller may change the rate, wrap `step` or add hooks.
        self._saved = [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self._optimizer.param_groups
        ]
        self._states = len(self._optimizer.state)
        for bucket in self.buckets:
            if bucket in self._at_once:
                self._apply(bucket)

    def check_read(self) -> None:
        """Find parameters that the forward pass has not read from their modules.

        They may have been read in another place, and are not updated late from then on. If they
        may have been used before they were updated, that is an error.
        """
        lacking = [
            p for p, b in self._owner.items() if p not in self._read and b not in self._at_once
        ]
        behind, self._behind = self._behind, False
        self._at_once.update(self._owner[p] for p in lacking)
        if behind and lacking:
            names = ", ".join(self._names[p] for p in lacking[:5])
            raise RuntimeError(
                f"the forward pass did not read {names} from their layers, as the first one did, "
                "and their update was still under way: call the same layers in every step, or give "
                "overlap=False"
            )

    def finish(self) -> None:
        """Wait for all gradients and apply all updates."""
        for bucket in reversed(self.buckets):
            if bucket.pending:
                self._apply(bucket)

    def take_timing(self, total_s: float) -> StepTiming:
        """The times since the last call, `total_s` in total."""
        taken = StepTiming(total_s, self.communication_s, self.summation_s, self.blocked_s)
        self.communication_s = self.summation_s = self.blocked_s = 0.0
        return taken

    def _wait(self, bucket: Bucket) -> None:
        start = time.perf_counter()
        came = bucket.ready.wait(0 if self.lost else self._timeout_s)
        self.blocked_s += time.perf_counter() - start
        if bucket.error is not None or not came:
            self.lost = True
            why = bucket.error or f"no answer within {self._timeout_s:g} s"
            raise PeerError(lost_peer(self._steps, why)) from bucket.error
        self._after(bucket)
        for p, view in bucket.views.items():
            # The model's layout or type may have changed since.
            kept = p.dtype == view.dtype and (p.stride() == view.stride() or not is_dense(p))
            # Another tensor of that memory: converting the model gives its gradients other memory.
            p.grad = view.detach() if kept else torch.empty_like(p).copy_(view)
        self.communication_s += bucket.communication_s
        self.summation_s += bucket.summation_s

    def _after(self, bucket: Bucket) -> None:
        """Let the current stream wait for a bucket's communication."""
        accelerator.current_stream(self._device).wait_event(bucket.averaged)

    def _apply(self, bucket: Bucket) -> None:
        if len(self._optimizer.state) < self._states:
            raise RuntimeError(
                "the optimizer's state was cleared while an update was under way, which needs it: "
                "call finish() before you change optimizer.state"
            )
        # A backward pass of the caller's may have gone through the model, as one of a GAN does.
        kept = [(p, p.grad) for p in self._owner if p.grad is not None]
        for p, _ in kept:
            p.grad = None
        self._wait(bucket)
        # The optimizer's own step: wrappers and hooks were added after these gradients.
        step = inspect.unwrap(type(self._optimizer).step)
        # The forward pass may be in inference mode, in which new state would be unusable.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(bucket.flat.device.type),
            self._as_it_was(),
        ):
            step(self._optimizer)
        self._states = len(self._optimizer.state)
        for p, gradient in [*((p, None) for p in bucket.views), *kept]:
            p.grad = gradient
        bucket.pending = False

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Restore the optimizer's settings at the call of `step` inside."""
        # Groups added since have no pending gradient.
        groups = self._optimizer.param_groups[: len(self._saved)]
        now = [dict(group) for group in groups]
        for group, saved in zip(groups, self._saved, strict=True):
            group.update(saved)
        try:
            yield
        finally:
            for group, present in zip(groups, now, strict=True):
                group.update(present)

    def abandon(self) -> None:
        """Discard a failed mini-batch; the update of the mini-batch before is still applied."""
        launched, self._next = self.buckets[: self._next], 0
        self.gathering = self._behind = False
        try:
            if launched:  # by the failed backward pass, before which all others were applied
                for bucket in launched:  # the thread still writes to it
                    bucket.ready.wait(self._timeout_s)
                    self._after(bucket)
            else:
                self.finish()
        except PeerError:
            pass  # the first error is raised
        for bucket in self.buckets:
            bucket.missing.update(bucket.views)
            bucket.pending = False

    def close(self) -> None:
        """End the thread and remove the hooks; pending updates are lost."""
        self._queue.put(None)
        self._thread.join(1.0)  # it is idle, unless another process hangs
        for bucket in self.buckets:  # its memory may be reused next
            self._after(bucket)
        for handle in self._handles:
            handle.remove()
        for module in self._watched:
            if isinstance(module._parameters, Parameters):
                vars(module)["_parameters"] = dict(dict.items(module._parameters))  # as they are


def _check_computing(name: str) -> None:
    """Refuse to update a parameter where torch computes no values, or transforms them."""
    modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
    where = next(iter(modes & {"FakeTensorMode", "ProxyTorchDispatchMode"}), "")
    if torch._C._are_functorch_transforms_active():
        where = "a transform of torch.func"
    if where:
        raise RuntimeError(
            f"{name} is read under {where} while its update is under way: call finish() before, or "
            "give overlap=False"
        )
