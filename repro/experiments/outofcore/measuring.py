"""Iterations measured under a limit; of CUDA in a process of their own.

Torch's CUDA allocator is chosen before CUDA is used.
"""

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from repro.experiments.design import Config, Outcome
from repro.experiments.outofcore import fitting
from repro.experiments.outofcore.building import Step, limit_bytes, trace_at, training_step
from repro.experiments.outofcore.fitting import ALLOCATORS, Make, fit
from repro.experiments.processes import in_a_process
from repro.experiments.saving import save_pinned, unseen
from repro.measure import (
    MemoryBudget,
    Timing,
    accelerator,
    is_out_of_memory,
    least_limit,
    time_interleaved,
)
from repro.measure.accelerator import HostMemoryError
from repro.measure.machine import machine
from repro.measure.precision import without_tf32
from repro.outofcore import BudgetTooSmall, DoesNotFit, OutOfCore, SwapPlan, host_bytes
from repro.outofcore.native import Installed, install
from repro.outofcore.planning import Name

_SETTLING = 5  # iterations until a block's plans are made
_TRIES = 12  # budgets, each a tenth smaller, until the device's own allocator serves one
# By mode, the names of an allocator and of a schedule of `OutOfCore`.
_SWAPPED: dict[str, tuple[str, Name]] = {
    "schedule": ("schedule", "window"),  # the paper's with our changes
    "schedule_va": ("schedule_va", "window"),
    "paper": ("schedule", "paper"),
    "paper_va": ("schedule_va", "paper"),
}
# Threads touch the memory before it is pinned: 4 GiB took 0.59 s instead of 1.48 by an H100.
_PINNING = ("pinned_use_cuda_host_register:True", "pinned_num_register_threads:8")


def is_cuda(device: str) -> bool:
    """Whether a device is CUDA's, which alone has allocators to choose from."""
    return torch.device(device).type == "cuda"


