"""Iterations measured under a limit, in this process."""

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from repro.experiments.design import Outcome
from repro.experiments.outofcore.building import Step, training_step
from repro.experiments.outofcore.fitting import (
    ALLOCATORS,
    Make,
    chunk_bytes,
    largest_budget,
    serve,
)
from repro.experiments.outofcore.modelled import Config, limit_bytes, trace_at
from repro.experiments.saving import save_pinned
from repro.measure import (
    MemoryBudget,
    accelerator,
    is_out_of_memory,
    least_limit,
    time_interleaved,
)
from repro.measure.accelerator import HostMemoryError
from repro.measure.machine import machine
from repro.measure.precision import without_tf32
from repro.outofcore import BudgetTooSmall, OutOfCore, SwapPlan, Trace, plan_swaps
from repro.outofcore.native import Installed, install
from repro.outofcore.schedules import Name

_SETTLING = 5  # iterations until a block's plans are made
_TRIES = 12  # budgets, each a tenth smaller, until the device's own allocator serves one
# What a mode trains with: the name of an allocator and of a schedule of `OutOfCore`.
_SWAPPED: dict[str, tuple[str, Name]] = {
    "schedule": ("schedule", "window"),  # the paper's with our changes, as in the simulated rows
    "schedule_va": ("schedule_va", "window"),
    "paper": ("schedule", "paper"),
    "paper_va": ("schedule_va", "paper"),
}


def is_cuda(device: str) -> bool:
    """Return whether a device has what is CUDA's alone: allocators to choose from."""
    return torch.device(device).type == "cuda"


def measure(config: Config, device: str) -> Outcome:
    """Do what `experiments.measured` says, in this process.

    Raises:
        ValueError: The mode is of CUDA's allocator, and the device another.
    """
    if config["mode"] == "expandable_segments" and not is_cuda(device):
        raise ValueError(f"expandable segments are CUDA's, and the device is {device}")
    with machine(config, device), without_tf32():
        if config["mode"] in _SWAPPED:
            return _swapped(config, device)
        if device == "cpu":
            return _in_core(config)
        limit = max(limit_bytes(config), least_limit(device))
        with MemoryBudget(limit, device) as held:
            step = _unswapped(config, device)
            for _ in range(2):  # the optimizer has its state from the second on
                step()
            timings = _time(config, device, {"iteration": step})
        metrics = {
            "limit_bytes": limit,
            "held_bytes": held.peak_bytes,
            "reserved_bytes": held.peak_reserved_bytes,
        }
        return Outcome(metrics, timings, held.peak_reserved_bytes)  # what the limit is on


def _in_core(config: Config) -> Outcome:
    limit, step = limit_bytes(config), _unswapped(config, "cpu")
    with MemoryBudget(limit) as held:
        for _ in range(2):
            step()
    # Watching every storage costs time: the limit was held above.
    steps = {"iteration": step, "reference": training_step(_reference(config), "cpu")}
    timings = _time(config, "cpu", steps)
    metrics = {"limit_bytes": limit, "held_bytes": held.peak_bytes}
    return Outcome(metrics, timings, held.peak_bytes)


def _unswapped(config: Config, device: str) -> Step:
    mode = config["mode"]
    step = training_step(config, device, mode == "checkpointing", mode == "offload")
    return _saving(step, device) if config["mode"] == "save_on_cpu" else step


def _saving(step: Step, device: str) -> Step:
    def run() -> None:
        with save_pinned(device):
            step()

    return run


def _reference(config: Config) -> Config:
    """Return the iteration that a CPU's are timed in turns with: the largest that fits in core."""
    return dict(config) | {"batch": config["base_batch"]}


def _time(config: Config, device: str, steps: Mapping[str, Step]) -> dict[str, Any]:
    return time_interleaved(
        steps, warmup=config["warmup"], repeats=config["repeats"], device=device
    )


def _swapped(config: Config, device: str) -> Outcome:
    """Train within the largest budget that an allocator can serve within the limit.

    On a CPU the allocators are simulated, their sizes in proportion to the limit; chunks are
    simulated on whatever is not CUDA. On a GPU the allocators are the real ones. The budget shrinks
    until they serve what runs; the paper's authors lowered theirs by hand.
    """
    name, limit = _SWAPPED[config["mode"]][0], limit_bytes(config)
    make: Make = partial(ALLOCATORS[name], limit)
    fitting = largest_budget(trace_at(config, config["batch"]), limit, make)
    if fitting is None:
        raise torch.OutOfMemoryError(f"out of memory: no budget can be served within {limit} bytes")
    if device == "cpu":
        return _shrinking(config, device, fitting.plan, limit, make)
    if name == "schedule":
        limit = max(limit, least_limit(device))
        with accelerator.limited(device, limit):
            return _shrinking(config, device, fitting.plan, limit)
    if is_cuda(device):
        chunk, limit = chunk_bytes(limit), max(limit, least_limit(device))
        installed = install(chunk, limit)
        return _shrinking(config, device, fitting.plan, limit, installed=installed)
    return _shrinking(config, device, fitting.plan, limit, make)


