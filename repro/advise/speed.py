"""How long the operations of a step take: by a data sheet, or by a few steps measured here."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from repro.advise.iterations import BACKWARD, FORWARD, RECOMPUTE, UPDATE, Iteration
from repro.mbs import MicroBatchError, MicroBatchStreamer
from repro.measure import MemoryMeter, accelerator, is_out_of_memory, memory_state
from repro.measure.datasheets import DEVICES, LAUNCH_S, REACHED, Device
from repro.measure.machine import machine
from repro.outofcore import BudgetTooSmall, OutOfCore, plan_swaps

if TYPE_CHECKING:
    from repro.advise.workload import Step, Workload

Vector = NDArray[np.float64]
LINK = 25e9  # bytes/s each way between host and device, where nobody measures it: PCIe 4.0 ×16
FILE = 1e9  # bytes/s of a file on an SSD
SEEN_S = 2e-5  # that an operation takes longer under OutOfCore, on the host
_REPEATS, _SMALLEST, _GROWTH = 3, 2, 4
_SWAPPING = 0.6  # of what a step needs: the budget of one that is to swap
_ENOUGH_S = 3.0  # of steps that swap
_MICRO = 3  # micro-batches, to tell the first from others
_LINK_BYTES = 2**26
# In the place of a data sheet of a CPU, to share measured times out among operations.
_CPU = Device("cpu", 1e11, 1e11, 4e10, 0)


@dataclass(frozen=True)
class Speed:
    """What a device takes for operations and copies.

    Attributes:
        device: By whose rates the operations of a step compare with each other.
        grounds: What the seconds come from.
        link: Bytes/s of copies (to the device, to the host).
        seen_s: What `OutOfCore` adds to each operation.
        moved_s: What each of its copies adds to an iteration beside what a simulation tells.
        block_s: What a recomputed block adds beside its operations.
        streamed_s: What MBS adds beside the operations of micro-batches: with the first, and with
            each further one, its sums of gradients among it. None where it was not measured.
        deferred_s: The same with deferred BatchNorm.
        streaming_refused: Why MBS did not take what is trained; empty where it did, or was not
            tried.
        measured: By phase of a step, its seconds at each of `sizes`; empty where nothing was.
        sizes: Batch sizes that were measured, ascending.
        beside_bytes: Held by the allocator beside live tensors, as measured.
    """

    device: Device
    grounds: str
    link: tuple[float, float] = (LINK, LINK)
    seen_s: float = SEEN_S
    moved_s: float = 0.0
    block_s: float = 0.0
    streamed_s: tuple[float, float] | None = None
    deferred_s: tuple[float, float] | None = None
    streaming_refused: str = ""
    measured: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    beside_bytes: int = 0

    @classmethod
    def of(cls, name: str = "H100") -> "Speed":
        """Return a device's by its data sheet.

        Args:
            name: One of `repro.measure.datasheets.DEVICES`; ``"cpu"`` is a CPU of which only
                the proportions are known.

        Raises:
            ValueError: It is none of them.
        """
        if name == "cpu":
            return cls(_CPU, "a CPU's proportions, not measured", (1e10, 1e10))
        if name not in DEVICES:
            raise ValueError(f"the device {name!r} has no data sheet: choose {', '.join(DEVICES)}")
        return cls(
            DEVICES[name],
            f"the data sheet of {name} at {REACHED:.0%}, ESTIMATED; copies at {LINK / 1e9:g} GB/s",
        )

    def seconds(self, iteration: Iteration, plain: Iteration, batch: int) -> Vector:
        """Return the seconds of each function of a step at a batch size, (n,).

        Args:
            iteration: The step.
            plain: The step as it was measured, undivided and without recomputation.
            batch: Samples.
        """
        times = self._by_rates(iteration, batch)
        if not self.measured:
            return times
        base = times if iteration is plain else self._by_rates(plain, batch)
        scales = {}
        for phase in (FORWARD, BACKWARD, UPDATE):
            total = base[plain.phases == phase].sum()
            scales[phase] = self._interpolated(phase, batch) / total if total else 0.0
        scales[RECOMPUTE] = scales[FORWARD]
        return times * np.array([scales[str(phase)] for phase in iteration.phases])

    def _by_rates(self, iteration: Iteration, batch: int) -> Vector:
        low = np.array([cost.low for cost in iteration.costs])
        flops = np.where(low, self.device.low_flops, self.device.flops)
        computing = iteration.flops(batch) / (REACHED * flops)
        moving = iteration.touched(batch) / (REACHED * self.device.bandwidth)
        return np.maximum(np.maximum(computing, moving), LAUNCH_S)

    def _interpolated(self, phase: str, batch: int) -> float:
        """Return measured seconds of a phase: on lines between sizes, and beyond by the last."""
        sizes, seconds = self.sizes, self.measured[phase]
        if len(sizes) == 1:
            return seconds[0] * (1 if phase == UPDATE else batch / sizes[0])
        if phase == UPDATE:  # whatever the batch
            return statistics.median(seconds)
        at = int(np.clip(np.searchsorted(sizes, batch), 1, len(sizes) - 1))
        (left, right), (low, high) = sizes[at - 1 : at + 1], seconds[at - 1 : at + 1]
        interpolated = low + (high - low) * (batch - left) / (right - left)
        return max(interpolated, min(low, high) * batch / right)


def probe(
    workload: "Workload",
    device: str | torch.device,
    batch: int,
    limit_bytes: int,
    seconds: float = 8.0,
) -> Speed:
    """Measure some steps on a device that is present, of growing batch sizes up to `batch`.

    Args:
        workload: Of whose model a copy is trained.
        device: Where.
        batch: No larger one is tried.
        limit_bytes: Sizes whose steps take more by their trace are left out.
        seconds: After which no larger size is begun.

    Raises:
        Exception: Whatever the step itself raises on real tensors.
    """
    device = accelerator.resolve(device)
    queued = accelerator.is_accelerator(device)
    room = min(limit_bytes, memory_state(device).free_bytes)
    times: dict[int, dict[str, float]] = {}
    begun, beside = time.perf_counter(), 0
    forked: dict[str, Any] = {"devices": []}
    if queued:
        forked = {"devices": [device.index], "device_type": device.type}
    kept = torch.random.fork_rng(**forked)
    with kept, accelerator.on(device), machine({}, device.type), torch.enable_grad():
        size, step_s = min(batch, _SMALLEST), 0.0
        while workload.plain.trace(size).peak_bytes <= room:
            try:
                with MemoryMeter(device) if queued else _Nothing() as meter:
                    timed = _timed_phases(workload, size, device, begun + seconds / 2)
            except RuntimeError as error:
                if not times or not is_out_of_memory(error):
                    raise
                break
            times[size] = timed
            if isinstance(meter, MemoryMeter):
                live = workload.plain.trace(size).peak_bytes
                beside = max(beside, meter.peak_reserved_bytes - meter.start_bytes - live)
            step_s = sum(timed.values())
            left = seconds / 2 - (time.perf_counter() - begun)  # the rest is for what follows
            growth = next((g for g in (_GROWTH, 2) if g * step_s * (_REPEATS + 1) <= left), 0)
            if size == batch or not growth:
                break
            size = min(batch, size * growth)
        if not times:
            smallest = workload.plain.trace(size).peak_bytes
            return replace(
                Speed.of("cpu" if not queued else "H100"),
                grounds=f"no step fits to be measured: {size} samples take {smallest:,} bytes; "
                "proportions of a data sheet, ESTIMATED",
            )
        smallest_s = sum(times[min(times)].values())
        seen = SEEN_S
        if (2 + _REPEATS) * smallest_s < begun + seconds - time.perf_counter():
            seen = _seen_s(workload, min(times), device, smallest_s)
        copied = _LINK_BYTES if queued else _typical_bytes(workload, batch)
        link = _link(device, copied)
    sizes = tuple(sorted(times))
    measured = {
        phase: tuple(times[size][phase] for size in sizes) for phase in (FORWARD, BACKWARD, UPDATE)
    }
    listed = ", ".join(map(str, sizes))
    where = accelerator.name(device) if queued else "this CPU"
    grounds = f"steps of {listed} samples measured on {where}"
    sheet = _CPU if not queued else next(
        (d for name, d in DEVICES.items() if name in where), DEVICES["H100"]
    )  # fmt: skip
    speed = Speed(sheet, grounds, link, seen, measured=measured, sizes=sizes, beside_bytes=beside)
    size = sizes[len(sizes) // 2]
    step_s = sum(times[size].values())

    def time_for(rounds: int) -> bool:
        """Return whether so many steps are still to be had; so long ones hide what is beside."""
        return rounds * step_s <= begun + seconds - time.perf_counter()

    kept = torch.random.fork_rng(**forked)
    with kept, accelerator.on(device), machine({}, device.type), torch.enable_grad():
        if time_for(4 + _REPEATS):
            speed = replace(speed, moved_s=_moved_s(workload, speed, device))
        if workload.model is None or queued:  # an accelerator goes on meanwhile
            return speed
        if time_for(2 * (1 + _REPEATS)):
            speed = replace(speed, block_s=_block_s(workload, speed, size, device))
        if time_for(2 * (1 + _MICRO) * (1 + _REPEATS)):
            try:
                micro, deferred = (
                    _streamed_s(workload, speed, size, device, rule)
                    for rule in ("micro", "deferred")
                )
            except MicroBatchError as error:
                return replace(speed, streaming_refused=str(error))
            speed = replace(speed, streamed_s=micro, deferred_s=deferred)
    return speed


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _timed_phases(
    workload: "Workload", size: int, device: torch.device, until: float
) -> dict[str, float]:
    """Return the least seconds of a step's phases, as others may use the machine.

    A warm-up comes before; from a time on there is one round alone, and no other.
    """

    def late() -> bool:
        return len(rounds) > 1 and time.perf_counter() > until

    rounds: list[dict[str, float]] = []
    if workload.step is not None:  # whose phases nobody sees
        step = workload.step(size)
        shares = _shares(workload, size)
        for _ in range(_REPEATS + 1):
            took = _took(step, device)
            rounds.append({phase: took * share for phase, share in shares.items()})
            if late():
                break
    else:
        parts, _ = workload.built(size, device)
        loss: list[torch.Tensor] = []
        for _ in range(_REPEATS + 1):
            parts.optimizer.zero_grad(set_to_none=True)
            forward = _took(lambda: loss.append(parts.forward()), device)
            backward = _took(lambda: loss.pop().backward(), device)
            update = _took(parts.optimizer.step, device)
            rounds.append({FORWARD: forward, BACKWARD: backward, UPDATE: update})
            if late():
                break
    return {phase: min(one[phase] for one in rounds[1:]) for phase in rounds[0]}


def _shares(workload: "Workload", size: int) -> dict[str, float]:
    times = Speed.of("cpu").seconds(workload.plain, workload.plain, size)
    phases = workload.plain.phases
    return {
        phase: float(times[phases == phase].sum() / times.sum())
        for phase in (FORWARD, BACKWARD, UPDATE)
    }


def _took(function: Callable[[], object], device: torch.device) -> float:
    accelerator.synchronize(device)
    start = time.perf_counter()
    function()
    accelerator.synchronize(device)
    return time.perf_counter() - start


def _seen_s(workload: "Workload", size: int, device: torch.device, plain_s: float) -> float:
    """Return what `OutOfCore` adds to an operation where nothing is swapped."""
    step: Step
    step = workload.step(size) if workload.step is not None else workload.built(size, device)[1]
    with OutOfCore(1 << 62, device=device) as block:
        for _ in range(2):  # recorded, and planned
            step()
            block.step()
        took = []
        for _ in range(_REPEATS):
            took.append(_took(step, device))
            block.step()
    count = len(workload.plain.small.functions)
    return max(0.0, min(took) - plain_s) / count


def _moved_s(workload: "Workload", speed: Speed, device: torch.device) -> float:
    """Return what a copy takes of an iteration beside what a simulation tells, by one that swaps.

    Threads, locks and caches are not simulated.
    """
    size = speed.sizes[len(speed.sizes) // 2]
    trace = workload.plain.trace(size)
    budget = max(trace.smallest_budget, int(_SWAPPING * trace.peak_bytes))
    plan = plan_swaps(trace, budget)
    times = speed.seconds(workload.plain, workload.plain, size) + speed.seen_s
    simulated = plan.simulate(times, speed.link)
    if not simulated.transfers:
        return 0.0
    step = workload.step(size) if workload.step is not None else workload.built(size, device)[1]
    took = []
    try:
        with OutOfCore(budget, window_bytes=None, device=device) as block:
            for number in range(_REPEATS + 3):  # recorded, planned, and once more
                took.append(_took(step, device))
                block.step()
                if number >= 3 and sum(took) > _ENOUGH_S:
                    break  # it swaps so much slower
    except BudgetTooSmall:  # what the first iteration holds of the one before
        return 0.0
    return max(0.0, min(took[3:]) - simulated.time_s) / len(simulated.transfers)


def _block_s(workload: "Workload", speed: Speed, size: int, device: torch.device) -> float:
    """Return what recomputing takes for a block beside its operations, by steps that recompute."""
    iteration = workload.checkpointed
    if isinstance(iteration, str) or not iteration.blocks:
        return 0.0
    step = workload.built(size, device, checkpointing=True)[1]
    took = min(_took(step, device) for _ in range(1 + _REPEATS))
    expected_s = float(speed.seconds(iteration, workload.plain, size).sum())
    return max(0.0, took - expected_s) / iteration.blocks


def _streamed_s(
    workload: "Workload", speed: Speed, size: int, device: torch.device, rule: str
) -> tuple[float, float]:
    """Return what the first and each further micro-batch of MBS take beside their operations."""
    times = speed.seconds(workload.plain, workload.plain, size)
    passes = float(times[workload.plain.phases != UPDATE].sum())
    one, several = (
        _streaming_s(workload, size, count, device, rule) - count * passes for count in (1, _MICRO)
    )
    return max(0.0, one), max(0.0, (several - one) / (_MICRO - 1))


def _streaming_s(
    workload: "Workload", size: int, count: int, device: torch.device, rule: str
) -> float:
    parts, _ = workload.built(count * size, device)
    streamer = MicroBatchStreamer(
        parts.model, parts.loss_fn, size, device=device, batchnorm=rule, check="off"
    )
    took = []
    for _ in range(1 + _REPEATS):
        parts.optimizer.zero_grad(set_to_none=True)
        took.append(_took(partial(streamer.backward, parts.inputs, parts.targets), device))
    return min(took[1:])


def _typical_bytes(workload: "Workload", batch: int) -> int:
    """Return the size of tensors that hold half of a step's bytes: caches speed up small ones."""
    sizes = np.sort([size for size in workload.plain.trace(batch).sizes.values() if size])
    return int(sizes[np.searchsorted(np.cumsum(sizes), sizes.sum() / 2)])


def _link(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Return measured bytes/s of copies of a size (to the device, to the host)."""
    host = torch.zeros(nbytes, dtype=torch.uint8)
    if accelerator.is_accelerator(device):
        host = host.pin_memory()
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    rates = []
    for into, of in ((on_device, host), (host, on_device)):
        into.copy_(of)
        least = min(_took(partial(into.copy_, of), device) for _ in range(_REPEATS))
        rates.append(nbytes / least)
    return rates[0], rates[1]
