"""Whether a claim holds in the records: words, intervals, and the rules between them.

A claim is judged by an interval, never by a mean alone. Spreads are pooled over the cells of one
design, since three seeds a cell say little about a spread and thirty cells of them much. Every
function returns a `Part`, a word and its evidence, and `combine` makes one verdict of parts.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

WORDS: Mapping[str, str] = {
    "reproduced": "the interval excludes the opposite and the effect reaches at least half of the "
    "paper's, or a sameness lies wholly within its margin",
    "partly": "some parts hold with certainty and others fail with certainty, or the direction is "
    "certain and the size far off",
    "undecided": "the interval admits both answers; the evidence says how many seeds would decide",
    "not reproduced": "the interval excludes the claim, or all that it admits is less than a "
    "quarter of the paper's effect",
    "not run": "the records that would say are missing, or are of a setting that cannot say",
}
KINDS: Mapping[str, str] = {
    "measured": "from runs, whose records stand beside",
    "simulated": "from a model of a machine that is not at hand",
    "arithmetic": "from the paper's own numbers or its authors' raw measurements alone",
}

HALF, QUARTER = 0.5, 0.25  # of the paper's effect: enough to reproduce it; too little to be it
POWER = 0.8
MOST_SEEDS = 200  # a cell; more is beyond reason for trainings
NO_NUMBER = "no number of"  # where even those would not decide: the value lies too near a bound

Part = tuple[str, str]  # a word of WORDS, and its evidence
_UNKNOWN = "a second measurement would say how far it scatters"


@dataclass(frozen=True)
class Verdict:
    """A word of `WORDS`, and the numbers behind it."""

    word: str
    evidence: str

    def __post_init__(self) -> None:
        if self.word not in WORDS:
            raise ValueError(f"verdict is {self.word!r}; allowed are {', '.join(WORDS)}")


class NotRun(LookupError):
    """Records that a claim needs are missing; the text says which."""


ALIKE = 0.05  # p of Bartlett's test, below which cells do not share a spread


@dataclass(frozen=True)
class Spread:
    """A standard deviation pooled over cells: seeds within a cell differ, cells are not mixed.

    Attributes:
        sd: NaN where no cell has two values.
        dof: Degrees of freedom.
        alike: Whether the cells may share it, by Bartlett's test: a few updates on a large batch
            scatter more than many on a small one. Where they do not, `difference` leaves it.
    """

    sd: float
    dof: int
    alike: bool = True

    @classmethod
    def pooled(cls, cells: Iterable[Sequence[float]]) -> "Spread":
        """Pool the spread within each cell; a cell of one value adds nothing."""
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
        return cls(math.sqrt(variance), total, _alike(variances, variance, total))

    @classmethod
    def pooled_logs(cls, cells: Iterable[Sequence[float]]) -> "Spread":
        """Pool the spread of logarithms, for `ratio`."""
        return cls.pooled([math.log(value) for value in cell] for cell in cells)


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

    def _text(self, value: float) -> str:
        return f"×{math.exp(value):.{self.digits}f}" if self.log else f"{value:+.{self.digits}f}"

    def text(self, level: float = 0.95) -> str:
        """Return the estimate and its interval in words."""
        unit = f" {self.unit}" if self.unit else ""
        low, high = self.interval(level)
        # Which one it is goes without saying for 95 % alone.
        rarer = "" if level == 0.95 else f" at {100 * level:.4g} %"
        if math.isnan(low):
            return f"{self._text(self.mean)}{unit} (no spread known)"
        if self.error == 0:
            return f"{self._text(self.mean)}{unit}"
        return f"{self._text(self.mean)} [{self._text(low)}, {self._text(high)}{rarer}]{unit}"

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
            Welch's error from these two alone.
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
    logs = [[math.log(value) for value in sample] for sample in (first, second)]
    gap = replace(difference(logs[0], logs[1], spread), log=True, digits=digits, trials=trials)
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

    Seeds alone are no pairs: that both cells have a seed 0 makes them no more alike.

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


def direction(
    name: str,
    gap: Gap,
    paper: float | None = None,
    *,
    sign: int = 1,
    candidates: int = 1,
    whose: str = "paper",
) -> Part:
    """Judge "A beats B".

    Reproduced where the 95 % interval excludes 0 on the paper's side and the effect reaches half
    of the paper's; partly where the side is certain and the effect smaller; not reproduced where
    the interval lies on the other side, or wholly below a quarter of the paper's effect; else
    undecided.

    Args:
        name: What is judged, for the evidence.
        gap: A - B, or A over B.
        paper: The paper's A - B, or A over B; None where it names no size.
        sign: 1 where the claim is that A is higher, -1 where it is lower.
        candidates: Of how many A is the best: the interval is widened for the choice (Bonferroni).
        whose: What names the size, where it is no paper.
    """
    level = 1 - 0.05 / candidates
    low, high = sorted(sign * end for end in gap.interval(level))
    mean, evidence = sign * gap.mean, f"{name} {gap.text(level)}"
    effect = None
    if paper is not None:
        size = math.log(paper) if gap.log else paper
        evidence += f", {whose} {gap._text(size)}"
        # Where the paper's own numbers go the other way, they set no size.
        effect = sign * size if sign * size > 0 else None
    if effect is not None:
        evidence += f" ({mean / effect:.2g} of the {whose}'s)"
    bounds = [0.0] if effect is None else [0.0, QUARTER * effect]
    word = "undecided"
    if math.isnan(low):
        return word, f"{evidence}; {_UNKNOWN}"
    if low > 0:
        word = "reproduced" if effect is None or mean >= HALF * effect else "partly"
    # An effect of exactly 0 is none.
    if high < bounds[-1] or (high <= 0 and (high < 0 or gap.error == 0)):
        word = "not reproduced"
    if word == "undecided":
        # Clear of either bound is decided: the farther one takes fewer seeds.
        farthest = max(abs(mean - bound) for bound in bounds)
        evidence += f"; {_needed([farthest], gap, level)}"
    return word, evidence


def equivalence(name: str, gap: Gap, margin: float, *, side: int = 0) -> Part:
    """Judge "A is as B" by two one-sided tests: the 90 % interval against a margin.

    Args:
        name: What is judged, for the evidence.
        gap: A - B, or A over B.
        margin: Above 0: of a difference in its unit, of a ratio as a share (0.05 for 5 %).
        side: 0 where A may lie neither above nor below; 1 for "at most so far above", where
            anything below is allowed; -1 for "at most so far below".

    Raises:
        ValueError: The margin is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin is {margin}; give what still counts as the same, above 0")
    limit = math.log1p(margin) if gap.log else margin
    low, high = gap.interval(0.90)
    shown = f"{100 * margin:.3g} %" if gap.log else f"{margin:.3g}{f' {gap.unit}' * bool(gap.unit)}"
    evidence = f"{name} {gap.text(0.90)}, margin {'-±+'[side + 1]}{shown}"
    # At most so far above is at most so far below with the signs changed.
    mean = -gap.mean if side > 0 else gap.mean
    low, high = (-high, -low) if side > 0 else (low, high)
    if low >= -limit and (side or high <= limit):
        return "reproduced", evidence
    if high < -limit or low > limit:
        return "not reproduced", evidence
    if math.isnan(low):
        return "undecided", f"{evidence}; {_UNKNOWN}"
    distances = [abs(mean + limit)] if side else [abs(mean + limit), abs(mean - limit)]
    if abs(mean) > limit:
        # Outside, the end that is passed has to be excluded; inside, both.
        distances = [min(distances)]
    return "undecided", f"{evidence}; {_needed(distances, gap, 0.90)}"


