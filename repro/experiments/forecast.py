"""How long the rest of a plan will take, and when to begin nothing more."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import fmean

from repro.experiments.outcome import UsageError


@dataclass
class Forecast:
    """The seconds that runs are expected to take, by what they took before.

    Attributes:
        took: Seconds by a run's name, of whatever seed.
        side_by_side: How many runs are computed at a time.
        unknown_s: What a run takes of which nothing is known, where somebody knows better than
            what other runs took elsewhere.
    """

    took: dict[str, float]
    side_by_side: int = 1
    unknown_s: float | None = None
    _here: dict[str, list[float]] = field(default_factory=dict)

    def learn(self, name: str, seconds: float) -> None:
        """Note what a run took here and now, which counts more than what it took elsewhere."""
        self._here.setdefault(name, []).append(seconds)

    def expected(self, name: str) -> float | None:
        """Return what a run of this name takes, None where nothing is known of any run.

        A run that is only known from elsewhere takes as much longer here as the others did; one
        that is not known at all takes what a run here takes in the mean, or `unknown_s`.
        """
        if name in self._here:
            return fmean(self._here[name])
        if name in self.took:
            known = [n for n in self._here if self.took.get(n)]
            took_here = sum(fmean(self._here[n]) for n in known)
            pace = took_here / sum(self.took[n] for n in known) if known else 1.0
            # No machines at hand differ by more, and of short runs the pace says little.
            return self.took[name] * min(4.0, max(0.25, pace))
        means = [fmean(seconds) for seconds in self._here.values()]
        if not means and self.unknown_s is not None:
            return self.unknown_s
        means = means or list(self.took.values())
        return fmean(means) if means else None

    def left(self, names: Mapping[str, int], alone: Collection[str] = frozenset()) -> float | None:
        """Return the seconds that so many runs of each name will take, None where unknown.

        Args:
            names: How many runs of each name are left.
            alone: Those that are computed one at a time, as measurements are.
        """
        total = 0.0
        for name, count in names.items():
            seconds = self.expected(name)
            if seconds is None:
                return None
            total += seconds * count / (1 if name in alone else self.side_by_side)
        return total


def in_words(seconds: float | None) -> str:
    """Return a time that is left in words: no finer than it is known."""
    if seconds is None:
        return "for an unknown time"
    minutes = round(seconds / 60)
    if minutes < 2:
        return "about a minute" if seconds > 20 else "less than a minute"
    if minutes < 120:
        return f"about {minutes} min"
    return f"about {minutes / 60:.1f} h"


def ending(
    until: str | None, hours: float | None, now: Callable[[], datetime] = datetime.now
) -> float | None:
    """Return when to begin no further run, on `time.monotonic`'s clock; None for never.

    Args:
        until: A time of day, such as ``02:30``: the next one.
        hours: From now on.
        now: The clock on the wall.

    Raises:
        UsageError: Both are given, or one is no such value.
    """
    if until is None and hours is None:
        return None
    if until is not None and hours is not None:
        raise UsageError(f"--until is {until!r} and --hours {hours:g}; give one of them")
    if hours is not None:
        if not 0 < hours < 10_000:
            raise UsageError(f"--hours is {hours:g}; give a number above 0, such as 2.5")
        return time.monotonic() + 3600 * hours
    try:
        asked = datetime.strptime(str(until), "%H:%M")
    except ValueError:
        raise UsageError(f"--until is {until!r}; give a time of day such as 02:30") from None
    today = now()
    end = today.replace(hour=asked.hour, minute=asked.minute, second=0, microsecond=0)
    if end <= today:
        end += timedelta(days=1)
    return time.monotonic() + (end - today).total_seconds()
