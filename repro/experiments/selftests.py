"""Small computations that show whether a method works on a device: what `doctor` runs of a paper.

A paper's are in its own ``selftest.py`` as `TESTS`. Each compares what the method gives on the
device with what plain torch gives, on the CPU or where bits count on the device itself.
"""

import importlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from repro.experiments import PAPERS
from repro.measure import accelerator
from repro.measure.precision import without_tf32


class NotHere(Exception):
    """A self-test needs what this machine lacks; the text says what."""


@dataclass(frozen=True)
class SelfTest:
    """One comparison.

    Attributes:
        text: What is compared with what.
        tolerance: Largest `relative_difference` that passes; 0 is to the bit.
        run: Given the device, returns the difference. It raises `NotHere` where it cannot be run.
    """

    text: str
    tolerance: float
    run: Callable[[str], float]


@dataclass(frozen=True)
class Checked:
    """What a self-test came to.

    Attributes:
        paper: Key of the paper.
        text: What was compared.
        status: ``ok``, ``failed`` (it differs, or ended with an error) or ``not run``.
        tolerance: Of the comparison.
        difference: None where there is none, or where it is not finite.
        seconds: How long it took.
        why: One line where it is not ``ok``.
    """

    paper: str
    text: str
    status: str
    tolerance: float | None
    difference: float | None
    seconds: float
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def relative_difference(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference over all tensors, relative to each one's largest value.

    Another number of tensors, another shape or a NaN is infinitely different.
    """
    ours = [tensor.detach().cpu().double() for tensor in actual]
    theirs = [tensor.detach().cpu().double() for tensor in expected]
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return math.inf
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one.numel() and not torch.equal(one, other):
            scale = float(other.abs().max()) or 1.0
            difference = float((one - other).abs().max()) / scale
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def tests_of(paper: str) -> Sequence[SelfTest]:
    """Return a paper's self-tests."""
    tests: Sequence[SelfTest] = importlib.import_module(f"repro.experiments.{paper}.selftest").TESTS
    return tests


def run_all(device: str, tell: Callable[[str], None] = lambda line: None) -> list[Checked]:
    """Run the self-tests of all papers; one that fails keeps no other from running.

    Args:
        device: Its one name, such as ``cuda:0``.
        tell: Called with a line before each.
    """
    results = []
    for paper in PAPERS:
        try:
            tests = tests_of(paper)
        except Exception as error:  # such as a library that cannot be loaded
            results.append(Checked(paper, "its code loads", "failed", None, None, 0.0, said(error)))
            continue
        for test in tests:
            tell(f"self-test of {paper}: {test.text}")
            results.append(run_one(paper, test, device))
    return results


def run_one(paper: str, test: SelfTest, device: str) -> Checked:
    """Run a self-test, whose error is a result."""
    start, difference, why = time.perf_counter(), None, ""
    status = "failed"
    try:
        with (
            without_tf32(),  # which differs from a CPU's float32 by 1e-3
            accelerator.forked_rng(device),
            accelerator.on(device),
            warnings.catch_warnings(action="ignore"),
        ):
            torch.manual_seed(0)
            difference = test.run(device)
            accelerator.synchronize(device)
        if difference <= test.tolerance:  # not so for NaN
            status = "ok"
        else:
            why = f"differs by {difference:.2g}, allowed is {test.tolerance:.2g}"
    except NotHere as reason:
        status, why = "not run", str(reason)
    except Exception as error:
        why = said(error)
    with suppress(Exception):  # what an error of the device leaves may fail again
        accelerator.empty_cache(device)
    if difference is not None and not math.isfinite(difference):
        difference = None
    elapsed = time.perf_counter() - start
    return Checked(paper, test.text, status, test.tolerance, difference, elapsed, why)


def said(error: Exception) -> str:
    """Return an error's kind and the first line of what it says."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"


def small_model(seed: int = 0) -> torch.nn.Module:
    """Return a small convolutional network on the CPU, without BatchNorm."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, padding=1, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 8 * 8, 10),
    )


def small_batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return images (samples, 3, 16, 16) and labels (samples,) below 10, on the CPU."""
    made = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 3, 16, 16, generator=made)
    return images, torch.randint(10, (samples,), generator=made)
