"""How the runs of a plan ended, and how long those that are left will take."""

from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean

from repro.experiments.design import Paper
from repro.records import Record, RecordStore, identity, reference_stores


@dataclass
class Tally:
    """How the runs of a plan ended."""

    done: int = 0  # computed here and now
    stood: int = 0  # had a record before
    elsewhere: int = 0  # computed by another process meanwhile
    out_of_memory: int = 0  # of those computed here
    failed: int = 0  # of those computed here
    failed_before: int = 0  # of the others, those that failed then
    left: int = 0  # not begun, as it was time to end
    left_out: int = 0  # not computed, for a library that is not installed
    missing: list[str] = field(default_factory=list)  # why, each reason once: a library to install

    def __str__(self) -> str:
        text = (
            f"{self.done} computed ({self.out_of_memory} out of memory, {self.failed} failed), "
            f"{self.stood} had a record"
        )
        if self.elsewhere:
            text += f", {self.elsewhere} computed by another process"
        if self.left:
            text += f", {self.left} left: the same command goes on"
        if self.left_out:
            text += f", {self.left_out} left out ({'; '.join(self.missing)})"
        if self.failed_before:
            text += f"; {self.failed_before} failed before, --retry-failed computes them again"
        return text


class Forecast:
    """Expected seconds of runs, by their name, from earlier ones.

    Args:
        before: Seconds of earlier runs here, else of reference records.
    """

    def __init__(self, before: dict[str, float]) -> None:
        self.before = before
        self._here: dict[str, list[float]] = {}

    def learn(self, name: str, seconds: float) -> None:
        """Note the seconds of a run here and now."""
        self._here.setdefault(name, []).append(seconds)

    def expected(self, name: str) -> float | None:
        """Return the expected seconds of a run, None where nothing is known of any run.

        A run that is not known at all takes the mean of those here, else of those before.
        """
        if name in self._here:
            return fmean(self._here[name])
        if name in self.before:
            return self.before[name]
        means = list(map(fmean, self._here.values())) or list(self.before.values())
        return fmean(means) if means else None


def in_words(seconds: float | None) -> str:
    """Return a remaining time in words, as coarse as it is known."""
    if seconds is None:
        return "for an unknown time"
    minutes = round(seconds / 60)
    if minutes < 2:
        return "about a minute" if seconds > 20 else "less than a minute"
    return f"about {minutes} min" if minutes < 120 else f"about {minutes / 60:.1f} h"


def took_before(paper: Paper, local: RecordStore) -> dict[str, float]:
    """Return the seconds of earlier runs, of any version: here, else of the references."""
    return {
        identity(record.experiment, record.config, 0): seconds_of(record)
        for store in (*reference_stores().values(), local)
        for record in store.read(paper.key)[0]
    }


def seconds_of(record: Record) -> float:
    """Return how long a record took; records tell whole seconds."""
    begun, ended = map(datetime.fromisoformat, (record.started, record.finished))
    return max(0.0, (ended - begun).total_seconds())