def measured(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Train a few iterations within a limit, in turns with the reference that fits in core."""
    return (measure_in_child if is_cuda(device) else measure)(config, device)


def measure(config: Config, device: str) -> Outcome:
    """Do the same in this process."""
    if config["mode"] == "expandable_segments" and not is_cuda(device):
        raise NotImplementedError(f"expandable segments are CUDA's, and the device is {device}")
    with machine(config, device), without_tf32():
        return (_swapped if config["mode"] in _SWAPPED else _unswapped)(config, device)


def _unswapped(config: Config, device: str) -> Outcome:
    """Train in core, with checkpointing or with saved tensors held elsewhere."""
    mode, on_cpu = config["mode"], device == "cpu"
    limit = max(limit_bytes(config), least_limit(device))
    plain = training_step(config, device, mode == "checkpointing", mode == "offload")

    def step() -> None:
        with save_pinned(device) if mode == "save_on_cpu" else nullcontext():
            plain()

    steps: dict[str, Step] = {"iteration": step}
    with MemoryBudget(limit, device) as held:
        for _ in range(2):  # the optimizer has its state from the second on
            step()
        if not on_cpu:
            timings = _time(config, device, steps)
    metrics = {"limit_bytes": limit, "held_bytes": held.peak_bytes}
    if on_cpu:
        # Watching every storage costs time: the limit was held above.
        timings = _time(config, device, steps | {"reference": _reference(config)})
    else:
        metrics["reserved_bytes"] = held.peak_reserved_bytes  # the limit is on these
    return Outcome(metrics, timings, metrics.get("reserved_bytes", held.peak_bytes))


def _reference(config: Config) -> Step:
    """The iteration that a CPU's are timed in turns with: the largest that fits in core."""
    return training_step({**config, "batch": config["base_batch"]}, "cpu")


def _time(config: Config, device: str, steps: Mapping[str, Step]) -> dict[str, Timing]:
    counts = {"warmup": config["warmup"], "repeats": config["repeats"]}
    return time_interleaved(steps, **counts, device=device)


def _swapped(config: Config, device: str) -> Outcome:
    """Train within the largest budget that an allocator can serve within the limit.

    Allocators are simulated on a CPU, chunks on whatever is not CUDA; real ones may need less.
    """
    name, schedule = _SWAPPED[config["mode"]]
    limit, trace = limit_bytes(config), trace_at(config, config["batch"])
    make: Make = partial(ALLOCATORS[name], limit)
    best = fitting.largest_budget(trace, limit, make)
    if best is None:
        raise torch.OutOfMemoryError(f"out of memory: no budget can be served within {limit} bytes")
    simulated = device == "cpu" or (name == "schedule_va" and not is_cuda(device))
    real = limit if simulated else max(limit, least_limit(device))
    limited: AbstractContextManager[None] = nullcontext()
    installed: Installed | None = None
    if not simulated and name == "schedule":
        limited = accelerator.limited(device, real)
    elif not simulated:
        installed = install(fitting.chunk_bytes(limit), real)

    def within(budget: int) -> Outcome:
        if installed is None:
            accelerator.reset_peak_memory(device)
        auto = "auto" if schedule == "window" and not simulated else None
        timings, metrics, plan = _train(config, device, budget, schedule, auto)
        metrics["limit_bytes"] = real
        if simulated:
            # The plan that runs may differ from the one that was fitted, in copies of views.
            served = fit(plan, make)
            if served is None:
                raise torch.OutOfMemoryError("out of memory: the plan that ran cannot be served")
            metrics["reserved_bytes"] = served.peaks["reserved_bytes"]
            return Outcome(metrics, timings, metrics["held_bytes"])
        metrics["reserved_bytes"] = (
            # It gives nothing back while it trains: the most of this try.
            installed.counters().reserved_bytes
            if installed
            else accelerator.max_memory_reserved(device)
        )
        return Outcome(metrics, timings, metrics["reserved_bytes"])

    budget, refused = best.plan.budget_bytes, ""
    with limited:
        for _ in range(_TRIES):
            try:
                return within(budget)
            except (RuntimeError, MemoryError, BudgetTooSmall) as error:
                # More may be run than the trace has.
                if not (isinstance(error, BudgetTooSmall) or is_refusal(error)):
                    raise
                refused = str(error)  # not the error, which holds the tensors that did not fit
            if budget <= trace.smallest_budget:
                break
            gc.collect()
            accelerator.empty_cache(device)  # the chunked allocator's, too
            budget = max(trace.smallest_budget, int(0.9 * budget))
    raise torch.OutOfMemoryError(f"out of memory: the last budget was {budget} bytes: {refused}")


def _link_rate(config: Config) -> float | None:
    """Bytes/s, as stated or in proportion to the bytes and the time of the largest in core."""
    if "link_share" not in config:
        return config.get("link_bytes_per_s")
    step = {"reference": _reference(config)}
    taken = time_interleaved(step, warmup=1, repeats=3, device="cpu")["reference"]
    held = trace_at(config, config["base_batch"]).peak_bytes
    return float(config["link_share"] * held / taken.median_s)


def _train(
    config: Config, device: str, budget: int, schedule: Name, window: Any = None
) -> tuple[dict[str, Timing], dict[str, Any], SwapPlan]:
    """Time iterations that swap, on a CPU in turns with the reference, which does not."""
    on_host = host_bytes(trace_at(config, config["batch"]), budget)
    block = OutOfCore(
        budget,
        schedule=schedule,
        window_bytes=window,
        device=device,
        host_bytes=None if device == "cpu" else on_host,
        link_bytes_per_s=_link_rate(config) if device == "cpu" else None,
    )
    plain = training_step(config, device)

    def step() -> None:
        plain()
        block.step()

    steps = {"iteration": step}
    if device == "cpu":
        steps["reference"] = unseen()(_reference(config))
    with block:
        for _ in range(_SETTLING):
            step()
        timings = _time(config, device, steps)
        done, followed = block.statistics, block.plan
    assert followed is not None
    planned = ("budget_bytes", "window_bytes", "bytes_moved")
    counted = ("host_bytes", "iterations", "replayed", "on_demand")
    metrics: dict[str, Any] = {name: getattr(followed, name) for name in planned}
    metrics |= {name: getattr(done, name) for name in counted}
    metrics |= {"held_bytes": done.peak_bytes, "host_foretold_bytes": on_host}
    if block.link_bytes_per_s is not None:
        metrics["link_bytes_per_s"] = block.link_bytes_per_s
    return timings, metrics, followed


def is_refusal(error: BaseException) -> bool:
    """Whether the device, and not the host, ran out of memory; chunks say so in plain words."""
    short = is_out_of_memory(error) or "out of memory" in str(error)
    return short and not isinstance(error, HostMemoryError)


def by_schedule(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Train within as many bytes of tensors as the limit has; no allocator is looked at."""
    limit = limit_bytes(config)
    with machine(config, device), without_tf32():
        try:
            timings, metrics, _ = _train(config, device, limit, config["schedule"])
        except DoesNotFit as error:
            raise torch.OutOfMemoryError(f"out of memory: {error}") from None
    return Outcome(metrics | {"limit_bytes": limit}, timings, metrics["held_bytes"])


def measure_in_child(config: Config, device: str) -> Outcome:
    """Run `measure` in a new process, and return its outcome or raise its lack of memory."""
    options = [*_PINNING, *["expandable_segments:True"] * (config["mode"] == "expandable_segments")]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": ",".join(options)}
    answer = in_a_process(f"{__name__}:answered", [dict(config), device], environment)
    for name, error in (("host", HostMemoryError), ("device", torch.OutOfMemoryError)):
        if name in answer:
            raise error(answer[name])
    timings = {n: Timing(tuple(s), config["warmup"]) for n, s in answer["timings"].items()}
    return Outcome(answer["metrics"], timings, answer["peak_bytes"])


def answered(config: Config, device: str) -> dict[str, Any]:
    """The outcome of `measure` as plain values, or the memory that was short."""
    try:
        outcome = measure(config, device)
    except (RuntimeError, MemoryError) as error:
        of_host = isinstance(error, HostMemoryError)
        if not (of_host or is_refusal(error)):
            raise
        return {"host" if of_host else "device": str(error)[:2000]}
    timings = {name: timing.samples_s for name, timing in outcome.timings.items()}
    return {"metrics": outcome.metrics, "timings": timings, "peak_bytes": outcome.peak_bytes}
