"""Verdicts and status over all papers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from repro import paths, report
from repro.experiments import PAPERS, load_paper
from repro.experiments.design import (
    COMPUTING_PROFILES,
    LONG,
    TOO_LITTLE,
    Artefact,
    Claim,
    Paper,
    claims_of,
    paper_toml,
    setting_of,
)
from repro.experiments.judge import NOT_EVEN, NOT_REPRODUCED, NOT_SEEN, WORDS, NotRun, Verdict
from repro.experiments.query import (
    LOCAL,
    Results,
    Source,
    find_source,
    of_reference,
)
from repro.experiments.view import devices
from repro.records import Record, RecordError, local_store

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]


def verdicts(paper: Paper, artefact: Artefact, results: Results) -> list[Row]:
    """Return an artefact's claims and verdicts, a row each, the paper's before our own questions.

    Beside what tables show a row has its ``key``, whether it is our ``own``, the first ``number``,
    the ``device`` of its records where these are not the results shown, and ``why_not`` where the
    claim certainly fails.
    """
    rows = []
    written = claims_of(paper.key).get(artefact.name, {})
    for key in artefact.claims:
        claim, verdict, used = judged(artefact, written[key], results)
        row = {
            "artefact": f"{paper.key}/{artefact.name}",
            "claim": claim.text,
            "in the paper": claim.source,
            "setting": setting_of(claim.kind, used),
            "expected": claim.expect,
            "verdict": verdict.word,
            "evidence": verdict.evidence + _named(used, results),
            "number": claim.first_number(verdict),
            "paper's number": next(_papers_numbers(claim, verdict), report.DASH),
            "key": f"{paper.key}/{artefact.name}.{key}",
            "own": claim.own,
            "device": "" if used is results else devices(used.records),
        }
        if verdict.word in (NOT_REPRODUCED, NOT_SEEN):
            row["why_not"] = _paragraph(artefact, claim, used)
        rows.append(row)
    return sorted(rows, key=lambda row: bool(row["own"]))


def _papers_numbers(claim: Claim, verdict: Verdict) -> Iterator[str]:
    """Yield the paper's number, or the margin, of each case that has one."""
    for name, case in verdict.cases.items():
        if not isinstance(case, NotRun) and (number := claim.papers_number(name, case)):
            yield number


