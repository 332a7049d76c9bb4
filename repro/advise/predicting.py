"""Whether a batch fits by a method, and its time: predicted from the trace of one training step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro.advise.iterations import UPDATE, Iteration, repeated
from repro.advise.speed import FILE, Speed
from repro.advise.workload import AdviceError, Workload
from repro.dualbatch import DualBatchPlan
from repro.measure import TimeModel, largest_batch
from repro.measure.checks import is_whole
from repro.measure.datasheets import LAUNCH_S, REACHED
from repro.outofcore import Trace, bound, plan_swaps, tune_window

METHODS = (
    "undivided",
    "mbs",
    "accumulation",
    "outofcore",
    "outofcore_file",
    "checkpointing",
    "save_on_cpu",
    "theta",
    "dualbatch",
    "microconv",
)
PAIRS = ("mbs_deferred", "checkpointing_mbs", "mbs_in_outofcore", "checkpointing_in_outofcore")
EXTRA = 1.05  # k of dual-batch learning: how much longer an epoch may take
PREFETCH = 2  # micro-batches that MBS copies ahead
LATENCY_S = 3e-5  # of starting a copy
SWAPPED_SHARE = 0.8  # of an accelerator's memory for tensors; kernels and gaps take the rest
_MOST = 1 << 24  # samples
_TUNED = 800  # functions of a trace whose window is tuned in a second or two
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and time of one method and one batch.

    Attributes:
        method: One of `METHODS` or `PAIRS`.
        batch: Samples of the mini-batch.
        fits: Whether it trains within the memory.
        peak_bytes: The most on the device at once; where it does not fit, what it would take.
        slowdown: Seconds over those of the undivided step (if that fitted); None where
            nothing is known of it, or nothing runs.
        bound: The least that the method can take, likewise: of out-of-core what no schedule beats,
            of `save_on_cpu` copies that overlap whole, of dual-batch learning k = 1; None where
            nothing bounds it but the predicted time.
        seconds: Of a step.
        host_bytes: Of host memory (or of the file) beside what the process has anyway.
        largest: The largest batch that fits by it; None where any does, or nothing is known.
        settings: Options of the method, such as ``micro_batch``.
        reason: Why it does not fit, or a remark; may be empty.
    """

    method: str
    batch: int
    fits: bool
    peak_bytes: int
    slowdown: float | None
    bound: float | None
    seconds: float | None
    host_bytes: int = 0
    largest: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def predict(
    workload: Workload,
    method: str,
    batch: int,
    memory_bytes: int,
    speed: Speed | None = None,
    *,
    device: str = "cpu",
    micro_batch: int | None = None,
    simulated: bool = False,
) -> Prediction:
    """Predict one method at one batch size.

    Args:
        workload: The training step.
        method: One of `METHODS` or `PAIRS`.
        batch: Samples of the mini-batch.
        memory_bytes: Limit on the device.
        speed: Of the device; by default a data sheet's.
        device: Its type, on which some methods depend.
        micro_batch: Of methods that divide; by default the largest that fits.
        simulated: The limit is one of `repro.measure.MemoryBudget` on a CPU in the place of a
            device: the mini-batch and host memory are not counted (give the mini-batch as
            `exclude` to `OutOfCore`). Otherwise a CPU's memory holds both.

    Raises:
        AdviceError: The method or a number is none, or the step cannot be recorded.
    """
    check_sizes(batch, memory_bytes)
    if micro_batch is not None and not is_whole(micro_batch, 1):
        raise AdviceError(f"micro_batch is {micro_batch!r}: give whole samples, or None")
    if method not in _PREDICTORS:
        raise AdviceError(f"method is {method!r}: choose {', '.join((*METHODS, *PAIRS))}")
    if speed is None:
        speed = Speed.of("cpu" if device == "cpu" else "H100")
    return _PREDICTORS[method](
        _Case(workload, method, batch, memory_bytes, speed, device == "cpu", micro_batch, simulated)
    )


def check_sizes(batch: int, memory_bytes: int) -> None:
    """Raise an AdviceError where a batch or a memory is no whole number of at least 1."""
    for name, value in (("batch", batch), ("memory_bytes", memory_bytes)):
        if not is_whole(value, 1):
            raise AdviceError(f"{name} is {value!r}: give a whole number of at least 1")


