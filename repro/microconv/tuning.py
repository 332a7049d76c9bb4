"""`tune` a model's convolutions under a workspace limit, and what it reports."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from repro.microconv import backends
from repro.microconv.assignment import assign_workspaces
from repro.microconv.cache import BenchmarkCache, default_path
from repro.microconv.conv import (
    Signature,
    TunedConv2d,
    TunedKernel,
    Workspace,
    call_overhead_s,
    install,
    kernels_of,
    segment_bytes,
    signature,
)
from repro.microconv.kernels import KINDS, Kernel
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

MIB = 2**20
MODES = ("WR", "WD")
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
    min_gain: float = 0.03,
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
    if not min_gain < 1:
        raise ValueError(f"min_gain is {min_gain}; give a share of time below 1")
    store = _open_cache(cache)
    untune(model)
    training = model.training if training is None else training
    report = TuningReport(mode, policy, workspace_limit)
    calls = _record_calls(model, sample_input, training, report.skipped)
    _Tuner(report, store, algorithms, max_error, min_gain).tune(calls)
    return report


def find_kernels(
    model: nn.Module, sample_input: Any, training: bool = True
) -> list[tuple[str, Kernel, int]]:
    """Return (layer, kernel, mini-batch size) of what `tune` would consider, in order of use.

    Arguments as `tune`; without `training` only forward passes.
    """
    return [
        (call.name, kernels_of(call.module, call.signature)[kind], call.batch)
        for call in _record_calls(model, sample_input, training, {})
        for kind in call.kinds
    ]


def untune(model: nn.Module) -> nn.Module:
    """Turn every tuned convolution of a model back into ``nn.Conv2d``; return the model."""
    for module in model.modules():
        if type(module) is TunedConv2d:
            del module.tuned, module.untuned_calls
            cast(nn.Module, module).__class__ = nn.Conv2d
    return model


def _open_cache(cache: BenchmarkCache | str | os.PathLike[str] | None) -> BenchmarkCache:
    if isinstance(cache, BenchmarkCache):
        return cache
    if cache is None:
        return _MEMORY
    return BenchmarkCache(default_path() if cache == "default" else cache)


@dataclass
class _Call:
    """A convolution as the sample calls it."""

    name: str
    module: nn.Conv2d
    signature: Signature
    batch: int
    kinds: tuple[str, ...]


def _ineligible(module: nn.Conv2d) -> str | None:
    if type(module) is not nn.Conv2d:
        return f"it is a {type(module).__name__}, which may compute something else"
    if module.groups != 1:
        return f"it has {module.groups} groups"
    if module.padding_mode != "zeros":
        return f"its padding mode is {module.padding_mode!r}"
    return None


def _record_calls(
    model: nn.Module, sample_input: Any, training: bool, skipped: dict[str, str]
) -> list[_Call]:
    """Run the sample and return the calls of eligible convolutions, each layer and shape once."""
    calls: dict[tuple[int, Signature], _Call] = {}
    hooks = []
    names = {m: name or "(model)" for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        (input,) = args
        name = names[module]
        skipped.pop(name, None)
        if reason := _ineligible(module):
            skipped[name] = reason
        elif input.dim() != 4 or not len(input):
            skipped[name] = f"its input has the shape {tuple(input.shape)}; a batch is needed"
        elif input.device.type not in ("cpu", "cuda") or not input.is_floating_point():
            skipped[name] = f"its input is {input.dtype} on {input.device}"
        else:
            call = signature(input, module.weight)
            try:
                kernels_of(module, call)
            except ValueError as problem:
                skipped[name] = str(problem)
                return
            kinds = ["forward"]
            if training:
                kinds += ["backward_data"] * input.requires_grad
                kinds += ["backward_filter"] * module.weight.requires_grad
            # A second call of the same shape needs the kernels of both.
            before = calls.get((id(module), call))
            merged = tuple(k for k in KINDS if k in kinds or (before and k in before.kinds))
            calls[id(module), call] = _Call(name, module, call, len(input), merged)

    for module, name in names.items():
        skipped[name] = _ineligible(module) or "the sample did not reach it"
        hooks.append(module.register_forward_pre_hook(note))
    try:
        with _undisturbed(model), torch.set_grad_enabled(training):
            if isinstance(sample_input, Mapping):
                model(**sample_input)
            elif isinstance(sample_input, tuple | list):
                model(*sample_input)
            else:
                model(sample_input)
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values())


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Put buffers and random state back at the end."""
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    devices = {p.device.index or 0 for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(sorted(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, saved in buffers.items():
                    buffer.copy_(saved)


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

    def tune(self, calls: Sequence[_Call]) -> None:
        """Tune all calls and put the result into their modules."""
        report = self.report
        wanted = [
            (call, kernels_of(call.module, call.signature)[kind])
            for call in calls
            for kind in call.kinds
        ]
        start = time.perf_counter()
        for call, kernel in wanted:
            self._measure(kernel, call.batch)
        report.benchmark_s = time.perf_counter() - start
        start = time.perf_counter()
        divisions = self._optimise(wanted)
        report.optimise_s = time.perf_counter() - start
        start = time.perf_counter()
        chosen = [
            self._try(call, kernel, division)
            for (call, kernel), division in zip(wanted, divisions, strict=True)
        ]
        report.benchmark_s += time.perf_counter() - start
        chosen = report.kernels = self._worthwhile(calls, chosen)
        for bench in self.benches.values():
            report.measured += bench.counts.measured
            report.cached += bench.counts.cached
        self._install(calls, chosen)

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

    def _optimise(self, wanted: Sequence[tuple[_Call, Kernel]]) -> list[Division | None]:
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
                    fronts[key] = pareto_front(call.batch, candidates, report.limit_bytes)
            except ValueError:  # nothing fits: torch's own remains
                solved[key], fronts[key] = None, []
        if report.mode == "WR":
            return [solved[kernel, call.batch] for call, kernel in wanted]
        choices: dict[int, list[Division]] = {}
        for index, (call, kernel) in enumerate(wanted):
            choices[index] = list(fronts[kernel, call.batch])
            if self.min_gain > -math.inf or not choices[index]:
                # Torch's own convolution takes none of the workspace that is shared out.
                native = self._native(kernel, call.batch)
                choices[index].append(Division(native.time_s, 0, []))
        shares = assign_workspaces(choices, report.limit_bytes)
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

    def _try(self, call: _Call, kernel: Kernel, division: Division | None) -> KernelReport:
        native = self._native(kernel, call.batch)
        time_s = native_s = native.time_s
        if division is not None and division.parts == [(call.batch, backends.NATIVE)]:
            division = None
        if division is not None and division.time_s > (1 - self.min_gain) * native.time_s:
            division = None
        if division is not None:
            bench = self._bench(kernel.device)
            time_s, native_s = bench.compare(kernel, call.batch, division.parts)
            if time_s > (1 - self.min_gain) * native_s:
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
        self, calls: Sequence[_Call], chosen: Sequence[KernelReport]
    ) -> list[KernelReport]:
        """Leave those layers to torch whose kernels gain less than a call from Python costs."""
        kept: list[KernelReport] = []
        remaining = iter(chosen)
        for call in calls:
            entries = [next(remaining) for _ in call.kinds]
            saved_s = sum(entry.native_s - entry.time_s for entry in entries)
            may_stay = self.min_gain > -math.inf and any(entry.division for entry in entries)
            device, training = entries[0].kernel.device, len(entries) > 1
            if may_stay and saved_s < call_overhead_s(device, training):
                entries = [replace(e, division=None, time_s=e.native_s) for e in entries]
            kept += entries
        return kept

    def _install(self, calls: Sequence[_Call], chosen: Sequence[KernelReport]) -> None:
        report = self.report
        by_call = {(entry.layer, entry.kernel): entry for entry in chosen}
        workspaces: dict[str, Workspace] = {}
        offset = 0
        for call in calls:
            tuned: dict[str, TunedKernel] = {}
            for kind, kernel in kernels_of(call.module, call.signature).items():
                entry = by_call.get((call.name, kernel))
                division = entry.division if entry else None
                candidates = self._divisible(kernel, call.batch) if division else {}
                tuned[kind] = TunedKernel(
                    kernel=kernel,
                    batch=call.batch,
                    parts=division.parts if division else None,
                    candidates=candidates,
                    limit_bytes=division.workspace_bytes if division else 0,
                    segment_bytes=segment_bytes(division, candidates),
                    offset=offset,
                    workspace=workspaces.setdefault(kernel.device, Workspace(kernel.device)),
                )
                tuned[kind].workspace.reserve(offset + tuned[kind].segment_bytes)
                if report.mode == "WD":
                    offset += tuned[kind].segment_bytes
            if all(kernel.parts is None for kernel in tuned.values()):
                report.skipped.setdefault(call.name, "torch's own convolution is as fast")
                continue
            report.skipped.pop(call.name, None)
            install(call.module, call.signature, tuned)
        for workspace in workspaces.values():
            if workspace.size:
                workspace.allocate()
                report.allocated_bytes += workspace.size