def judged(artefact: Artefact, written: Claim, results: Results) -> tuple[Claim, Verdict, Results]:
    """Judge a claim by a GPU's records where they decide it, else by the results shown.

    Returns:
        The claim with what was expected of these records, its verdict, and the records.
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


def searched() -> str:
    """Return the folders in which records are looked for."""
    local = paths.results_dir() / LOCAL
    references = " and ".join(str(folder) for folder in reversed(paths.reference_dirs()))
    return f"Looked for records of this machine in {local}, for reference records in {references}."


def checks(artefact: Artefact, results: Results) -> list[Row]:
    """Return an artefact's checks, a row each, by a GPU's records where those tell."""
    rows = []
    for check in artefact.checks:
        row = check.row(results)
        if results.gpu is not None and (told := check.row(results.gpu))["holds"] != "not run":
            row = told | {"evidence": told["evidence"] + _named(results.gpu, results)}
        rows.append(row)
    return rows


_FAILURES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


@contextmanager
def naming_bad_records(source: Source, artefact: Artefact, results: Results) -> Iterator[None]:
    """Name the record that keeps an artefact from being shown, such as one without a metric.

    Raises:
        RecordError: The artefact of this record alone fails, too.
        Exception: As it was, where no record is to blame: a defect of ours.
    """
    try:
        yield
    except _FAILURES as problem:
        guilty = [record for record in results.records if _fails(artefact, results, [record])]
        if isinstance(problem, RecordError) or not guilty or _fails(artefact, results, []):
            raise
        (path,) = source.paths(guilty[:1]).values()
        packed = path.suffix == ".gz"
        named = f"{path}{f' (record {guilty[0].key})' * packed}"
        advice = "restore it from git" if packed else "move it away or delete it, then run again"
        raise RecordError(
            f"{source.paper.key}/{artefact.name} cannot be shown for what is in {named} "
            f"({type(problem).__name__}: {problem}); {advice}"
        ) from problem


def _fails(artefact: Artefact, results: Results, records: Sequence[Record]) -> bool:
    """Whether an artefact of these records alone cannot be shown."""
    part = copy(results)
    part.records = list(records)
    try:
        artefact.table(part)
        for numbers in artefact.claims.values():
            with suppress(NotRun):
                numbers(part)
        if artefact.draw:
            artefact.figure(part)
    except _FAILURES:
        return True
    return False


def paper_verdicts(source: Source) -> list[Row]:
    """Return all verdicts on a paper."""
    rows = []
    for name, artefact in source.paper.artefacts.items():
        rows += verdicts(source.paper, artefact, source.look(name))
    return rows


WHAT_MORE = (
    "PROFILE=long trains longer, with more seeds and in further processes: it decides accuracy. "
    "A GPU (make gpu MINUTES=10) has the papers' own networks, and measures what a CPU cannot."
)


def promise_rows(judged_here: Sequence[Row], profile: str | None) -> list[Row]:
    """Return a row for each promise of a paper: its verdict and first number, reference and here.

    Empty where this machine has no records of the profile.
    """
    if profile is None or not any(local_store(profile).holds(key) for key in PAPERS):
        return []
    here = {row["key"]: row for row in judged_here}
    rows = []
    for paper in dict.fromkeys(row["artefact"].partition("/")[0] for row in judged_here):
        judged_there = paper_verdicts(find_source(load_paper(paper), local=False))
        reference = {row["key"]: row for row in judged_there}
        for promise in paper_toml(paper)["promises"]:
            key = f"{paper}/{promise['claim']}"
            row = {"paper": paper, "promise": promise["text"]}
            row["paper's number"] = reference[key]["paper's number"]
            for side, found in (("reference", reference[key]), ("here", here[key])):
                row[side] = f"{found['verdict']} ({found['setting']})"
                row[f"{side}, number"] = found["number"]
            rows.append(row)
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


def status(profile: str | None = None) -> list[Row]:
    """Count this machine's records of each artefact under each profile that has any."""
    rows = []
    for key in PAPERS:
        paper = load_paper(key)
        for name in COMPUTING_PROFILES if profile is None else (profile,):
            store = local_store(name)
            if profile is None and not store.holds(key):
                continue
            source = Source(paper, {(LOCAL, name): store}, name)
            for artefact in paper.artefacts.values():
                if artefact.parts:
                    continue  # each is counted by itself
                results = source.look(artefact.name)
                words = [record.status for record in results.records]
                rows.append(
                    {
                        "artefact": f"{key}/{artefact.name}",
                        "profile": name,
                        "runs": len(results.expected),
                        "ok": words.count("ok"),
                        "out of memory": words.count("out_of_memory"),
                        "failed": words.count("failed"),
                        "missing": results.missing,
                    }
                )
    return rows


def complete(row: Row) -> bool:
    """Whether a row of `status` has all its records, and none that failed."""
    return not (row["failed"] or row["missing"])


def completeness(rows: Sequence[Row]) -> str:
    """Return in a sentence or two how many artefacts of `status` have all their records."""
    if not rows:
        return (
            "This machine has no records yet: python -m repro run all computes them; show and "
            "report use the reference records."
        )
    whole = sum(map(complete, rows))
    profiles = ", ".join(dict.fromkeys(row["profile"] for row in rows))
    if whole < len(rows):
        return f"{whole} of {len(rows)} artefacts have all their records (profile {profiles})."
    runs, full = (sum(row[name] for row in rows) for name in ("runs", "out of memory"))
    return (
        f"All {len(rows)} artefacts of this machine have all their records (profile {profiles}; "
        f"{runs} runs, {full} of them out of memory as recorded)."
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


def frame(rows: Sequence[Row], columns: Sequence[str] | None = None) -> "pd.DataFrame":
    """Return rows as a data frame, of all columns or of these."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(columns) if columns else None, dtype=object)