def certain(name: str, holds: bool) -> Part:
    """Judge what has no spread: equal bits, a count, the outcome of a deterministic plan."""
    return ("reproduced" if holds else "not reproduced"), name


def in_all_cases(
    cases: Mapping[str, tuple[Gap, float | None]],
    *,
    sign: int = 1,
    what: str = "mean of all",
    whose: str = "paper",
) -> Verdict:
    """Judge "in all cases" by one pooled contrast, and each case by Holm's correction.

    The mean of the cases' effects decides whether there is one. A case that certainly fails, by
    Holm's correction over the cases, refutes "all"; with the others certain it leaves "partly". A
    case whose own mean is below a quarter of the paper's leaves it open. So "reproduced" says that
    there is an effect and that every case points to it, not that each is certain by itself.

    Args:
        cases: By name: the gap, and the paper's effect (a ratio where the gap is a logarithm).
        sign: 1 where the claim is that A is higher, -1 where it is lower.
        what: Names the contrast in the evidence.
        whose: As of `direction`.

    Raises:
        NotRun: There is no case.
    """
    if not cases:
        raise NotRun("no records")
    gaps = [gap for gap, _ in cases.values()]
    papers = [paper for _, paper in cases.values()]
    log = gaps[0].log
    sizes = [math.log(p) if log else p for p in papers if p is not None]
    common = None
    if len(sizes) == len(gaps):
        common = math.fsum(sizes) / len(sizes)
        common = math.exp(common) if log else common
    count = len(gaps)
    contrast = replace(
        gaps[0],
        mean=math.fsum(gap.mean for gap in gaps) / count,
        error=math.sqrt(math.fsum(gap.error**2 for gap in gaps)) / count,
        dof=min(gap.dof for gap in gaps),
        # Each seed more is one in every case.
        sd=math.sqrt(math.fsum(gap.sd**2 for gap in gaps)) / count,
    )
    whole, pooled = direction(what, contrast, common, sign=sign, whose=whose)
    order = sorted(cases, key=lambda name: _level_away(cases[name][0]))
    words: dict[str, str] = {}
    stopped = False
    for rank, name in enumerate(order):
        gap, paper = cases[name]
        # Holm: from the surest case on, each against the cases that are left; none after a miss,
        # where Bonferroni's correction over all of them still stands.
        left = count - rank
        low, high = gap.interval(1 - 0.05 / left)
        stopped = stopped or not (low > 0 or high < 0)
        words[name], _ = direction(
            name, gap, paper, sign=sign, candidates=count if stopped else left
        )
    listed = "; ".join(
        f"{name} {gap}{_of(gap, paper, whose)}" for name, (gap, paper) in cases.items()
    )
    evidence = f"{pooled}; {listed}"
    failed = [name for name, word in words.items() if word == "not reproduced"]
    sure = [name for name, word in words.items() if word in ("reproduced", "partly")]
    if failed:
        word = "partly" if sure and len(failed) + len(sure) == count else "not reproduced"
        return Verdict(word, f"{evidence}; certainly not for {', '.join(failed)}")
    short = [name for name, (gap, paper) in cases.items() if _falls_short(gap, paper, sign)]
    open_ = [name for name in short if name not in sure]
    if whole in ("reproduced", "partly") and open_:
        text = f"{evidence}; on average, but not yet for {', '.join(open_)}"
        return Verdict("undecided", text)
    return Verdict(whole, evidence)


