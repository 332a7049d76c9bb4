"""From measured values to a word: an estimate with its interval, three rules, one verdict.

An estimate is a mean of differences, or of log ratios, with a t interval: paired where the design
pairs (trainings by seed, times taken in turns by round), else Welch's. Nothing is tested first to
choose between them. The rule of a claim, its margin and the paper's effect stand in its paper's
``paper.toml``.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

Found = TypeVar("Found")

HALF, QUARTER, TENFOLD = 0.5, 0.25, 10.0  # of the paper's effect
MOST_SEEDS = 200  # a cell; more is beyond reason for trainings
POWER = 0.8
LEVEL, EQUIVALENCE_LEVEL = 0.95, 0.90  # two one-sided tests at 5 % use the 90 % interval

NOT_REPRODUCED, NOT_SEEN = "not reproduced", "not seen here"
WORDS: Mapping[str, str] = {
    "reproduced": "the 95 % interval excludes zero (of a ratio: one) on the paper's side, and the "
    "effect is 0.5 to 10 times the paper's; or, of a claim that two are equal, the 90 % interval "
    "lies within its margin",
    "partly": "the side is certain and the size is not the paper's, in all cases or some; or some "
    "cases hold and others certainly do not",
    "undecided": "the interval holds the paper's answer and the opposite one; more runs may decide",
    NOT_SEEN: "it certainly fails, in a setting that is not the paper's own",
    NOT_REPRODUCED: "it certainly fails in the paper's own setting",
    "not run": "no record is there, or the setting cannot answer the question",
}


class NotRun(LookupError):
    """Records that a claim needs are missing, or cannot tell; the text says which and why."""


def or_none(find: Callable[..., Found], *arguments: Any, **options: Any) -> Found | None:
    """Return what is found, None where records are missing."""
    try:
        return find(*arguments, **options)
    except NotRun:
        return None


class BySeed(list[float]):
    """The values of one cell with the seed of each: cells are compared seed by seed.

    Seeds of the first look only set how many are needed: where a comparison has others, those
    judge alone. `NotRun` where a seed occurs twice.
    """

    def __init__(
        self, values: Iterable[float], seeds: Iterable[int], look: Collection[int] = ()
    ) -> None:
        super().__init__(values)
        self.seeds = tuple(seeds)
        self.look = frozenset(look)
        if len(set(self.seeds)) != len(self):
            raise NotRun(
                f"a cell has several trainings of one seed ({', '.join(map(str, self.seeds))}): "
                "their settings, such as of --set, make several cells one"
            )

    def logs(self) -> "BySeed":
        """Return the logarithms."""
        return BySeed(map(math.log, self), self.seeds, self.look)

    def at(self, seeds: Iterable[int]) -> list[float]:
        """Return the values of these seeds, in their order."""
        by_seed = dict(zip(self.seeds, self, strict=True))
        return [by_seed[seed] for seed in seeds]


def judging_seeds(cells: Sequence[BySeed]) -> list[int]:
    """Return the seeds that all cells have; where there are any, those after the first look."""
    common = set(cells[0].seeds).intersection(*(cell.seeds for cell in cells[1:]))
    if not common:
        raise NotRun("no records" if not all(cells) else "no seed was trained in all cells")
    later = common.difference(*(cell.look for cell in cells))
    return sorted(later or common)


@dataclass(frozen=True)
class Estimate:
    """A difference of means, or the logarithm of a ratio, with its standard error."""

    mean: float
    error: float  # standard error; 0 of a deterministic value, NaN where none is known
    dof: float = math.inf  # degrees of freedom of the error
    n: int = 1  # how many values each cell has
    log: bool = False  # whether it is the logarithm of a ratio
    unit: str = ""  # of a difference, for the evidence
    digits: int = 2  # behind the point, for the evidence
    # Of how many it is the best: its 95 % interval is widened for the choice (Bonferroni).
    candidates: int = 1
    trials: str = "seeds"  # the unit of repetition: seeds, rounds, processes
    label: str = ""  # the network that ran, such as ResNet-8 (for ResNet-50), for the evidence
    note: str = ""  # anything else that the evidence has to say

    def named(self, label: str, note: str = "") -> "Estimate":
        """Return it with a label, and a note if there is one."""
        return replace(self, label=label, note=note or self.note)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the two-sided interval of this level, on the scale of `mean`."""
        if self.error == 0:
            return self.mean, self.mean
        half = _quantile(self.dof, 1 - (1 - level) / self.candidates / 2) * self.error
        return self.mean - half, self.mean + half

    def drawn(self) -> tuple[float, tuple[float, float] | None]:
        """Return the value and its 95 % interval, None where it is unknown; of ratios no logs."""
        scale = (lambda value: math.exp(min(value, 700.0))) if self.log else float
        low, high = map(scale, self.interval())
        return scale(self.mean), None if math.isnan(low) else (low, high)

    def shown(self, value: float) -> str:
        """Return a value of this scale in words, such as an end of its interval."""
        if self.log:
            factor = math.exp(min(value, 700.0))
            return f"×{factor:.{self.digits}f}" if factor < 1e6 else f"×{factor:.3g}"
        return f"{value:+.{self.digits}f}"

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        low, high = self.interval()
        if math.isnan(low):
            return f"{self.shown(self.mean)}{unit} (no spread known)"
        if self.error == 0:
            return f"{self.shown(self.mean)}{unit}"
        widened = f" for the best of {self.candidates}" if self.candidates > 1 else ""
        return f"{self.shown(self.mean)} [{self.shown(low)}, {self.shown(high)}{widened}]{unit}"


