"""Which of the five, and when: ``[[page]]`` of ``paper.toml`` with numbers of records. (Part 3)"""

from collections.abc import Iterable
from typing import Any

from repro.experiments.design import claims_of, paper_toml
from repro.experiments.judge import NotRun
from repro.experiments.query import Results
from repro.experiments.together import accuracy, limit
from repro.experiments.together.runs import (
    BATCHNORM,
    LABELS,
    STRATEGIES,
    artefact,
    trainings,
    under_limit,
)
from repro.report import DASH

NOT_RUN = "not run yet"
_ARTEFACTS = {"limit": limit.UNDER_LIMIT, "accuracy": accuracy.ACCURACY}
_PARTS = {"limit": "Part 1 (together/limit)", "accuracy": "Part 2 (together/accuracy)"}


def _of_method(results: Results, mode: str) -> str:
    """The speed kept on each network at the largest that fits, and the gradient's error."""
    kept: list[str] = []
    errors: dict[str, list[float]] = {"with BatchNorm": [], "without": []}
    for (network, _), tried in limit.measured(results, [mode]).items():
        if last := limit.largest(tried):
            speed = limit.speed(last)
            kept.append(f"{network} {speed.shown(speed.mean)[1:]} at {last['multiple']}×")
            group = "with BatchNorm" if network in BATCHNORM else "without"
            errors[group].append(last["gradient_error"])
    if not kept:
        return NOT_RUN
    spans = [f"{group} {min(own):.1g} to {max(own):.1g}" for group, own in errors.items() if own]
    told = f"of undivided images/s: {', '.join(kept)}"
    return f"{told}; relative error of the gradient {', '.join(spans)}"


def _of_strategy(results: Results, strategy: str) -> str:
    """Accuracy, updates and simulated time over the fixed small batch's."""
    try:
        points = accuracy.less(results, strategy, "fixed")
    except NotRun as missing:
        return f"not compared: {missing}" if results.ok("train") else NOT_RUN
    updates, time = (
        accuracy.told(accuracy.over, results, strategy, "fixed", name)
        for name in ("updates", "parallel")
    )
    costs = f"updates {updates}; SIMULATED time on several devices {time}"
    return f"over the fixed small batch: {points}; {costs}"


def _word(results: Results, name: str) -> str:
    """The verdict on a claim, by the records that show it."""
    part, _, key = name.partition(".")
    own = results.parts.get(part, results)
    return f"{key}: {_ARTEFACTS[part].judge(claims_of('together')[part][key], own).word}"


def table(results: Results) -> list[dict[str, Any]]:
    """The page: a row for each tool, with the numbers of the records that are there."""
    rows = []
    for row in paper_toml("together")["page"]:
        told = {}
        for name in row["numbers"]:
            told_by = _of_method if name in LABELS else _of_strategy
            told[{**LABELS, **STRATEGIES}[name]] = told_by(results, name)
        several = len(told) > 1
        rows.append(
            {
                "tool": row["tool"],
                "answers": row["answers"],
                "take it where": row["take"],
                "what it gives and costs": "; ".join(
                    f"{label}: {text}" if several else text for label, text in told.items()
                ),
                "the wrong tool where": row["wrong"],
                "claims": "; ".join(_word(results, name) for name in row["claims"]) or DASH,
                "figure": _PARTS[row["figure"]],
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