def _falls_short(gap: Gap, paper: float | None, sign: int) -> bool:
    """Whether a case's mean is no quarter of the paper's effect, or for none not above 0."""
    size = 0.0 if paper is None else math.log(paper) if gap.log else paper
    return sign * gap.mean <= QUARTER * max(0.0, sign * size)


def _of(gap: Gap, paper: float | None, whose: str) -> str:
    if paper is None:
        return ""
    return f" ({whose} {gap._text(math.log(paper) if gap.log else paper)})"


def _level_away(gap: Gap) -> float:
    """Return the two-sided p of a gap of 0: the smaller, the surer its side."""
    if not gap.error > 0:
        return 1.0 if math.isnan(gap.error) or gap.mean == 0 else 0.0
    from scipy.special import stdtr

    return float(2 * stdtr(min(gap.dof, 1e9), -abs(gap.mean) / gap.error))


def combine(parts: Sequence[Part], quantifier: str = "all") -> Verdict:
    """Make one verdict of the parts of a claim.

    Args:
        parts: Words and evidence.
        quantifier: ``all``: one certain failure makes it not reproduced, or partly where the
            other parts are certain and not all fail. ``most``: decided by more than half of the
            parts, or by half of them failing. ``any``: one part is enough.

    Raises:
        ValueError: The quantifier is another.
    """
    if quantifier not in ("all", "most", "any"):
        raise ValueError(f"quantifier is {quantifier!r}; allowed are all, most, any")
    words = [word for word, _ in parts]
    evidence = "; ".join(text for _, text in parts)
    if unknown := set(words) - WORDS.keys():
        raise ValueError(f"words are {', '.join(sorted(unknown))}; allowed are {', '.join(WORDS)}")
    if not parts or all(word == "not run" for word in words):
        return Verdict("not run", evidence or "no records")
    held, half, lost = (words.count(word) for word in ("reproduced", "partly", "not reproduced"))
    count, open_ = len(words), words.count("undecided") + words.count("not run")
    if quantifier == "any":
        if held:
            word = "reproduced"
        elif lost == count:
            word = "not reproduced"
        else:
            word = "undecided" if open_ else "partly"
    elif quantifier == "most":
        if 2 * held > count:
            word = "reproduced"
        elif 2 * lost >= count:
            word = "not reproduced"
        else:
            word = "undecided" if open_ else "partly"
    elif lost:
        word = "partly" if not open_ and lost < count else "not reproduced"
    elif open_:
        word = "undecided"
    else:
        word = "partly" if half else "reproduced"
    return Verdict(word, evidence)


