"""Differences and ratios of measured values, with their intervals.

Spreads are pooled over the cells of one design, since three seeds a cell say little about a spread
and thirty cells of them much. Where the cells go up and down together with the seed, seeds are
blocks: cells of the same seeds are compared seed by seed, where there are enough of them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from repro.records import Record


from repro.experiments.judge import NotRun

ALIKE = 0.05  # p of Bartlett's test, below which cells do not share a spread
# p of the F test, below which seeds are blocks. Stricter: where it errs, intervals are too narrow.
BLOCKS = 0.01
# Seeds from which on blocks are compared one by one: fewer know less of their own differences'
# spread than all cells together of each value's. Theirs need not be equally alike (sphericity).
ENOUGH = 6
LEFT = 0.1  # of a spread, what seeds one by one have at least: values are counted, equal by chance


class BySeed(list[float]):
    """The values of one cell, with the seed of each.

    A seed draws the first weights and the order of the samples alike for all cells of a design.
    """

    def __init__(self, values: Iterable[float], seeds: Iterable[int]) -> None:
        super().__init__(values)
        self.seeds = tuple(seeds)
        if len(set(self.seeds)) != len(self):
            raise NotRun(
                f"a cell has several trainings of one seed ({', '.join(map(str, self.seeds))}): "
                "their settings, such as of --set, make several cells one"
            )

    @classmethod
    def of(cls, records: Sequence["Record"], read: Callable[["Record"], float]) -> "BySeed":
        """Read a value of every record.

        Raises:
            NotRun: Two have one seed.
        """
        return cls(map(read, records), (record.seed for record in records))


def logs_of(cell: Sequence[float]) -> Sequence[float]:
    """Return the logarithms of a cell, of the same seeds where it says them."""
    logs = [math.log(value) for value in cell]
    return BySeed(logs, cell.seeds) if isinstance(cell, BySeed) else logs


@dataclass(frozen=True)
class Spread:
    """A standard deviation pooled over cells: seeds within a cell differ, cells are not mixed.

    Attributes:
        sd: NaN where no cell has two values.
        dof: Degrees of freedom.
        alike: Whether the cells may share it, by Bartlett's test: a few updates on a large batch
            scatter more than many on a small one. Where they do not, `contrast` leaves it.
        blocks: Whether the cells say their seeds (`BySeed`) and follow them, by the F test.
    """

    sd: float
    dof: int
    alike: bool = True
    blocks: bool = False

    @classmethod
    def pooled(cls, cells: Iterable[Sequence[float]]) -> "Spread":
        """Pool the spread within each cell; a cell of one value adds nothing."""
        several = [cell for cell in cells if len(cell) > 1]
        variances = []  # of each cell: variance, degrees of freedom
        for cell in several:
            mean = math.fsum(cell) / len(cell)
            dof = len(cell) - 1
            variances.append((math.fsum((value - mean) ** 2 for value in cell) / dof, dof))
        total = sum(dof for _, dof in variances)
        if not total:
            return cls(math.nan, 0)
        variance = math.fsum(v * dof for v, dof in variances) / total
        spread = cls(math.sqrt(variance), total, _alike(variances, variance, total))
        return replace(spread, blocks=_blocks(several, spread))

    @classmethod
    def pooled_logs(cls, cells: Iterable[Sequence[float]]) -> "Spread":
        """Pool the spread of logarithms, for `ratio`."""
        return cls.pooled(map(logs_of, cells))


def _alike(cells: Sequence[tuple[float, int]], pooled: float, total: int) -> bool:
    """Test equal variances (Bartlett 1937)."""
    if len(cells) < 2 or pooled == 0:
        return True
    if not math.isfinite(pooled):
        return False
    from scipy.special import chdtrc

    # Equal values by chance are no proof of a spread of 0.
    logs = math.fsum(dof * math.log(max(v, 1e-6 * pooled)) for v, dof in cells)
    statistic = total * math.log(pooled) - logs
    correction = 1 + (math.fsum(1 / dof for _, dof in cells) - 1 / total) / (3 * (len(cells) - 1))
    return bool(chdtrc(len(cells) - 1, statistic / correction) >= ALIKE)


def _blocks(cells: Sequence[Sequence[float]], spread: Spread) -> bool:
    """Test whether seeds tell of the values, beside their cells (randomised block design)."""
    of_seeds = [cell for cell in cells if isinstance(cell, BySeed)]
    if len(of_seeds) < len(cells) or not spread.alike or not 0 < spread.sd < math.inf:
        return False
    # A copy, such as of trainings whose decay never came, would follow its seeds by itself.
    distinct = {(cell.seeds, tuple(cell)): cell for cell in of_seeds}
    if len(distinct) < len(cells):
        return Spread.pooled(distinct.values()).blocks
    import numpy as np
    from scipy.special import fdtrc

    values = np.array([value for cell in of_seeds for value in cell])
    cell_of = np.array([number for number, cell in enumerate(of_seeds) for _ in cell])
    seed_of = np.array([seed for cell in of_seeds for seed in cell.seeds])
    columns = np.hstack([of[:, None] == np.unique(of)[None, :] for of in (cell_of, seed_of)])
    fitted, _, rank, _ = np.linalg.lstsq(columns.astype(float), values, rcond=None)
    dof = len(values) - int(rank)
    if not dof or dof == spread.dof:
        return False
    left = float(((values - columns @ fitted) ** 2).sum())
    by_seeds = max(0.0, spread.sd**2 * spread.dof - left) / (spread.dof - dof)
    left = max(left, 1e-6 * spread.sd**2)
    return bool(fdtrc(spread.dof - dof, dof, by_seeds / (left / dof)) < BLOCKS)


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


def contrast(
    cells: Sequence[Sequence[float]],
    weights: Sequence[float],
    spread: Spread | None = None,
    least: Sequence[float] | None = None,
    *,
    log: bool = False,
    unit: str = "",
    digits: int = 2,
    trials: str = "seeds",
) -> Gap:
    """Return the sum of the cells' means, each times its weight.

    The error is of the spread that cells share, and Welch's and Satterthwaite's where they share
    none. Where seeds are blocks it is of each seed's own contrast, if it comes of the same seeds
    (`ENOUGH` of them) and its weights come to 0, so that what a seed gives to all cells drops out.

    Args:
        cells: Values of each, such as seeds; of ratios the logarithms.
        weights: Of each cell.
        spread: Pooled over the cells of the design; None for Welch's.
        least: The spread that each cell has at least, such as of rounding.
        log: Whether the values are logarithms.
        unit: For the evidence.
        digits: Behind the point, in words.
        trials: What the values are; ``rounds`` of a timing.

    Raises:
        NotRun: A cell is empty.
    """
    floors = least or [0.0] * len(cells)
    used = [(c, w, low) for c, w, low in zip(cells, weights, floors, strict=True) if w]
    if not used or not all(len(cell) for cell, _, _ in used):
        raise NotRun("no records")
    if not all(math.isfinite(value) for cell, _, _ in used for value in cell):
        return unsure(math.nan, log, unit, digits)
    mean = math.fsum(weight * math.fsum(cell) / len(cell) for cell, weight, _ in used)
    # Two cells of so many values each, and of the spread below, would give the same error.
    count = len(used) / math.fsum(1 / len(cell) for cell, _, _ in used)

    def as_gap(variances: Sequence[float], dof: float) -> Gap:
        error = math.sqrt(math.fsum(variances))
        seed_dof = dof / (count - 1) if count > 1 and math.isfinite(dof) else 2.0
        sd = error * math.sqrt(count / 2)
        return Gap(mean, error, dof, sd, log, unit, digits, seed_dof, trials)

    def shared(sd: float) -> list[float]:
        return [weight**2 * max(sd, low) ** 2 / len(cell) for cell, weight, low in used]

    comes_to_0 = abs(math.fsum(weight for _, weight, _ in used)) < 1e-9
    if spread and spread.blocks and comes_to_0 and _of_same_seeds(used):
        apart = math.sqrt(math.fsum(weight**2 for _, weight, _ in used))
        sd = max(Spread.pooled([_of_each_seed(used)]).sd, LEFT * spread.sd * apart)
        return as_gap([max(sd**2 / count, math.fsum(shared(0.0)))], len(used[0][0]) - 1)
    # What seeds give to the mean of one cell scatters by as many of them, not by all cells.
    if spread and spread.dof and spread.alike and (comes_to_0 or not spread.blocks):
        return as_gap(shared(spread.sd), spread.dof)
    if min(len(cell) for cell, _, _ in used) < 2:
        return as_gap([math.nan], math.nan)
    variances = [
        weight**2 * max(Spread.pooled([cell]).sd, low) ** 2 / len(cell)
        for cell, weight, low in used
    ]
    freedom = math.fsum(v**2 / (len(c) - 1) for v, (c, _, _) in zip(variances, used, strict=True))
    return as_gap(variances, math.fsum(variances) ** 2 / freedom if freedom else math.inf)


_Used = Sequence[tuple[Sequence[float], float, float]]  # cell, weight, least spread


def _of_same_seeds(used: _Used) -> bool:
    """Whether cells have the same seeds, and `ENOUGH` of them."""
    seeds = {frozenset(c.seeds) if isinstance(c, BySeed) else None for c, _, _ in used}
    return len(seeds) == 1 and None not in seeds and len(used[0][0]) >= ENOUGH


def _of_each_seed(used: _Used) -> list[float]:
    """Return the contrast of each seed alone."""
    of: dict[int, float] = {}
    for cell, weight, _ in used:
        assert isinstance(cell, BySeed)
        for seed, value in zip(cell.seeds, cell, strict=True):
            of[seed] = of.get(seed, 0.0) + weight * value
    return list(of.values())


def difference(
    first: Sequence[float],
    second: Sequence[float],
    spread: Spread | None = None,
    unit: str = "",
    digits: int = 2,
) -> Gap:
    """Return ``mean(first) - mean(second)``, as `contrast` of the two.

    Args:
        first: Values of one cell, such as seeds.
        second: Of the other.
        spread: Pooled over the cells of the design; None for Welch's error from these two alone.
        unit: For the evidence.
        digits: Behind the point, in words.

    Raises:
        NotRun: One of them is empty.
    """
    return contrast([first, second], [1.0, -1.0], spread, unit=unit, digits=digits)


def ratio(
    first: Sequence[float],
    second: Sequence[float],
    spread: Spread | None = None,
    digits: int = 2,
    *,
    trials: str = "seeds",
) -> Gap:
    """Return the ratio of geometric means of positive values, first over second.

    Args:
        first: Such as times of one way, in turns with the other's.
        second: Of the other way.
        spread: Of logarithms (`Spread.pooled_logs`); None for Welch's error.
        digits: Behind the point, in words.
        trials: What the values are; ``rounds`` of a timing.

    Raises:
        NotRun: One of them is empty.
        ValueError: A value is not above 0.
    """
    wrong = [value for value in (*first, *second) if not value > 0]
    if wrong:
        raise ValueError(f"a ratio needs values above 0, got {wrong[0]}")
    logs = [logs_of(first), logs_of(second)]
    return contrast(logs, [1.0, -1.0], spread, log=True, digits=digits, trials=trials)


def paired(
    first: Sequence[float],
    second: Sequence[float],
    unit: str = "",
    digits: int = 2,
    *,
    resolution: float = 0.0,
) -> Gap:
    """Return the mean of ``first - second``, of pairs that are alike but for what is asked.

    Seeds alone are no pairs: whether they are blocks a whole design says (`Spread.blocks`).

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
