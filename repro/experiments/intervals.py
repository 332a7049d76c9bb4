"""Differences and ratios of measured values, with their intervals.

Spreads are pooled over the cells of one design, since three seeds a cell say little about a spread
and thirty cells of them much. Where the cells go up and down together with the seed, seeds are
blocks: cells of the same seeds are compared seed by seed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from repro.records import Record


class NotRun(LookupError):
    """Records that a claim needs are missing; the text says which."""


ALIKE = 0.05  # p of Bartlett's test, below which cells do not share a spread
# p of the F test, below which seeds are blocks. Stricter: where it errs, intervals are too narrow.
BLOCKS = 0.01


class BySeed(list[float]):
    """The values of one cell, with the seed of each.

    A seed draws the first weights and the order of the samples alike for all cells of a design.
    """

    def __init__(self, values: Iterable[float], seeds: Iterable[int]) -> None:
        super().__init__(values)
        self.seeds = tuple(seeds)
        if len(set(self.seeds)) != len(self):
            raise ValueError(f"{len(self)} values have the seeds {self.seeds}; give one to each")

    @classmethod
    def of(cls, records: Sequence["Record"], read: Callable[["Record"], float]) -> "BySeed":
        """Read a value of every record."""
        return cls(map(read, records), (record.seed for record in records))


@dataclass(frozen=True)
class Spread:
    """A standard deviation pooled over cells: seeds within a cell differ, cells are not mixed.

    Attributes:
        sd: NaN where no cell has two values.
        dof: Degrees of freedom.
        alike: Whether the cells may share it, by Bartlett's test: a few updates on a large batch
            scatter more than many on a small one. Where they do not, `difference` leaves it.
        within: What is left of it within seeds, for cells of the same seeds; None where seeds are
            no blocks (see `BLOCKS`) or the cells are not `BySeed`.
    """

    sd: float
    dof: int
    alike: bool = True
    within: "Spread | None" = None

    @classmethod
    def pooled(cls, cells: Iterable[Sequence[float]]) -> "Spread":
        """Pool the spread within each cell; a cell of one value adds nothing."""
        cells = list(cells)
        variances = []  # of each cell: variance, degrees of freedom
        for cell in cells:
            if len(cell) > 1:
                mean = math.fsum(cell) / len(cell)
                dof = len(cell) - 1
                variances.append((math.fsum((value - mean) ** 2 for value in cell) / dof, dof))
        total = sum(dof for _, dof in variances)
        if not total:
            return cls(math.nan, 0)
        variance = math.fsum(v * dof for v, dof in variances) / total
        alike = _alike(variances, variance, total)
        return cls(math.sqrt(variance), total, alike, _within(cells, variance, total))

    @classmethod
    def pooled_logs(cls, cells: Iterable[Sequence[float]]) -> "Spread":
        """Pool the spread of logarithms, for `ratio`."""
        return cls.pooled(map(logs_of, cells))


def logs_of(cell: Sequence[float]) -> Sequence[float]:
    """Return the logarithms of a cell, of the same seeds where it says them."""
    logs = [math.log(value) for value in cell]
    return BySeed(logs, cell.seeds) if isinstance(cell, BySeed) else logs


def _within(cells: Sequence[Sequence[float]], pooled: float, total: int) -> Spread | None:
    """Return the spread that cells and seeds leave (randomised blocks), where seeds are blocks."""
    several = [cell for cell in cells if isinstance(cell, BySeed) and len(cell) > 1]
    if len(several) < sum(len(cell) > 1 for cell in cells) or not math.isfinite(pooled):
        return None
    import numpy as np
    from scipy.special import fdtrc

    values = np.array([value for cell in several for value in cell])
    seeds = sorted({seed for cell in several for seed in cell.seeds})
    columns = np.array(
        [
            [*(other is cell for other in several), *(other == seed for other in seeds)]
            for cell in several
            for seed in cell.seeds
        ],
        dtype=float,
    )
    fitted, _, rank, _ = np.linalg.lstsq(columns, values, rcond=None)
    dof = len(values) - int(rank)
    if not dof or dof == total or pooled == 0:
        return None
    left = float(np.sum((values - columns @ fitted) ** 2))
    # Equal values by chance are no proof of a spread of 0.
    variance = max(left / dof, 1e-6 * pooled)
    by_seeds = max(0.0, pooled * total - left) / (total - dof)
    if fdtrc(total - dof, dof, by_seeds / variance) >= BLOCKS:
        return None
    return Spread(math.sqrt(variance), dof)


def _alike(cells: Sequence[tuple[float, int]], pooled: float, total: int) -> bool:
    """Test equal variances (Bartlett 1937)."""
    if len(cells) < 2 or pooled == 0:
        return True
    from scipy.special import chdtrc

    # Equal values by chance are no proof of a spread of 0.
    logs = math.fsum(dof * math.log(max(v, 1e-6 * pooled)) for v, dof in cells)
    statistic = total * math.log(pooled) - logs
    correction = 1 + (math.fsum(1 / dof for _, dof in cells) - 1 / total) / (3 * (len(cells) - 1))
    return bool(chdtrc(len(cells) - 1, statistic / correction) >= ALIKE)


@dataclass(frozen=True)
class Gap:
    """A difference of two means, or the logarithm of a ratio, with its standard error.

    Attributes:
        mean: The estimate.
        error: Its standard error; 0 for a value that holds exactly, NaN where none is known.
        dof: Degrees of freedom of the error.
        sd: Spread of one value, for the number of seeds that would decide.
        log: Whether it is the logarithm of a ratio.
        unit: Of a difference, for the evidence.
        digits: Behind the point, for the evidence.
        seed_dof: Degrees of freedom that each seed more a cell adds: one for each cell whose
            spread counts.
        trials: What more of would tell: seeds, or the rounds of a timing.
    """

    mean: float
    error: float
    dof: float = math.inf
    sd: float = 0.0
    log: bool = False
    unit: str = ""
    digits: int = 2
    seed_dof: float = 2.0
    trials: str = "seeds"

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the two-sided interval of this level, on the scale of `mean`."""
        if self.error == 0:
            return self.mean, self.mean
        half = _quantile(self.dof, (1 + level) / 2) * self.error
        return self.mean - half, self.mean + half

    def shown(self, value: float) -> str:
        """Return a value of this scale in words, such as an end of its interval."""
        return f"×{math.exp(value):.{self.digits}f}" if self.log else f"{value:+.{self.digits}f}"

    def text(self, level: float = 0.95) -> str:
        """Return the estimate and its interval in words."""
        unit = f" {self.unit}" if self.unit else ""
        low, high = self.interval(level)
        # Which one it is goes without saying for 95 % alone.
        rarer = "" if level == 0.95 else f" at {100 * level:.4g} %"
        if math.isnan(low):
            return f"{self.shown(self.mean)}{unit} (no spread known)"
        if self.error == 0:
            return f"{self.shown(self.mean)}{unit}"
        return f"{self.shown(self.mean)} [{self.shown(low)}, {self.shown(high)}{rarer}]{unit}"

    def __str__(self) -> str:
        return self.text()


