"""Whether a batch fits by a method, and its time: predicted from the trace of one training step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from repro.advise.iterations import FEW, UPDATE, Iteration, Vector, repeated
from repro.advise.speed import FILE, Speed
from repro.advise.workload import AdviceError, Workload
from repro.measure import largest_batch
from repro.measure.checks import is_whole
from repro.measure.datasheets import LAUNCH_S, REACHED
from repro.outofcore import Trace, bound, plan_swaps, tune_window

PREFETCH = 2  # micro-batches that MBS copies ahead
LATENCY_S = 3e-5  # of starting a copy
SWAPPED_SHARE = 0.8  # of an accelerator's memory for tensors; kernels and gaps take the rest
_MOST = 1 << 24  # samples
_TUNED = 800  # functions of a trace whose window is tuned in a second or two
_SAME = "on a CPU the host's memory is the same: nothing is gained"


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and time of one method and one batch."""

    method: str  # one of `METHODS`
    batch: int  # samples of the mini-batch
    fits: bool  # whether it trains within the memory
    peak_bytes: int  # on the device at once; where it does not fit, what it would take
    # Seconds over those of the undivided step (if that fitted), and the least that the method can
    # take likewise: no schedule of out-of-core is faster, no copies of `save_on_cpu`. None where
    # nothing is known, or nothing runs.
    slowdown: float | None
    bound: float | None
    seconds: float | None  # of a step
    host_bytes: int = 0  # of host memory (or of the file) beside what the process has anyway
    largest: int | None = None  # batch that fits; None where any does, or nothing is known
    settings: dict[str, Any] = field(default_factory=dict)  # such as ``micro_batch``
    reason: str = ""  # why it does not fit, or a remark
    # Of a step, where that was asked for; `slowdown` is then over undivided steps as measured.
    measured_s: float | None = None


def predict(
    workload: Workload,
    method: str,
    batch: int,
    memory_bytes: int,
    speed: Speed | None = None,
    *,
    device: str = "cpu",
    simulated: bool = False,
) -> Prediction:
    """Predict one method at one batch size.

    Args:
        workload: The training step.
        method: One of `METHODS`.
        batch: Samples of the mini-batch.
        memory_bytes: Limit on the device.
        speed: Of the device; by default a data sheet's.
        device: Its type, on which some methods depend.
        simulated: The limit is one of `repro.measure.MemoryBudget` on a CPU in the place of a
            device: the mini-batch and host memory are not counted (give the mini-batch as
            `exclude` to `OutOfCore`). Otherwise a CPU's memory holds both.

    Raises:
        AdviceError: The method or a number is none, or the step cannot be recorded.
    """
    for name, value in (("batch", batch), ("memory_bytes", memory_bytes)):
        if not is_whole(value, 1):
            raise AdviceError(f"{name} is {value!r}: give a whole number of at least 1")
    if method not in METHODS:
        raise AdviceError(f"method is {method!r}: choose {', '.join(METHODS)}")
    on_cpu = device == "cpu"
    speed = speed or Speed.of("cpu" if on_cpu else "H100")
    workload = workload if on_cpu else workload.on_accelerator
    case = _Case(workload, method, batch, memory_bytes, speed, on_cpu, simulated)
    return METHODS[method](case)


