"""Whole iterations of a network held to a workspace limit, each policy in turns, by processes."""

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from repro.experiments.design import Config, Outcome
from repro.experiments.microconv import experiments
from repro.experiments.microconv.experiments import iteration, rounding
from repro.experiments.microconv.runs import AGAIN, FREE, MIB, MORE, PLAIN
from repro.experiments.processes import in_a_process
from repro.measure import accelerator, time_interleaved
from repro.measure.allocations import peak_inside
from repro.measure.machine import machine
from repro.microconv import BenchmarkCache, WorkspaceLimitError, tune

_REPORTED = ("native_s", "workspace_bytes", "allocated_bytes")  # of `tune`
_WATCHED = (
    "aten::convolution",
    "aten::convolution_backward",
    "repro_microconv::convolution",
    "repro_microconv::data_gradient",
    "repro_microconv::filter_gradient",
)

# Torch's own convolutions under other settings: how many plans `cudnn.benchmark` tries, 0 for all,
# and the variables set for the process. The cap is cuDNN's (release notes of 8.0.5): MiB, of the
# workspace that its legacy functions return, which the second variable has torch use. Whether
# torch's plans of today keep it is not documented: the workspace seen tells.
_CAP, _LEGACY = "CUDNN_CONV_WSCAP_DBG", "TORCH_CUDNN_V8_API_DISABLED"
SETTINGS: dict[str, tuple[int | None, tuple[str, ...]]] = {
    PLAIN: (None, ()),
    "cudnn.benchmark": (10, ()),
    "cudnn.benchmark, all plans": (0, ()),
    "cudnn.benchmark, all plans, capped": (0, (_CAP,)),
    "cudnn.benchmark, legacy API, capped": (0, (_CAP, _LEGACY)),
}


def iterations(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time a network's iteration untuned, and held to a limit with each policy, all in turns.

    Forms are torch's own twice, which shows the scatter; `tune` without a binding limit, in more
    rounds unless it leaves the model as it was; and held to the limit by each policy, or listed
    with the smallest limit that would do. Further processes find the measurements in a file.
    With ``rivals`` in the configuration, torch's own under other settings are run instead.
    """
    if config.get("rivals"):
        return _rivals(config, device)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/times.sqlite"
        BenchmarkCache(Path(path)).take(experiments.shared(config, device))
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
    seen: dict[str, Any] = {name: {"seen_bytes": None} for name in names}
    samples: list[dict[str, list[float]]] = []
    for number in range(config["processes"]):
        sample: dict[str, list[float]] = {}
        for name in names if number % 2 == 0 else reversed(names):
            values = {_CAP: f"{config['limit_mib']:g}", _LEGACY: "1"}
            environment = {variable: values[variable] for variable in SETTINGS[name][1]}
            own = [dict(config), device, name]
            try:
                answer = in_a_process(f"{__name__}:rival", own, environment)
            except RuntimeError as error:
                if name == PLAIN:
                    raise
                seen[name]["error"] = str(error)[-300:]
                continue
            sample[name] = answer["samples_s"]
            seen[name]["seen_bytes"] = max(seen[name]["seen_bytes"] or 0, answer["seen_bytes"])
        samples.append(sample)
    return Outcome(metrics={"forms": {}, "rivals": seen, "samples_s": samples})


def rival(config: Config, device: str, name: str) -> dict[str, Any]:
    """The seconds of torch's own iterations under a setting, and the workspace seen.

    It leaves the setting as it is: for a process of its own.
    """
    limit, cudnn = SETTINGS[name][0], torch.backends.cudnn
    cudnn.benchmark, cudnn.benchmark_limit = limit is not None, limit or 0
    with machine(config, device), rounding(config, device):
        step = partial(iteration, *experiments.build_network(config, device))
        step()  # chooses the plans
        with _Workspace(device) as seen:
            step()
        timed = time_interleaved({"": step}, warmup=1, repeats=config["repeats"], device=device)
        return {"samples_s": list(timed[""].samples_s), "seen_bytes": seen.largest}


class _Workspace(TorchDispatchMode):
    """The largest allocation of a convolution on an accelerator besides its result, in bytes."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device, self.largest = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watched = "convolution" in func.overloadpacket.__name__
        if not watched or not accelerator.is_accelerator(self._device):
            return func(*args, **(kwargs or {}))
        accelerator.reset_peak_memory(self._device)
        result = func(*args, **(kwargs or {}))
        inside = accelerator.max_memory_allocated(self._device)
        inside -= accelerator.memory_allocated(self._device)
        self.largest = max(self.largest, inside)
        return result


def timed_forms(
    config: Config, device: str, path: str, measured: bool
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The seconds of each form's iterations, and, where `measured`, the outcome of each form."""
    with machine(config, device), rounding(config, device):
        plain, images, labels = experiments.build_network(config, device)
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
            loss_error, gradient_error = experiments.difference(model, plain, images, labels)
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
                "seen_bytes": seen,
                "loss_error": loss_error,
                "gradient_error": gradient_error,
                **{name: getattr(report, name) for name in _REPORTED},
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
