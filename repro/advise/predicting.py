"""Whether a batch fits by a method, and what that costs: from the trace of one training step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro.advise.iterations import UPDATE, Iteration, repeated
from repro.advise.speed import FILE, Speed
from repro.advise.workload import AdviceError, Workload
from repro.dualbatch import DualBatchPlan, InfeasiblePlan
from repro.measure import TimeModel, largest_batch
from repro.measure.checks import is_whole
from repro.measure.datasheets import LAUNCH_S, REACHED
from repro.outofcore import Simulation, SwapPlan, Trace, bound, plan_swaps, tune_window

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
    """What is foretold of one method and one batch.

    Attributes:
        method: One of `METHODS` or `PAIRS`.
        batch: Samples of the mini-batch.
        fits: Whether it trains within the memory.
        peak_bytes: The most on the device at once; where it does not fit, what it would take.
        slowdown: Seconds over those of the undivided step (if that fitted); None where
            nothing is known of it, or nothing runs.
        bound: The least that the method can take, likewise: of out-of-core what no schedule beats,
            of `save_on_cpu` copies that overlap whole, of dual-batch learning k = 1; None where
            nothing bounds it but the time that is foretold.
        seconds: Of a step.
        host_bytes: Of host memory (or of the file) beside what the process has anyway.
        largest: The largest batch that fits by it; None where any does, or nothing is known.
        settings: What to give to the method, such as ``micro_batch``.
        reason: Why it does not fit, or what to know of it; may be empty.
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
    """Foretell one method at one batch size.

    Args:
        workload: What is trained.
        method: One of `METHODS` or `PAIRS`.
        batch: Samples of the mini-batch.
        memory_bytes: That may be taken on the device.
        speed: Of the device; by default a data sheet's.
        device: Its type, which some methods depend on.
        micro_batch: Of methods that divide; by default the largest that fits.
        simulated: The limit is one of `repro.measure.MemoryBudget` on a CPU, which stands for a
            device: the mini-batch and what goes to the host are not counted (give the
            mini-batch as `exclude` to `OutOfCore`). Otherwise a CPU's memory holds both.

    Raises:
        AdviceError: The method or a number is none, or the step cannot be recorded.
    """
    for name, value in (("batch", batch), ("memory_bytes", memory_bytes)):
        if not is_whole(value, 1):
            raise AdviceError(f"{name} is {value!r}: give a whole number of at least 1")
    if micro_batch is not None and not is_whole(micro_batch, 1):
        raise AdviceError(f"micro_batch is {micro_batch!r}: give whole samples, or None")
    if method not in _WAYS:
        raise AdviceError(f"method is {method!r}: choose {', '.join((*METHODS, *PAIRS))}")
    if speed is None:
        speed = Speed.of("cpu" if device == "cpu" else "H100")
    case = _Case(workload, batch, memory_bytes, speed, device, micro_batch, simulated)
    return _WAYS[method](case)


