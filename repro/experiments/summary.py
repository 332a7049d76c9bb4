"""Verdicts and status over all papers."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from repro import paths, report
from repro.experiments import PAPERS, load_paper
from repro.experiments.design import (
    COMPUTING_PROFILES,
    LONG,
    SEEDS,
    SETTINGS,
    TOO_LITTLE,
    Artefact,
    Claim,
    Paper,
    UsageError,
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
    results_of,
)
from repro.records import Record, RecordError, local_store

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
CLAIM_COLUMNS = ("artefact", "claim", "in the paper", "setting", "expected", "verdict", "evidence")


def verdicts(paper: Paper, artefact: Artefact, results: Results) -> list[Row]:
    """Return an artefact's claims and verdicts, a row each, the paper's before our own questions.

    Beside `CLAIM_COLUMNS` a row has its ``key``, whether it is our ``own``, the ``device`` of its
    records where these are not the results shown, and ``why_not`` where the claim certainly fails.
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
            "key": f"{paper.key}/{artefact.name}.{key}",
            "own": claim.own,
            "device": "" if used is results else devices(used),
        }
        if verdict.word in (NOT_REPRODUCED, NOT_SEEN):
            row["why_not"] = _paragraph(artefact, claim, used)
        rows.append(row)
    return sorted(rows, key=lambda row: bool(row["own"]))


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
    return "" if used is shown else f"; {devices(used)}, profile {used.profile}"


def devices(results: Results) -> str:
    """Return the names of the devices of records."""
    return ", ".join(dict.fromkeys(record.device["name"] for record in results.records))


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


@contextmanager
def naming_bad_records(source: Source, artefact: Artefact, results: Results) -> Iterator[None]:
    """Name the record whose content keeps an artefact from being shown.

    Raises:
        RecordError: An artefact of this record alone fails, too.
        Exception: As it was, where no record is to blame: a defect of ours.
    """
    try:
        yield
    except _FAILURES as problem:
        if isinstance(problem, RecordError | UsageError) or _fails(artefact, results, []):
            raise
        guilty = [record for record in results.records if _fails(artefact, results, [record])]
        files = source.paths(guilty)
        if not files:
            raise
        packed = any(path.suffix == ".gz" for path in files.values())
        named = [f"{files[id(r)]}{f' (record {r.key})' * packed}" for r in guilty if id(r) in files]
        advice = "restore it from git" if packed else "move it away or delete it, then run again"
        raise RecordError(
            f"{source.paper.key}/{artefact.name} cannot be shown for what is in "
            f"{' and '.join(named[:3])} ({type(problem).__name__}: {problem}); {advice}"
        ) from problem


_FAILURES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def _fails(artefact: Artefact, results: Results, records: Sequence[Record]) -> bool:
    """Whether an artefact of these records alone cannot be shown."""
    part = copy(results)
    part.__dict__.pop("frame", None)
    part.records = list(records)
    try:
        with warnings.catch_warnings(action="ignore"):
            artefact.table(part)
            artefact.caption(part)
            for check in artefact.checks:
                check.row(part)
            for numbers in artefact.claims.values():
                with suppress(NotRun):
                    numbers(part)
            if artefact.draw:
                artefact.figure(part)
    except _FAILURES:
        return True
    return False


def whereabouts(paper: Paper, artefact: Artefact) -> str:
    """Return where an artefact's claims are written down, and where their numbers come from."""
    module = paper_toml(paper.key)["artefacts"][artefact.name]["question"].partition(":")[0]
    return (
        f"Rules, margins and expectations: repro/experiments/{paper.key}/paper.toml; numbers: "
        f"repro/experiments/{paper.key}/{module}.py."
    )


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


def paper_verdicts(source: Source) -> list[Row]:
    """Return all verdicts on a paper."""
    rows = []
    for artefact in source.paper.artefacts.values():
        results = results_of(artefact, source)
        with naming_bad_records(source, artefact, results):
            rows += verdicts(source.paper, artefact, results)
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
    rows = []
    for key in dict.fromkeys(row["artefact"].partition("/")[0] for row in judged_here):
        source = find_source(load_paper(key), local=False)
        sides = {"reference": paper_verdicts(source), "here": judged_here}
        for promise in paper_toml(key)["promises"]:
            row = {"paper": key, "promise": promise["text"]}
            row["paper's number"] = _papers_number(source, promise["claim"])
            for side, judged_rows in sides.items():
                found = {one["key"]: one for one in judged_rows}[f"{key}/{promise['claim']}"]
                row[side] = f"{found['verdict']} ({found['setting']})"
                row[f"{side}, number"] = one_number(found)
            rows.append(row)
    return rows


def _papers_number(source: Source, name: str) -> str:
    """Return the paper's number of a claim's first case, or its margin; a dash without one."""
    place, _, key = name.partition(".")
    artefact, claim = source.paper.artefacts[place], claims_of(source.paper.key)[place][key]
    with suppress(NotRun):
        *_, used = judged(artefact, claim, results_of(artefact, source))
        for case, ours in artefact.claims[key](used).items():
            if not isinstance(ours, NotRun):
                return claim.papers_number(case, ours)
    return report.DASH


_INTERVALS = re.compile(r" \[[^\]]*\]| \(90 %[^)]*\)| \([^( ]+ of the \w+'s\)")
_UNKNOWN = " (no spread known)"


def one_number(row: Row) -> str:
    """Return the first number of a verdict, without its interval, before the case that it is of."""
    parts = _INTERVALS.sub("", row["evidence"]).split("; ")
    for part in parts if row["verdict"] != "not run" else ():
        whole, *papers = re.split(r", (?=(?:paper|prediction|margin) \S*\d)", part)
        found = re.fullmatch(r"(?:(.*) )?([×+-]\d.*)", whole.replace(_UNKNOWN, ""))
        if found:
            notes = ", ".join(["no spread known"] * (_UNKNOWN in whole) + papers)
            number = f"{found[2]} ({notes})" if notes else found[2]
            return f"{number}: {found[1].rstrip(':,')}" if found[1] else number
    return parts[0]


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


def definitions() -> list[Row]:
    """Return the meaning of each verdict and setting, a row each."""
    return [
        {"word": word, "means": means}
        for meanings in (WORDS, SETTINGS)
        for word, means in meanings.items()
    ]


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
                results = results_of(artefact, source, SEEDS[name])
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
    full = sum(row["out of memory"] for row in rows)
    return (
        f"All {len(rows)} artefacts of this machine have all their records (profile {profiles}; "
        f"{sum(row['runs'] for row in rows)} runs, {full} of them out of memory as recorded)."
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
        checks = sum(len(artefact.checks) for artefact in load_paper(key).artefacts.values())
        counted.append(
            {
                "paper": key,
                "promises": len(paper_toml(key)["promises"]) if claims else 0,
                "claims": len(claims),
                "checks": checks,
                "our questions": len(judged) - len(claims),
            }
            | counts(claims or judged)
        )
    total = {
        name: sum(row[name] for row in counted)
        for name in ("promises", "claims", "checks", "our questions")
    }
    return [*counted, {"paper": "all papers", **total} | counts(of_papers(rows))]


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