def link_rate(config: Config, device: str) -> float | None:
    """Return bytes/s, as stated or in proportion to what the largest in core holds and takes here.

    None where copies are as fast as they are: an accelerator has a link.
    """
    if device != "cpu" or "link_share" not in config:
        return config.get("link_bytes_per_s") if device == "cpu" else None
    reference = _reference(config)
    step = {"reference": training_step(reference, "cpu")}
    taken = time_interleaved(step, warmup=1, repeats=3, device="cpu")["reference"]
    held = trace_at(config, reference["batch"]).peak_bytes
    return float(config["link_share"] * held / np.median(taken.samples_s))


def _shrinking(
    config: Config,
    device: str,
    plan: SwapPlan,
    limit: int,
    make: Make | None = None,
    installed: Installed | None = None,
) -> Outcome:
    budget, smallest = plan.budget_bytes, plan.trace.smallest_budget
    refused = ""  # not the error, which holds what did not fit
    for _ in range(_TRIES):
        if installed is None:
            accelerator.reset_peak_memory(device)
        try:
            return _within(config, device, plan_swaps(plan.trace, budget), limit, make, installed)
        except BudgetTooSmall as error:  # what the device runs needs more than the trace said
            refused = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_refusal(error):
                raise
            refused = str(error)
        if budget <= smallest:
            break
        gc.collect()
        accelerator.empty_cache(device)  # the chunked allocator's, too
        budget = max(smallest, int(0.9 * budget))
    raise torch.OutOfMemoryError(f"out of memory: the last budget was {budget} bytes: {refused}")


def is_refusal(error: BaseException) -> bool:
    """Return whether the device ran out of memory, not the host.

    The chunked allocator's error is a plain RuntimeError.
    """
    if isinstance(error, HostMemoryError):
        return False
    return is_out_of_memory(error) or "out of memory" in str(error)


def _within(
    config: Config,
    device: str,
    plan: SwapPlan,
    limit: int,
    make: Make | None,
    installed: Installed | None = None,
) -> Outcome:
    """Train within a plan's budget; `make` simulates the allocator where it is not a real one."""
    link = link_rate(config, device)
    schedule = _SWAPPED[config["mode"]][1]
    block = OutOfCore(
        plan.budget_bytes,
        schedule=schedule,
        window_bytes="auto" if make is None and schedule == "window" else None,
        device=device,
        host_bytes=plan.trace.host_bytes(plan.budget_bytes) if device != "cpu" else None,
        link_bytes_per_s=link,
    )

    def serves() -> None:
        # The trace of what runs may differ from the one that was fitted, in copies of views.
        if make is not None and block.plan is not None and serve(block.plan, make) is None:
            raise torch.OutOfMemoryError("out of memory: the plan that runs cannot be served")

    timings, metrics = train_within(config, device, block, plan.trace, serves)
    metrics["limit_bytes"] = limit
    held: int = metrics["held_bytes"]
    if make is not None:
        assert block.plan is not None
        report = serve(block.plan, make)
        if report is None:
            raise torch.OutOfMemoryError("out of memory: the plan that ran cannot be served")
        metrics["reserved_bytes"] = report.peak_reserved_bytes
        return Outcome(metrics, timings, held)
    if installed is not None:  # it gives nothing back while it trains: the most of this try
        metrics["reserved_bytes"] = installed.counters().reserved_bytes
    else:
        metrics["reserved_bytes"] = accelerator.max_memory_reserved(device)
    return Outcome(metrics, timings, metrics["reserved_bytes"])


def train_within(
    config: Config,
    device: str,
    block: OutOfCore,
    foretold: Trace,
    settled: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time iterations within a block, on a CPU in turns with the reference outside of it.

    Args:
        config: Of the run.
        device: Where it runs.
        block: Not entered.
        foretold: The trace by which the host's memory is foretold.
        settled: Called once the block's plans are made.

    Returns:
        Timings, and metrics.
    """
    plain = training_step(config, device)

    def step() -> None:
        plain()
        block.step()

    steps = {"iteration": step}
    if device == "cpu":
        reference = training_step(_reference(config), device)  # outside of the block

        def unseen() -> None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                reference()

        steps["reference"] = unseen
    with block:
        for _ in range(_SETTLING):
            step()
        settled()
        timings = _time(config, device, steps)
        done, followed = block.statistics, block.plan
    assert followed is not None
    metrics = _described(followed) | {
        "held_bytes": done.peak_bytes,
        "host_bytes": done.host_bytes,
        "host_foretold_bytes": foretold.host_bytes(block.budget_bytes),
        "iterations": done.iterations,
        "replayed": done.replayed,
        "on_demand": done.on_demand,
    }
    if block.link_bytes_per_s is not None:
        metrics["link_bytes_per_s"] = block.link_bytes_per_s
    return timings, metrics


def _described(plan: SwapPlan) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "window_bytes": plan.window_bytes,
        "bytes_moved": plan.bytes_moved,
    }
