"""`tune` a model's convolutions under a workspace limit."""

import os
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from repro.measure import accelerator, describe_device
from repro.measure.checks import is_whole
from repro.microconv import backends
from repro.microconv.cache import BenchmarkCache, CacheError, CacheWarning, default_path
from repro.microconv.kernels import Kernel
from repro.microconv.measuring import Bench
from repro.microconv.optimize import POLICIES
from repro.microconv.results import TuningReport
from repro.microconv.sampling import NotTunableError, check_model, check_tunable, record_calls
from repro.microconv.tuner import Tuner

MIB = 2**20
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

    Every eligible ``nn.Conv2d`` runs the fastest division of its mini-batch from then on (WR,
    section III-B, or WD, section III-C), and stays an ``nn.Conv2d``; `untune` undoes it. Of finite
    operands results differ by no more than the stated errors of the algorithms. Inf and NaN are
    never hidden, so that a ``GradScaler`` skips the step, but FFT and Winograd turn Inf into NaN
    and spread it over the sample's image.

    A kernel that torch's own convolution computes as fast within the limit is left to torch: its
    inner allocations are measured, and count as its workspace. Where they exceed the limit, the
    kernel is divided or replaced, whatever time that takes. A last trial runs the whole model,
    divided and not, in turns: layers that do not make it faster are untied again, but for those
    that keep to the limit only so.

    Differs from the paper: a chosen division must also win, by `min_gain`, a trial against torch's
    own convolution as a step runs it; under WR all kernels share one buffer, since they follow
    each other, instead of holding one each.

    Args:
        model: Changed in place, its parameters and hooks as they are. A tuned one is untuned
            first.
        sample_input: A tensor, a tuple of positional or a dictionary of keyword arguments of the
            model, with the mini-batch size, image size, data type and device to tune for. The
            model is run with it, up to some dozens of times; changes to the model's modules, the
            sample and generators are put back, also where a run raises.
        workspace_limit: Bytes, of each kernel (WR) or of all together (WD). They hold for calls
            as the sample's, of its mini-batch and smaller ones.
        policy: ``powerOfTwo``, ``all`` or ``undivided``; see `micro_batch_sizes`. None takes
            `$REPRO_MICROCONV_POLICY`, else ``powerOfTwo``.
        mode: ``WR`` or ``WD``.
        strict: Hold torch's own convolutions to the limit as well, or refuse. Without, they are
            not held, and reported.
        algorithms: Backends (``torch``, ``nnpack``, ``cudnn``) or single algorithms such as
            ``nnpack:ft8x8`` that divisions may be made of; None for all that are there. Under
            `strict` torch's own is divided where nothing of these fits.
        max_error: Leave out algorithms that state a larger error in float32, relative to the
            largest magnitude of a result: a small element may be off by a larger share of itself.
            From 1e-2 on float16 may be summed in float16 by cuDNN (``cudnn_half``).
        training: Whether gradients are computed, and their kernels tuned; None for
            ``model.training``.
        devices: Accelerators of one kind, the model's own among them, which measure micro-batch
            sizes at once (section III-B); None for the model's own alone.
        min_gain: Share of time that a division must save in the trial; below 0 the whole model is
            not tried, and ``-math.inf`` takes the best division even where torch's own is faster.
        cache: File of benchmark results, or a `BenchmarkCache`; ``"default"`` is
            ``microconv.sqlite`` in `$REPRO_CACHE` or the user's cache folder, or memory where that
            cannot be used; None keeps them in memory until the process ends.

    Returns:
        The choice for each kernel, the layers that were left alone and why.

    Raises:
        NotTunableError: It is no module, it cannot be called with the sample, it has lazy layers or
            convolutions on several devices, or `tune` is called within a mode that watches
            operations.
        ValueError: An argument is not one of its choices.
        WorkspaceLimitError: A kernel cannot be held to the limit; the model is as it was.
        BackendMissingError: A backend was named that is not there.
        CacheError: The cache cannot be used.
    """
    check_tunable(model)
    policy = policy or os.environ.get("REPRO_MICROCONV_POLICY") or "powerOfTwo"
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose {', '.join(POLICIES)}")
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; choose {', '.join(MODES)}")
    if not is_whole(workspace_limit):
        raise ValueError(f"workspace_limit is {workspace_limit!r}; give whole bytes, as 64 * 2**20")
    if (workspace_limit := int(workspace_limit)) < 0:
        raise ValueError(f"workspace_limit is {workspace_limit}; it must be at least 0 bytes")
    if not (isinstance(max_error, Real) and max_error > 0):
        raise ValueError(f"max_error is {max_error!r}; give a relative error above 0")
    if not (isinstance(min_gain, Real) and min_gain < 1):
        raise ValueError(f"min_gain is {min_gain!r}; give a share of time below 1")
    alike = _one_kind(devices)
    store = _open_cache(cache)
    training = model.training if training is None else training
    report = TuningReport(mode, policy, workspace_limit, strict)
    calls, report.skipped, others = record_calls(model, sample_input, training)
    found = sorted({call.signature[3] for call in calls})  # the devices
    if len(found) > 1:
        raise NotTunableError(
            f"the model has convolutions on {' and '.join(found)}; tune its parts one by one"
        )
    if alike and not set(found) <= set(alike):
        raise ValueError(
            f"the model is on {found[0]}, which is not among the devices {', '.join(alike)}; name "
            f"it as well"
        )
    report.unavailable = backends.check_names(algorithms, found[0] if found else "cpu")
    tuner = Tuner(report, Bench(algorithms, store, max_error, alike), min_gain)
    tuner.tune(model, calls, others, sample_input, training)
    return report


def _one_kind(devices: Sequence[torch.device | str] | None) -> list[str]:
    """Names of the devices that measure at once.

    Raises:
        ValueError: They are not accelerators of one kind.
    """
    if devices is None:
        return []
    names = list(dict.fromkeys(map(str, devices)))
    if isinstance(devices, str) or not names or not all(map(accelerator.is_accelerator, names)):
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
    """(layer, kernel, mini-batch size) of all that `tune` would consider, in order of use.

    Arguments and errors as `tune`; without `training` only forward passes.
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
        raise CacheError(f"cache is {cache!r}; give a file, a BenchmarkCache, or None for memory")
    if cache != "default":
        return BenchmarkCache(cache)
    try:
        return BenchmarkCache(default_path())
    except CacheError as error:  # of a place that nobody asked for
        warnings.warn(
            f"{error}; results are kept in memory until the process ends",
            CacheWarning,
            stacklevel=3,
        )
        return _MEMORY
