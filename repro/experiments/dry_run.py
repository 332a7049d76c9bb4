"""The first steps of a run without its data, device or time: does it start, and its memory.

The experiment's own function runs on tensors that have shapes and no content, and is stopped after
a few steps of one optimizer. A recipe that cannot start fails here.
"""

import gc
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from repro.datasets import ImageData, Split
from repro.datasets.catalogue import TRAIN_SHARE
from repro.experiments import arguments
from repro.experiments.design import Artefact, Paper, Run, UsageError
from repro.experiments.one_run import Enough
from repro.experiments.run import Setting
from repro.measure import MemoryMeter, is_out_of_memory
from repro.measure.fake_tensors import imagined
from repro.report import DASH

STEPS = 2  # of one optimizer, which has its state from the second on
FAILS, UNTRIED, NO_STEP = "fails: ", "cannot be tried without the device: ", "has no training step"
GROUNDS = (
    f"The first {STEPS} training steps on tensors without content. Memory is of live tensors, by "
    "the run's own meter where it has one; a kernel's workspace comes on top, and so do images or "
    "batches that grow later."
)
# Images of the training and the test split, classes, height and width.
_SETS: dict[str, tuple[int, int, int, tuple[int, int]]] = {
    "cifar10": (50_000, 10_000, 10, (32, 32)),
    "cifar100": (50_000, 10_000, 100, (32, 32)),
    "flowers102": (1_020, 6_149, 102, (500, 500)),
    "carvana": (4_080, 1_008, 2, (1280, 1918)),  # targets are masks
    "imagenet": (1_281_167, 50_000, 1000, (224, 224)),
    "div2k": (800, 100, 0, (648, 2040)),
}
_FLOWERS = 8_189  # of Flowers-102, in all its splits


def imagined_data(wanted: Mapping[str, Any]) -> ImageData:
    """Return a dataset of the shape that `repro.datasets.load` gives for ``config["dataset"]``."""
    name, size = wanted["name"], wanted.get("image_size")
    phantom = name == "phantom"
    train, test, classes, sides = (
        (wanted["train"], wanted["test"], 0, (size, size)) if phantom else _SETS[name]
    )
    if size is not None:
        sides = (size, size) if isinstance(size, int) else tuple(size)
    if wanted.get("split") == "random":
        train, test = round(TRAIN_SHARE * _FLOWERS), _FLOWERS - round(TRAIN_SHARE * _FLOWERS)

    def split(count: int) -> Split:
        images = torch.empty(count, 1 if phantom else 3, *sides, dtype=torch.uint8)
        masks = torch.empty(count, *sides, dtype=torch.uint8) if name == "carvana" else None
        labelled = classes and masks is None
        return Split(images, torch.empty(count, dtype=torch.int64) if labelled else None, masks)

    names = tuple(map(str, range(classes)))
    return ImageData(
        name, name, "real", "Shapes alone.", f"imagined {wanted}", names, split(train), split(test)
    )


class _NotTried(BaseException):
    """A run needs the values of tensors, or a process or a file; the text says which."""


@contextmanager
def _watching(peaks: list[int], most: list[int]) -> Iterator[None]:
    """Make tensors without content, note meters' peaks and steps, refuse the use of values."""
    from repro.outofcore import OutOfCore

    leave = MemoryMeter.__exit__
    steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # frees their memory

    def leaving(meter: MemoryMeter, *exception: Any) -> None:
        leave(meter, *exception)
        peaks.append(meter.peak_bytes)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        steps[optimizer] = steps.get(optimizer, 0) + 1
        most.append(steps[optimizer])
        if steps[optimizer] == STEPS:
            raise Enough

    refused = (
        (OutOfCore, "__enter__", "it swaps to the host's memory"),
        (BaseProcess, "start", "it starts processes"),
        (subprocess.Popen, "__init__", "it starts processes"),
        (Tensor, "numpy", "it reads files, or values of tensors"),
    )
    gc.collect()  # dual-batch learning looks at all models that are alive
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(register_optimizer_step_post_hook(stepped).remove)
        stack.enter_context(mock.patch.object(MemoryMeter, "__exit__", leaving))
        for owner, name, why in refused:
            stack.enter_context(mock.patch.object(owner, name, side_effect=_NotTried(why)))
        stack.enter_context(imagined())
        yield


def try_first_steps(paper: Paper, run: Run) -> tuple[str, int | None]:
    """Try the first steps of a run; return how that ends, and the most bytes of live tensors.

    It starts, is out of memory, has `NO_STEP`, or there is a reason after `FAILS` or `UNTRIED`.
    """
    from repro.microconv import BackendMissingError, NotTunableError

    experiment, config = paper.experiments[run.experiment], run.config
    if not (experiment.trains or experiment.measures):
        return NO_STEP, None
    peaks: list[int] = []  # of the experiment's own meters
    most: list[int] = []  # steps of one optimizer
    result = "starts"
    with _watching(peaks, most):
        data = imagined_data(config["dataset"]) if config.get("dataset") else None
        with MemoryMeter("cpu") as meter:
            try:
                experiment.function(config, 0, data, "cpu")
            except Enough:
                pass
            except (_NotTried, NotImplementedError) as why:  # the latter on a CPU
                return f"{UNTRIED}{why}", None
            except (NotTunableError, BackendMissingError):
                return f"{UNTRIED}it times the device's kernels", None
            except Exception as error:
                first = next(iter(str(error).splitlines()), "")
                if is_out_of_memory(error):
                    result = "out of memory"
                elif type(error).__module__.startswith("torch._subclasses"):
                    return f"{UNTRIED}it depends on values of tensors ({first})", None
                else:
                    return f"{FAILS}{type(error).__name__}: {first}", None
            peak = peaks[-1] if peaks else meter.peak_bytes
    if not most and result == "starts":
        return NO_STEP, None
    return result, peak


def try_runs(
    named: Sequence[tuple[Paper, Sequence[Artefact]]],
    setting: Setting,
    kept: arguments.Choices,
    tell: Callable[[str], None],
) -> list[dict[str, str]]:
    """Try the first steps of runs with the papers' own data, at hand or not; a row for each."""
    profile, rows = setting.profile, []
    if profile not in ("gpu", "paper"):
        raise UsageError(
            f"--dry-run tries what a GPU would run, and the profile is {profile}; "
            "add --profile gpu or paper"
        )
    for paper, artefacts in named:
        chosen = {task: next(iter(names), "") for task, names in paper.datasets[profile].items()}
        for run in arguments.plan(paper, artefacts, profile, chosen, setting.changed, kept):
            name = f"{paper.key} {run}"
            tell(name)
            result, peak = try_first_steps(paper, run)
            size = DASH if peak is None else f"{peak / 2**30:.3g}"
            rows.append({"run": name, "peak (GiB)": size, "result": result})
    return rows
