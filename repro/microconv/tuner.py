"""The work of `tune`: measure, optimise within the limit, try, and put into the model."""

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

from torch import nn

from repro.microconv import backends
from repro.microconv.asked import check_model
from repro.microconv.assignment import assign_workspaces
from repro.microconv.cache import BenchmarkCache
from repro.microconv.conv import install, uninstall
from repro.microconv.kernels import Kernel
from repro.microconv.measuring import Bench, Trial
from repro.microconv.optimize import (
    Candidate,
    Division,
    best_division,
    micro_batch_sizes,
    pareto_front,
)
from repro.microconv.results import KernelReport, TuningReport
from repro.microconv.sampling import Call, Untunable, training_step, undisturbed
from repro.microconv.tuned_kernel import TunedKernel, Workspace, kernels_of, segment_bytes

_ROUNDS = 4
_MOST_TRIALS = 6  # of the whole model, to find the layers that pay


class WorkspaceLimitError(ValueError):
    """Kernels cannot be held to a workspace limit.

    Attributes:
        least_bytes: The smallest limit that would do.
        kernels: By layer and kind, the smallest workspace of each kernel that does not fit.
    """

    def __init__(
        self, limit_bytes: int, mode: str, kernels: dict[str, int], least: int, samples: int = 1
    ) -> None:
        self.least_bytes, self.kernels = least, kernels
        largest = sorted(kernels, key=lambda name: -kernels[name])
        needs = ", ".join(f"{name} needs {kernels[name]}" for name in largest[:6])
        more = f" and {len(largest) - 6} more" if len(largest) > 6 else ""
        each = "for each kernel" if mode == "WR" else "in all"
        share = f", {-(-least // samples)} for each of {samples} samples" if samples > 1 else ""
        super().__init__(
            f"{len(kernels)} kernels cannot be held to {limit_bytes} bytes of workspace {each}: "
            f"{needs} bytes{more}; the smallest limit that would do is {least} bytes{share}: "
            f"give that, or strict=False to leave torch's own convolution without a limit"
        )


@dataclass(frozen=True)
class Progress:
    """How far the measuring of a model's kernels is.

    Attributes:
        done: Kernels that are measured.
        total: Kernels in all.
        elapsed_s: Seconds so far.
        left_s: Seconds that the rest will take, by its number of multiplications.
    """

    done: int
    total: int
    elapsed_s: float
    left_s: float

    def __str__(self) -> str:
        return (
            f"microconv: {self.done} of {self.total} kernels measured in {self.elapsed_s:.0f} s, "
            f"about {self.left_s:.0f} s left"
        )


def untune(model: nn.Module) -> nn.Module:
    """Have every tuned convolution of a model run torch's own again; return the model.

    Raises:
        NotTunableError: It is no module.
    """
    check_model(model, "untune")
    for module in model.modules():
        uninstall(module)
    return model