class Exact(NamedTuple):
    """A result without spread: equal bits, a count, the outcome of a deterministic plan."""

    holds: bool
    text: str


Case = Estimate | Exact | NotRun
Cases = Mapping[str, Case]
Cell = Sequence[float]


def cases(names: Iterable[str], estimate: Callable[[str], Estimate | Exact]) -> dict[str, Case]:
    """Estimate each of several cases; a case without records holds its `NotRun`."""
    found: dict[str, Case] = {}
    for name in names:
        try:
            found[name] = estimate(name)
        except NotRun as missing:
            found[name] = missing
    return found


def contrast(
    cells: Sequence[Cell],
    weights: Sequence[float],
    *,
    log: bool = False,
    unit: str = "",
    digits: int = 2,
    trials: str = "seeds",
    steps: Sequence[float] = (),
) -> Estimate:
    """Return the sum of the cells' means, each times its weight.

    Cells that are all `BySeed` are compared seed by seed (paired t); others by Welch's error with
    Satterthwaite's degrees of freedom.

    Of ratios (`log`) the cells hold the values themselves, above 0, and the result is a log ratio.
    `steps` are those of each cell's values, such as one test image: equal values do not prove a
    spread of 0, but one no larger than rounding's. See `Estimate` for the others.

    Raises:
        NotRun: A cell is empty, or the cells share no seed.
        ValueError: A ratio has a value that is not above 0.
    """
    if not cells or not all(len(cell) for cell in cells):
        raise NotRun("no records")
    if log:
        wrong = [value for cell in cells for value in cell if not value > 0]
        if wrong:
            raise ValueError(f"a ratio needs values above 0, got {wrong[0]}")
        cells = [c.logs() if isinstance(c, BySeed) else [math.log(v) for v in c] for c in cells]
    steps = steps or [0.0] * len(cells)
    by_seed = [cell for cell in cells if isinstance(cell, BySeed)]
    if len(by_seed) == len(cells):
        seeds = judging_seeds(by_seed)
        rows = zip(*(cell.at(seeds) for cell in by_seed), strict=True)
        sums = [_sum(w * v for w, v in zip(weights, row, strict=True)) for row in rows]
        step = math.hypot(*(w * s for w, s in zip(weights, steps, strict=True)))
        cells, weights, steps = [sums], [1], [step]
    else:
        cells = [c.at(judging_seeds([c])) if isinstance(c, BySeed) else c for c in cells]
    mean = _sum(w * _sum(c) / len(c) for c, w in zip(cells, weights, strict=True))
    form: dict[str, Any] = {"log": log, "unit": unit, "digits": digits, "trials": trials}
    shortest = min(map(len, cells))
    if shortest < 2 or not math.isfinite(mean):
        return Estimate(mean, math.nan, math.nan, shortest, **form)
    parts = [
        (weight**2 * max(statistics.variance(cell), step**2 / 12) / len(cell), len(cell) - 1)
        for cell, weight, step in zip(cells, weights, steps, strict=True)
    ]
    total = math.fsum(part for part, _ in parts)
    freedom = math.fsum(part**2 / dof for part, dof in parts)
    dof = total**2 / freedom if freedom else math.inf
    return Estimate(mean, math.sqrt(total), dof, shortest, **form)


def _sum(values: Iterable[float]) -> float:
    """Return an exact sum; of infinities, where there may be none, NaN or an infinity."""
    numbers = [*values]
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def difference(
    first: Cell, second: Cell, unit: str = "", digits: int = 2, *, step: float = 0.0
) -> Estimate:
    """Return ``mean(first) - mean(second)`` of values with this step; see `contrast`."""
    return contrast([first, second], [1, -1], unit=unit, digits=digits, steps=[step, step])


