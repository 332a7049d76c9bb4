"""Captions, titles of panels, verdicts on claims, and how many there are of each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from repro import report
from repro.experiments import load_paper
from repro.experiments.design import (
    LONG,
    TOO_LITTLE,
    Artefact,
    Claim,
    Paper,
    claims_of,
    paper_toml,
    setting_of,
)
from repro.experiments.judge import NOT_EVEN, NOT_REPRODUCED, NOT_SEEN, WORDS, Verdict
from repro.experiments.query import Results, Source, devices, of_reference

Row = dict[str, Any]


def full_caption(artefact: Artefact, results: Results) -> str:
    """Return an artefact's caption, and which machine and profile its rows are of."""
    shown = f" Shown: {'; '.join(results.places)}." if results.places else ""
    return report.printable(artefact.caption(results) + shown)  # it quotes records


def stand_ins(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a caption's sentence on networks and data in the place of the paper's, if any.

    Pairs are of what ran and the paper's, such as ``("cifar10-jpeg", "CIFAR-10")``, where the
    dataset is the paper's: what follows a hyphen says how it is stored.
    """
    different = dict.fromkeys(
        f"{ours} for {paper}"
        for ours, paper in pairs
        if ours != paper and ours.partition("-")[0] != paper.lower().replace("-", "")
    )
    if different:
        yield f"STAND-IN: {', '.join(different)}."


def panel(role: str, ours: str = "", data: str = "") -> str:
    """Return a panel's title: the network and the data that ran here, and the paper's network.

    `role` is the paper's, such as ``ResNet-50``; `ours` is empty where it is the same.
    """
    ran = f"{ours} for {role}" if ours and ours != role else role
    return f"ours: {ran}{f', {data}' if data else ''}"


def verdicts(paper: Paper, artefact: Artefact, results: Results) -> list[Row]:
    """Return an artefact's claims and verdicts, a row each, the paper's before our own questions.

    Beside what tables show a row has its ``key``, whether it is our ``own``, the ``number`` that
    decides, the ``device`` of its records where these are not the results shown, and ``why_not``
    where the claim certainly fails.
    """
    rows = []
    written = claims_of(paper.key).get(artefact.name, {})
    for key in artefact.claims:
        claim, verdict, used = judged(artefact, written[key], results)
        papers = claim.papers_number(*claim.deciding(verdict)) if verdict.cases else None
        row = {
            "artefact": f"{paper.key}/{artefact.name}",
            "claim": claim.text,
            "in the paper": claim.source,
            "setting": setting_of(claim.kind, used),
            "expected": claim.expect,
            "verdict": verdict.word,
            "evidence": verdict.evidence + _named(used, results),
            "repeats": verdict.repeats,
            "number": claim.number(verdict),
            "paper's number": papers or report.DASH,
            "key": f"{paper.key}/{artefact.name}.{key}",
            "own": claim.own,
            "device": "" if used is results else devices(used.records),
        }
        if verdict.word in (NOT_REPRODUCED, NOT_SEEN):
            row["why_not"] = _paragraph(artefact, claim, used)
        rows.append(row)
    return sorted(rows, key=lambda row: bool(row["own"]))


def judged(artefact: Artefact, written: Claim, results: Results) -> tuple[Claim, Verdict, Results]:
    """Judge a claim by a GPU's records where they decide it, else by the results shown.

    Returns the claim with what was expected of these records, its verdict, and the records.
    """
    for used in filter(None, (results.gpu, results)):
        claim = written.under(used.profile)
        verdict = artefact.judge(claim, used)
        if verdict.word not in ("undecided", "not run"):
            break
    return claim, verdict, used


def _named(used: Results, shown: Results) -> str:
    """Name the devices of records that are not those shown."""
    return "" if used is shown else f"; {devices(used.records)}, profile {used.profile}"


def of_papers(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of claims that a paper makes, without questions of our own."""
    return [row for row in rows if not row["own"]]


NOTHING_YET = "Nobody has looked into it yet: the reference records do not say so."


def _paragraph(artefact: Artefact, claim: Claim, results: Results) -> str:
    """Return why a claim failed, and of which records that was found where these are others."""
    profile = claim.why_of or (LONG if artefact.long else "quick")
    if not claim.why_not or (results.profile == profile and of_reference(results)):
        return claim.why_not.strip() or NOTHING_YET
    return f"Of the reference records, profile {profile}: {claim.why_not.strip()}"


def checks(artefact: Artefact, results: Results) -> list[Row]:
    """Return an artefact's checks, a row each, by a GPU's records where those tell."""
    rows = []
    for check in artefact.checks:
        row = check.row(results)
        if results.gpu is not None and (told := check.row(results.gpu))["holds"] != "not run":
            row = told | {"evidence": told["evidence"] + _named(results.gpu, results)}
        rows.append(row)
    return rows


def paper_verdicts(source: Source) -> list[Row]:
    """Return all verdicts on a paper."""
    rows = []
    for name, artefact in source.paper.artefacts.items():
        rows += verdicts(source.paper, artefact, source.look(name))
    return rows


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Return how many claims got each verdict."""
    words = [row["verdict"] for row in rows]
    return {word: words.count(word) for word in WORDS}


def lacking_runs(rows: Sequence[Row]) -> int:
    """Return how many undecided claims more runs would decide, within reason (`MOST_SEEDS`)."""
    return sum(
        row["verdict"] == "undecided"
        and "a cell decide" in row["evidence"]
        and not any(word in row["evidence"] for word in (NOT_EVEN, TOO_LITTLE))
        for row in rows
    )


def count_rows(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each paper: promises, claims, checks, our own questions, and verdicts.

    The verdicts are those on the papers' claims; of `together`, which has no paper, on our
    questions.
    """
    counted = []
    for key in dict.fromkeys(row["artefact"].partition("/")[0] for row in rows):
        judged = [row for row in rows if row["artefact"].startswith(f"{key}/")]
        claims = of_papers(judged)
        numbers = {
            "promises": len(paper_toml(key)["promises"]) if claims else 0,
            "claims": len(claims),
            "checks": sum(len(artefact.checks) for artefact in load_paper(key).artefacts.values()),
            "our questions": len(judged) - len(claims),
        }
        counted.append({"paper": key, **numbers, **counts(claims or judged)})
    summed = ("promises", "claims", "checks", "our questions")
    total = {name: sum(row[name] for row in counted) for name in summed}
    return [*counted, {"paper": "all papers", **total, **counts(of_papers(rows))}]


def lead_of(rows: Sequence[Row]) -> str:
    """Return how many claims the papers make and their verdicts, and those on our questions."""
    papers, ours = of_papers(rows), [row for row in rows if row["own"]]
    lead = f"{len(papers)} claims of five papers: {in_words(counts(papers))}."
    if lacking := lacking_runs(papers):
        lead += f" More runs would decide {lacking} of the undecided claims."
    if ours:
        lead += f" {len(ours)} questions of our own: {in_words(counts(ours))}."
    return lead


def in_words(numbers: Mapping[str, int]) -> str:
    """Return counts of verdicts as a list, without those that are nought."""
    return ", ".join(f"{number} {word}" for word, number in numbers.items() if number)