@dataclass
class _Case:
    """One question, and the quantities that several methods need."""

    workload: Workload
    method: str
    batch: int
    memory: int
    speed: Speed
    on_cpu: bool
    simulated: bool

    def __post_init__(self) -> None:
        self.plain = self.workload.plain
        self.undivided_s = float(self.times(self.plain, self.batch).sum())
        self.one_memory = self.on_cpu and not self.simulated  # the device's is the host's
        self.beside = self.speed.beside_bytes
        available = self.memory if self.on_cpu else int(SWAPPED_SHARE * self.memory)
        self.budget = max(0, available - self.beside)  # for `OutOfCore`
        # An accelerator hides the host's time for a recomputed block.
        self.block_s = self.speed.block_s if self.on_cpu else 0.0

    # ---- memory

    def batch_bytes(self, batch: int) -> int:
        return self.plain.bytes_of(self.plain.inputs, batch)

    def counted(self, iteration: Iteration) -> Iteration:
        """The step with the variables that the limit counts."""
        return iteration.without_inputs if self.simulated else iteration

    def undivided_bytes(self, iteration: Iteration, batch: int) -> int:
        return math.ceil(self.counted(iteration).alive(batch).max()) + self.beside

    def divided_bytes(self, iteration: Iteration, streamed: bool, micro: int) -> int:
        """Peak of a mini-batch in micro-batches; from the second on all gradients are there."""
        if micro >= self.batch:
            return self.undivided_bytes(iteration, self.batch)
        update = iteration.without_inputs.alive(micro)
        peak = np.where(iteration.phases == UPDATE, update, iteration.alive_again(micro)).max()
        if not self.simulated:
            ring = 1 + PREFETCH if streamed else 1
            peak += self.batch_bytes(self.batch if self.on_cpu else min(self.batch, ring * micro))
        if streamed:  # running statistics are copied, to be put back where memory runs out
            peak += iteration.buffer_bytes
        return math.ceil(peak) + self.beside

    def smallest_budget(self, iteration: Iteration, batch: int) -> int:
        """The most that one operation needs."""
        return int(self.counted(iteration).touched(batch).max())

    def largest(self, peak_of: Callable[[int], int], allowed: int) -> int:
        """The largest batch, or micro-batch, that fits into so many bytes."""
        # Memory is linear in the batch size but for which function has most: a search is quick.
        return largest_batch(
            lambda size: size <= _MOST and peak_of(size) <= allowed, within=1 << 30
        )

    def micro_batch(self, most: int) -> int:
        """Samples of each of as few micro-batches as can be, alike but for one sample."""
        return -(-self.batch // -(-self.batch // max(1, min(self.batch, most))))

    # ---- time

    def times(self, iteration: Iteration, batch: int) -> Vector:
        return self.speed.seconds(iteration, self.plain, batch)

    def seen(self, times: Vector) -> Vector:
        """Seconds of functions under `OutOfCore`, which an accelerator hides."""
        return times + self.speed.seen_s if self.on_cpu else np.maximum(times, self.speed.seen_s)

    @property
    def streamed_s(self) -> tuple[float, float] | None:
        """Extra seconds of MBS with the first micro-batch and with each further one, if known."""
        if not self.on_cpu or self.method == "accumulation":
            return None
        return self.speed.deferred_s if self.method == "mbs_deferred" else self.speed.streamed_s

    def divided_s(self, iteration: Iteration, micro: int) -> float:
        """Seconds of a mini-batch in micro-batches of `micro` samples or one less."""
        count = -(-self.batch // micro)
        few, more = divmod(self.batch, count)
        update, total = iteration.phases == UPDATE, 0.0
        for size, times in ((few, count - more), (few + 1, more)):
            if times:
                seconds = self.times(iteration, size)
                total += times * (float(seconds[~update].sum()) + iteration.blocks * self.block_s)
                last = float(seconds[update].sum())
        if (streamed := self.streamed_s) is not None:
            total += streamed[0] + (count - 1) * streamed[1]
        elif count > 1:  # each gradient is added to the sum: read, read and written
            moving = 3 * iteration.bytes_of(iteration.gradients, FEW)
            moving_s = moving / (REACHED * self.speed.device.bandwidth)
            total += (count - 1) * max(moving_s, len(iteration.gradients) * LAUNCH_S)
        return total + last

    # ---- answers

    def answer(
        self, peak: float, seconds: float | None, least: float | None = None, **others: Any
    ) -> Prediction:
        slowdown, bound_ = (None if s is None else s / self.undivided_s for s in (seconds, least))
        fits = others.pop("fits", peak <= self.memory)
        given = self.method, self.batch, fits, int(peak), slowdown, bound_, seconds
        return Prediction(*given, **others)

    def refused(self, peak: int, reason: str = "", **others: Any) -> Prediction:
        reason = reason or f"MBS refuses it: {self.speed.streaming_refused}"
        return self.answer(peak, None, fits=False, reason=reason, **others)

    def undivided(
        self,
        peak_of: Callable[[int], int],
        seconds: float,
        least: float | None = None,
        host: int = 0,
    ) -> Prediction:
        """The answer of a method that does not divide the mini-batch."""
        largest = self.largest(peak_of, self.memory)
        reason = "" if largest >= self.batch else f"at most {largest} samples fit"
        given = {"host_bytes": host, "largest": largest, "reason": reason}
        return self.answer(peak_of(self.batch), seconds, least, **given)

    def swapped(
        self, trace: Trace, seen: Vector, link: tuple[float, float]
    ) -> tuple[float, float, int, int]:
        """Seconds of an iteration that swaps, their bound, peak and host bytes."""
        if len(trace.functions) <= _TUNED:
            plan = tune_window(trace, self.budget, seen, link, LATENCY_S)
        else:
            plan = plan_swaps(trace, self.budget)
        done = plan.simulate(seen, link, LATENCY_S)
        least = min(bound(trace, self.budget, seen, link, LATENCY_S), done.time_s)
        seconds = done.time_s + len(done.transfers) * self.speed.moved_s
        held = trace.held_bytes if trace.peak_bytes > self.budget else 0
        return seconds, least, done.peak_bytes, plan.host_bytes + held


def _undivided(case: _Case) -> Prediction:
    return case.undivided(partial(case.undivided_bytes, case.plain), case.undivided_s)


def _divided(case: _Case, iteration: Iteration | None = None) -> Prediction:
    iteration, streamed = iteration or case.plain, case.method != "accumulation"
    peak = partial(case.divided_bytes, iteration, streamed)
    fitting = min(case.batch, case.largest(peak, case.memory))
    micro = case.micro_batch(fitting)
    if streamed and case.speed.streaming_refused:
        return case.refused(peak(micro))
    return case.answer(
        peak(micro),
        case.divided_s(iteration, micro),
        host_bytes=case.batch_bytes(case.batch) if micro < case.batch and not case.on_cpu else 0,
        largest=0 if fitting == 0 else None,
        settings={"micro_batch": micro},
        reason="" if fitting else "not even a micro-batch of 1 fits",
    )


def _checkpointing(case: _Case) -> Prediction:
    """Predict from the step that recomputes; where that cannot be recorded, the reason is given."""
    iteration, blocks = case.workload.checkpointed, case.workload.blocks
    if isinstance(iteration, str):
        return case.answer(case.undivided_bytes(case.plain, case.batch), None, reason=iteration)
    if case.method == "checkpointing_mbs":
        prediction = _divided(case, iteration)
    else:
        seconds = float(case.times(iteration, case.batch).sum()) + iteration.blocks * case.block_s
        prediction = case.undivided(partial(case.undivided_bytes, iteration), seconds)
    names = None if callable(blocks) else blocks
    return replace(prediction, settings={"blocks": names} | prediction.settings)


def _save_on_cpu(case: _Case) -> Prediction:
    base = case.undivided_s
    if case.one_memory:  # `Tensor.cpu` of a tensor on the CPU is that tensor
        why = "on a CPU it keeps what it saves where that is: nothing is gained"
        return case.answer(case.undivided_bytes(case.plain, case.batch), base, reason=why)

    def peak(size: int) -> int:
        peak_bytes = int(case.plain.kept_on_host(size)[0].max()) + case.beside
        return peak_bytes - case.batch_bytes(size) if case.simulated else peak_bytes

    moved = case.plain.kept_on_host(case.batch)[1]
    into, out = (moved / rate for rate in case.speed.link)
    return case.undivided(peak, base + into + out, max(base, into, out), moved)


def _outofcore(case: _Case) -> Prediction:
    plain, budget, in_file = case.plain, case.budget, case.method == "outofcore_file"
    if in_file and not case.on_cpu:
        why = "swap_folder= is for a CPU: an accelerator swaps to pinned host memory"
        return case.refused(case.undivided_bytes(plain, case.batch), why)
    trace = case.counted(plain).trace(case.batch)
    largest = case.largest(partial(case.smallest_budget, plain), budget)
    given: dict[str, Any] = {"largest": largest, "settings": {"budget_bytes": budget}}
    if trace.smallest_budget > budget:
        why = f"one operation alone needs more; at most {largest} samples fit"
        return case.refused(trace.smallest_budget + case.beside, why, **given)
    seen = case.seen(case.times(plain, case.batch))
    if trace.peak_bytes <= budget:
        peak, why = trace.peak_bytes + case.beside, "nothing has to be swapped"
        return case.answer(peak, float(seen.sum()), reason=why, **given)
    if case.one_memory and not in_file:
        return replace(_undivided(case), reason=_SAME, settings=given["settings"])
    link = (FILE, FILE) if in_file else case.speed.link
    seconds, least, peak, host = case.swapped(trace, seen, link)
    return case.answer(peak + case.beside, seconds, least, host_bytes=host, **given)


def _mbs_in_outofcore(case: _Case) -> Prediction:
    """Predict a block around mini-batches that are streamed in micro-batches."""
    budget, plain = case.budget, case.plain
    fitting = case.largest(lambda size: case.smallest_budget(plain, size) + budget // 8, budget)
    micro = case.micro_batch(fitting)
    count = -(-case.batch // micro)
    single = case.counted(plain).trace(micro)
    if case.speed.streaming_refused:
        return case.refused(single.smallest_budget + case.beside)
    if count == 1:
        prediction = _outofcore(case)
        settings = prediction.settings | {"micro_batch": micro}
        return replace(prediction, settings=settings, largest=None if prediction.fits else 0)
    settings = {"micro_batch": micro, "budget_bytes": budget}
    # The third micro-batch takes as long as each further one.
    iterations = [repeated(single, plain, times) for times in sorted({2, min(count, 3)})]
    if (least := max(trace.smallest_budget for trace, _ in iterations)) > budget:
        why = "one operation alone needs more"
        return case.refused(least + case.beside, why, settings=settings)
    times = case.times(plain, micro)
    outcomes = [
        np.array(case.swapped(trace, case.seen(times[order]), case.speed.link))
        for trace, order in iterations
    ]
    two, three = outcomes[0], outcomes[-1]
    seconds, bound_s = (two + (count - 2) * (three - two))[:2]
    peak, host = np.maximum(two, three)[2:].astype(int)
    if case.one_memory and host:
        return case.refused(int(peak + host) + case.beside, _SAME, settings=settings)
    first_s, more_s = case.streamed_s or (0.0, 0.0)
    return case.answer(
        int(peak) + case.beside,
        float(seconds) + (first_s + (count - 1) * more_s),
        float(bound_s),
        host_bytes=int(host) + (0 if case.on_cpu else case.batch_bytes(case.batch)),
        settings=settings,
    )


# The plainest first: of methods that are equally fast the first is taken.
METHODS: dict[str, Callable[[_Case], Prediction]] = {
    "undivided": _undivided,
    "mbs": _divided,
    "accumulation": _divided,
    "outofcore": _outofcore,
    "outofcore_file": _outofcore,
    "checkpointing": _checkpointing,
    "save_on_cpu": _save_on_cpu,
    "mbs_deferred": _divided,
    "checkpointing_mbs": _checkpointing,
    "mbs_in_outofcore": _mbs_in_outofcore,
}