def ratio(first: Cell, second: Cell, digits: int = 2, *, trials: str = "seeds") -> Estimate:
    """Return the ratio of geometric means, first over second; see `contrast`."""
    return contrast([first, second], [1, -1], log=True, digits=digits, trials=trials)


def paired_ratio(first: Cell, second: Cell, digits: int = 2, *, trials: str = "rounds") -> Estimate:
    """Return the ratio of times that were taken in turns, first over second, round by round.

    A slow spell of the machine meets both values of a round, and drops out of their ratio.
    """
    if len(first) and len(second) and len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot pair with {len(second)}")
    ours, theirs = (BySeed(cell, range(len(cell))) for cell in (first, second))
    return ratio(ours, theirs, digits, trials=trials)


def mean_of(
    values: Cell, *, log: bool = False, unit: str = "", digits: int = 2, trials: str = "processes"
) -> Estimate:
    """Return the mean of values, such as one of each process; of ratios where `log`."""
    return contrast([values], [1], log=log, unit=unit, digits=digits, trials=trials)


def deterministic(value: float, log: bool = False, unit: str = "", digits: int = 2) -> Estimate:
    """Return a value that is the same in every run, such as a count of bytes; a ratio if `log`."""
    return Estimate(math.log(value) if log else value, 0.0, log=log, unit=unit, digits=digits)


def unsure(value: float, log: bool = False, unit: str = "", digits: int = 2) -> Estimate:
    """Return a single measured value of unknown spread: it decides nothing."""
    return replace(deterministic(value, log, unit, digits), error=math.nan, dof=math.nan)


