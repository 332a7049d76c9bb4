"""`tune` a model's convolutions under a workspace limit, and what it reports."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from repro.microconv import backends
from repro.microconv.assignment import assign_workspaces
from repro.microconv.cache import BenchmarkCache, default_path
from repro.microconv.conv import (
    TunedConv2d,
    TunedKernel,
    Workspace,
    install,
    kernels_of,
    segment_bytes,
)
from repro.microconv.kernels import Kernel
from repro.microconv.measuring import Bench
from repro.microconv.optimize import (
    POLICIES,
    Candidate,
    Division,
    best_division,
    micro_batch_sizes,
    pareto_front,
)
from repro.microconv.results import KernelReport, TuningReport
from repro.microconv.sampling import Call, record_calls

MIB = 2**20
MODES = ("WR", "WD")
_ROUNDS = 4
_MEMORY = BenchmarkCache(None)


def tune(
    model: nn.Module,
    sample_input: Any,
    workspace_limit: int = 64 * MIB,
    policy: str = "powerOfTwo",
    mode: str = "WR",
    *,
    algorithms: Sequence[str] | None = None,
    max_error: float = 1e-4,
    training: bool | None = None,
    min_gain: float = 0.05,
    cache: BenchmarkCache | str | os.PathLike[str] | None = "default",
) -> TuningReport:
    """Make a model's convolutions run divided into micro-batches, each as fast as it can be.

    Every eligible ``nn.Conv2d`` is turned in place into one that runs the fastest division of its
    mini-batch found by measuring (WR, section III-B) or by sharing out one workspace (WD, section
    III-C); `untune` turns it back. Results differ by no more than the stated errors of the
    algorithms. A kernel that torch's own convolution computes as fast is left to torch; its
    internal memory is torch's own affair and not held to the limit, but measured and reported.

    Differs from the paper: a chosen division must also win, by `min_gain`, a trial against torch's
    own convolution as a step runs it; under WR all kernels share one buffer, since they follow
    each other, instead of holding one each.

    Args:
        model: Changed in place, its parameters and hooks as they are. A tuned one is untuned
            first.
        sample_input: A tensor, a tuple of positional or a dictionary of keyword arguments of the
            model, with the mini-batch size, image size, data type and device to tune for. The
            model is run once with it; buffers and random state are put back.
        workspace_limit: Bytes, of each kernel (WR) or of all together (WD).
        policy: ``powerOfTwo``, ``all`` or ``undivided``; see `micro_batch_sizes`.
        mode: ``WR`` or ``WD``.
        algorithms: Backends (``torch``, ``nnpack``, ``cudnn``) or single algorithms such as
            ``nnpack:ft8x8`` that divisions may be made of; None for all that are there.
        max_error: Leave out algorithms that state a larger relative error in float32.
        training: Whether gradients are computed, and their kernels tuned; None for
            ``model.training``.
        min_gain: Share of time that a division must save in the trial; ``-math.inf`` takes the
            best division even where torch's own convolution is faster.
        cache: File of benchmark results, or a `BenchmarkCache`; ``"default"`` is
            ``microconv.sqlite`` in `$REPRO_CACHE` or the user's cache folder; None keeps them in
            memory until the process ends.

    Returns:
        What was chosen for each kernel, what was left alone and why.

    Raises:
        ValueError: An argument is not one of its choices.
        BackendMissingError: A backend was named that is not there.
        CacheError: The cache cannot be used.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose {', '.join(POLICIES)}")
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; choose {', '.join(MODES)}")
    if isinstance(workspace_limit, bool) or not isinstance(workspace_limit, int):
        raise ValueError(f"workspace_limit is {workspace_limit!r}; give whole bytes, as 64 * 2**20")
    if workspace_limit < 0:
        raise ValueError(f"workspace_limit is {workspace_limit}; it must be at least 0 bytes")
    if not max_error > 0:
        raise ValueError(f"max_error is {max_error}; give a relative error above 0")
    if not min_gain < 1:
        raise ValueError(f"min_gain is {min_gain}; give a share of time below 1")
    backends.check_names(algorithms)
    store = _open_cache(cache)
    training = model.training if training is None else training
    report = TuningReport(mode, policy, workspace_limit)
    calls, report.skipped = record_calls(model, sample_input, training)
    _Tuner(report, store, algorithms, max_error, min_gain).tune(model, calls)
    return report


