"""Peak memory, simulated memory limits, and the linear model of memory against batch size."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from repro.measure import accelerator
from repro.measure.checks import is_whole
from repro.measure.host import available_bytes

Resident = nn.Module | Iterable[nn.Module | torch.Tensor]


class BudgetExceededError(torch.OutOfMemoryError):
    """A `MemoryBudget` was exceeded; caught like any out-of-memory error."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device ran out of memory.

    cuDNN and cuBLAS raise errors of their own for a failed workspace allocation (cuDNN also reports
    an unsupported operation), and the CPU allocator raises a plain `RuntimeError`.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    phrases = (
        "CUDNN_STATUS_NOT_SUPPORTED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "unable to find an engine to execute this computation",
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "CUDA error: out of memory",
    )
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in an operator's arguments or results; pytree would be slower."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a sparse or nested tensor; none for any other tensor."""
    match tensor.layout:
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.values()] if tensor.is_nested and tensor.layout is torch.strided else []


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    parts = components(tensor) or [tensor]
    return [part.untyped_storage() for part in parts if part.layout == torch.strided]


def keep_conjugates(args: Sequence[Any]) -> None:
    """Let an operation that a dispatch mode is about to call conjugate complex numbers itself.

    Below a mode torch forgets that a tensor is conjugated: `torch.linalg.pinv` gives wrong values.
    """
    if args and isinstance(args[0], torch.Tensor) and args[0].dtype.is_complex:
        for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)  # until the mode returns


