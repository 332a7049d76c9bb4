"""Which of the five, and when: ``[[page]]`` of ``paper.toml`` with numbers of records. (Part 3)"""

from collections.abc import Iterable, Sequence
from typing import Any

from repro.experiments.design import paper_toml
from repro.experiments.judge import NotRun
from repro.experiments.query import Results
from repro.experiments.together import accuracy, limit
from repro.experiments.together.runs import LABELS, artefact, trainings, under_limit

NOT_RUN = "not run yet"


def _of_method(results: Results, mode: str) -> str:
    """The speed kept at the largest mini-batch that each network trains."""
    found = [limit.largest(tried) for tried in limit.measured(results, [mode]).values()]
    if not (lasts := [last for last in found if last]):
        return NOT_RUN
    means = sorted((speed.mean, speed.shown(speed.mean)[1:]) for speed in map(limit.speed, lasts))
    speeds, times = [text for _, text in means], sorted(last["multiple"] for last in lasts)
    return f"{_span(speeds)} of undivided speed, at {_span(times)} times its largest batch"


def _span(ordered: Sequence[object]) -> str:
    return " to ".join(dict.fromkeys(str(end) for end in (ordered[0], ordered[-1])))


def _of_strategy(results: Results, strategy: str) -> str:
    """Accuracy and updates over the fixed small batch's."""
    try:
        points = accuracy.less(results, strategy, "fixed")
    except NotRun as missing:
        return f"not compared: {missing}" if results.ok("train") else NOT_RUN
    updates = accuracy.over(results, strategy, "fixed", "updates")
    share = f"{updates.shown(updates.mean)[1:]} of the updates of a fixed small batch"
    return f"{points.shown(points.mean)} points for {share}"


def table(results: Results) -> list[dict[str, Any]]:
    """The page: a row for each tool, with a number from the records that are there."""
    rows = []
    for row in paper_toml("together")["page"]:
        told_by = _of_method if row["number"] in LABELS else _of_strategy
        rows.append(
            {
                "tool": row["tool"],
                "answers": row["answers"],
                "take it where": row["take"],
                "the wrong tool where": row["wrong"],
                "what it gives and costs": told_by(results, row["number"]),
            }
        )
    return rows


def facts(results: Results) -> Iterable[str]:
    """Yield the sentences of both parts' captions."""
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