def find_kernels(
    model: nn.Module, sample_input: Any, training: bool = True
) -> list[tuple[str, Kernel, int]]:
    """Return (layer, kernel, mini-batch size) of what `tune` would consider, in order of use.

    Arguments as `tune`; without `training` only forward passes.
    """
    calls, _ = record_calls(model, sample_input, training)
    return [(call.name, kernel, call.batch) for call in calls for kernel in call.kernels()]


def untune(model: nn.Module) -> nn.Module:
    """Turn every tuned convolution of a model back into ``nn.Conv2d``; return the model."""
    for module in model.modules():
        if type(module) is TunedConv2d:
            del module.tuned, module.untuned_calls, module.geometry
            cast(nn.Module, module).__class__ = nn.Conv2d
        elif isinstance(module, TunedConv2d):  # torch.nn.utils.parametrize made a class of it
            made = type(module)
            bases = tuple(nn.Conv2d if base is TunedConv2d else base for base in made.__bases__)
            del module.tuned, module.untuned_calls, module.geometry
            module.__class__ = type(made.__name__, bases, dict(made.__dict__))
    return model


def _open_cache(cache: BenchmarkCache | str | os.PathLike[str] | None) -> BenchmarkCache:
    if isinstance(cache, BenchmarkCache):
        return cache
    if cache is None:
        return _MEMORY
    return BenchmarkCache(default_path() if cache == "default" else cache)