class _StorageFollower(TorchDispatchMode):
    """Sums the bytes of live storages that operations under it return or read as parameters.

    Other tensors from outside, such as a mini-batch in host memory, are not counted.
    """

    def __init__(self, on_growth: Callable[[int, int], None]) -> None:
        super().__init__()
        self.live_bytes = 0
        self._on_growth = on_growth
        self._alive: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = []
        for tensor in tensors_in((args, kwargs)):
            given += _storages(tensor)  # now: a sparse tensor may get other parts in place
            if isinstance(tensor, nn.Parameter):
                self.follow(tensor)
        keep_conjugates(args)
        result = func(*args, **(kwargs or {}))
        returned = tensors_in(result)
        try:
            for tensor in returned:
                self.follow(tensor, given)
        except BudgetExceededError as error:
            # The traceback keeps its frames, and so the refused allocation: free it.
            del result, returned, tensor
            raise error.with_traceback(None)  # noqa: B904 - an error being handled is shown, too
        return result

    def follow(self, tensor: torch.Tensor, given: Sequence[torch.UntypedStorage] = ()) -> None:
        """Count the storages of `tensor` until they are freed, except those that were `given`."""
        if tensor.device.type != "cpu":
            return
        for storage in _storages(tensor):
            # The Python wrapper of a storage lives as long as the storage itself, views included.
            key = storage._cdata
            if key in self._alive or any(key == other._cdata for other in given):
                continue
            size = storage.nbytes()
            self._alive[key] = weakref.finalize(storage, self._forget, key, size)
            self.live_bytes += size
            self._on_growth(self.live_bytes, size)

    def _forget(self, key: int, size: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live_bytes -= size

    def stop(self) -> None:
        for finalizer in list(self._alive.values()):  # a garbage collection may forget some
            finalizer.detach()
        self._alive.clear()


_active_meters: list["MemoryMeter"] = []  # those of one accelerator share its peak counters


class MemoryMeter:
    """Peak memory of the operations inside a ``with`` block, in bytes.

    On an accelerator the peak is the caching allocator's; its unused memory is given back on entry,
    so that it holds only memory that was needed. On a CPU a dispatch mode follows the live
    storages: those allocated inside, those of `resident`, and parameters that an operation inside
    touches. Other tensors that exist before count as host memory, such as a mini-batch that waits
    to be streamed. Not seen on a CPU: a kernel's own allocations, other threads, later sizes of a
    storage, and, until they are touched as parameters, results of `torch.tensor`, `torch.load`,
    `copy.deepcopy`. Two gradients that autograd would add in place count beside their sum there.

    `start_bytes` are the live bytes on entry (on a CPU, those of `resident`).
    """

    def __init__(self, device: torch.device | str = "cpu", resident: Resident = ()) -> None:
        self.device = accelerator.resolve(device)
        self._queued = accelerator.is_accelerator(self.device)
        self.start_bytes = 0
        self._resident = resident
        self._peak_bytes = self._peak_reserved_bytes = 0
        self._follower: _StorageFollower | None = None

    def __enter__(self) -> Self:
        if self in _active_meters:
            raise RuntimeError("the meter or budget is in force already: make another to nest")
        with ExitStack() as undo:
            self._begin(undo)
            self._undo = undo.pop_all()
        return self

    def _begin(self, undo: ExitStack) -> None:
        self._peak_bytes = self._peak_reserved_bytes = 0
        if self._queued:
            accelerator.synchronize(self.device)
            accelerator.empty_cache(self.device)
            reset_peak(self.device)
            self.start_bytes = accelerator.memory_allocated(self.device)
        else:
            self._follower = _StorageFollower(self._grown)
            undo.callback(setattr, self, "_follower", None)  # which would keep what is resident
            undo.callback(self._follower.stop)
            for tensor in _tensors(self._resident):
                self._follower.follow(tensor)
            self.start_bytes = self._follower.live_bytes
            undo.enter_context(self._follower)
        _active_meters.append(self)
        undo.callback(_active_meters.remove, self)
        undo.callback(self._note_peaks)

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        if self._queued:
            return accelerator.memory_allocated(self.device)
        return self._follower.live_bytes if self._follower else 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once from entry to the end of the block."""
        self._note_peaks()
        return self._peak_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the allocator held; a device's limit applies to these."""
        self._note_peaks()
        return self._peak_reserved_bytes

    def _note_peaks(self) -> None:
        if self._queued and self in _active_meters:
            live = accelerator.max_memory_allocated(self.device)
            reserved = accelerator.max_memory_reserved(self.device)
            self._peak_bytes = max(self._peak_bytes, live)
            self._peak_reserved_bytes = max(self._peak_reserved_bytes, reserved)

    def _grown(self, live_bytes: int, size: int) -> None:
        self._peak_bytes = self._peak_reserved_bytes = max(self._peak_bytes, live_bytes)


def reset_peak(device: torch.device | str) -> None:
    """Make an accelerator's peak its memory of now; meters that are active keep theirs."""
    for meter in _active_meters:
        meter._note_peaks()
    accelerator.reset_peak_memory(device)


def comparable_peaks(meters: Sequence[MemoryMeter]) -> list[int]:
    """Peaks of several batch sizes, in bytes, for fitting a line and comparing with a limit.

    Reserved bytes grow by whole segments, and live bytes stay below a limit that is met: each is
    its peak of live bytes plus the largest reserved excess of all meters.
    """
    beside = max(meter.peak_reserved_bytes - meter.peak_bytes for meter in meters)
    return [meter.peak_bytes + beside for meter in meters]


def least_limit(device: torch.device | str) -> int:
    """The smallest useful memory limit of an accelerator, even for the smallest network.

    torch's allocator takes 2 and 20 MiB at once. On CUDA cuBLAS has one workspace, of up to 32 MiB
    on Hopper, for the forward pass's thread and one for the backward's, and cuBLASLt another.
    """
    if not accelerator.is_accelerator(device):
        return 1
    workspaces = 3 * 32 * 2**20 if torch.device(device).type == "cuda" else 0
    return 64 * 2**20 + workspaces


class MemoryBudget(MemoryMeter):
    """A memory limit of `limit_bytes`, 1 or more, for the code inside a ``with`` block.

    On an accelerator the limit is on the bytes that torch's allocator holds in this process
    (`peak_reserved_bytes`). On a CPU it is simulated: an operation raises `BudgetExceededError`, a
    `torch.OutOfMemoryError`, if its result would bring the live storages that `MemoryMeter` follows
    above the limit. The result that did not fit is released before.

    Example:
        >>> with MemoryBudget(limit_bytes=64 * 2**20, resident=model) as budget:
        ...     loss_fn(model(inputs), targets).backward()
        >>> budget.peak_bytes

    `resident` are a module, or modules and tensors, that occupy the device already (CPU only; an
    accelerator's allocator counts them). What of them does not fit raises on entry.
    """

    def __init__(
        self, limit_bytes: int, device: torch.device | str = "cpu", resident: Resident = ()
    ) -> None:
        super().__init__(device, resident)
        if isinstance(limit_bytes, float) and limit_bytes % 1 == 0:
            limit_bytes = int(limit_bytes)
        if not is_whole(limit_bytes, 1):
            raise ValueError(
                f"limit_bytes is {limit_bytes!r}; give a whole number of bytes, at least 1"
            )
        self.limit_bytes = int(limit_bytes)

    def _begin(self, undo: ExitStack) -> None:
        if self._queued:
            undo.enter_context(accelerator.limited(self.device, self.limit_bytes))
        super()._begin(undo)

    def _grown(self, live_bytes: int, size: int) -> None:
        if live_bytes > self.limit_bytes:
            raise BudgetExceededError(
                f"out of memory (simulated limit): an allocation of {size:,} bytes brings the "
                f"live storages to {live_bytes:,} bytes, above the budget of "
                f"{self.limit_bytes:,}; use a smaller micro-batch or a larger limit_bytes"
            )
        super()._grown(live_bytes, size)


@dataclass(frozen=True)
class MemoryState:
    """A device's live bytes and limit; `simulated` if a CPU budget sets the limit."""

    live_bytes: int
    limit_bytes: int
    simulated: bool = False

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be allocated."""
        return max(0, self.limit_bytes - self.live_bytes)


def memory_state(device: torch.device | str = "cpu") -> MemoryState:
    """The live bytes and the limit of `device` now, without waiting for it.

    The limit is an active `MemoryBudget`'s, else on an accelerator the driver's free bytes plus the
    caching allocator's, else the host memory available to this process (within its cgroup), with
    live bytes taken as 0.
    """
    device = accelerator.resolve(device)
    here = (meter for meter in _active_meters if meter.device == device)
    budgets = [meter for meter in here if isinstance(meter, MemoryBudget)]
    if accelerator.is_accelerator(device):
        free, total = accelerator.free_and_total_bytes(device)
        limit = min(total, free + accelerator.memory_reserved(device))
        limit = min([limit, accelerator.limit_bytes(device), *(b.limit_bytes for b in budgets)])
        return MemoryState(accelerator.memory_allocated(device), limit)
    if budgets:
        tightest = min(budgets, key=lambda budget: budget.limit_bytes - budget.live_bytes)
        return MemoryState(tightest.live_bytes, tightest.limit_bytes, simulated=True)
    return MemoryState(0, available_bytes())


def _tensors(resident: Resident) -> Iterator[torch.Tensor]:
    for one in [resident] if isinstance(resident, nn.Module) else resident:
        if isinstance(one, nn.Module):
            yield from (*one.parameters(), *one.buffers())
            yield from (p.grad for p in one.parameters() if p.grad is not None)
        else:
            yield one


@dataclass(frozen=True)
class LinearMemoryModel:
    """Peak memory as a straight line of the batch size, M(B) = p + B a.

    Source: Lu et al. (dual-batch learning), section 5.3, equation 9.

    Attributes:
        fixed_bytes: p, bytes independent of the batch: parameters, gradients, workspace.
        bytes_per_sample: a, activations and data of one sample.
    """

    fixed_bytes: float
    bytes_per_sample: float

    @classmethod
    def fit(cls, batch_sizes: Sequence[int], peak_bytes: Sequence[int]) -> "LinearMemoryModel":
        """Fit the line to measured peaks by least squares, in exact arithmetic.

        Raises ValueError for fewer than two distinct batch sizes, or lists of unequal length.
        """
        if len(batch_sizes) != len(peak_bytes) or len(set(batch_sizes)) < 2:
            raise ValueError(
                f"the linear memory model needs peaks at two or more distinct batch sizes, got "
                f"sizes {list(batch_sizes)} and {len(peak_bytes)} peaks"
            )
        x, y = [Fraction(int(b)) for b in batch_sizes], [Fraction(int(m)) for m in peak_bytes]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        # Memory does not shrink with the batch; a measured slope below 0 is noise.
        slope = max(Fraction(0), covariance / sum((a - mean_x) ** 2 for a in x))
        return cls(fixed_bytes=float(mean_y - slope * mean_x), bytes_per_sample=float(slope))

    def predict(self, batch_size: int) -> float:
        """M(B) in bytes."""
        return self.fixed_bytes + self.bytes_per_sample * batch_size

    def largest_batch(self, limit_bytes: float) -> int:
        """The largest B with M(B) <= `limit_bytes`, B_max; 0 where none fits."""
        if self.fixed_bytes > limit_bytes:
            return 0
        if self.bytes_per_sample == 0 or limit_bytes == math.inf:
            return 2**63 - 1
        largest = math.floor((limit_bytes - self.fixed_bytes) / self.bytes_per_sample)
        # The division may round the largest batch down by one.
        return largest + 1 if self.predict(largest + 1) <= limit_bytes else largest