@cache
def _quantile(dof: float, probability: float) -> float:
    """Return a quantile of Student's t; NaN where no spread is known."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(dof, probability))


Part = tuple[str, str]  # a word of WORDS, and its evidence


@dataclass(frozen=True)
class Verdict:
    """A word of `WORDS`, the numbers behind it in words, and the cases that they are of."""

    word: str
    evidence: str
    cases: Cases = field(default_factory=dict, compare=False)

    @property
    def repeats(self) -> str:
        """Over how many what the intervals are; of rounds of one process, too narrow."""
        counts: dict[str, list[int]] = {}
        for case in self.cases.values():
            if isinstance(case, Estimate) and case.error > 0:
                counts.setdefault(case.trials, []).append(case.n)
        return ", ".join(_repeats(kind, many) for kind, many in counts.items())


def _repeats(kind: str, counts: Sequence[int]) -> str:
    """Say how many repeats the cases have; of a spread known from elsewhere only the kind."""
    kind = f"{kind} of one process" if kind == "rounds" else kind
    if max(counts) == 1:
        return kind
    return " to ".join(str(n) for n in sorted({min(counts), max(counts)})) + f" {kind}"


def direction(
    name: str,
    ours: Estimate,
    paper: float | None = None,
    *,
    sign: int = 1,
    whose: str = "paper",
) -> Part:
    """Judge "A beats B": the side and the size are two parts.

    The side is certain where the 95 % interval excludes 0. The size is the paper's where the mean
    is at least half of its effect, and at most ten times. Both make it reproduced, the side alone
    partly. On the other side, or around 0 and wholly below a quarter of the paper's effect, it
    certainly fails.

    Args:
        name: Of the case, for the evidence.
        ours: A - B, or A over B.
        paper: The paper's; None where it names no size.
        sign: 1 where the claim is that A is higher, -1 where it is lower.
        whose: The effect's source, for the evidence.
    """
    low, high = sorted(sign * end for end in ours.interval())
    mean, evidence = sign * ours.mean, f"{name} {ours}".strip()
    effect = None
    if paper is not None:
        size = math.log(paper) if ours.log else paper
        evidence += f", {whose} {ours.shown(size)}"
        # Where the paper's own numbers go the other way, they set no size.
        effect = sign * size if sign * size > 0 else None
    if effect is not None:
        evidence += f" ({mean / effect:.2g} of the {whose}'s)"
    if math.isnan(low):
        return "undecided", evidence
    if low > 0:
        sized = effect is None or HALF * effect <= mean <= TENFOLD * effect
        return "reproduced" if sized else "partly", evidence
    bounds = [0.0] if effect is None else [0.0, QUARTER * effect]
    if high < bounds[-1] or (high <= 0 and (high < 0 or ours.error == 0)):
        return NOT_REPRODUCED, evidence
    # Clear of either bound is decided: the farther one takes fewer seeds.
    farthest = max(abs(mean - bound) for bound in bounds)
    return "undecided", f"{evidence}; {_needed([farthest], ours, LEVEL)}"


def equivalence(name: str, ours: Estimate, margin: float, *, side: int = 0) -> Part:
    """Judge "A is as B" by two one-sided tests: the 90 % interval against a margin.

    Args:
        name: Of the case, for the evidence.
        ours: A - B, or A over B.
        margin: Above 0: of a difference in its unit, of a ratio as a share (0.05 for 5 %).
        side: 0; 1 for "at most so far above", -1 for "at most so far below".
    """
    if not margin > 0:
        raise ValueError(f"margin is {margin}; give what still counts as the same, above 0")
    limit = math.log1p(margin) if ours.log else margin
    low, high = ours.interval(EQUIVALENCE_LEVEL)
    between = "" if not ours.error > 0 else f" (90 %: {ours.shown(low)} to {ours.shown(high)})"
    evidence = f"{name} {ours}{between}, {margin_text(ours, margin, side)}".strip()
    # At most so far above is at most so far below with the signs changed.
    mean = -ours.mean if side > 0 else ours.mean
    low, high = (-high, -low) if side > 0 else (low, high)
    if low >= -limit and (side or high <= limit):
        return "reproduced", evidence
    if high < -limit or low > limit:
        return NOT_REPRODUCED, evidence
    if math.isnan(low):
        return "undecided", evidence
    distances = [abs(mean + limit)] if side else [abs(mean + limit), abs(mean - limit)]
    if abs(mean) > limit:
        # Outside, the end that is passed has to be excluded; inside, both.
        distances = [min(distances)]
    return "undecided", f"{evidence}; {_needed(distances, ours, EQUIVALENCE_LEVEL)}"


def margin_text(ours: Estimate, margin: float, side: int) -> str:
    """Return a margin in words, of a ratio as a share; see `equivalence`."""
    size = f"{100 * margin:.3g} %" if ours.log else f"{margin:.3g} {ours.unit}".strip()
    return f"margin {'-±+'[side + 1]}{size}"


def combine(parts: Sequence[Part], over: str = "all") -> Verdict:
    """Make one verdict of the parts of a claim, of which ``all`` have to hold, or ``any``.

    Deciding an open part never makes a worse word better: with a failure and nothing that holds,
    open parts leave it undecided, since they may still make it partly.
    """
    words = [word for word, _ in parts]
    evidence = "; ".join(text for _, text in parts)
    if not parts or all(word == "not run" for word in words):
        return Verdict("not run", evidence or "no records")
    held, half, lost = (words.count(word) for word in ("reproduced", "partly", NOT_REPRODUCED))
    count = len(words)
    open_ = count - held - half - lost
    enough = count if over == "all" else 1
    if held >= enough:
        word = "reproduced"
    elif held + open_ >= enough:
        word = "undecided"  # it may still be reproduced
    elif held or half:
        word = "partly"
    else:
        word = "undecided" if open_ else NOT_REPRODUCED
    return Verdict(word, evidence)


def seeds_to_decide(ours: Estimate, distances: Sequence[float], level: float) -> int | None:
    """Return how many seeds a cell exclude bounds with power 0.8, if the mean seen is true.

    Distances are of bounds from the mean; `level` is of the two-sided interval. None where more
    than `MOST_SEEDS` are needed, or no spread is known.
    """
    if math.isnan(ours.error) or not min(distances) > 0:
        return None
    from scipy.special import nctdtr, stdtrit

    for count in range(max(2, ours.n), MOST_SEEDS + 1):
        error = ours.error * math.sqrt(ours.n / count)
        dof = ours.dof * (count - 1) / max(1, ours.n - 1)
        reach = stdtrit(dof, 1 - (1 - level) / ours.candidates / 2)
        missed = [float(nctdtr(dof, distance / error, reach)) for distance in distances]
        # For a large shift the series gives no number, and there is no doubt.
        if sum(share for share in missed if not math.isnan(share)) <= 1 - POWER:
            return count
    return None


NOT_EVEN = f"if that is the true value, {MOST_SEEDS}"


def _needed(distances: Sequence[float], ours: Estimate, level: float) -> str:
    count = seeds_to_decide(ours, distances, level)
    if count is None:
        return f"{NOT_EVEN} {ours.trials} a cell would not decide"
    return f"if that is the true value, about {count} {ours.trials} a cell decide"
