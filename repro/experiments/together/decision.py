"""Which of the five, and when: sentences whose numbers are those of the records. (Part 3)

``[[page]]`` of ``paper.toml`` has the sentences. A placeholder ``{KIND:ARGUMENTS}`` becomes what
the function `_said_KIND` says of its arguments.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from repro.experiments.design import claims_of, paper_toml
from repro.experiments.judge import NotRun
from repro.experiments.query import Results
from repro.experiments.together import accuracy, limit
from repro.experiments.together.runs import (
    BATCHNORM,
    NETWORKS,
    TRANSFORMER,
    artefact,
    trainings,
    under_limit,
)
from repro.report import DASH

NOT_RUN = "not run yet"
_EXHIBITS = {"limit": limit.UNDER_LIMIT, "accuracy": accuracy.ACCURACY}
_PLACE = re.compile(r"\{(\w+):(\w+)(?: (\w+))?\}")


def _speeds(results: Results, mode: str, reference: str | None) -> str:
    """The speed kept on each network, and at how many times what fits.

    With a reference it is at the largest that this other method trains, on its networks.
    """
    kept = []
    for network in NETWORKS:
        by_multiple = limit.points(results, network, mode)
        tried = limit.points(results, network, reference or mode)
        most = max((multiple for multiple, point in tried.items() if point.fits), default=0)
        if (last := by_multiple.get(most)) is not None and last.fits:
            kept.append(f"{network} {last.speed.shown(last.speed.mean)[1:]} at {most}×")
    return f"of undivided images/s: {', '.join(kept)}" if kept else f"speed: {NOT_RUN}"


def _errors(results: Results, mode: str, normalised: str | None) -> str:
    """How far gradients are from the whole mini-batch's, at the largest that fits."""
    networks = BATCHNORM if normalised == "batchnorm" else [TRANSFORMER]
    tried = limit.measured(results, [mode], networks).values()
    errors = [last.gradient_error for found in tried if (last := limit.largest(found))]
    if not errors:
        return NOT_RUN
    return " to ".join(dict.fromkeys(f"{error:.1g}" for error in (min(errors), max(errors))))


def _ends(results: Results, mode: str, _: str | None) -> str:
    """The networks on which a method does not fit, and from which mini-batch on."""
    known = {network: tried for (network, _), tried in limit.measured(results, [mode]).items()}
    if not known:
        return NOT_RUN
    failed = {n: [m for m, p in tried.items() if p.fits is False] for n, tried in known.items()}
    ends = [f"{network} at {min(tried)}×" for network, tried in failed.items() if tried]
    if not ends:
        return f"fits on all networks up to {max(max(tried) for tried in known.values())}×"
    return "does not fit on " + ", ".join(ends)


def _accuracy(results: Results, strategy: str, _: str | None = None) -> str:
    """A strategy's accuracy less the fixed small batch's, with its interval."""
    try:
        return f"{accuracy.less(results, strategy, 'fixed')} over the fixed small batch"
    except NotRun as missing:
        return f"not compared: {missing}" if accuracy.searched(results) else NOT_RUN


def _gives(results: Results, strategy: str, _: str | None) -> str:
    """The same, and the updates and the simulated time over the fixed small batch's."""
    said = _accuracy(results, strategy)
    try:
        updates, time = (
            accuracy.over(results, strategy, "fixed", name) for name in ("updates", "parallel")
        )
    except NotRun:
        return said
    return f"{said}; updates over fixed: {updates}; SIMULATED time on several devices: {time}"


def _seconds(results: Results, strategy: str, _: str | None) -> str:
    """The time of a training on this machine over the fixed small batch's."""
    means = []
    for one in (strategy, "fixed"):
        ends = [accuracy.seconds(results, record) for record in accuracy.trained(results, one)]
        known = [end for end in ends if end is not None]
        if not known or len(known) < len(ends):
            return NOT_RUN
        means.append(statistics.fmean(known))
    return f"{means[0] / means[1]:.2f}"


_SAID: Mapping[str, Callable[[Results, str, str | None], str]] = {
    "speeds": _speeds,
    "errors": _errors,
    "ends": _ends,
    "accuracy": _accuracy,
    "gives": _gives,
    "seconds": _seconds,
}


def _word(results: Results, name: str) -> str:
    """What became of a claim, judged on the records that show it."""
    artefact, _, key = name.partition(".")
    own = results.parts.get(artefact, results)
    return f"{key}: {_EXHIBITS[artefact].judge(claims_of('together')[artefact][key], own).word}"


def table(results: Results) -> list[dict[str, Any]]:
    """The page: a row for each tool, with the numbers of the records that are there."""

    def filled(text: str) -> str:
        return _PLACE.sub(lambda place: _SAID[place[1]](results, place[2], place[3]), text)

    source = {"limit": "Part 1 (together/limit)", "accuracy": "Part 2 (together/accuracy)"}
    return [
        {
            "tool": row["tool"],
            "answers": row["answers"],
            "take it where": row["take"],
            "what it gives and costs": filled(row["gives"]),
            "the wrong tool": filled(row["wrong"]),
            "claims": "; ".join(_word(results, name) for name in row["claims"]) or DASH,
            "figure": source[row["figure"]],
        }
        for row in paper_toml("together")["page"]
    ]


def facts(results: Results) -> Iterable[str]:
    """Yield what the captions of both parts say of machine, limit and data."""
    yield from limit.facts(results)
    yield from accuracy.facts(results)


DECISION = artefact(
    "decision",
    facts=facts,
    parts=("limit", "accuracy"),
    # It computes nothing of its own.
    plan=lambda profile, chosen: [*under_limit(profile), *trainings(profile, chosen)],
    rows=table,
)
