"""Measurements under one memory limit: does it fit, how fast is it, is the result the same?"""

import gc
import itertools
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from repro import measure
from repro.advise import Workload, predict, probe
from repro.experiments.design import Config, Outcome
from repro.experiments.saving import unseen
from repro.experiments.together import methods
from repro.experiments.together.methods import SWAPS, Method, Problem, build_problem
from repro.measure import Timing, accelerator
from repro.measure.machine import machine
from repro.outofcore import BudgetTooSmall

UNDIVIDED = "undivided"
STEPS = 2  # that are watched: the optimizer has its state from the second on
SETTLING = 3  # of out-of-core: two are recorded, one is the first by a plan


def limit(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Train by one method under the limit of one network, at each multiple of the largest batch.

    Times are taken in turns with undivided steps of the largest mini-batch that fits, without the
    watching of memory, which costs time.
    """
    points: list[dict[str, Any]] = []
    timings: dict[str, Timing] = {}
    with machine(config, device):
        allowed = limit_bytes(config, device)
        for multiple in config["multiples"]:
            batch = multiple * config["fits"]
            row, timed = _measure(config, build_problem(config, batch), allowed, device)
            points.append({"multiple": multiple, "batch": batch} | row)
            timings |= {f"{name} ×{multiple}": timing for name, timing in timed.items()}
            _release(device)
    peaks = [point["peak_bytes"] for point in points if point["fits"]]
    return Outcome({"limit_bytes": allowed, "points": points}, timings, max(peaks, default=None))


def limit_bytes(config: Config, device: str) -> int:
    """Return the limit: halfway between what `fits` samples need undivided and one more."""
    peaks = []
    for batch in (config["fits"], config["fits"] + 1):
        method = _undivided(config, batch, device)
        with measure.MemoryMeter(device, resident=method.model) as meter:
            for _ in range(STEPS):
                method.step()
        peaks.append(meter.peak_reserved_bytes)
        del method  # an accelerator's limit is on all that lives there
        _release(device)
    return max(sum(peaks) // 2, measure.least_limit(device))


def _undivided(config: Config, batch: int, device: str) -> Method:
    undivided = {**config, "mode": UNDIVIDED}
    return Method(undivided, build_problem(config, batch), None, 0, device)  # it needs no limit


def _measure(
    config: Config, problem: Problem, allowed: int, device: str
) -> tuple[dict[str, Any], dict[str, Timing]]:
    """Measure the largest micro-batch that fits; `fits` is None where the method is refused."""
    why = ""
    for micro in methods.micro_batches(config["mode"], config["fits"], len(problem.inputs)):
        try:
            row, timed = _within(config, problem, micro, allowed, device)
            return {"fits": True, "why": ""} | row, timed
        except methods.Refused as error:
            return {"fits": None, "why": str(error)}, {}
        except (BudgetTooSmall, RuntimeError, MemoryError) as error:
            if not isinstance(error, BudgetTooSmall) and not measure.is_out_of_memory(error):
                raise
            why = str(error)
        _release(device)
    return {"fits": False, "why": why}, {}


def _release(device: str) -> None:
    """Free the memory that cycles still hold; a CPU's limit is on what is made inside."""
    if accelerator.is_accelerator(device):
        gc.collect()
        accelerator.empty_cache(device)


def _within(
    config: Config, problem: Problem, micro: int | None, allowed: int, device: str
) -> tuple[dict[str, Any], dict[str, Timing]]:
    method = Method(config, problem, micro, allowed, device)
    watched: Any = nullcontext()
    if config["mode"] not in SWAPS:
        watched = measure.MemoryBudget(allowed, device, resident=method.model)
    elif accelerator.is_accelerator(device):
        watched = accelerator.limited(device, allowed)
    with method.within():
        with watched:
            for _ in range(SETTLING if method.block else STEPS):
                method.step()
        with unseen() if method.block else nullcontext():
            reference = _undivided(config, config["fits"], device)
        reference_step = unseen()(reference.step) if method.block else reference.step
        reference_step()  # its optimizer makes its state
        steps = {"step": method.step, "reference": reference_step}
        turns = {"warmup": config["warmup"], "repeats": config["repeats"]}
        timed = measure.time_interleaved(steps, device=device, **turns)
        held = method.block.statistics.peak_bytes if method.block else watched.peak_reserved_bytes
    host_bytes = method.block.statistics.host_bytes if method.block else method.host_bytes
    errors = _errors(config, problem, micro, allowed, device)
    return {"micro": micro, "peak_bytes": held, "host_bytes": host_bytes} | errors, timed


def _errors(
    config: Config, problem: Problem, micro: int | None, allowed: int, device: str
) -> dict[str, float | None]:
    """Return how far gradients and running statistics are from those of an undivided pass."""
    if config["mode"] == UNDIVIDED:
        return {"gradient_error": 0.0, "batchnorm_error": None}
    # Out-of-core training is looked at once it follows a plan.
    rounds = 1 + SETTLING if config["mode"] in SWAPS else 1
    whole = _undivided(config, len(problem.inputs), device)
    for _ in range(rounds):
        whole.passes()
    expected = _taken(whole.model)
    del whole
    method = Method(config, problem, micro, allowed, device)
    with method.within():
        for _ in range(rounds):
            method.passes()
            if method.block is not None:
                method.block.step()
    actual = _taken(method.model)
    gradient, running = (relative(a, b) for a, b in zip(actual, expected, strict=True))
    return {"gradient_error": gradient, "batchnorm_error": running}


def _taken(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients and BatchNorm's running statistics, on the CPU."""
    gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    running = [b.cpu() for name, b in model.named_buffers() if "running_" in name]
    return gradients, running


def relative(actual: list[Tensor], expected: list[Tensor]) -> float | None:
    """Return the norm of the difference over that of the expected; None for no tensors."""
    assert [t.shape for t in actual] == [t.shape for t in expected]
    if not expected:
        return None
    ours, theirs = (torch.cat([t.flatten().double() for t in own]) for own in (actual, expected))
    return float((ours - theirs).norm() / theirs.norm())


def predict_limit(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Predict every method at every multiple of what fits, under the limit that is measured by.

    The network is recorded without content and a few undivided steps of what fits are timed;
    nothing that is predicted is run.
    """
    fits, cells = config["fits"], []
    options: dict[str, Any] = {
        "device": device.partition(":")[0],
        "simulated": not accelerator.is_accelerator(device),
    }
    with machine(config, device):
        allowed = limit_bytes(config, device)
        begun = time.perf_counter()
        problem = build_problem(config, fits)
        example = problem.inputs, problem.targets
        model, blocks = methods.build_model(config, "cpu"), methods.recompute
        workload = Workload.of(model, example=example, loss_fn=problem.loss, blocks=blocks)
        speed = probe(workload, device, fits, allowed, seconds=config["probe_s"])

        def predicted(mode: str, batch: int) -> Any:
            return predict(workload, mode, batch, allowed, speed, **options)

        image_s = predicted(UNDIVIDED, fits).seconds / fits
        for mode, multiple in itertools.product(config["modes"], config["multiples"]):
            cost, undivided = (predicted(name, multiple * fits) for name in (mode, UNDIVIDED))
            cell = {"mode": mode, "multiple": multiple, "fits": cost.fits, "slowdown": None}
            if cost.fits:
                scale = undivided.seconds / cost.batch / image_s  # of an image, not of a mini-batch
                cell["slowdown"] = cost.slowdown and scale * cost.slowdown
                cell["bound"] = cost.bound and scale * cost.bound
                cell["peak_bytes"] = cost.peak_bytes
            cells.append(cell)
        took = time.perf_counter() - begun
    metrics = {"limit_bytes": allowed, "cells": cells}
    return Outcome(metrics, {"advice": Timing((took,), 0)}, allowed)