@dataclass
class _Case:
    """One question, and the quantities that several methods need."""

    workload: Workload
    method: str
    batch: int
    memory: int
    speed: Speed
    on_cpu: bool
    micro: int | None
    simulated: bool

    @property
    def plain(self) -> Iteration:
        return self.workload.plain

    @property
    def beside(self) -> int:
        return self.speed.beside_bytes

    @property
    def budget(self) -> int:
        """Limit for `OutOfCore`."""
        available = self.memory if self.on_cpu else int(SWAPPED_SHARE * self.memory)
        return max(0, available - self.beside)

    # ---- memory

    def batch_bytes(self, batch: int) -> int:
        return self.plain.bytes_of(self.plain.inputs, batch)

    def left_out(self, iteration: Iteration) -> frozenset[str]:
        return iteration.inputs if self.simulated else frozenset()

    def undivided_bytes(self, iteration: Iteration, batch: int) -> int:
        alive = iteration.alive(batch, self.left_out(iteration))
        return math.ceil(alive.max()) + self.beside

    def divided_bytes(self, iteration: Iteration, micro: int, streamed: bool) -> int:
        """Peak of a mini-batch in several micro-batches of a size.

        Gradients are all there from the second micro-batch on; a new one lies beside the sum until
        it is added.
        """
        if micro >= self.batch:
            return self.undivided_bytes(iteration, self.batch)
        gradients = iteration.gradients
        total = iteration.bytes_of(gradients, iteration.few)
        without = gradients | iteration.inputs
        passes = iteration.alive(micro, without) + total + iteration.born(gradients)
        update = iteration.alive(micro, iteration.inputs)
        peak = np.where(iteration.phases == UPDATE, update, passes).max()
        if not self.simulated:
            ring = 1 + PREFETCH if streamed else 1
            samples = self.batch if self.on_cpu else min(self.batch, ring * micro)
            peak += self.batch_bytes(samples)
        if streamed:  # running statistics are copied, to be put back where memory runs out
            peak += iteration.kept_bytes("buffer")
        return math.ceil(peak) + self.beside

    def trace(self, iteration: Iteration, batch: int) -> Trace:
        """Trace for the plans of out-of-core training."""
        trace = iteration.trace(batch)
        without = self.left_out(iteration)
        return replace(trace, sizes={n: 0 if n in without else s for n, s in trace.sizes.items()})

    def smallest_budget(self, iteration: Iteration, batch: int) -> int:
        """The most that one operation needs."""
        return int(iteration.touched(batch, self.left_out(iteration)).max())

    def largest(self, peak_of: Callable[[int], int], allowed: int | None = None) -> int:
        """The largest batch, or micro-batch, that fits into the memory or other bytes."""
        most = self.memory if allowed is None else allowed
        # Memory is linear in the batch size but for which function has most: a search is quick.
        return largest_batch(lambda size: size <= _MOST and peak_of(size) <= most, within=1 << 30)

    def sizes(self, peak: Callable[[int], int]) -> dict[str, Any]:
        """The largest batch, with a reason where that is smaller than the one in question."""
        largest = self.largest(peak)
        reason = "" if largest >= self.batch else f"at most {largest} samples fit"
        return {"largest": largest, "reason": reason}

    def micro_batch(self, most: int) -> int:
        """Samples of each of as few micro-batches as can be, alike but for one sample."""
        micro = min(self.batch, self.micro or max(1, most))
        return -(-self.batch // -(-self.batch // micro))

    # ---- time

    def times(self, iteration: Iteration, batch: int) -> Vector:
        return self.speed.seconds(iteration, self.plain, batch)

    def undivided_s(self) -> float:
        return float(self.times(self.plain, self.batch).sum())

    def seen(self, times: Vector) -> Vector:
        """Seconds of functions under `OutOfCore`, which an accelerator hides."""
        return times + self.speed.seen_s if self.on_cpu else np.maximum(times, self.speed.seen_s)

    @property
    def block_s(self) -> float:
        """Seconds of the host for a recomputed block, which an accelerator hides."""
        return self.speed.block_s if self.on_cpu else 0.0

    def streamed_s(self) -> tuple[float, float] | None:
        """Extra seconds of MBS, of the first micro-batch and of each further one.

        None where they were not measured, or an accelerator hides them.
        """
        if not self.on_cpu or self.method == "accumulation":
            return None
        return self.speed.deferred_s if self.method == "mbs_deferred" else self.speed.streamed_s

    def divided_s(self, iteration: Iteration, micro: int) -> float:
        """Seconds of a mini-batch in micro-batches of `micro` samples or one less."""
        count = -(-self.batch // micro)
        few, more = divmod(self.batch, count)
        total = 0.0
        for size, times in ((few, count - more), (few + 1, more)):
            if not times:
                continue
            seconds = self.times(iteration, size)
            update = iteration.phases == UPDATE
            total += times * (float(seconds[~update].sum()) + iteration.blocks * self.block_s)
            last = float(seconds[update].sum())
        if (streamed := self.streamed_s()) is not None:
            total += streamed[0] + (count - 1) * streamed[1]
        elif count > 1:  # each gradient is added to the sum: read, read and written
            nbytes = iteration.bytes_of(iteration.gradients, iteration.few)
            moving = 3 * nbytes / (REACHED * self.speed.device.bandwidth)
            total += (count - 1) * max(moving, len(iteration.gradients) * LAUNCH_S)
        return total + last

    # ---- answers

    def answer(
        self, peak: float, seconds: float | None, least: float | None = None, **others: Any
    ) -> Prediction:
        base = self.undivided_s()
        return Prediction(
            self.method,
            self.batch,
            others.pop("fits", peak <= self.memory),
            int(peak),
            None if seconds is None else seconds / base,
            None if least is None else least / base,
            seconds,
            **others,
        )

    def refused(self, peak: int) -> Prediction:
        why = f"MBS refuses it: {self.speed.streaming_refused}"
        return self.answer(peak, None, fits=False, reason=why)

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
        return seconds, least, done.peak_bytes, plan.host_bytes


def _undivided(case: _Case) -> Prediction:
    peak = case.undivided_bytes(case.plain, case.batch)
    sizes = case.sizes(lambda size: case.undivided_bytes(case.plain, size))
    return case.answer(peak, case.undivided_s(), **sizes)


def _divided(case: _Case, iteration: Iteration, streamed: bool = True) -> Prediction:
    def peak(size: int) -> int:
        return case.divided_bytes(iteration, size, streamed)

    fitting = min(case.batch, case.largest(peak))
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


def _recomputing(answer: Callable[[_Case, Iteration], Prediction]) -> Callable[..., Prediction]:
    """Predict from the step that recomputes; where that cannot be recorded, the reason is given."""

    def predictor(case: _Case) -> Prediction:
        checkpointed, blocks = case.workload.checkpointed, case.workload.blocks
        if isinstance(checkpointed, str):
            peak = case.undivided_bytes(case.plain, case.batch)
            return case.answer(peak, None, reason=checkpointed)
        prediction = answer(case, checkpointed)
        names = None if callable(blocks) else tuple(blocks)
        return replace(prediction, settings={"blocks": names} | prediction.settings)

    return predictor


def _checkpointing(case: _Case, iteration: Iteration) -> Prediction:
    seconds = float(case.times(iteration, case.batch).sum()) + iteration.blocks * case.block_s
    peak = case.undivided_bytes(iteration, case.batch)
    sizes = case.sizes(lambda size: case.undivided_bytes(iteration, size))
    return case.answer(peak, seconds, **sizes)


def _outofcore_file(case: _Case) -> Prediction:
    if not case.on_cpu:
        peak = case.undivided_bytes(case.plain, case.batch)
        why = "swap_folder= is for a CPU: an accelerator swaps to pinned host memory"
        return case.answer(peak, None, fits=False, reason=why)
    return _swapped(case, case.plain, (FILE, FILE))


def _swapped(case: _Case, iteration: Iteration, link: tuple[float, float]) -> Prediction:
    budget, trace = case.budget, case.trace(iteration, case.batch)
    largest = case.largest(lambda size: case.smallest_budget(iteration, size), budget)
    given: dict[str, Any] = {"largest": largest, "settings": {"budget_bytes": budget}}
    if trace.smallest_budget > budget:
        why = f"one operation alone needs more; at most {largest} samples fit"
        peak = trace.smallest_budget + case.beside
        return case.answer(peak, None, fits=False, reason=why, **given)
    seen = case.seen(case.times(iteration, case.batch))
    if trace.peak_bytes <= budget:
        peak, why = trace.peak_bytes + case.beside, "nothing has to be swapped"
        return case.answer(peak, float(seen.sum()), reason=why, **given)
    seconds, least, peak, host = case.swapped(trace, seen, link)
    if case.on_cpu and case.method != "outofcore_file":
        given["reason"] = "on a CPU the host's memory is the same: the process takes both"
    host += trace.held_bytes
    return case.answer(peak + case.beside, seconds, least, host_bytes=host, **given)


def _mbs_in_outofcore(case: _Case) -> Prediction:
    """Predict a block around mini-batches that are streamed in micro-batches."""
    budget, plain = case.budget, case.plain
    fitting = case.largest(lambda size: case.smallest_budget(plain, size) + budget // 8, budget)
    micro = case.micro_batch(fitting)
    count = -(-case.batch // micro)
    settings = {"micro_batch": micro, "budget_bytes": budget}
    if case.speed.streaming_refused:
        return case.refused(case.trace(plain, micro).smallest_budget + case.beside)
    if count == 1:
        prediction = _swapped(replace(case, method="outofcore"), plain, case.speed.link)
        settings = prediction.settings | {"micro_batch": micro}
        return replace(prediction, method=case.method, settings=settings)
    outcomes = []
    for repeats in sorted({2, min(count, 3)}):  # the third shows the time of each further one
        trace, order = repeated(case.trace(plain, micro), plain, repeats)
        if trace.smallest_budget > budget:
            why = "one operation alone needs more"
            peak = trace.smallest_budget
            return case.answer(peak, None, fits=False, settings=settings, reason=why)
        seen = case.seen(case.times(plain, micro)[order])
        seconds, least, peak, host = case.swapped(trace, seen, case.speed.link)
        host += trace.held_bytes if trace.peak_bytes > budget else 0
        outcomes.append((seconds, least, peak, host))
    times, leasts, peaks, hosts = zip(*outcomes, strict=True)
    first_s, more_s = case.streamed_s() or (0.0, 0.0)
    return case.answer(
        max(peaks) + case.beside,
        times[0] + (count - 2) * (times[-1] - times[0]) + (first_s + (count - 1) * more_s),
        leasts[0] + (count - 2) * (leasts[-1] - leasts[0]),
        host_bytes=max(hosts) + (0 if case.on_cpu else case.batch_bytes(case.batch)),
        settings=settings,
    )


def _save_on_cpu(case: _Case) -> Prediction:
    base = case.undivided_s()
    if case.on_cpu and not case.simulated:  # `Tensor.cpu` of a tensor on the CPU is that tensor
        why = "on a CPU it keeps what it saves where that is: nothing is gained"
        return case.answer(case.undivided_bytes(case.plain, case.batch), base, reason=why)

    def peak(size: int) -> int:
        peak_bytes = int(case.plain.kept_on_host(size)[0].max()) + case.beside
        return peak_bytes - case.batch_bytes(size) if case.simulated else peak_bytes

    moved = case.plain.kept_on_host(case.batch)[1]
    into, out = (moved / rate for rate in case.speed.link)
    seconds, least = base + into + out, max(base, into, out)
    return case.answer(peak(case.batch), seconds, least, host_bytes=moved, **case.sizes(peak))


def _theta(case: _Case) -> Prediction:
    weights = case.plain.kept_bytes("parameter")

    def peak(size: int) -> int:
        return case.undivided_bytes(case.plain, size) + weights

    sizes = case.sizes(peak)
    largest = sizes["largest"]
    if sizes["reason"]:
        why = f"it grows the batch; beyond {largest} samples let it stream (MBS, micro_batch=)"
        sizes["reason"] = why
    settings = {"initial_batch": max(1, min(largest, case.batch) // 8)}
    return case.answer(peak(case.batch), case.undivided_s(), settings=settings, **sizes)


def _dualbatch(case: _Case) -> Prediction:
    weights = case.plain.kept_bytes("parameter") + case.plain.kept_bytes("buffer")
    beside = weights if case.on_cpu else 0  # the server's copy lies on the host

    def peak(size: int) -> int:
        return case.undivided_bytes(case.plain, size) + beside

    answers = case.sizes(peak)
    answers["reason"] += " as a large batch" if answers["reason"] else ""
    large = max(2, min(answers["largest"], case.batch))
    sizes = max(1, large // 2), large
    settings: dict[str, Any] = {"large_batch": large, "k": EXTRA}
    try:
        seconds = [float(case.times(case.plain, size).sum()) for size in sizes]
        fitted = TimeModel.fit(sizes, seconds)
        plan = DualBatchPlan.solve(fitted, EXTRA, 1, 1, large, 100 * large)
        settings |= {"small_batch": plan.small_batch, "a": fitted.a, "b": fitted.b}
    except ValueError as error:  # no feasible plan among them
        answers["reason"] = f"no small batch: {str(error).splitlines()[0]}"
    base = case.undivided_s()
    return case.answer(peak(case.batch), EXTRA * base, base, settings=settings, **answers)


def _microconv(case: _Case) -> Prediction:
    why = (
        "how much faster a division is has to be measured: tune() does, and keeps undivided what "
        "is not; tensors take as much as without"
    )
    return case.answer(case.undivided_bytes(case.plain, case.batch), None, reason=why)


_PREDICTORS: dict[str, Callable[[_Case], Prediction]] = {
    "undivided": _undivided,
    "accumulation": lambda case: _divided(case, case.plain, streamed=False),
    "mbs": lambda case: _divided(case, case.plain),
    "mbs_deferred": lambda case: _divided(case, case.plain),
    "mbs_in_outofcore": _mbs_in_outofcore,
    "outofcore": lambda case: _swapped(case, case.plain, case.speed.link),
    "outofcore_file": _outofcore_file,
    "checkpointing": _recomputing(_checkpointing),
    "save_on_cpu": _save_on_cpu,
    "theta": _theta,
    "dualbatch": _dualbatch,
    "microconv": _microconv,
    "checkpointing_mbs": _recomputing(_divided),
    "checkpointing_in_outofcore": _recomputing(
        lambda case, step: _swapped(case, step, case.speed.link)
    ),
}
