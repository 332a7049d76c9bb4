"""How long the operations of a step take: by a data sheet, or by a few steps measured here."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from repro.advise.iterations import BACKWARD, FORWARD, RECOMPUTE, UPDATE, Iteration, Vector
from repro.advise.workload import Workload
from repro.mbs import MicroBatchError, MicroBatchStreamer
from repro.measure import MemoryMeter, accelerator, is_out_of_memory, memory_state
from repro.measure.datasheets import COPIED, DEVICES, REACHED, Device
from repro.measure.machine import machine
from repro.outofcore import BudgetTooSmall, OutOfCore, plan_swaps

Phases = dict[str, float]  # seconds
FILE = 1e9  # bytes/s of a file on an SSD
SEEN_S = 2e-5  # that an operation takes longer under OutOfCore, on the host
_MEASURED = (FORWARD, BACKWARD, UPDATE)
_REPEATS, _SMALLEST, _GROWTH = 3, 2, 4
_SWAPPING = 0.6  # of the bytes of a step: the budget of one that is to swap
_ENOUGH_S = 3.0  # of steps that swap
_MICRO = 3  # micro-batches, to tell the first from others
_LINK_BYTES = 2**26
# In the place of a data sheet of a CPU, to share measured times out among operations.
_CPU = Device("cpu", 1e11, 1e11, 4e10, 0, 1e10)


@dataclass(frozen=True)
class Speed:
    """Times of operations and copies on a device."""

    device: Device  # by whose rates the operations of a step compare with each other
    grounds: str  # source of the seconds
    link: tuple[float, float]  # bytes/s of copies (to the device, to the host)
    seen_s: float = SEEN_S  # extra seconds of each operation under `OutOfCore`
    moved_s: float = 0.0  # extra seconds of each of its copies over a simulation
    block_s: float = 0.0  # extra seconds of a recomputed block over its operations
    # Extra seconds of MBS over the operations of micro-batches: with the first, and with each
    # further one, its sums of gradients among it; None where not measured.
    streamed_s: tuple[float, float] | None = None
    deferred_s: tuple[float, float] | None = None  # the same with deferred BatchNorm
    streaming_refused: str = ""  # why MBS refused the step, if it was tried
    # By batch size, ascending, the seconds of a step's phases; empty where nothing was measured.
    measured: Mapping[int, Phases] = field(default_factory=dict)
    beside_bytes: int = 0  # held by the allocator beside live tensors, as measured

    @classmethod
    def of(cls, name: str = "H100") -> "Speed":
        """Speed of a device by its data sheet, one of `repro.measure.datasheets.DEVICES`.

        ``"cpu"`` is a CPU of which only the proportions are known.
        """
        if name == "cpu":
            return cls(_CPU, "a CPU's proportions, not measured", (_CPU.link, _CPU.link))
        link = COPIED * DEVICES[name].link
        grounds = f"the data sheet of {name} at {REACHED:.0%}, copies at {COPIED:.0%}, ESTIMATED"
        return cls(DEVICES[name], grounds, (link, link))

    def seconds(self, iteration: Iteration, plain: Iteration, batch: int) -> Vector:
        """Seconds of each function of a step at a batch size, (n,).

        `plain` is the step as it was measured, undivided and without recomputation.
        """
        times = self._by_rates(iteration, batch)
        if not self.measured:
            return times
        base = self._by_rates(plain, batch)
        for phase in (*_MEASURED, RECOMPUTE):
            like = FORWARD if phase == RECOMPUTE else phase
            total = base[plain.phases == like].sum()
            scale = self._interpolated(like, batch) / total if total else 0.0
            times[iteration.phases == phase] *= scale
        return times

    def _by_rates(self, iteration: Iteration, batch: int) -> Vector:
        low = [cost.low for cost in iteration.costs]
        return self.device.seconds(iteration.flops(batch), iteration.touched(batch), low)

    def _interpolated(self, phase: str, batch: int) -> float:
        """Measured seconds of a phase: on lines between sizes, and beyond by the last."""
        sizes, seconds = [*self.measured], [took[phase] for took in self.measured.values()]
        if len(sizes) == 1:
            return seconds[0] * (1 if phase == UPDATE else batch / sizes[0])
        if phase == UPDATE:  # whatever the batch
            return statistics.median(seconds)
        at = int(np.clip(np.searchsorted(sizes, batch), 1, len(sizes) - 1))
        (left, right), (low, high) = sizes[at - 1 : at + 1], seconds[at - 1 : at + 1]
        interpolated = low + (high - low) * (batch - left) / (right - left)
        return max(interpolated, min(low, high) * batch / right)


def probe(
    workload: Workload,
    device: str | torch.device,
    batch: int,
    limit_bytes: int,
    seconds: float = 8.0,
) -> Speed:
    """Measure some steps on a device that is present, of growing batch sizes up to `batch`.

    A copy of the workload's model is trained. Sizes whose steps take more than `limit_bytes` by
    their trace are left out; after `seconds` no larger size is begun. Whatever the step itself
    raises on real tensors is raised.
    """
    device = accelerator.resolve(device)
    here, alone = accelerator.on(device), accelerator.forked_rng(device)
    with torch.device("cpu"), alone, here, machine({}, device.type), torch.inference_mode(False):
        return _Probe(workload, device, batch, seconds).speed(limit_bytes)


class _Probe:
    """The measurements of `probe`, until its seconds are spent."""

    def __init__(
        self, workload: Workload, device: torch.device, batch: int, seconds: float
    ) -> None:
        self.workload, self.device, self.batch = workload, device, batch
        self.queued = accelerator.is_accelerator(device)
        begun = time.perf_counter()
        self.half, self.end = begun + seconds / 2, begun + seconds

    def speed(self, limit_bytes: int) -> Speed:
        times, beside = self._grown(min(limit_bytes, memory_state(self.device).free_bytes))
        if not times:
            grounds = "no step fits to be measured; proportions of a data sheet, ESTIMATED"
            return replace(Speed.of("H100" if self.queued else "cpu"), grounds=grounds)
        where = accelerator.name(self.device) if self.queued else "this CPU"
        sheets = (sheet for name, sheet in DEVICES.items() if name in where)
        alone = len(times) == 1 and self.batch not in times
        rough = "; times of larger batches are scaled from it, and mostly too long" if alone else ""
        speed = Speed(
            next(sheets, DEVICES["H100"]) if self.queued else _CPU,
            f"steps of {', '.join(map(str, times))} samples measured on {where}{rough}",
            link=self._link(),
            measured=times,
            beside_bytes=beside,
        )
        return self._with_extras(speed)

    def _grown(self, room: int) -> tuple[dict[int, Phases], int]:
        """Seconds of phases by batch size, and bytes held beside live tensors."""
        times: dict[int, Phases] = {}
        size, beside = min(self.batch, _SMALLEST), 0
        while (live := int(self.workload.plain.alive(size).max())) <= room:
            try:
                with MemoryMeter(self.device) if self.queued else nullcontext() as meter:
                    times[size] = self._timed_phases(size)
            except RuntimeError as error:
                if not times or not is_out_of_memory(error):
                    raise
                break
            if isinstance(meter, MemoryMeter):
                held = meter.peak_reserved_bytes - meter.start_bytes
                beside = max(beside, held - live)
            round_s = sum(times[size].values()) * (_REPEATS + 1)
            left = self.half - time.perf_counter()
            growth = next((g for g in (_GROWTH, 2) if g * round_s <= left), 0)
            if size == self.batch or not growth:
                break
            size = min(self.batch, size * growth)
        return times, beside

    def _timed_phases(self, size: int) -> Phases:
        """The least seconds of a step's phases after a warm-up, as others may use the machine."""
        parts = self.workload.built(size, self.device)
        loss: list[torch.Tensor] = []
        rounds: list[Phases] = []
        while len(rounds) <= _REPEATS:
            parts.clear()
            forward = self._took(lambda: loss.append(parts.forward()))
            backward = self._took(lambda: loss.pop().backward())
            update = self._took(parts.optimizer.step)
            rounds.append({FORWARD: forward, BACKWARD: backward, UPDATE: update})
            if len(rounds) > 1 and time.perf_counter() > self.half:
                break
        return {phase: min(timed[phase] for timed in rounds[1:]) for phase in rounds[0]}

    def _took(self, function: Callable[[], object]) -> float:
        accelerator.synchronize(self.device)
        start = time.perf_counter()
        function()
        accelerator.synchronize(self.device)
        return time.perf_counter() - start

    def _with_extras(self, speed: Speed) -> Speed:
        """Measure extra seconds while there is time: so long steps hide them."""
        steps = [(size, sum(phases.values())) for size, phases in speed.measured.items()]
        (least, least_s), (size, size_s) = steps[0], steps[len(steps) // 2]

        def time_for(steps: int, step_s: float = size_s) -> bool:
            return steps * step_s <= self.end - time.perf_counter()

        if time_for(2 + _REPEATS, least_s):
            speed = replace(speed, seen_s=self._seen_s(least, least_s))
        if time_for(4 + _REPEATS):
            speed = replace(speed, moved_s=self._moved_s(speed, size))
        if self.queued:  # an accelerator goes on meanwhile
            return speed
        if time_for(2 * (1 + _REPEATS)):
            speed = replace(speed, block_s=self._block_s(speed, size))
        if time_for(2 * (1 + _MICRO) * (1 + _REPEATS)):
            try:
                micro, deferred = (
                    self._streamed_s(speed, size, rule) for rule in ("micro", "deferred")
                )
            except MicroBatchError as error:
                return replace(speed, streaming_refused=str(error))
            speed = replace(speed, streamed_s=micro, deferred_s=deferred)
        return speed

    def _swapping(self, size: int, budget: int, rounds: int, **options: Any) -> list[float]:
        """Seconds of steps under `OutOfCore`."""
        parts = self.workload.built(size, self.device)
        took: list[float] = []
        with OutOfCore(budget, device=self.device, **options) as block:
            while len(took) < rounds and (len(took) < 4 or sum(took) <= _ENOUGH_S):
                took.append(self._took(parts.step))
                block.step()
        return took

    def _seen_s(self, size: int, plain_s: float) -> float:
        """Extra seconds of an operation under `OutOfCore` where nothing is swapped."""
        took = self._swapping(size, 1 << 62, 2 + _REPEATS)
        least = min(took[2:])  # recorded and planned before
        return max(0.0, least - plain_s) / len(self.workload.plain.small.functions)

    def _moved_s(self, speed: Speed, size: int) -> float:
        """Extra seconds of a copy over a simulation: threads, locks, caches."""
        plain = self.workload.plain
        trace = plain.trace(size)
        budget = max(trace.smallest_budget, int(_SWAPPING * trace.peak_bytes))
        times = speed.seconds(plain, plain, size) + speed.seen_s
        simulated = plan_swaps(trace, budget).simulate(times, speed.link)
        if not simulated.transfers:
            return 0.0
        try:  # recorded, planned, and once more
            took = self._swapping(size, budget, 3 + _REPEATS, window_bytes=None)
        except BudgetTooSmall:  # by tensors that the first iteration holds of the one before
            return 0.0
        return max(0.0, min(took[3:]) - simulated.time_s) / len(simulated.transfers)

    def _block_s(self, speed: Speed, size: int) -> float:
        """Extra seconds of a recomputed block over its operations."""
        iteration = self.workload.checkpointed
        if isinstance(iteration, str) or not iteration.blocks:
            return 0.0
        step = self.workload.built(size, self.device, checkpointing=True).step
        took = min(self._took(step) for _ in range(1 + _REPEATS))
        expected_s = float(speed.seconds(iteration, self.workload.plain, size).sum())
        return max(0.0, took - expected_s) / iteration.blocks

    def _streamed_s(self, speed: Speed, size: int, rule: str) -> tuple[float, float]:
        """Extra seconds of the first and each further micro-batch of MBS over their operations."""
        plain = self.workload.plain
        passes = float(speed.seconds(plain, plain, size)[plain.phases != UPDATE].sum())
        extra = []
        for count in (1, _MICRO):
            parts = self.workload.built(count * size, self.device)
            how: dict[str, Any] = {"device": self.device, "batchnorm": rule, "check": "off"}
            streamer = MicroBatchStreamer(parts.model, parts.loss_fn, size, **how)
            took = []
            for _ in range(1 + _REPEATS):
                parts.clear()
                took.append(self._took(partial(streamer.backward, parts.inputs, parts.targets)))
            extra.append(min(took[1:]) - count * passes)
        return max(0.0, extra[0]), max(0.0, (extra[1] - extra[0]) / (_MICRO - 1))

    def _link(self) -> tuple[float, float]:
        """Measured bytes/s of copies (to the device, to the host)."""
        nbytes = _LINK_BYTES
        if not self.queued:
            # Of tensors that hold half of a step's bytes: caches speed up small ones.
            sizes = np.sort([s for s in self.workload.plain.trace(self.batch).sizes.values() if s])
            nbytes = int(sizes[np.searchsorted(np.cumsum(sizes), sizes.sum() / 2)])
        host = accelerator.empty_pinned(nbytes, self.device, torch.uint8).zero_()
        on_device = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

        def rate(into: torch.Tensor, of: torch.Tensor) -> float:
            into.copy_(of)
            return nbytes / min(self._took(partial(into.copy_, of)) for _ in range(_REPEATS))

        return rate(on_device, host), rate(host, on_device)