@dataclass
class _Case:
    """What is asked, and what several methods look at."""

    workload: Workload
    batch: int
    memory: int
    speed: Speed
    device: str
    micro: int | None
    simulated: bool

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def plain(self) -> Iteration:
        return self.workload.plain

    def batch_bytes(self, batch: int) -> int:
        return self.plain.bytes_of(self.plain.inputs, batch)

    @property
    def budget(self) -> int:
        """What to give to `OutOfCore`."""
        available = self.memory if self.on_cpu else int(SWAPPED_SHARE * self.memory)
        return max(0, available - self.speed.beside_bytes)

    def undivided_s(self) -> float:
        return float(self.speed.seconds(self.plain, self.plain, self.batch).sum())

    # ---- memory

    def undivided_bytes(self, iteration: Iteration, batch: int) -> int:
        alive = iteration.alive(batch, self.left_out(iteration))
        return math.ceil(alive.max()) + self.speed.beside_bytes

    def divided_bytes(self, iteration: Iteration, micro: int, streamed: bool) -> int:
        """Return the peak of a mini-batch in several micro-batches of a size.

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
        return math.ceil(peak) + self.speed.beside_bytes

    def trace(self, iteration: Iteration, batch: int) -> Trace:
        """Return the trace that out-of-core training plans by."""
        trace = iteration.trace(batch)
        if not self.simulated:
            return trace
        without = {name: 0 if name in iteration.inputs else n for name, n in trace.sizes.items()}
        return replace(trace, sizes=without)

    def smallest_budget(self, iteration: Iteration, batch: int) -> int:
        """Return the most that one operation needs."""
        return int(iteration.touched(batch, self.left_out(iteration)).max())

    def left_out(self, iteration: Iteration) -> frozenset[str]:
        return iteration.inputs if self.simulated else frozenset()

    def largest(self, peak_of: Callable[[int], int], allowed: int | None = None) -> int:
        """Return the largest batch, or micro-batch, that fits into the memory or other bytes."""
        most = self.memory if allowed is None else allowed
        # Memory is linear in the batch size but for which function has most: a search is quick.
        return largest_batch(lambda size: size <= _MOST and peak_of(size) <= most, within=1 << 30)

    # ---- time

    def divided_s(
        self, iteration: Iteration, micro: int, streamed: tuple[float, float] | None
    ) -> float:
        """Return the seconds of a mini-batch in micro-batches that differ by at most a sample.

        Args:
            iteration: The step.
            micro: Most samples of a micro-batch.
            streamed: As of `streamed_s`.
        """
        count = -(-self.batch // micro)
        few, more = divmod(self.batch, count)
        total = 0.0
        for size, times in ((few, count - more), (few + 1, more)):
            if not times:
                continue
            seconds = self.speed.seconds(iteration, self.plain, size)
            update = iteration.phases == UPDATE
            total += times * (float(seconds[~update].sum()) + iteration.blocks * self.block_s)
            last = float(seconds[update].sum())
        if streamed is not None:
            total += streamed[0] + (count - 1) * streamed[1]
        elif count > 1:  # each gradient is added to the sum: read, read and written
            nbytes = iteration.bytes_of(iteration.gradients, iteration.few)
            sums = sum(1 for name in iteration.gradients)
            total += (count - 1) * self.adding_s(nbytes, sums)
        return total + last

    @property
    def block_s(self) -> float:
        """What the host takes for a recomputed block; an accelerator's goes on meanwhile."""
        return self.speed.block_s if self.on_cpu else 0.0

    def streamed_s(self, method: str) -> tuple[float, float] | None:
        """Return what MBS adds with the first micro-batch, and with each further one.

        None where that was not measured, or an accelerator goes on meanwhile.
        """
        if not self.on_cpu or method == "accumulation":
            return None
        return self.speed.deferred_s if method == "mbs_deferred" else self.speed.streamed_s

    def moving_s(self, simulated: Simulation) -> float:
        """Return the seconds of an iteration that swaps."""
        return simulated.time_s + len(simulated.transfers) * self.speed.moved_s

    def adding_s(self, nbytes: int, count: int) -> float:
        return max(3 * nbytes / (REACHED * self.speed.device.bandwidth), count * LAUNCH_S)

    # ---- answers

    def answer(
        self,
        method: str,
        peak: int,
        seconds: float | None,
        least: float | None = None,
        **others: Any,
    ) -> Prediction:
        base = self.undivided_s()
        fits = others.pop("fits", peak <= self.memory)
        return Prediction(
            method,
            self.batch,
            fits,
            int(peak),
            None if seconds is None else seconds / base,
            None if least is None else least / base,
            seconds,
            **others,
        )


def _undivided(case: _Case) -> Prediction:
    largest = case.largest(lambda size: case.undivided_bytes(case.plain, size))
    return case.answer(
        "undivided",
        case.undivided_bytes(case.plain, case.batch),
        case.undivided_s(),
        largest=largest,
        reason="" if largest >= case.batch else f"at most {largest} samples fit",
    )


