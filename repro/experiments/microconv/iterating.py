"""Whole iterations of a network held to a workspace limit, each policy in turns, by processes."""

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repro.datasets import ImageData
from repro.experiments.child import in_a_process
from repro.experiments.design import Outcome
from repro.experiments.microconv import building
from repro.experiments.microconv.building import Config, iteration, rounding
from repro.experiments.microconv.runs import AGAIN, FREE, MORE, PLAIN
from repro.measure import time_interleaved
from repro.measure.allocations import peak_inside
from repro.measure.machine import machine
from repro.microconv import BenchmarkCache, WorkspaceLimitError, tune

MIB = 2**20
_WATCHED = (
    "aten::convolution",
    "aten::convolution_backward",
    "repro_microconv::convolution",
    "repro_microconv::data_gradient",
    "repro_microconv::filter_gradient",
)

# Torch's own convolutions under other settings: how many plans `cudnn.benchmark` tries, 0 for all.
SETTINGS = {PLAIN: None, "cudnn.benchmark": 10, "cudnn.benchmark, all plans": 0}


def iterations(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Time a network's iteration untuned, and held to a limit with each policy, all in turns.

    Forms are torch's own twice, which shows the scatter of one and the same thing; `tune` without a
    binding limit, which is not timed where it leaves the model as it was, and else in more rounds;
    and `tune` held to the limit by each policy. A form that cannot be held is listed with the
    smallest limit that would do. This process measures and divides; the iterations are
    timed in it and in others after each other, which find the measurements in a file.

    With ``rivals`` in the configuration, torch's own under other settings are run instead.
    """
    if config.get("rivals"):
        return _rivals(config, device)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/times.sqlite"
        BenchmarkCache(Path(path)).take(building.shared(config, device))
        first, described = timed_forms(config, device, path, measured=True)
        samples, own = [first], [dict(config), device, path, False]
        for _ in range(config["processes"] - 1):
            samples.append(in_a_process(f"{__name__}:timed_forms", own)[0])
    return Outcome(metrics={"forms": described, "samples_s": samples})


def _rivals(config: Config, device: str) -> Outcome:
    """Time torch's own iterations, each setting in processes of its own, in turns.

    Torch keeps the plan that a shape got first, whatever the setting it was chosen under: two
    settings in one process would run the same plans. One that fails is listed with its error.
    """
    names = [PLAIN, *config["rivals"]]
    errors: dict[str, str | None] = dict.fromkeys(config["rivals"])
    samples: list[dict[str, list[float]]] = []
    for number in range(config["processes"]):
        sample: dict[str, list[float]] = {}
        for name in names if number % 2 == 0 else reversed(names):
            try:
                sample[name] = in_a_process(f"{__name__}:rival", [dict(config), device, name])
            except RuntimeError as error:
                if name == PLAIN:
                    raise
                errors[name] = str(error)[-300:]
        samples.append(sample)
    return Outcome(metrics={"forms": {}, "rivals": errors, "samples_s": samples})


def rival(config: Config, device: str, name: str) -> list[float]:
    """The seconds of torch's own iterations under a setting.

    It leaves the setting as it is: for a process of its own.
    """
    limit, cudnn = SETTINGS[name], torch.backends.cudnn
    cudnn.benchmark, cudnn.benchmark_limit = limit is not None, limit or 0
    with machine(config, device), rounding(config, device):
        step = partial(iteration, *building.build_network(config, device))
        timed = time_interleaved({"": step}, warmup=2, repeats=config["repeats"], device=device)
        return list(timed[""].samples_s)


def timed_forms(
    config: Config, device: str, path: str, measured: bool
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The seconds of each form's iterations, and, where `measured`, the outcome of each form."""
    with machine(config, device), rounding(config, device):
        plain, images, labels = building.build_network(config, device)
        # In memory: a file is written to the disk after each of hundreds of measurements.
        cache = BenchmarkCache(None)
        cache.take(BenchmarkCache(Path(path)))
        forms: dict[str, nn.Module] = {PLAIN: plain, AGAIN: copy.deepcopy(plain)}
        outcomes: dict[str, Any] = {}
        for name, options in _forms(config).items():
            model = copy.deepcopy(plain)
            try:
                report = tune(model, images, cache=cache, **options)
            except WorkspaceLimitError as refused:
                kernels = len(refused.kernels)
                outcomes[name] = {"least_bytes": refused.least_bytes, "kernels": kernels}
                continue
            if name != FREE or any(entry.division for entry in report.kernels):
                forms[name] = model
            if not measured:
                continue
            loss_error, gradient_error = building.difference(model, plain, images, labels)
            seen: int | None = None
            if images.device.type == "cpu":
                inside = peak_inside(partial(iteration, model, images, labels), _WATCHED)
                seen = max((taken for _, taken in inside), default=0)
            outcomes[name] = {
                "kernels": len(report.kernels),
                "divided": sum(entry.division is not None for entry in report.kernels),
                "needed": sum(entry.needed for entry in report.kernels),
                "untied": len(report.untied),
                "predicted_s": report.time_s,
                "native_s": report.native_s,
                "workspace_bytes": report.workspace_bytes,
                "allocated_bytes": report.allocated_bytes,
                "seen_bytes": seen,
                "loss_error": loss_error,
                "gradient_error": gradient_error,
            }
        BenchmarkCache(Path(path)).take(cache)
        steps = {name: partial(iteration, model, images, labels) for name, model in forms.items()}
        timed = time_interleaved(steps, warmup=1, repeats=config["repeats"], device=device)
        samples = {name: list(timing.samples_s) for name, timing in timed.items()}
        if FREE in steps:
            few = {name: steps[name] for name in (PLAIN, AGAIN, FREE)}
            timed = time_interleaved(few, warmup=0, repeats=config["pairs"], device=device)
            samples |= {name + MORE: list(timing.samples_s) for name, timing in timed.items()}
        return samples, outcomes


def _forms(config: Config) -> dict[str, dict[str, Any]]:
    """The options of `tune` for each form."""
    free = config["algorithms"][: config["free"]]
    forms: dict[str, dict[str, Any]] = {
        FREE: {"strict": False, "workspace_limit": 512 * MIB, "algorithms": free}
    }
    for mode, total, policy in config["ways"]:
        name = f"WR {policy}" if mode == "WR" else f"WD {total:g} MiB {policy}"
        forms[name] = {
            "mode": mode,
            "policy": policy,
            "workspace_limit": int((config["limit_mib"] if mode == "WR" else total) * MIB),
            "algorithms": config["algorithms"],
            # A gain that kernels promise is taken: the iterations that follow are the trial.
            "min_gain": -1e-9,
        }
    return forms
