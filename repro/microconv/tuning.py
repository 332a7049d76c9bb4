"""`tune` a model's convolutions under a workspace limit."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from repro.measure import accelerator, describe_device
from repro.measure.checks import choice, whole
from repro.microconv import backends
from repro.microconv.cache import BenchmarkCache, CacheError, CacheWarning, default_path
from repro.microconv.kernels import Kernel
from repro.microconv.measuring import Bench
from repro.microconv.optimize import POLICIES
from repro.microconv.results import MIB, TuningReport
from repro.microconv.sampling import NotTunableError, check_model, check_tunable, record_calls
from repro.microconv.tuner import Tuner

MODES = ("WR", "WD")
_MEMORY = BenchmarkCache(None)


def tune(
    model: nn.Module,
    sample_input: Any,
    workspace_limit: int = 64 * MIB,
    policy: str | None = None,
    mode: str = "WR",
    *,
    strict: bool = True,
    algorithms: Sequence[str] | None = None,
    max_error: float = 1e-4,
    training: bool | None = None,
    devices: Sequence[torch.device | str] | None = None,
    min_gain: float = 0.05,
    cache: BenchmarkCache | str | os.PathLike[str] | None = "default",
) -> TuningReport:
    """Make a model's convolutions run divided into micro-batches, within a limit, and faster.

    From then on every eligible ``nn.Conv2d`` runs the fastest division of its mini-batch (WR,
    section III-B, or WD, section III-C), and stays an ``nn.Conv2d``; `untune` undoes it. For finite
    operands results differ by at most the stated errors of the algorithms. Inf and NaN are never
    hidden, but FFT and Winograd turn Inf into NaN and spread it over the sample's image.

    A kernel is left to torch where torch's own convolution is as fast within the limit; its
    internal allocations are measured, and count. A last trial runs the whole model, divided and
    undivided, in turns: layers that do not make it faster are restored, unless the limit requires
    their division.

    Differs from the paper: a chosen division must also win, by `min_gain`, a trial against torch's
    own convolution in the form of a training step; under WR all kernels share one buffer, since
    they run one after the other, instead of holding one each.

    Args:
        model: The model, changed in place; a tuned model is untuned first.
        sample_input: A tensor, a tuple of positional or a dictionary of keyword arguments of the
            model, with the mini-batch size, image size, data type and device to tune for. The
            model runs it up to some dozens of times; what that changes is undone. A named tuple is
            one argument.
        workspace_limit: Bytes, of each kernel (WR) or of all together (WD), for calls like the
            sample's, with its mini-batch size; where a kernel is divided, also with a smaller one.
        policy: ``powerOfTwo``, ``all`` or ``undivided``; see `micro_batch_sizes`. None takes
            `$REPRO_MICROCONV_POLICY`, else ``powerOfTwo``.
        mode: ``WR`` or ``WD``.
        strict: Hold torch's own convolutions to the limit, too, or raise. Without it they may
            exceed the limit, and are reported.
        algorithms: Backends (``torch``, ``nnpack``, ``cudnn``) or single algorithms such as
            ``nnpack:ft8x8`` for divisions; None for all available. Under `strict` torch's own
            convolution is divided if none of these fits.
        max_error: Leave out algorithms that state a larger error; see `stated_error`. From 1e-2 on
            cuDNN may sum float16 in float16 (``cudnn_half``).
        training: Whether kernels of gradients are tuned; None for ``model.training``.
        devices: Accelerators of one kind, including the model's own, which measure micro-batch
            sizes at once (section III-B); None for only the model's own.
        min_gain: Share of time that a division must save in the trial; below 0 the whole model is
            not tried, and ``-math.inf`` takes the best division even if torch's own is faster.
        cache: File of measurements, or a `BenchmarkCache`; ``"default"`` is ``microconv.sqlite`` in
            `$REPRO_CACHE` or the user's cache folder; None keeps them until the process ends.

    Returns:
        The choice for each kernel, and the unchanged layers with reasons.

    Raises:
        NotTunableError: `model` is no module, has lazy layers or convolutions on several devices;
            or a mode that intercepts operations is active.
        ValueError: An argument is not one of its choices.
        WorkspaceLimitError: A kernel cannot be held to the limit; the model is unchanged.
        BackendMissingError: A named backend is unavailable.
        CacheError: The cache cannot be used.
    """
    check_tunable(model)
    policy = policy or os.environ.get("REPRO_MICROCONV_POLICY") or "powerOfTwo"
    choice("policy", policy, POLICIES)
    choice("mode", mode, MODES)
    workspace_limit = whole("workspace_limit", workspace_limit, 0)
    if not max_error > 0:
        raise ValueError(f"max_error is {max_error!r}; give a relative error above 0")
    if not min_gain < 1:
        raise ValueError(f"min_gain is {min_gain!r}; give a share of time below 1")
    bench = Bench(algorithms, _open_cache(cache), max_error, _of_one_kind(devices))
    training = model.training if training is None else training
    report = TuningReport(mode, policy, workspace_limit, strict)
    calls, report.skipped, others = record_calls(model, sample_input, training, strict)
    found = sorted({call.signature[3] for call in calls})  # the devices
    if len(found) > 1:
        raise NotTunableError(
            f"the model has convolutions on {' and '.join(found)}; tune its parts one by one"
        )
    if bench.devices and not set(found) <= set(bench.devices):
        raise ValueError(
            f"the model is on {found[0]}, which is not among the devices "
            f"{', '.join(bench.devices)}; name it as well"
        )
    report.unavailable = backends.check_names(algorithms, found[0] if found else "cpu")
    Tuner(report, bench, min_gain, others).tune(model, calls, sample_input, training)
    return report


def _of_one_kind(devices: Sequence[torch.device | str] | None) -> list[str]:
    """Names of the devices that measure at once, whose times have to compare."""
    if devices is None:
        return []
    names = list(dict.fromkeys(map(str, devices))) if isinstance(devices, list | tuple) else []
    if not names or not all(map(accelerator.is_accelerator, names)):
        raise ValueError(
            f"devices is {devices!r}; give a list of accelerators such as ['cuda:0', 'cuda:1'], or "
            "None: what a CPU measures at once shares its cores"
        )
    kinds = {str(describe_device(name)["name"]) for name in names}
    if len(kinds) > 1:
        raise ValueError(
            f"the devices {', '.join(names)} are {' and '.join(sorted(kinds))}; times of one say "
            "nothing of another: give devices of one kind"
        )
    return names


def find_kernels(
    model: nn.Module, sample_input: Any, training: bool = True
) -> list[tuple[str, Kernel, int]]:
    """(layer, kernel, mini-batch size) of all kernels that `tune` would consider, in order of use.

    Arguments and errors as in `tune`; without `training` only forward passes.
    """
    check_model(model, "find_kernels")
    calls, _, _ = record_calls(model, sample_input, training)
    return [(call.name, kernel, call.batch) for call in calls for kernel in call.kernels()]


def _open_cache(cache: BenchmarkCache | str | os.PathLike[str] | None) -> BenchmarkCache:
    if isinstance(cache, BenchmarkCache):
        return cache
    if cache is None:
        return _MEMORY
    if not isinstance(cache, str | os.PathLike):
        raise ValueError(f'cache is {cache!r}; give a file, a BenchmarkCache, "default" or None')
    if cache != "default":
        return BenchmarkCache(cache)
    try:
        return BenchmarkCache(default_path())
    except CacheError as error:  # the user did not ask for this file
        told = f"{error}; results are kept in memory until the process ends"
        warnings.warn(told, CacheWarning, stacklevel=3)
        return _MEMORY