class _Tuner:
    """One `tune`: measure, optimise, try, and put into place."""

    def __init__(
        self,
        report: TuningReport,
        store: BenchmarkCache,
        algorithms: Sequence[str] | None,
        max_error: float,
        min_gain: float,
    ) -> None:
        self.report, self.store = report, store
        self.algorithms, self.max_error, self.min_gain = algorithms, max_error, min_gain
        self.benches: dict[str, Bench] = {}
        self.measured: dict[tuple[Kernel, int], dict[int, list[Candidate]]] = {}
        self.unfit: set[tuple[Kernel, int]] = set()
        self.failed: set[tuple[Kernel, int, str]] = set()

    def tune(self, model: nn.Module, calls: Sequence[Call]) -> None:
        """Tune all calls and put the result into their modules."""
        report = self.report
        wanted = [(call, kernel) for call in calls for kernel in call.kernels()]
        start = time.perf_counter()
        for call, kernel in wanted:
            self._measure(kernel, call.batch)
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
        report.kernels = self._worthwhile(calls, chosen)
        report.benchmark_s += time.perf_counter() - start
        for bench in self.benches.values():
            report.measured += bench.counts.measured
            report.cached += bench.counts.cached
        self._install(model, calls, report.kernels)

    def _bench(self, device: str) -> Bench:
        if device not in self.benches:
            choice = backends.choose(self.algorithms, device)
            self.report.unavailable += choice.unavailable
            self.benches[device] = Bench(choice, self.store, self.max_error)
        return self.benches[device]

    def _measure(self, kernel: Kernel, batch: int) -> None:
        if (kernel, batch) not in self.measured:
            sizes = micro_batch_sizes(batch, self.report.policy)
            self.measured[kernel, batch] = self._bench(kernel.device).candidates(
                kernel, batch, sizes, self.report.limit_bytes
            )

    def _optimise(self, wanted: Sequence[tuple[Call, Kernel]]) -> list[Division | None]:
        """Return a division for each kernel, None for torch's own undivided convolution."""
        report = self.report
        fronts: dict[tuple[Kernel, int], list[Division]] = {}
        solved: dict[tuple[Kernel, int], Division | None] = {}
        for call, kernel in wanted:
            key = (kernel, call.batch)
            if key in fronts or key in solved:
                continue
            candidates = self._divisible(kernel, call.batch)
            try:
                if report.mode == "WR":
                    solved[key] = best_division(call.batch, candidates, report.limit_bytes)
                else:
                    # Undivided, torch's own takes none of the workspace that is shared out.
                    whole = [w for w in candidates[call.batch] if w.algorithm != backends.NATIVE]
                    candidates |= {call.batch: whole}
                    front = pareto_front(call.batch, candidates, report.limit_bytes)
                    fronts[key] = [d for d in front if (*key, str(d)) not in self.failed]
            except ValueError:  # nothing fits: torch's own remains
                solved[key], fronts[key] = None, []
                self.unfit.add(key)
        if report.mode == "WR":
            return [solved[kernel, call.batch] for call, kernel in wanted]
        choices = {index: fronts[kernel, call.batch] for index, (call, kernel) in enumerate(wanted)}
        own = {
            index: Division(self._native(kernel, call.batch).time_s, 0, [])
            for index, (call, kernel) in enumerate(wanted)
        }
        try:  # where divisions are asked for, torch's own is the last resort
            fallback = {index: front or [own[index]] for index, front in choices.items()}
            forced = self.min_gain == -math.inf
            shares = assign_workspaces(fallback, report.limit_bytes) if forced else {}
        except ValueError:
            shares = {}
        if not shares:
            every = {index: [own[index], *front] for index, front in choices.items()}
            shares = assign_workspaces(every, report.limit_bytes)
        return [shares[index] if shares[index].parts else None for index in range(len(wanted))]

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
        if division is not None and division.time_s > (1 - self.min_gain) * native.time_s:
            division = None
        if division is not None:
            bench = self._bench(kernel.device)
            trial = bench.compare(kernel, call.batch, division.parts)
            time_s, native_s = trial.medians_s
            if trial.ratio > 1 - self.min_gain:
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
        )

    def _worthwhile(
        self, calls: Sequence[Call], chosen: Sequence[KernelReport]
    ) -> list[KernelReport]:
        """Leave those layers to torch whose kernels gain less than a call from Python costs."""
        kept: list[KernelReport] = []
        remaining = iter(chosen)
        for call in calls:
            entries = [next(remaining) for _ in call.kinds]
            saved_s = sum(entry.native_s - entry.time_s for entry in entries)
            may_stay = self.min_gain > -math.inf and any(entry.division for entry in entries)
            kernel, training = entries[0].kernel, len(entries) > 1
            if may_stay and saved_s < self._bench(kernel.device).overhead_s(kernel, training):
                entries = [replace(e, division=None, time_s=e.native_s) for e in entries]
            kept += entries
        return kept

    def _install(
        self, model: nn.Module, calls: Sequence[Call], chosen: Sequence[KernelReport]
    ) -> None:
        report = self.report
        by_call = {(entry.layer, entry.kernel): entry for entry in chosen}
        workspaces: dict[str, Workspace] = {}
        made: list[tuple[Call, dict[str, TunedKernel]]] = []
        offsets: dict[str, int] = {}
        for call in calls:
            tuned: dict[str, TunedKernel] = {}
            for kind, kernel in kernels_of(call.module, call.signature).items():
                entry = by_call.get((call.name, kernel))
                division = entry.division if entry else None
                tuned[kind] = TunedKernel(
                    kernel=kernel,
                    batch=call.batch,
                    parts=division.parts if division else None,
                    candidates=self._divisible(kernel, call.batch) if division else {},
                    limit_bytes=division.workspace_bytes if division else 0,
                    segment_bytes=segment_bytes(kernel, division),
                    offset=offsets.get(kernel.device, 0),
                    workspace=workspaces.setdefault(kernel.device, Workspace(kernel.device)),
                    native_s=self._native_times(kernel, call.batch),
                )
                end = tuned[kind].offset + tuned[kind].segment_bytes
                tuned[kind].workspace.reserve(end)
                if report.mode == "WD":
                    offsets[kernel.device] = end
            if any(kernel.parts is not None for kernel in tuned.values()):
                made.append((call, tuned))
        for workspace in workspaces.values():
            if workspace.size:
                workspace.allocate()  # before the model is changed: memory may run out
                report.allocated_bytes += workspace.size
        untune(model)
        for call, tuned in made:
            install(call.module, call.signature, tuned)
        swapped = {call.name for call, _ in made}
        for call in calls:
            if call.name not in swapped:
                report.skipped[call.name] = self._reason(call)

    def _reason(self, call: Call) -> str:
        """Say why a layer that could be tuned was not."""
        keys = [(kernel, call.batch) for kernel in call.kernels()]
        if any(key not in self.unfit for key in keys):
            return "torch's own convolution is as fast"
        if all(not ways for key in keys for ways in self._divisible(*key).values()):
            return "no algorithm that was asked for computes it"
        return "no division fits into the limit"