def difference(
    first: Sequence[float],
    second: Sequence[float],
    spread: Spread | None = None,
    unit: str = "",
    digits: int = 2,
) -> Gap:
    """Return ``mean(first) - mean(second)``.

    Args:
        first: Values of one cell, such as seeds.
        second: Of the other.
        spread: Pooled over the cells of the design; None, or cells that do not share one, for
            Welch's error from these two alone. What seeds share is left out of it where they are
            blocks and both cells have the same.
        unit: For the evidence.
        digits: Behind the point, in words.

    Raises:
        NotRun: One of them is empty.
    """
    if not len(first) or not len(second):
        raise NotRun("no records")
    if not all(math.isfinite(value) for value in (*first, *second)):
        return replace(unsure(math.nan, unit=unit, digits=digits), mean=math.nan)
    gap = math.fsum(first) / len(first) - math.fsum(second) / len(second)
    # Two cells of so many values each would give the same error.
    count = 2 / (1 / len(first) + 1 / len(second))

    def as_gap(error: float, dof: float, sd: float) -> Gap:
        seed_dof = dof / (count - 1) if count > 1 and math.isfinite(dof) else 2.0
        return Gap(gap, error, dof, sd, unit=unit, digits=digits, seed_dof=seed_dof)

    if spread is not None and spread.dof and spread.alike:
        if spread.within is not None and same_seeds([first, second]):
            spread = spread.within
        return as_gap(spread.sd * math.sqrt(2 / count), spread.dof, spread.sd)
    if min(len(first), len(second)) < 2:
        return as_gap(math.nan, math.nan, math.nan)
    squares = [Spread.pooled([sample]).sd ** 2 / len(sample) for sample in (first, second)]
    total = sum(squares)
    dof = (
        total**2 / sum(v**2 / (len(s) - 1) for v, s in zip(squares, (first, second), strict=True))
        if total
        else math.inf
    )
    return as_gap(math.sqrt(total), dof, math.sqrt(total * count / 2))


def same_seeds(cells: Sequence[Sequence[float]]) -> bool:
    """Return whether cells say their seeds, and all the same."""
    seeds = {frozenset(cell.seeds) if isinstance(cell, BySeed) else None for cell in cells}
    return len(seeds) == 1 and None not in seeds


