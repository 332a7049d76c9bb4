"""Whether a claim holds in the records: the words, and the rules between them.

A claim is judged by an interval, never by a mean alone. Every function returns a `Part`, a word and
its evidence, and `combine` makes one verdict of parts.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from repro.experiments.intervals import Gap, NotRun

MOST_SEEDS = 200  # a cell; more is beyond reason for trainings
WORDS: Mapping[str, str] = {
    "reproduced": "the interval excludes the opposite and the effect reaches at least half of the "
    "paper's, or a sameness lies wholly within its margin",
    "partly": "some parts hold with certainty and others fail with certainty, or the direction is "
    "certain and the size far off",
    "undecided": "the interval admits both answers; the evidence says how many seeds would decide, "
    f"or, where a bound lies so near that {MOST_SEEDS} a cell would not, how near",
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
        evidence += f", {whose} {gap.shown(size)}"
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
    mean: Gap | None = None,
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
        mean: Of the cases' effects, where they do not scatter independently.

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
    contrast = mean or replace(
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
    return f" ({whose} {gap.shown(math.log(paper) if gap.log else paper)})"


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
        why = f"{NO_NUMBER} {gap.trials} within reason (up to {MOST_SEEDS} a cell) would decide"
        near = min(distances)
        away = f"{100 * math.expm1(near):.2g} %" if gap.log else f"{near:.2g} {gap.unit}".rstrip()
        return why if math.isnan(gap.sd) else f"{why}, {away} from a bound"
    return f"about {count} {gap.trials} a cell would decide"
