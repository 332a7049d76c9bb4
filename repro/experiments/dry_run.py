"""The first steps of a run without its data, device or time: does it start, its memory, its time.

The experiment's own function runs on tensors that have shapes and no content, and is stopped after
a few steps of one optimizer. A recipe that cannot start fails here.
"""

import gc
import math
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from repro.datasets import ImageData, Split
from repro.datasets.catalogue import TRAIN_SHARE
from repro.experiments import arguments
from repro.experiments.design import SEEDS, Artefact, Paper, Run, UsageError
from repro.experiments.one_run import Enough
from repro.experiments.run import Setting
from repro.measure import MemoryMeter, is_out_of_memory
from repro.measure.datasheets import DEVICES, GIB, LAUNCH_S, REACHED
from repro.measure.fake_tensors import NotedOperations, Work, imagined
from repro.report import DASH

STEPS = 2  # of one optimizer, which has its state from the second on
FAILS, UNTRIED, NO_STEP = "fails: ", "cannot be tried without the device: ", "has no training step"
GROUNDS = (
    f"The first {STEPS} training steps on tensors without content. Memory is of live tensors, by "
    "the run's own meter where it has one; a kernel's workspace comes on top, and so do images or "
    "batches that grow later. Times are ESTIMATED, not measured: all epochs as the last of these "
    f"steps, each operation by itself at {100 * REACHED:.0f} % of the data sheet's rate of "
    f"computing or moving, at least {1e6 * LAUNCH_S:.0f} μs, without loading and evaluation."
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
    """Return a dataset of the shape that `repro.datasets.load` gives; see `imagined`.

    Args:
        wanted: The ``dataset`` of a run's configuration.
    """
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


@dataclass(frozen=True)
class Tried:
    """The first steps of a run."""

    result: str  # starts, out of memory, `NO_STEP`, or a reason after `FAILS` or `UNTRIED`
    model: str = DASH  # its class, with the number of its parameters
    images: str = DASH  # sizes of an input without the batch, such as 3×32×32
    peak_bytes: int | None = None  # live tensors at most
    steps: float | None = None  # of the whole run, if all are as the last one; None: no training
    work: Work = Work(())  # noqa: RUF009 (frozen)


class _NotTried(BaseException):
    """A run needs the values of tensors, or a process or a file; the text says which."""


class _Watch:
    """Notes models, steps and peaks while an experiment runs."""

    def __init__(self) -> None:
        self.most = 0  # steps of one optimizer
        self.model, self.images, self.samples = DASH, DASH, 0
        self.work = Work(())
        self.peaks: list[int] = []  # of the experiment's own meters
        self.noted = NotedOperations()
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # frees their memory
        self._outer: nn.Module | None = None  # the first module called since the last step
        self._samples = 0

    def called(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note a forward pass: each of the outermost module is one of a (micro-)batch."""
        if self._outer is None and next(module.parameters(), None) is not None:
            self._outer = module
            self.noted.operations.clear()  # of loading the batch
            count = sum(parameter.numel() for parameter in module.parameters())
            self.model = f"{type(module).__name__}, {count / 1e6:.3g} M parameters"
        if module is self._outer and inputs and isinstance(inputs[0], Tensor):
            self._samples += len(inputs[0])
            self.images = "×".join(map(str, inputs[0].shape[1:]))

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the end of a step."""
        self.work, self.samples = Work(tuple(self.noted.operations)), self._samples
        self._outer, self._samples = None, 0
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self.most = max(self.most, self._steps[optimizer])
        if self.most == STEPS:
            raise Enough


@contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    """Make tensors without content, tell `watch` of their use, refuse the use of values."""
    from repro.outofcore import OutOfCore

    leave, call = MemoryMeter.__exit__, nn.Module.__call__

    def leaving(meter: MemoryMeter, *exception: Any) -> None:
        leave(meter, *exception)
        watch.peaks.append(meter.peak_bytes)

    def calling(module: nn.Module, *inputs: Any, **options: Any) -> Any:
        watch.called(module, inputs)
        return call(module, *inputs, **options)

    refused = (
        (OutOfCore, "__enter__", "it swaps to the host's memory"),
        (BaseProcess, "start", "it starts processes"),
        (subprocess.Popen, "__init__", "it starts processes"),
        (Tensor, "numpy", "it reads files, or values of tensors"),
    )
    gc.collect()  # dual-batch learning looks at all models that are alive
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(register_optimizer_step_post_hook(watch.stepped).remove)
        # Torch's global hooks are refused by checks of losses.
        stack.enter_context(mock.patch.object(nn.Module, "__call__", calling))
        stack.enter_context(mock.patch.object(MemoryMeter, "__exit__", leaving))
        for owner, name, why in refused:
            stack.enter_context(mock.patch.object(owner, name, side_effect=_NotTried(why)))
        stack.enter_context(imagined())
        yield


def try_first_steps(paper: Paper, run: Run) -> Tried:
    """Try the first steps of a run."""
    from repro.microconv import BackendMissingError, NotTunableError

    experiment, config = paper.experiments[run.experiment], run.config
    if not (experiment.trains or experiment.measures):
        return Tried(NO_STEP)
    watch, result = _Watch(), "starts"
    with _watching(watch):
        data = imagined_data(config["dataset"]) if config.get("dataset") else None
        with MemoryMeter("cpu") as meter, watch.noted:
            try:
                experiment.function(config, 0, data, "cpu")
            except Enough:
                pass
            except _NotTried as why:
                return Tried(f"{UNTRIED}{why}")
            except (NotTunableError, BackendMissingError):
                return Tried(f"{UNTRIED}it times the device's kernels")
            except Exception as error:
                first = next(iter(str(error).splitlines()), "")
                if is_out_of_memory(error):
                    result = "out of memory"
                elif type(error).__module__.startswith("torch._subclasses"):
                    return Tried(f"{UNTRIED}it depends on values of tensors ({first})")
                else:
                    return Tried(f"{FAILS}{type(error).__name__}: {first}")
            peak = watch.peaks[-1] if watch.peaks else meter.peak_bytes
    if not watch.most and result == "starts":
        return Tried(NO_STEP)
    steps = None  # a refused run takes no time
    if result == "starts" and experiment.trains and data is not None and watch.samples:
        epochs = sum(n for n, _ in config["stages"]) if "stages" in config else config["epochs"]
        steps = epochs * (config.get("train_samples") or len(data.train)) / watch.samples
    return Tried(result, watch.model, watch.images, peak, steps, watch.work)


def try_runs(
    named: Sequence[tuple[Paper, Sequence[Artefact]]],
    setting: Setting,
    kept: arguments.Choices,
    on: str,
    given: Mapping[str, Any],
    tell: Callable[[str], None],
) -> list[dict[str, str]]:
    """Try the first steps of runs.

    Args:
        named: Papers with some of their artefacts.
        setting: Profile (``gpu`` or ``paper``), seeds and changes of the runs.
        kept: Keys and values of ``--only``; see `arguments.only`.
        on: A device of `DEVICES`, by whose data sheet times are estimated.
        given: Options that mean nothing here, by name.
        tell: Called with each run's name before it is tried.

    Returns:
        A row for each model, size of images and result of every artefact.

    Raises:
        UsageError: One of those options is given, or the profile, device or a choice is none.
    """
    import pandas as pd

    for name in [name for name, value in given.items() if value]:
        raise UsageError(
            f"--dry-run needs neither data nor device, and takes no --{name}; leave it out "
            "(--on names the device whose time is estimated)"
        )
    profile, seeds = setting.profile, setting.seeds
    if profile not in ("gpu", "paper"):
        raise UsageError(
            f"--dry-run tries what a GPU would run, and the profile is {profile}; "
            "add --profile gpu or paper"
        )
    if on not in DEVICES:
        raise UsageError(f"--on is {on!r}; choose {', '.join(DEVICES)}")
    listed: list[dict[str, Any]] = []
    for paper, artefacts in named:
        # The papers' own data, at hand or not.
        chosen = {task: next(iter(names), "") for task, names in paper.datasets[profile].items()}
        plan = arguments.plan(paper, artefacts, profile, chosen)
        # Choices are of the whole plan: an artefact may lack the key, as where all is computed.
        varied = arguments.changed_runs(paper, plan, setting.changed)
        wanted = set(arguments.only(list(varied.values()), kept))
        tried: dict[Run, Tried] = {}
        for artefact in artefacts:
            name = f"{paper.key}/{artefact.name}"
            for run in dict.fromkeys(varied[run] for run in artefact.runs(profile, chosen)):
                if run not in wanted:
                    continue
                if run not in tried:
                    tell(f"{name}: {run}")
                    tried[run] = try_first_steps(paper, run)
                one = tried[run]
                count = len(seeds or SEEDS[profile] if run.seeds is None else run.seeds)
                seconds = count * (one.steps or math.nan) * one.work.seconds(DEVICES[on])
                listed.append(
                    {"artefact": name, "runs": count, "model": one.model, "images": one.images}
                    | {"result": one.result, "s": seconds}
                    | {"peak": (one.peak_bytes or math.nan) / GIB}
                )
    if not listed:
        return []
    columns = ["artefact", "model", "images", "result"]
    return [
        {"artefact": artefact, "runs": f"{group.runs.sum()}", "model": model, "images": images}
        | {"peak (GiB)": _range(group.peak.min(), group.peak.max())}
        | {f"h on {on} (ESTIMATED)": _range(group.s.sum(min_count=1) / 3600)}
        | {"result": result}
        for (artefact, model, images, result), group in pd.DataFrame(listed).groupby(
            columns, sort=False
        )
    ]


def _range(*ends: float) -> str:
    return DASH if math.isnan(ends[0]) else " to ".join(dict.fromkeys(f"{v:.3g}" for v in ends))