class _Tuner:
    """One `tune`: measure, optimise, try, and put into place."""

    def __init__(
        self,
        report: TuningReport,
        store: BenchmarkCache,
        algorithms: Sequence[str] | None,
        max_error: float,
        min_gain: float,
        progress: Callable[[Progress], None],
        devices: Sequence[str] = (),
    ) -> None:
        self.report, self.store, self.progress = report, store, progress
        self.devices = devices
        self.algorithms, self.max_error, self.min_gain = algorithms, max_error, min_gain
        self.benches: dict[str, Bench] = {}
        self.measured: dict[tuple[Kernel, int], dict[int, list[Candidate]]] = {}
        self.unfit: set[tuple[Kernel, int]] = set()
        self.failed: set[tuple[Kernel, int, str]] = set()
        self.own_divided: set[tuple[Kernel, int]] = set()  # torch's own, for want of anything else
        self.spare = 0  # bytes that WD has given to no kernel
        self.others: dict[str, int] = {}  # bytes of convolutions that cannot be divided

    def beside(self, others: Sequence[Untunable], training: bool) -> None:
        """Measure what the convolutions take that are not tuned."""
        for other in others:
            for way, taken in other.temporary_bytes(training).items():
                name = f"{other.name} {way}"
                self.others[name] = max(taken, self.others.get(name, 0))

    def tune(self, model: nn.Module, calls: Sequence[Call], sample: Any, training: bool) -> None:
        """Tune all calls and put the result into their modules."""
        report = self.report
        wanted = [(call, kernel) for call in calls for kernel in call.kernels()]
        start = time.perf_counter()
        self._measure_all(wanted)
        report.benchmark_s = time.perf_counter() - start
        # Under WD the workspace of a division that fails its trial goes to others: solved again.
        for _ in range(_ROUNDS if report.mode == "WD" else 1):
            start = time.perf_counter()
            divisions = self._optimise(wanted)
            report.optimise_s += time.perf_counter() - start
            start = time.perf_counter()
            chosen = [
                self._try(call, kernel, division)
                for (call, kernel), division in zip(wanted, divisions, strict=True)
            ]
            report.benchmark_s += time.perf_counter() - start
            failed = {
                (kernel, call.batch, str(division))
                for (call, kernel), division, entry in zip(wanted, divisions, chosen, strict=True)
                if division is not None and entry.division is None
            }
            if failed <= self.failed:
                break
            self.failed |= failed
        start = time.perf_counter()
        kept = self._worthwhile(calls, chosen)
        report.kernels = self._settle(model, calls, kept, sample, training)
        report.benchmark_s += time.perf_counter() - start
        for bench in self.benches.values():
            report.measured += bench.counts.measured
            report.cached += bench.counts.cached

    def _measure_all(self, wanted: Sequence[tuple[Call, Kernel]]) -> None:
        """Measure every kernel once, and tell how far that is."""
        keys = list(dict.fromkeys((kernel, call.batch) for call, kernel in wanted))
        work = [self._work(*key) for key in keys]
        start = time.perf_counter()
        for number, key in enumerate(keys, start=1):
            self._measure(*key)
            elapsed = time.perf_counter() - start
            left_s = elapsed * math.fsum(work[number:]) / math.fsum(work[:number])
            self.progress(Progress(number, len(keys), elapsed, left_s))

    def _work(self, kernel: Kernel, batch: int) -> float:
        """Return what measuring a kernel takes, in multiplications of each algorithm."""
        conv = kernel.conv
        one = math.prod(conv.weight_shape) * math.prod(conv.out_size)
        return float(one * sum(micro_batch_sizes(batch, self.report.policy)))

    def _bench(self, device: str) -> Bench:
        if device not in self.benches:
            choice = backends.choose(self.algorithms, device)
            self.report.unavailable += choice.unavailable
            others = self.devices if device in self.devices else ()
            self.benches[device] = Bench(choice, self.store, self.max_error, others)
        return self.benches[device]

    def _measure(self, kernel: Kernel, batch: int) -> None:
        if (kernel, batch) not in self.measured:
            sizes = micro_batch_sizes(batch, self.report.policy)
            self.measured[kernel, batch] = self._bench(kernel.device).candidates(
                kernel, batch, sizes, self.report.limit_bytes
            )

    def _optimise(self, wanted: Sequence[tuple[Call, Kernel]]) -> list[Division | None]:
        """Return a division for each kernel, None for torch's own undivided convolution.

        Raises:
            WorkspaceLimitError: `strict`, and they cannot be held.
        """
        keys = list(dict.fromkeys((kernel, call.batch) for call, kernel in wanted))
        if self.report.mode == "WR":
            solved = {key: self._best(*key) for key in keys}
            self._hold(wanted)
            return [solved[kernel, call.batch] for call, kernel in wanted]
        strict, limit = self.report.strict, self.report.limit_bytes
        limit -= sum(self.others.values()) if strict else 0
        fronts = {key: self._front(*key) for key in keys}
        choices = {index: fronts[kernel, call.batch] for index, (call, kernel) in enumerate(wanted)}
        whole: dict[int, Division] = {}
        for index, (call, kernel) in enumerate(wanted):
            native = self._native(kernel, call.batch)
            whole[index] = Division(native.time_s, native.workspace_bytes if strict else 0, [])
        # Where divisions are asked for, torch's own is the last resort.
        tries = [{index: [whole[index], *front] for index, front in choices.items()}]
        if self.min_gain == -math.inf:
            tries.insert(0, {index: front or [whole[index]] for index, front in choices.items()})
        if strict:  # and what is smallest, whatever it is made of
            every = {key: self._smallest(*key) for key in keys}
            tries.append(
                {
                    index: [whole[index], *choices[index], *every[kernel, call.batch]]
                    for index, (call, kernel) in enumerate(wanted)
                }
            )
        for options in tries:
            with suppress(ValueError):
                shares = assign_workspaces(options, max(0, limit))
                self.spare = limit - sum(d.workspace_bytes for d in shares.values())
                return [d if d.parts else None for d in (shares[i] for i in range(len(wanted)))]
        raise self._refusal(wanted)

    def _best(self, kernel: Kernel, batch: int) -> Division | None:
        """Return the fastest division within the limit (WR), None where nothing fits."""
        limit, key = self.report.limit_bytes, (kernel, batch)
        with suppress(ValueError):
            return best_division(batch, self._divisible(kernel, batch), limit)
        if self.report.strict and self._native(kernel, batch).workspace_bytes > limit:
            with suppress(ValueError):
                division = best_division(batch, self.measured[key], limit)
                self.own_divided.add(key)
                return division
        self.unfit.add(key)
        return None

    def _front(self, kernel: Kernel, batch: int) -> list[Division]:
        """Return the divisions that WD may choose, torch's own undivided apart; often none."""
        candidates = self._divisible(kernel, batch)
        # Undivided, torch's own is a choice besides.
        whole = [w for w in candidates[batch] if w.algorithm != backends.NATIVE]
        candidates |= {batch: whole}
        try:
            front = pareto_front(batch, candidates, self.report.limit_bytes)
        except ValueError:  # nothing fits: torch's own remains
            self.unfit.add((kernel, batch))
            return []
        return [d for d in front if (kernel, batch, str(d)) not in self.failed]

    def _smallest(self, kernel: Kernel, batch: int) -> list[Division]:
        """Return what keeps a kernel small where that is needed, torch's own divided as well."""
        with suppress(ValueError):
            self.own_divided.add((kernel, batch))
            return pareto_front(batch, self.measured[kernel, batch], self.report.limit_bytes)
        return []

    def _hold(self, wanted: Sequence[tuple[Call, Kernel]]) -> None:
        """Refuse where a kernel takes more than the limit for each.

        Raises:
            WorkspaceLimitError: `strict`, and one does.
        """
        limit = self.report.limit_bytes
        if not self.report.strict:
            return
        unfit = any(
            (kernel, call.batch) in self.unfit
            and self._native(kernel, call.batch).workspace_bytes > limit
            for call, kernel in wanted
        )
        if unfit or any(taken > limit for taken in self.others.values()):
            raise self._refusal(wanted)

    def _refusal(self, wanted: Sequence[tuple[Call, Kernel]]) -> WorkspaceLimitError:
        """Return the error that says what would do."""
        report = self.report
        needs = [
            (
                f"{call.name} {kernel.kind}",
                self._bench(kernel.device).least_bytes(
                    kernel, call.batch, micro_batch_sizes(call.batch, report.policy)
                ),
            )
            for call, kernel in wanted
        ]
        needs += self.others.items()
        limit = report.limit_bytes
        beyond: dict[str, int] = {}
        for name, size in needs:  # a layer that is called with two shapes is there twice
            if report.mode == "WD" or size > limit:
                known = beyond.get(name, 0)
                beyond[name] = known + size if report.mode == "WD" else max(known, size)
        sizes = [size for _, size in needs]
        least = sum(sizes) if report.mode == "WD" else max(sizes)
        return WorkspaceLimitError(limit, report.mode, beyond, least, report.samples)

    def _needed(self, kernel: Kernel, batch: int, division: Division) -> bool:
        """Return whether torch's own convolution would take more than it may.

        Under WD it may take what no kernel has, once: what is promised to one is not left to the
        next.
        """
        if not self.report.strict:
            return False
        native = self._native(kernel, batch).workspace_bytes
        if self.report.mode == "WR":
            return native > self.report.limit_bytes
        more = max(0, native - division.workspace_bytes)
        if more > self.spare:
            return True
        self.spare -= more
        return False

    def _divisible(self, kernel: Kernel, batch: int) -> dict[int, list[Candidate]]:
        """Return what a division may be made of: without torch's own where it was not asked for."""
        admits = self._bench(kernel.device).choice.admits
        return {
            size: [way for way in ways if admits(way.algorithm)]
            for size, ways in self.measured.get((kernel, batch), {}).items()
        }

    def _native(self, kernel: Kernel, batch: int) -> Candidate:
        ways = self.measured[kernel, batch][batch]
        return next(way for way in ways if way.algorithm == backends.NATIVE)

    def _native_times(self, kernel: Kernel, batch: int) -> dict[int, float]:
        if self.min_gain == -math.inf:
            return {}
        return {
            size: way.time_s
            for size, ways in self.measured.get((kernel, batch), {}).items()
            for way in ways
            if way.algorithm == backends.NATIVE
        }

    def _try(self, call: Call, kernel: Kernel, division: Division | None) -> KernelReport:
        native = self._native(kernel, call.batch)
        time_s = native_s = native.time_s
        if division is not None and division.parts == [(call.batch, backends.NATIVE)]:
            division = None
        needed = division is not None and self._needed(kernel, call.batch, division)
        if division is not None and division.time_s > (1 - self.min_gain) * native.time_s:
            division = division if needed else None
        if division is not None:
            bench = self._bench(kernel.device)
            trial = bench.compare(kernel, call.batch, division.parts)
            time_s, native_s = trial.medians_s
            if trial.ratio > 1 - self.min_gain and not needed:
                division, time_s = None, native_s
        names = {name for _, name in division.parts} if division else set()
        return KernelReport(
            layer=call.name,
            kernel=kernel,
            batch=call.batch,
            division=division,
            time_s=time_s,
            native_s=native_s,
            native_bytes=native.workspace_bytes,
            error=max((backends.stated_error(name, kernel) for name in names), default=0.0),
            needed=needed and division is not None,
        )

    def _worthwhile(
        self, calls: Sequence[Call], chosen: Sequence[KernelReport]
    ) -> list[KernelReport]:
        """Leave those layers to torch whose kernels gain less than a call from Python costs."""
        kept: list[KernelReport] = []
        for _, entries in _by_call(calls, chosen):
            saved_s = sum(entry.native_s - entry.time_s for entry in entries)
            may_stay = self.min_gain > -math.inf and any(entry.division for entry in entries)
            may_stay = may_stay and not any(entry.needed for entry in entries)
            kernel, training = entries[0].kernel, len(entries) > 1
            if may_stay and saved_s < self._bench(kernel.device).overhead_s(kernel, training):
                entries = [_untied(entry) for entry in entries]
            kept += entries
        return kept

    def _settle(
        self,
        model: nn.Module,
        calls: Sequence[Call],
        chosen: Sequence[KernelReport],
        sample: Any,
        training: bool,
    ) -> list[KernelReport]:
        """Put into place what makes the whole model faster, and what keeps it to the limit."""
        report = self.report
        step = partial(training_step, model, sample, training)
        made = self._make(calls, chosen)  # before the model is changed: memory may run out
        text = repr(model)
        groups = list(_by_call(calls, chosen))
        gains = {
            number: math.fsum(e.native_s - e.time_s for e in entries if not e.needed)
            for number, (_, entries) in enumerate(groups)
            if any(entry.division and not entry.needed for entry in entries)
        }

        def with_layers(kept: Collection[int]) -> list[KernelReport]:
            return [
                entry if number in kept or entry.needed else _untied(entry)
                for number, (_, entries) in enumerate(groups)
                for entry in entries
            ]

        def trial(kept: Collection[int], base: Sequence[KernelReport]) -> Trial:
            forms = [self._make(calls, with_layers(kept)), self._make(calls, base)]
            places = [partial(_install, model, form) for form in forms]
            divided = [
                [f"{entry.layer} {entry.kernel.facts()} {entry.division}" for entry in form]
                for form in (with_layers(kept), base)
            ]
            what = sha256(json.dumps([text, divided]).encode()).hexdigest()
            bench = self._bench(chosen[0].kernel.device)
            try:
                return bench.compare_models(what, chosen[0].kernel, (places[0], places[1]), step)
            finally:
                untune(model)

        trials = 0

        def paying(group: list[int]) -> list[int]:
            """Return the layers of a group that pay together, or the halves of it that do."""
            nonlocal trials
            if not group or trials == _MOST_TRIALS:
                return []
            trials += 1
            if trial(group, with_layers(())).pays:
                return group
            half = (len(group) + 1) // 2
            return [] if half == len(group) else [*paying(group[:half]), *paying(group[half:])]

        if self.min_gain >= 0:
            with undisturbed(model, sample):  # an earlier tuning, too, should the model raise
                untune(model)
                order = sorted(gains, key=lambda number: -gains[number])
                kept = paying(order)
                if len(kept) < len(order) and kept and not trial(kept, with_layers(())).pays:
                    kept = []  # not together
                report.untied = [groups[n][0].name for n in order if n not in kept]
                chosen = with_layers(kept)
                made = self._make(calls, chosen)
                if any(entry.division for entry in chosen):
                    report.model = trial(kept, [_untied(entry) for entry in chosen])
        _install(model, made)
        for workspace in {
            id(k.workspace): k.workspace for _, t in made for k in t.values()
        }.values():
            report.allocated_bytes += workspace.size
        swapped = {call.name for call, _ in made}
        for call in calls:
            if call.name not in swapped:
                report.skipped[call.name] = self._reason(call)
        return list(chosen)

    def _make(
        self, calls: Sequence[Call], chosen: Sequence[KernelReport]
    ) -> list[tuple[Call, dict[str, TunedKernel]]]:
        """Return the kernels of the layers that run divided, with their workspace."""
        by_call = {(entry.layer, entry.kernel): entry for entry in chosen}
        workspaces: dict[str, Workspace] = {}
        made: list[tuple[Call, dict[str, TunedKernel]]] = []
        offsets: dict[str, int] = {}
        for call in calls:
            tuned: dict[str, TunedKernel] = {}
            for kind, kernel in kernels_of(call.module, call.signature).items():
                entry = by_call.get((call.name, kernel))
                division = entry.division if entry else None
                needed = entry is not None and entry.needed
                tuned[kind] = TunedKernel(
                    kernel=kernel,
                    batch=call.batch,
                    parts=division.parts if division else None,
                    candidates=self._ways(kernel, call.batch) if division else {},
                    limit_bytes=division.workspace_bytes if division else 0,
                    segment_bytes=segment_bytes(kernel, division),
                    offset=offsets.get(kernel.device, 0),
                    workspace=workspaces.setdefault(kernel.device, Workspace(kernel.device)),
                    # What only so keeps to the limit is divided at other sizes as well.
                    native_s={} if needed else self._native_times(kernel, call.batch),
                )
                end = tuned[kind].offset + tuned[kind].segment_bytes
                tuned[kind].workspace.reserve(end)
                if self.report.mode == "WD":
                    offsets[kernel.device] = end
            if any(kernel.parts is not None for kernel in tuned.values()):
                made.append((call, tuned))
        for workspace in workspaces.values():
            if workspace.size:
                workspace.allocate()
        return made

    def _ways(self, kernel: Kernel, batch: int) -> dict[int, list[Candidate]]:
        """Return what a mini-batch of another size may be divided into."""
        if (kernel, batch) in self.own_divided:
            return self.measured[kernel, batch]
        return self._divisible(kernel, batch)

    def _reason(self, call: Call) -> str:
        """Say why a layer that could be tuned was not."""
        if call.name in self.report.untied:
            return "its divisions do not make the whole model faster"
        keys = [(kernel, call.batch) for kernel in call.kernels()]
        if any(key not in self.unfit for key in keys):
            return "torch's own convolution is as fast"
        if all(not ways for key in keys for ways in self._divisible(*key).values()):
            return "no algorithm that was asked for computes it"
        return "no division fits into the limit"


def _by_call(
    calls: Sequence[Call], entries: Sequence[KernelReport]
) -> Iterator[tuple[Call, list[KernelReport]]]:
    """Yield each call with its kernels' entries."""
    remaining = iter(entries)
    for call in calls:
        yield call, [next(remaining) for _ in call.kinds]


def _untied(entry: KernelReport) -> KernelReport:
    return replace(entry, division=None, time_s=entry.native_s, error=0.0, needed=False)


def _install(model: nn.Module, made: Sequence[tuple[Call, dict[str, TunedKernel]]]) -> None:
    untune(model)
    for call, tuned in made:
        install(call.module, call.signature, tuned)
