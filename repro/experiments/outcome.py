"""What the code that runs shares with the code that judges: an outcome, the paper's numbers.

Records depend on this module, and so not on how claims are judged or tables are made.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from repro import paths

if TYPE_CHECKING:
    from repro.measure import Timing

RAY_ADDRESS = "REPRO_RAY_ADDRESS"  # of the cluster that trainings on Ray use; empty: one is started


class UsageError(ValueError):
    """Something was asked for that does not exist; the text names what does."""


class LibraryMissing(UsageError):
    """A run needs a library that is not installed; the text says what to install."""


def no_record(error: RuntimeError) -> UsageError:
    """Return what to raise for an error of a cluster, which says nothing of the method."""
    kind = LibraryMissing if isinstance(error.__cause__, ImportError) else UsageError
    return kind(str(error))


@dataclass(frozen=True)
class Outcome:
    """What an experiment's function returns: the measured part of a record."""

    metrics: dict[str, Any]
    timings: dict[str, Timing] = field(default_factory=dict)
    peak_bytes: int | None = None


@cache
def paper_toml(paper: str) -> dict[str, Any]:
    """Return ``PAPER/paper.toml``: a paper's promises, reported numbers and claims."""
    path = paths.PACKAGE / "experiments" / paper / "paper.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def reported(paper: str) -> dict[str, Any]:
    """Return the numbers that a paper reports."""
    numbers: dict[str, Any] = paper_toml(paper)["reported"]
    return numbers
