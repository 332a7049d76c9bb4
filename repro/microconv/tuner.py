"""The steps of `tune`: measure, optimise within the limit, try, and install into the model."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from repro.microconv import backends
from repro.microconv.conv import install, uninstall
from repro.microconv.kernels import Kernel
from repro.microconv.measuring import Bench, Trial, compare_models
from repro.microconv.optimize import (
    Candidate,
    Division,
    assign_workspaces,
    micro_batch_sizes,
)
from repro.microconv.results import KernelReport, TuningReport, WorkspaceLimitError
from repro.microconv.sampling import Call, check_model, training_step, undisturbed
from repro.microconv.tuned_kernel import TunedKernel, Workspace, kernels_of

_ROUNDS = 4
_MOST_TRIALS = 6  # of the whole model, to find the layers that make it faster

_Key = tuple[Kernel, int]  # a kernel and its mini-batch size
_Task = tuple[str, _Key]  # with the layer's name
Layers = list[tuple[Call, dict[str, TunedKernel]]]


def untune(model: nn.Module) -> nn.Module:
    """Restore torch's own convolution in every tuned layer of a model; return the model."""
    check_model(model, "untune")
    for module in model.modules():
        uninstall(module)
    return model


class Tuner:
    """One call of `tune`; `report` has the mode, policy and limit, and is filled in."""

    def __init__(
        self, report: TuningReport, bench: Bench, min_gain: float, others: dict[str, int]
    ) -> None:
        self.report, self.bench, self.min_gain = report, bench, min_gain
        self.others = others  # bytes of convolutions that cannot be divided; none if not strict
        self.measured: dict[_Key, dict[int, list[Candidate]]] = {}
        self.unfit: set[_Key] = set()
        self.failed: set[tuple[_Key, str]] = set()
        self.own_divided: set[_Key] = set()  # torch's own may be divided, for lack of others
        self.spare = 0  # bytes that WD has assigned to no kernel

    def tune(self, model: nn.Module, calls: Sequence[Call], sample: Any, training: bool) -> None:
        """Tune all calls and install the result in their modules."""
        report = self.report
        tasks = [(call.name, (kernel, call.batch)) for call in calls for kernel in call.kernels()]
        for kernel, batch in dict.fromkeys(key for _, key in tasks):  # step 1 of WR
            sizes = micro_batch_sizes(batch, report.policy)
            ways = self.bench.candidates(kernel, batch, sizes, report.limit_bytes)
            self.measured[kernel, batch] = ways
        # Under WD the workspace of a division that fails its trial is reassigned by solving again.
        for _ in range(_ROUNDS if report.mode == "WD" else 1):
            known = len(self.failed)
            divisions = self._wr(tasks) if report.mode == "WR" else self._wd(tasks)
            chosen = [self._try(*pair) for pair in zip(tasks, divisions, strict=True)]
            if len(self.failed) == known:
                break
        remaining = iter(chosen)
        layers = [[next(remaining) for _ in call.kinds] for call in calls]
        made = self._make(calls, layers)  # before the model is changed: memory may run out
        if self.min_gain >= 0:
            with undisturbed(model, sample):  # restores an earlier tuning if the model raises
                untune(model)
                step = partial(training_step, model, sample, training)
                layers = self._paying(model, calls, layers, step)
            made = self._make(calls, layers)
        _install(model, made)
        report.allocated_bytes = made[0][1]["forward"].workspace.size if made else 0
        divided = {call.name for call, _ in made}
        report.skipped |= {c.name: self._reason(c) for c in calls if c.name not in divided}
        report.kernels = [entry for entries in layers for entry in entries]
        report.measured, report.cached = self.bench.measured, self.bench.cached

    def _wr(self, tasks: Sequence[_Task]) -> list[Division | None]:
        """WR: a division for each kernel, None for torch's own undivided convolution."""
        report = self.report
        solved: dict[_Key, Division | None] = {}
        for key in dict.fromkeys(key for _, key in tasks):
            front = self._within(key, self._divisible(key))
            too_much = self._native(key).workspace_bytes > report.limit_bytes
            if not front and report.strict and too_much:
                self.own_divided.add(key)
                front = self._within(key, self.measured[key])
            if not front:
                self.unfit.add(key)
            solved[key] = front[-1] if front else None
        taken = [*self.others.values(), *(self._native(k).workspace_bytes for k in self.unfit)]
        if report.strict and max(taken, default=0) > report.limit_bytes:
            raise self._refusal(tasks)
        return [solved[key] for _, key in tasks]

    def _wd(self, tasks: Sequence[_Task]) -> list[Division | None]:
        """WD: as in `_wr`, with one limit for all kernels."""
        strict = self.report.strict
        limit = self.report.limit_bytes - (sum(self.others.values()) if strict else 0)
        whole: dict[_Key, Division] = {}
        fronts: dict[_Key, list[Division]] = {}
        for key in dict.fromkeys(key for _, key in tasks):
            native = self._native(key)
            whole[key] = Division(native.time_s, native.workspace_bytes if strict else 0, [])
            # Besides torch's own, undivided.
            candidates = self._divisible(key)
            candidates[key[1]] = [w for w in candidates[key[1]] if w.algorithm != backends.NATIVE]
            if not (front := self._within(key, candidates)):
                self.unfit.add(key)
            fronts[key] = [d for d in front if (key, str(d)) not in self.failed]
        tries = [{key: [whole[key], *front] for key, front in fronts.items()}]
        if self.min_gain == -math.inf:  # divisions are required, torch's own is the last resort
            tries.insert(0, {key: front or [whole[key]] for key, front in fronts.items()})
        if strict:  # last, also divisions of torch's own
            self.own_divided.update(fronts)
            every = {key: self._within(key, self.measured[key]) for key in fronts}
            tries.append({key: [whole[key], *fronts[key], *every[key]] for key in fronts})
        for options in tries if limit >= 0 else ():
            with suppress(ValueError):
                choices = {index: options[key] for index, (_, key) in enumerate(tasks)}
                shares = assign_workspaces(choices, limit)
                self.spare = limit - sum(d.workspace_bytes for d in shares.values())
                return [shares[index] if shares[index].parts else None for index in choices]
        raise self._refusal(tasks)

    def _within(self, key: _Key, candidates: dict[int, list[Candidate]]) -> list[Division]:
        """The desirable divisions within the limit, none if nothing fits."""
        with suppress(ValueError):
            return backends.divisions(key[1], candidates, self.report.limit_bytes)
        return []

    def _refusal(self, tasks: Sequence[_Task]) -> WorkspaceLimitError:
        """The error that states the smallest sufficient limit."""
        report = self.report
        needs = []
        for layer, (kernel, batch) in tasks:
            sizes = micro_batch_sizes(batch, report.policy)
            needs.append((f"{layer} {kernel.kind}", self.bench.least_bytes(kernel, batch, sizes)))
        needs += self.others.items()
        together: Callable[[Iterable[int]], int] = sum if report.mode == "WD" else max
        beyond = {  # a layer that is called with two shapes occurs twice
            name: together(n for other, n in needs if other == name)
            for name, size in needs
            if report.mode == "WD" or size > report.limit_bytes
        }
        least = together(size for _, size in needs)
        return WorkspaceLimitError(report.limit_bytes, report.mode, beyond, least)

    def _needed(self, key: _Key, division: Division) -> bool:
        """Whether torch's own convolution would exceed its allowed bytes.

        Under WD these include bytes assigned to no kernel, each byte once: a call that uses them
        takes them from later kernels.
        """
        report, native = self.report, self._native(key).workspace_bytes
        if not report.strict or report.mode == "WR":
            return report.strict and native > report.limit_bytes
        more = max(0, native - division.workspace_bytes)
        if more > self.spare:
            return True
        self.spare -= more
        return False

    def _divisible(self, key: _Key) -> dict[int, list[Candidate]]:
        """Candidates of a division: without torch's own unless it was requested."""
        return {
            size: [way for way in ways if self.bench.admits(way.algorithm)]
            for size, ways in self.measured[key].items()
        }

    def _native(self, key: _Key) -> Candidate:
        return next(w for w in self.measured[key][key[1]] if w.algorithm == backends.NATIVE)

    def _try(self, task: _Task, division: Division | None) -> KernelReport:
        """Keep a division that beats torch's own in a trial, or that the limit requires."""
        layer, (kernel, batch) = task
        key = kernel, batch
        native = self._native(key)
        left = KernelReport(
            layer, kernel, batch, None, native.time_s, native.time_s, native.workspace_bytes, 0.0
        )
        if division is None or division.parts == [(batch, backends.NATIVE)]:
            return left
        needed = self._needed(key, division)
        most = 1 - self.min_gain  # of torch's own time
        if needed or division.time_s <= most * native.time_s:
            trial = self.bench.compare(kernel, batch, division.parts)
            time_s, native_s = trial.medians_s
            if needed or trial.ratio <= most:
                error = max(backends.stated_error(name, kernel) for _, name in division.parts)
                kept = replace(left, division=division, error=error, needed=needed)
                return replace(kept, time_s=time_s, native_s=native_s)
            left = replace(left, time_s=native_s, native_s=native_s)
        self.failed.add((key, str(division)))
        return left

    def _paying(
        self,
        model: nn.Module,
        calls: Sequence[Call],
        layers: list[list[KernelReport]],
        step: Callable[[], None],
    ) -> list[list[KernelReport]]:
        """The layers, with those untied that do not make the whole model faster in a few trials.

        Kernels that the limit requires stay.
        """
        required = [[e if e.needed else _untied(e) for e in entries] for entries in layers]
        undivided = [[_untied(e) for e in entries] for entries in layers]

        def form(kept: Collection[int]) -> list[list[KernelReport]]:
            """The layers of these numbers tuned; of the others, what the limit requires."""
            return [layers[n] if n in kept else least for n, least in enumerate(required)]

        def trial(kept: Collection[int], base: list[list[KernelReport]]) -> Trial:
            forms = form(kept), base
            first, second = (partial(_install, model, self._make(calls, one)) for one in forms)
            try:
                return compare_models(layers[0][0].kernel, (first, second), step)
            finally:
                untune(model)

        trials: list[Trial] = []

        def paying(group: list[int]) -> list[int]:
            """The group, if it makes the model faster, else the halves of it that do."""
            if not group or len(trials) == _MOST_TRIALS:
                return []
            trials.append(trial(group, required))
            if trials[-1].pays:
                return group
            half = (len(group) + 1) // 2
            return [*paying(group[:half]), *paying(group[half:])] if len(group) > 1 else []

        def gain(number: int) -> float:
            return math.fsum(e.native_s - e.time_s for e in layers[number] if not e.needed)

        optional = [n for n, least in enumerate(required) if layers[n] != least]
        order = sorted(optional, key=gain, reverse=True)
        kept = paying(order)
        if kept and kept != order and not trial(kept, required).pays:
            kept = []
        self.report.untied = [calls[number].name for number in order if number not in kept]
        if form(kept) != undivided:
            self.report.model = trial(kept, undivided)
        return form(kept)

    def _make(self, calls: Sequence[Call], layers: Sequence[Sequence[KernelReport]]) -> Layers:
        """The kernels of the divided layers, with their workspace."""
        made: Layers = []
        offset = 0
        workspace = Workspace(calls[0].signature[3] if calls else "cpu")
        for call, entries in zip(calls, layers, strict=True):
            divided = {entry.kernel: entry for entry in entries if entry.division}
            if not divided:
                continue
            tuned = {}
            for kind, kernel in kernels_of(call.module, call.signature).items():
                tuned[kind] = TunedKernel(kernel, call.batch, workspace, offset)
                if entry := divided.get(kernel):
                    key = kernel, call.batch
                    own = key in self.own_divided
                    tuned[kind].division = entry.division
                    wd, limit = self.report.mode == "WD", self.report.limit_bytes
                    tuned[kind].limit_bytes = entry.workspace_bytes if wd else limit
                    tuned[kind].candidates = self.measured[key] if own else self._divisible(key)
                end = offset + tuned[kind].segment_bytes
                workspace.size = max(workspace.size, end)
                offset = end if self.report.mode == "WD" else 0
            made.append((call, tuned))
        if workspace.size:
            workspace.allocate()
        return made

    def _reason(self, call: Call) -> str:
        if call.name in self.report.untied:
            return "its divisions do not make the whole model faster"
        if self.unfit >= {(kernel, call.batch) for kernel in call.kernels()}:
            return "no division by the algorithms that were asked for fits into the limit"
        return "torch's own convolution is as fast"


def _untied(entry: KernelReport) -> KernelReport:
    return replace(entry, division=None, time_s=entry.native_s, error=0.0, needed=False)


def _install(model: nn.Module, made: Layers) -> None:
    untune(model)
    for call, tuned in made:
        install(call.module, call.signature, tuned)