def each(names: Iterable[str], judge: Callable[[str], Part]) -> list[Part]:
    """Judge each of several cases; one whose records are missing is "not run"."""
    parts = []
    for name in names:
        try:
            parts.append(judge(name))
        except NotRun as missing:
            parts.append(("not run", f"{name}: {missing}"))
    return parts


def seeds_to_decide(
    distances: Sequence[float], sd: float, level: float = 0.95, seed_dof: float = 2.0
) -> int | None:
    """Return how many seeds a cell exclude bounds with power 0.8; None for too many.

    Args:
        distances: Between the true effect, taken to be what is seen, and each bound; two lie on
            either side of it.
        sd: Spread of one value in a cell.
        level: Of the two-sided interval that is to exclude the bounds.
        seed_dof: Degrees of freedom that each seed more a cell adds.
    """
    if math.isnan(sd) or not min(distances) > 0:
        return None
    if sd == 0:
        return 2
    from scipy.special import nctdtr, stdtrit

    for count in range(2, MOST_SEEDS + 1):
        dof, error = seed_dof * (count - 1), sd * math.sqrt(2 / count)
        reach = stdtrit(dof, (1 + level) / 2)
        missed = [float(nctdtr(dof, distance / error, reach)) for distance in distances]
        # For a large shift the series gives no number, and there is no doubt.
        if sum(share for share in missed if not math.isnan(share)) <= 1 - POWER:
            return count
    return None


def _needed(distances: Sequence[float], gap: Gap, level: float) -> str:
    count = seeds_to_decide(distances, gap.sd, level, gap.seed_dof)
    if count is None:
        return f"{NO_NUMBER} {gap.trials} within reason (up to {MOST_SEEDS} a cell) would decide"
    return f"about {count} {gap.trials} a cell would decide"


@cache
def _quantile(dof: float, probability: float) -> float:
    """Return a quantile of Student's t."""
    if math.isnan(dof):
        return math.nan
    from scipy.special import ndtri, stdtrit  # scipy.stats takes a second to import

    return float(ndtri(probability) if math.isinf(dof) else stdtrit(dof, probability))