def _divided(case: _Case, method: str, iteration: Iteration, streamed: bool) -> Prediction:
    def peak(size: int) -> int:
        return case.divided_bytes(iteration, size, streamed)

    fitting = min(case.batch, case.largest(peak))
    micro = min(case.micro or max(fitting, 1), case.batch)
    # As many micro-batches, alike but for one sample.
    micro = -(-case.batch // -(-case.batch // micro))
    if streamed and case.speed.streaming_refused:
        return _refused(case, method, peak(micro))
    host = case.batch_bytes(case.batch) if micro < case.batch and not case.on_cpu else 0
    return case.answer(
        method,
        peak(micro),
        case.divided_s(iteration, micro, case.streamed_s(method)),
        host_bytes=host,
        largest=0 if fitting == 0 else None,
        settings={"micro_batch": micro},
        reason="" if fitting else "not even a micro-batch of 1 fits",
    )


def _refused(case: _Case, method: str, peak: int) -> Prediction:
    why = f"MBS refuses it: {case.speed.streaming_refused}"
    return case.answer(method, peak, None, fits=False, reason=why)


def _recomputing(
    method: str, answer: Callable[[_Case, Iteration], Prediction]
) -> Callable[[_Case], Prediction]:
    """Return how a method is foretold that recomputes; where that cannot be, it says why."""

    def foretell(case: _Case) -> Prediction:
        checkpointed = case.workload.checkpointed
        if isinstance(checkpointed, Iteration):
            prediction = answer(case, checkpointed)
            blocks = case.workload.blocks
            names = None if callable(blocks) else tuple(blocks)
            return replace(prediction, settings={"blocks": names} | prediction.settings)
        peak = case.undivided_bytes(case.plain, case.batch)
        return case.answer(method, peak, None, reason=checkpointed)

    return foretell


def _checkpointing(case: _Case, iteration: Iteration) -> Prediction:
    seconds = case.speed.seconds(iteration, case.plain, case.batch)
    largest = case.largest(lambda size: case.undivided_bytes(iteration, size))
    return case.answer(
        "checkpointing",
        case.undivided_bytes(iteration, case.batch),
        float(seconds.sum()) + iteration.blocks * case.block_s,
        largest=largest,
        reason="" if largest >= case.batch else f"at most {largest} samples fit",
    )


def _outofcore(case: _Case) -> Prediction:
    return _swapped(case, "outofcore", case.plain, case.speed.link)


def _outofcore_file(case: _Case) -> Prediction:
    if not case.on_cpu:
        peak = case.undivided_bytes(case.plain, case.batch)
        why = "swap_folder= is for a CPU: an accelerator swaps to pinned host memory"
        return case.answer("outofcore_file", peak, None, fits=False, reason=why)
    return _swapped(case, "outofcore_file", case.plain, (FILE, FILE))


def _swapped(
    case: _Case, method: str, iteration: Iteration, link: tuple[float, float]
) -> Prediction:
    budget = case.budget
    trace = case.trace(iteration, case.batch)
    settings = {"budget_bytes": budget}
    largest = case.largest(lambda size: case.smallest_budget(iteration, size), budget)
    if trace.smallest_budget > budget:
        return case.answer(
            method,
            trace.smallest_budget + case.speed.beside_bytes,
            None,
            fits=False,
            largest=largest,
            settings=settings,
            reason=f"one operation alone needs more; at most {largest} samples fit",
        )
    times = case.speed.seconds(iteration, case.plain, case.batch)
    seen = times + case.speed.seen_s if case.on_cpu else np.maximum(times, case.speed.seen_s)
    if trace.peak_bytes <= budget:
        peak = trace.peak_bytes + case.speed.beside_bytes
        return case.answer(
            method, peak, float(seen.sum()), largest=largest, settings=settings,
            reason="nothing has to be swapped",
        )  # fmt: skip
    plan = _plan(trace, budget, seen, link)
    simulated = plan.simulate(seen, link, LATENCY_S)
    least = bound(trace, budget, seen, link, LATENCY_S)
    reason = ""
    if case.on_cpu and method != "outofcore_file":
        reason = "on a CPU the host's memory is the same: the process takes both"
    return case.answer(
        method,
        simulated.peak_bytes + case.speed.beside_bytes,
        case.moving_s(simulated),
        min(least, simulated.time_s),
        host_bytes=plan.host_bytes + trace.held_bytes,
        largest=largest,
        settings=settings,
        reason=reason,
    )


def _mbs_in_outofcore(case: _Case) -> Prediction:
    """Foretell a block around mini-batches that are streamed in micro-batches."""
    budget = case.budget
    fitting = case.largest(
        lambda size: case.smallest_budget(case.plain, size) + budget // 8, budget
    )
    micro = min(case.batch, case.micro or max(1, fitting))
    count = -(-case.batch // micro)
    micro = -(-case.batch // count)
    if case.speed.streaming_refused:
        peak = case.trace(case.plain, micro).smallest_budget + case.speed.beside_bytes
        return _refused(case, "mbs_in_outofcore", peak)
    if count == 1:
        prediction = _outofcore(case)
        settings = prediction.settings | {"micro_batch": micro}
        return replace(prediction, method="mbs_in_outofcore", settings=settings)
    outcomes = []
    # What further micro-batches take shows in the third.
    for repeats in sorted({min(count, 2), min(count, 3)}):
        trace, order = repeated(case.trace(case.plain, micro), case.plain, repeats)
        if trace.smallest_budget > budget:
            return case.answer(
                "mbs_in_outofcore", trace.smallest_budget, None, fits=False,
                settings={"micro_batch": micro, "budget_bytes": budget},
                reason="one operation alone needs more",
            )  # fmt: skip
        times = case.speed.seconds(case.plain, case.plain, micro)[order]
        seen = times + case.speed.seen_s if case.on_cpu else np.maximum(times, case.speed.seen_s)
        plan = _plan(trace, budget, seen, case.speed.link)
        done = plan.simulate(seen, case.speed.link, LATENCY_S)
        least = bound(trace, budget, seen, case.speed.link, LATENCY_S)
        outcomes.append(
            (
                case.moving_s(done),
                min(least, done.time_s),
                done.peak_bytes,
                plan.host_bytes + (trace.held_bytes if trace.peak_bytes > budget else 0),
            )
        )
    times_s, leasts, peaks, hosts = zip(*outcomes, strict=True)
    more = count - 2
    beside = 0 if case.on_cpu else case.batch_bytes(case.batch)
    first_s, more_s = case.streamed_s("mbs") or (0.0, 0.0)
    streamed_s = first_s + (count - 1) * more_s
    return case.answer(
        "mbs_in_outofcore",
        max(peaks) + case.speed.beside_bytes,
        times_s[0] + more * (times_s[-1] - times_s[0]) + streamed_s,
        leasts[0] + more * (leasts[-1] - leasts[0]),
        host_bytes=max(hosts) + beside,
        settings={"micro_batch": micro, "budget_bytes": budget},
    )


def _plan(trace: Trace, budget: int, times: Vector, link: tuple[float, float]) -> SwapPlan:
    if len(trace.functions) <= _TUNED:
        return tune_window(trace, budget, times, link, LATENCY_S)
    return plan_swaps(trace, budget)


def _save_on_cpu(case: _Case) -> Prediction:
    base = case.undivided_s()
    if case.on_cpu and not case.simulated:  # `Tensor.cpu` of a tensor on the CPU is that tensor
        return case.answer(
            "save_on_cpu",
            case.undivided_bytes(case.plain, case.batch),
            base,
            reason="on a CPU it keeps what it saves where that is: nothing is gained",
        )

    def peak(size: int) -> int:
        peak_bytes = int(case.plain.kept_on_host(size)[0].max()) + case.speed.beside_bytes
        return peak_bytes if not case.simulated else peak_bytes - case.batch_bytes(size)

    moved = case.plain.kept_on_host(case.batch)[1]
    into, out = moved / case.speed.link[0], moved / case.speed.link[1]
    largest = case.largest(peak)
    return case.answer(
        "save_on_cpu",
        peak(case.batch),
        base + into + out,
        max(base, into, out),
        host_bytes=moved,
        largest=largest,
        reason="" if largest >= case.batch else f"at most {largest} samples fit",
    )


def _theta(case: _Case) -> Prediction:
    weights = case.plain.kept_bytes("parameter")

    def peak(size: int) -> int:
        return case.undivided_bytes(case.plain, size) + weights

    largest = case.largest(peak)
    why = f"it grows the batch; beyond {largest} samples let it stream (MBS, micro_batch=)"
    return case.answer(
        "theta",
        peak(case.batch),
        case.undivided_s(),
        largest=largest,
        settings={"initial_batch": max(1, min(largest, case.batch) // 8)},
        reason="" if largest >= case.batch else why,
    )


def _dualbatch(case: _Case) -> Prediction:
    weights = case.plain.kept_bytes("parameter") + case.plain.kept_bytes("buffer")
    beside = weights if case.on_cpu else 0  # the server's copy lies on the host

    def peak(size: int) -> int:
        return case.undivided_bytes(case.plain, size) + beside

    largest = case.largest(peak)
    at_most = max(2, min(largest, case.batch))
    sizes = max(1, at_most // 2), at_most
    settings: dict[str, Any] = {"large_batch": at_most, "k": EXTRA}
    reason = "" if largest >= case.batch else f"at most {largest} samples fit as a large batch"
    seconds = EXTRA * case.undivided_s()
    try:
        fitted = TimeModel.fit(
            sizes, [float(case.speed.seconds(case.plain, case.plain, s).sum()) for s in sizes]
        )
        plan = DualBatchPlan.solve(fitted, EXTRA, 1, 1, at_most, 100 * at_most)
        settings |= {"small_batch": plan.small_batch, "a": fitted.a, "b": fitted.b}
    except (InfeasiblePlan, ValueError) as error:
        reason = f"no small batch: {str(error).splitlines()[0]}"
    return case.answer(
        "dualbatch",
        peak(case.batch),
        seconds,
        case.undivided_s(),
        largest=largest,
        settings=settings,
        reason=reason,
    )


def _microconv(case: _Case) -> Prediction:
    peak = case.undivided_bytes(case.plain, case.batch)
    return case.answer(
        "microconv",
        peak,
        None,
        reason="how much faster a division is has to be measured: tune() does, and keeps "
        "undivided what is not; tensors take as much as without",
    )


_WAYS: dict[str, Callable[[_Case], Prediction]] = {
    "undivided": _undivided,
    "accumulation": lambda case: _divided(case, "accumulation", case.plain, False),
    "mbs": lambda case: _divided(case, "mbs", case.plain, True),
    "mbs_deferred": lambda case: _divided(case, "mbs_deferred", case.plain, True),
    "mbs_in_outofcore": _mbs_in_outofcore,
    "outofcore": _outofcore,
    "outofcore_file": _outofcore_file,
    "checkpointing": _recomputing("checkpointing", _checkpointing),
    "save_on_cpu": _save_on_cpu,
    "theta": _theta,
    "dualbatch": _dualbatch,
    "microconv": _microconv,
    "checkpointing_mbs": _recomputing(
        "checkpointing_mbs", lambda case, step: _divided(case, "checkpointing_mbs", step, True)
    ),
    "checkpointing_in_outofcore": _recomputing(
        "checkpointing_in_outofcore",
        lambda case, step: _swapped(case, "checkpointing_in_outofcore", step, case.speed.link),
    ),
}