def ratio(
    first: Sequence[float],
    second: Sequence[float],
    spread: Spread | None = None,
    digits: int = 2,
    *,
    trials: str = "seeds",
    resolution: float = 0.0,
) -> Gap:
    """Return the ratio of geometric means of positive values, first over second.

    Args:
        first: Such as times of one way, in turns with the other's.
        second: Of the other way.
        spread: Of logarithms (`Spread.pooled_logs`); None for Welch's error.
        digits: Behind the point, in words.
        trials: What the values are; ``rounds`` of a timing.
        resolution: What `first` is counted in, such as whole epochs: equal counts are no proof of
            a spread of 0, but of one no larger than rounding's.

    Raises:
        NotRun: One of them is empty.
        ValueError: A value is not above 0.
    """
    wrong = [value for value in (*first, *second) if not value > 0]
    if wrong:
        raise ValueError(f"a ratio needs values above 0, got {wrong[0]}")
    gap = difference(logs_of(first), logs_of(second), spread)
    gap = replace(gap, log=True, digits=digits, trials=trials)
    if not resolution or math.isnan(gap.error):
        return gap
    # Of numbers that are spread evenly over what is rounded to one count.
    least = resolution / math.sqrt(12) / (math.fsum(first) / len(first))
    if gap.error >= least / math.sqrt(len(first)):
        return gap
    return replace(gap, error=least / math.sqrt(len(first)), dof=len(first) - 1, sd=least)


def paired(
    first: Sequence[float],
    second: Sequence[float],
    unit: str = "",
    digits: int = 2,
    *,
    resolution: float = 0.0,
) -> Gap:
    """Return the mean of ``first - second``, of pairs that are alike but for what is asked.

    Seeds alone are no pairs: whether they are blocks a whole design says (`Spread.within`).

    Args:
        first: Values of one way.
        second: Of the other, in the same order.
        unit: For the evidence.
        digits: Behind the point, in words.
        resolution: What the values are counted in, such as one test image: equal values are no
            proof of a spread of 0, but of one no larger than rounding's.

    Raises:
        NotRun: They are empty.
        ValueError: They are not of one length.
    """
    apart = [one - other for one, other in zip(first, second, strict=True)]
    if not apart:
        raise NotRun("no records")
    mean, spread = math.fsum(apart) / len(apart), Spread.pooled([apart])
    sd = max(spread.sd, resolution / math.sqrt(12)) if spread.dof else math.nan
    # Of `seeds_to_decide`, two cells of such a spread have a difference with this error.
    return Gap(
        mean,
        sd / math.sqrt(len(apart)),
        spread.dof or math.nan,
        sd / math.sqrt(2),
        unit=unit,
        digits=digits,
        seed_dof=1.0,
    )


def in_turns(
    first: Sequence[float], second: Sequence[float], digits: int = 2, *, trials: str = "rounds"
) -> Gap:
    """Return the ratio of positive values that were taken in turns, first over second.

    A slow spell of the machine meets both values of a round, so that the rounds' own ratios count,
    and their spread makes the error.

    Args:
        first: Such as times of one way, by round.
        second: Of the other way, of the same rounds.
        digits: Behind the point, in words.
        trials: What the values are; ``processes`` where each is the median of one.

    Raises:
        NotRun: One of them is empty.
        ValueError: They are not of one length, or a value is not above 0.
    """
    if not len(first) or not len(second):
        raise NotRun("no records")
    wrong = [value for value in (*first, *second) if not value > 0]
    if wrong:
        raise ValueError(f"a ratio needs values above 0, got {wrong[0]}")
    ours, theirs = ([math.log(value) for value in values] for values in (first, second))
    return replace(paired(ours, theirs, digits=digits), log=True, trials=trials)


def over_processes(
    values: Sequence[float], log: bool = False, unit: str = "", digits: int = 2
) -> Gap:
    """Return the mean of what each process of a measurement came to; its spread makes the error.

    Args:
        values: One of each process; of ratios the logarithms.
        log: Whether they are logarithms of ratios.
        unit: Of others.
        digits: Behind the point, in words.

    Raises:
        NotRun: They are empty.
    """
    gap = paired(values, [0.0] * len(values), unit, digits)
    return replace(gap, log=log, trials="processes")


def exactly(value: float, log: bool = False, unit: str = "", digits: int = 2) -> Gap:
    """Return a value that is the same in every run, such as a count of bytes, as a gap.

    Args:
        value: A difference, or a ratio where `log`.
        log: Whether it is a ratio.
        unit: Of a difference.
        digits: Behind the point, in words.
    """
    return Gap(math.log(value) if log else value, 0.0, log=log, unit=unit, digits=digits)


def unsure(value: float, log: bool = False, unit: str = "", digits: int = 2) -> Gap:
    """Return a single measured value whose spread nobody knows: it decides nothing."""
    return replace(exactly(value, log, unit, digits), error=math.nan, dof=math.nan, sd=math.nan)


@cache
def _quantile(dof: float, probability: float) -> float:
    """Return a quantile of Student's t."""
    if math.isnan(dof):
        return math.nan
    from scipy.special import ndtri, stdtrit  # scipy.stats takes a second to import

    return float(ndtri(probability) if math.isinf(dof) else stdtrit(dof, probability))
