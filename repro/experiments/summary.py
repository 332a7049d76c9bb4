"""Verdicts, status and the HTML report over all papers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import paths, report
from repro.experiments import PAPERS, load_paper
from repro.experiments.design import (
    COMPUTING_PROFILES,
    SEEDS,
    Artefact,
    Paper,
    Results,
    expectation,
)
from repro.experiments.judging import KINDS, WORDS
from repro.experiments.sources import LOCAL, Source, find_source, results_of
from repro.measure.files import check_writable, replacing
from repro.records import commit_state, library_versions, local_store, now

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
CLAIM_COLUMNS = ("artefact", "claim", "in the paper", "kind", "expected", "verdict", "evidence")


def verdicts(paper: Paper, artefact: Artefact, results: Results) -> list[Row]:
    """Return an artefact's claims and verdicts, a row each."""
    rows = []
    for claim in artefact.claims:
        expected = expectation(paper.key, artefact.name, claim.key)
        verdict = claim.judge(results, expected)
        values = (
            f"{paper.key}/{artefact.name}",
            claim.text,
            claim.source,
            claim.kind,
            expected.expect,
            verdict.word,
            verdict.evidence,
        )
        rows.append(dict(zip(CLAIM_COLUMNS, values, strict=True)))
    return rows


def whereabouts(paper: Paper, artefact: Artefact) -> str:
    """Return where an artefact's claims are judged, and where it is written what was expected."""
    module = artefact.question.partition(":")[0].replace(".", "/")
    return f"Judged in {module}.py; expected in repro/experiments/expected/{paper.key}.toml."


def checks(artefact: Artefact, results: Results) -> list[Row]:
    """Return what holds by construction, a row each."""
    return [check.row(results) for check in artefact.checks]


def caption(artefact: Artefact, results: Results) -> str:
    """Return an artefact's caption, and which machine and profile its rows are of."""
    shown = f" Shown: {'; '.join(results.places)}." if results.places else ""
    return report.printable(artefact.caption(results) + shown)  # it quotes records


def paper_verdicts(source: Source) -> list[Row]:
    """Return all verdicts on a paper."""
    return [
        row
        for artefact in source.paper.artefacts.values()
        for row in verdicts(source.paper, artefact, results_of(artefact, source))
    ]


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Return how many claims got each verdict."""
    words = [row["verdict"] for row in rows]
    return {word: words.count(word) for word in WORDS}


def definitions() -> list[Row]:
    """Return what the verdicts and the kinds of claims mean, a row each."""
    return [
        {"word": word, "means": means}
        for meanings in (WORDS, KINDS)
        for word, means in meanings.items()
    ]


def reference_counts() -> Mapping[str, dict[str, int]]:
    """Return the verdicts' counts of every paper, from the reference records alone."""
    return {
        key: counts(paper_verdicts(find_source(load_paper(key), local=False))) for key in PAPERS
    }


def status(profile: str | None = None) -> list[Row]:
    """Count this machine's records of each artefact under each profile that has any."""
    rows = []
    for key in PAPERS:
        paper = load_paper(key)
        for name in COMPUTING_PROFILES if profile is None else (profile,):
            store = local_store(name)
            if profile is None and not any((store.folder / key).glob("*.json")):
                continue
            source = Source(paper, {(LOCAL, name): store}, name)
            for artefact in paper.artefacts.values():
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
                        "stale": len(results.stale),
                    }
                )
    return rows


def write_report(
    profile: str | None = None, device: str | None = None, output: str | None = None
) -> tuple[list[Row], Path]:
    """Write the HTML report; return the verdicts and its path.

    Raises:
        OSError: It cannot be written there (`NotAFileError`: `output` is a folder, a device or a
            pipe; of a symbolic link the file is written that it leads to).
    """
    path = Path(output) if output else paths.results_dir() / "local" / "report.html"
    check_writable(path)  # before minutes are spent
    sections, rows, labels, numbers = [], [], [], []
    for key in PAPERS:
        paper = load_paper(key)
        source = find_source(paper, profile, device)
        labels.append(f"{paper.title}: {source.label}")
        for artefact in paper.artefacts.values():
            results = results_of(artefact, source)
            judged = verdicts(paper, artefact, results)
            rows += judged
            sections.append(
                report.Section(
                    anchor=f"{key}-{artefact.name}",
                    title=f"{artefact.source}: {artefact.title}",
                    caption=caption(artefact, results),
                    table=artefact.table(results),
                    checks=frame(checks(artefact, results)),
                    verdicts=frame(judged, CLAIM_COLUMNS[1:]),
                    figure=artefact.figure(results) if artefact.draws else None,
                )
            )
        own = [row for row in rows if row["artefact"].startswith(f"{key}/")]
        numbers.append({"paper": paper.title, "claims": len(own)} | counts(own))
    page = report.html_page(
        "repro: five papers, reproduced",
        "What each paper claims, and what was measured. " + "; ".join(labels) + ".",
        frame(rows, CLAIM_COLUMNS),
        [frame(numbers), frame(definitions())],
        sections,
        provenance(),
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return rows, path


def frame(rows: Sequence[Row], columns: Sequence[str] | None = None) -> "pd.DataFrame":
    """Return rows as a data frame, of all columns or of these."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(columns) if columns else None, dtype=object)


def provenance() -> str:
    """Return the versions and the commit that this report was made with."""
    commit, dirty = commit_state()
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    state = f"commit {commit}{' with changes' if dirty else ''}" if commit else "no checkout"
    return f"Report of {now()}; {state}; {versions}. Each record names its own."
