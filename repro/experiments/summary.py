"""Verdicts, status and the HTML report over all papers."""

from pathlib import Path

import pandas as pd

from repro import paths, report
from repro.experiments import PAPERS, load_paper
from repro.experiments.design import COMPUTING_PROFILES, SEEDS, Artefact, Paper, Results
from repro.experiments.sources import Source, find_source, results_of
from repro.records import local_store


def verdicts(paper: Paper, artefact: Artefact, results: Results) -> pd.DataFrame:
    """Return an artefact's claims and verdicts as a table."""
    rows = [
        {
            "artefact": f"{paper.key}/{artefact.name}",
            "claim": claim.text,
            "in the paper": claim.source,
            "verdict": verdict.word,
            "evidence": verdict.evidence,
        }
        for claim, verdict in ((claim, claim.check(results)) for claim in artefact.claims)
    ]
    return pd.DataFrame(rows, columns=["artefact", "claim", "in the paper", "verdict", "evidence"])


def paper_verdicts(paper: Paper, source: Source) -> pd.DataFrame:
    """Return all verdicts on a paper."""
    frames = [
        verdicts(paper, artefact, results_of(paper, artefact, source))
        for artefact in paper.artefacts.values()
    ]
    return pd.concat(frames, ignore_index=True)


def status(profile: str | None = None) -> pd.DataFrame:
    """Count this machine's records of each artefact under each profile that has any."""
    rows = []
    for key in PAPERS:
        paper = load_paper(key)
        for name in COMPUTING_PROFILES if profile is None else (profile,):
            store = local_store(name)
            if profile is None and not any((store.folder / key).glob("*.json")):
                continue
            for artefact in paper.artefacts.values():
                results = results_of(paper, artefact, Source("local", name, store), SEEDS[name])
                counts = [record.status for record in results.records]
                rows.append(
                    {
                        "artefact": f"{key}/{artefact.name}",
                        "profile": name,
                        "runs": len(results.expected),
                        "ok": counts.count("ok"),
                        "out of memory": counts.count("out_of_memory"),
                        "failed": counts.count("failed"),
                        "missing": results.missing,
                        "stale": len(results.stale),
                    }
                )
    columns = ["artefact", "profile", "runs", "ok", "out of memory", "failed", "missing", "stale"]
    return pd.DataFrame(rows, columns=columns)


def write_report(
    profile: str | None = None, device: str | None = None, output: str | None = None
) -> tuple[pd.DataFrame, Path]:
    """Write the HTML report; return the verdicts and its path."""
    sections, frames, labels = [], [], []
    for key in PAPERS:
        paper = load_paper(key)
        source = find_source(paper, profile, device)
        labels.append(f"{paper.title}: {source.label}")
        for artefact in paper.artefacts.values():
            results = results_of(paper, artefact, source)
            judged = verdicts(paper, artefact, results)
            frames.append(judged)
            sections.append(
                report.Section(
                    anchor=f"{key}-{artefact.name}",
                    title=f"{artefact.source}: {artefact.title}",
                    caption=artefact.caption(results),
                    table=artefact.table(results),
                    verdicts=judged.drop(columns="artefact"),
                    figure=artefact.figure(results) if artefact.figure else None,
                )
            )
    every = pd.concat(frames, ignore_index=True)
    page = report.html_page(
        "repro: five papers, reproduced",
        "What each paper claims, and what was measured. " + "; ".join(labels) + ".",
        every,
        sections,
        provenance(),
    )
    path = Path(output) if output else paths.results_dir() / "local" / "report.html"
    return every, report.write_html(path, page)


def provenance() -> str:
    """Return the versions and the commit that this report was made with."""
    from repro.records import commit_state, library_versions, now

    commit, dirty = commit_state()
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    state = f"commit {commit}{' with changes' if dirty else ''}" if commit else "no checkout"
    return f"Report of {now()}; {state}; {versions}. Each record names its own."
