"""Retry with smaller micro-batches after an out-of-memory error, in all processes together."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from repro.mbs.batches import Piece, Plan, uncounted_copy
from repro.mbs.distributed import error_of_a_peer
from repro.mbs.errors import NondeterministicModelError
from repro.mbs.setting import Setting
from repro.mbs.sizing import AutoSizer, release_memory
from repro.mbs.transaction import version_of
from repro.mbs.weighing import Totals
from repro.measure import MemoryMeter, is_out_of_memory
from repro.measure.batches import leaves_of
from repro.measure.untouched import untouched


class Retries:
    """Runs a mini-batch at a micro-batch size that fits.

    `size` is None if the sizer chooses it. `accumulate` computes the gradient of a plan's
    micro-batches, with weights over a divisor.
    """

    def __init__(
        self, setting: Setting, size: int | None, accumulate: Callable[[Plan, float], Any]
    ) -> None:
        self._setting, self._size, self._accumulate = setting, size, accumulate
        least = setting.processes.least if setting.processes.sharded else None
        self.sizer = AutoSizer(setting.device, least) if size is None else None
        self._too_large: int | None = None
        self.count = 0  # of retries of this mini-batch

    def run(
        self, piece: Piece, run: Callable[[int], tuple[Totals, Any]], roots: Sequence[nn.Module]
    ) -> tuple[Totals, Any]:
        """Run at the size given or chosen, or smaller if memory runs out.

        Probes restore the attributes of the `roots`: the model and the loss's modules. All
        processes run the same size, and retry if one must; of a fully sharded model none retries.
        """
        if self.sizer is None:
            assert self._size is not None
            return run(self._size)
        setting = self._setting
        stager, device, together = setting.stager, setting.device, setting.processes.replicated
        self._too_large, self.count = None, 0
        fewest = setting.processes.least(piece.num_samples)
        most = -setting.processes.least(-piece.num_samples)
        first = self.sizer.needs_probe(fewest)
        problem: Exception | None = None
        if first:
            try:
                self.sizer.probe(fewest, partial(self._measure, piece, roots))
            except Exception as error:
                if not together:
                    raise
                problem = error
        versions = _versions(piece)
        while True:
            stager.marks.clear()  # of probes and failed tries
            size = self.sizer.size_for(most)
            if together:
                size = setting.processes.agreed_size(size, piece.num_samples, problem)
            try:
                watched = MemoryMeter(device, resident=setting.module) if first else nullcontext()
                with watched as meter:
                    done = run(size)
                if meter is not None:
                    self.sizer.observed(max(done[0].sizes), meter.peak_bytes)
                self.sizer.succeeded()
                return done
            except Exception as error:
                size = self._too_large or size  # set in the process that ran out
                if not is_out_of_memory(error) or size == 1 or setting.processes.sharded:
                    raise
            if _versions(piece) != versions:
                raise NondeterministicModelError(
                    "memory ran out, and the mini-batch cannot be tried again in smaller "
                    "micro-batches: the model or the loss has changed its inputs in place; let it "
                    "compute new tensors (x - mean, not x.sub_(mean)), or give a smaller "
                    "micro_batch_size"
                )
            # Outside the except block: the error's traceback holds the failed try's tensors.
            stager.release()
            release_memory(device)
            self.sizer.failed(size)
            self.count += 1

    def _measure(self, piece: Piece, roots: Sequence[nn.Module], size: int) -> tuple[int, int, int]:
        """Measure the memory of micro-batches without side effects, see `AutoSizer.probe`."""
        setting = self._setting
        part = next(replace(piece, weights=None).plan(size, as_in_paper=True).parts())
        # Gradients exist only after the first; and as many as may be on the device at once.
        count = max(2, setting.stager.ring_length)
        parts = partial(map, partial(uncounted_copy, device=setting.device), [part] * count)
        sample = Plan([(0, size)] * count, [1.0] * count, parts)
        with (
            untouched(*roots, tensors=False),
            MemoryMeter(setting.device, resident=setting.module) as meter,
            setting.ledger.transaction(keep=False),
        ):
            self._accumulate(sample, 1.0)
        if names := setting.ledger.buffers.changed_frozen():
            raise NondeterministicModelError(
                f"micro_batch_size='auto' computes small micro-batches first, and a forward pass "
                f"changes {names[0]}, a parameter that is not trained, for good; register it as a "
                f"buffer, update it outside forward, or give a whole number"
            )
        start, peak, held = meter.start_bytes, meter.peak_bytes, meter.peak_reserved_bytes
        if setting.processes.sharded:  # of the process that takes most
            start, peak, held = map(int, setting.processes.most(start, peak - start, held - peak))
            peak, held = start + peak, start + peak + held
        return start, peak, held

    def together(self, run: Callable[[], Totals], largest: int = 1) -> Totals:
        """Run in processes that compute independently; an error in one is raised in all."""
        if not self._setting.processes.replicated:
            return run()
        problem: Exception | None = None
        try:
            totals = run()
        except Exception as error:
            problem = error
        kind = 0 if problem is None else 1 if is_out_of_memory(problem) else 2
        worst, negative = self._setting.processes.most(
            kind, -largest if kind == 1 else -float("inf")
        )
        self._too_large = int(-negative) if worst == 1 else None
        if worst:
            raise problem if kind == worst and problem else error_of_a_peer(worst == 1)
        return totals


def _versions(piece: Piece) -> list[int]:
    leaves = leaves_of((piece.inputs, piece.targets))
    return [version_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
