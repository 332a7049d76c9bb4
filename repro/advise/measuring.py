"""Seconds of a training step by each method, measured by running the lines that are advised."""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from repro.advise.predicting import Prediction
from repro.advise.snippets import snippet
from repro.advise.workload import AdviceError, Workload
from repro.mbs import MicroBatchError
from repro.measure import accelerator, is_out_of_memory, memory_state
from repro.measure.machine import machine
from repro.outofcore import BudgetTooSmall

STEPS = 5  # that are timed
WARMUP, SETTLING = 1, 3  # steps before them; before those of out-of-core, which two are planned by


def measured(
    workload: Workload, rows: Sequence[Prediction], device: str, memory_bytes: int
) -> list[Prediction]:
    """Predictions with the measured seconds of methods that fit, and of undivided steps.

    The lines of `snippet` train a copy of the model, on an accelerator within the limit. Undivided
    steps that do not fit are run beyond it, where the device has the memory, to compare with.
    """
    where = accelerator.resolve(device)
    alone, normal = accelerator.forked_rng(where), torch.inference_mode(False)
    with torch.device("cpu"), normal, alone, accelerator.on(where), machine({}, where.type):
        batch = workload.samples(rows[0].batch)
        if not all(isinstance(part, torch.Tensor) for part in batch):
            raise AdviceError(
                "measure=True runs lines that take one tensor of inputs and one of targets, and "
                "the example has others: leave it out"
            )
        done = [_measured(workload, row, batch, where, memory_bytes) for row in rows]
    base = next(row.measured_s for row in done if row.method == "undivided")
    return [
        replace(row, slowdown=row.measured_s / base if base else None, bound=None)
        if row.measured_s
        else row
        for row in done
    ]


def _measured(
    workload: Workload, row: Prediction, batch: Any, device: torch.device, memory_bytes: int
) -> Prediction:
    code, free = snippet(row), memory_state(device).free_bytes
    if not code or not (row.fits or row.method == "undivided"):
        return row
    if row.peak_bytes > free:
        return replace(row, reason=f"not measured: {free:,} bytes are free")
    limited = row.fits and accelerator.is_accelerator(device)
    try:
        with accelerator.limited(device, memory_bytes) if limited else nullcontext():
            return replace(row, measured_s=_seconds(workload, code, batch, device))
    except Exception as error:
        fits, why = row.fits, f"not measured: {type(error).__name__}"
        if isinstance(error, MicroBatchError):
            fits, why = False, "MBS refuses it"
        elif isinstance(error, BudgetTooSmall) or is_out_of_memory(error):
            fits, why = False, "measured, it ran out of memory"
        return replace(row, fits=fits, reason=f"{why}: {error}".partition("\n")[0])
    finally:
        gc.collect()  # a model's cycles


def _seconds(workload: Workload, code: str, batch: Any, device: torch.device) -> float:
    """Median seconds of a step of a method's lines."""
    warmup = SETTLING if "OutOfCore" in code else WARMUP
    times: list[float] = []

    def loader() -> Iterator[Any]:
        for _ in range(warmup + STEPS + 1):
            accelerator.synchronize(device)
            times.append(time.perf_counter())
            if len(times) <= warmup + STEPS:
                yield batch

    parts = workload.built(min(2, len(batch[0])), device)
    given = {**vars(parts), "torch": torch, "device": str(device), "loader": loader()}
    with tempfile.TemporaryDirectory() as folder:
        exec(code, {**given, "swap_folder": folder})
    return statistics.median(end - start for start, end in pairwise(times[warmup:]))
