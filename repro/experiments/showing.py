"""One artefact on the terminal, its figure in a file, all of them as a report; and the status."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from repro import paths, report, terminal
from repro.experiments import PAPERS, find_artefacts, load_paper, story, view
from repro.experiments.arguments import Choices, with_changes
from repro.experiments.design import (
    COMPUTING_PROFILES,
    SETTINGS,
    Artefact,
    Paper,
    UsageError,
    paper_toml,
)
from repro.experiments.judge import WORDS
from repro.experiments.processes import Workers
from repro.experiments.query import LOCAL, Results, Source, devices, find_source, results_of
from repro.experiments.view import Row
from repro.measure.files import regular, replacing
from repro.measure.host import cores
from repro.records import (
    Record,
    RecordError,
    check_writable,
    commit_state,
    library_versions,
    local_store,
    now,
)

FORMATS = ("svg", "pdf", "png")
_CLAIM_COLUMNS = ("verdict", "claim", "in the paper", "setting", "expected", "evidence", "repeats")


def found(
    target: str, profile: str | None, device: str | None, changes: Choices = ()
) -> list[tuple[Source, Artefact, Results]]:
    """Return each artefact that is named, with its best records and where they are.

    `UsageError` where there is no such artefact or device, or no run has a key of `changes`.
    """
    paper, artefacts = find_artefacts(target)
    source = find_source(paper, profile, device)
    gathered = [results_of(artefact, source, changes=changes) for artefact in artefacts]
    runs = [run for results in gathered for run, _ in results.expected]
    with_changes(paper, runs, changes)  # refuses a key that none of them has
    return [(source, *pair) for pair in zip(artefacts, gathered, strict=True)]


MOST_ROWS = 24  # of a table, unless its evidence is asked for
Shown = TypeVar("Shown")


def text(source: Source, artefact: Artefact, results: Results, evidence: bool = False) -> str:
    """Return an artefact's verdicts, table and caption, as wide as the terminal.

    With `evidence` the table is whole, and the numbers behind each verdict and check follow it.
    """

    def gathered(results: Results) -> tuple[list[Mapping[str, Any]], str, list[Row], list[Row]]:
        caption = view.full_caption(artefact, results)
        judged = view.verdicts(source.paper, artefact, results)
        return list(artefact.rows(results)), caption, judged, view.checks(artefact, results)

    rows, caption, judged, checked = naming_bad_records(source, artefact, results, gathered)
    title = f"{source.paper.key}/{artefact.name}: {artefact.title}"
    if evidence:
        parts = [terminal.table(rows, title), terminal.prose(caption)]
        if checked:
            parts.append(terminal.table(checked, "Checks, which are no claims of the paper"))
        if judged:
            folder = f"repro/experiments/{source.paper.key}"
            question = paper_toml(source.paper.key)["artefacts"][artefact.name]["question"]
            where = f"{folder}/paper.toml; numbers: {folder}/{question.partition(':')[0]}.py."
            claims = [{name: row[name] for name in _CLAIM_COLUMNS} for row in judged]
            parts.append(terminal.table(claims, "Claims"))
            parts.append(terminal.prose(f"Rules, margins and expectations: {where}"))
        return "\n\n".join(parts)
    words = [
        f"{row['verdict']} ({', '.join(filter(None, (row['setting'], row['device'])))}): "
        f"{row['claim']}\n  {row['number']}"
        for row in judged
    ]
    words += [f"A check fails: {row['check']}" for row in checked if row["holds"] == "NO"]
    verdicts = terminal.prose(report.printable("\n".join(words)), "  ")
    table = terminal.table(rows, most=MOST_ROWS)
    if results.gpu is not None:
        where = report.printable(devices(results.gpu.records))
        rest = f"The rows of {where}: --profile {results.gpu.profile}"
        table = f"{table}\n{terminal.prose(rest)}"
    texts = [terminal.prose(title), verdicts, table, terminal.prose(caption)]
    return "\n\n".join(filter(None, texts))


def setup(target: str, profile: str | None, device: str | None) -> str:
    """Return the sentences on all artefacts of a paper, as wide as the terminal."""
    paper, _ = find_artefacts(target)
    sentences = story.setup(find_source(paper, profile, device))
    return terminal.prose("\n".join(["Setup", *map(report.printable, sentences)]))


def write_figure(
    target: str,
    out: str,
    profile: str | None = None,
    device: str | None = None,
    changes: Choices = (),
) -> Path:
    """Write the figure of an artefact, and return its path, which ends in one of `FORMATS`.

    `target` may be ``overview``: the main effects of all papers. `changes` are those of runs by
    ``--set``. `UsageError` where there is no such artefact, it has no figure or no records, the
    format is unknown, or no file can be written there.
    """
    path = Path(out).expanduser()
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise UsageError(f"--out is {out!r}; let it end in .svg, .pdf or .png")
    if target == "overview":
        if changes:
            raise UsageError("overview has figures of all papers, and takes no --set; leave it out")
        _check_target(path, "the figure")
        sources = {key: find_source(load_paper(key), profile, device) for key in PAPERS}
        if not any(source.records for source in sources.values()):
            raise UsageError("there are no records, so nothing to draw; give another --profile")
        _write(path, report.figure_file(story.effects_figure(sources), form))
        return path
    paper, artefacts = find_artefacts(target)
    drawn = ", ".join(f"{paper.key}/{a.name}" for a in paper.artefacts.values() if a.draw)
    if "/" not in target:
        raise UsageError(f"{target!r} is a whole paper; give one of its figures: {drawn}")
    if not artefacts[0].draw:
        raise UsageError(f"{target} has no figure; these have one: {drawn}")
    _check_target(path, "the figure")
    ((source, artefact, results),) = found(target, profile, device, changes)
    if not results.records:
        raise UsageError(
            f"there are no records of {target}, so nothing to draw: python -m repro run {target}, "
            "or give another --profile or --from"
        )
    drawing = naming_bad_records(source, artefact, results, artefact.figure)
    _write(path, report.figure_file(drawing, form))
    return path


def _check_target(path: Path, what: str) -> None:
    """Refuse a path that no file can be written to, before it takes work to find out."""
    regular(path)
    check_writable(path.parent, what, "free some space, make it writable, or give another path")


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_report(
    profile: str | None = None, device: str | None = None, output: str | None = None
) -> tuple[list[Row], Path]:
    """Write the report as Markdown, its figures into a folder beside it.

    Returns the verdicts, and the path of the Markdown. Of a symbolic link the file is written that
    it leads to. `UsageError` where a folder is named for it, `OSError` where it cannot be written.
    """
    path = paths.results_dir() / "local" / "report.md"
    if output is not None:
        if output.endswith("/"):
            raise UsageError(f"--output is {output!r}, a folder; give the path of a file")
        path = Path(output).expanduser()
    _check_target(path, "the report")  # before it is made
    chapters: dict[str, tuple[list[str], list[Row]]] = {}
    asked = [(key, profile, device, path) for key in PAPERS]
    with (
        terminal.Bar("report", len(asked), sys.stderr.isatty()) as bar,
        Workers(min(len(asked), cores())) as workers,
    ):
        for (key, *_), chapter in workers.map(_chapter, asked):
            chapters[key] = chapter
            bar.step()
    rows = [row for key in PAPERS for row in chapters[key][1]]
    words = [
        f"- **{word}**: {report.markdown(said)}." for word, said in {**WORDS, **SETTINGS}.items()
    ]
    blocks = [
        "# Five papers, checked",
        report.markdown(view.lead_of(rows)),
        report.markdown_table(view.count_rows(rows)),
        "\n".join([*words, "- **expected**: the verdict, as written down before the records."]),
        *(block for key in PAPERS for block in chapters[key][0]),
        report.markdown(_provenance()),
    ]
    # A record may hold half of a pair of UTF-16, which JSON can write and UTF-8 cannot.
    _write(path, ("\n\n".join(blocks) + "\n").encode(errors="backslashreplace"))
    return rows, path


def _chapter(asked: tuple[str, str | None, str | None, Path]) -> tuple[list[str], list[Row]]:
    """Return a paper's blocks of Markdown and its verdicts; write its figures beside the report.

    `asked` is the key of the paper, profile, device, and the path of the report.
    """
    key, profile, device, path = asked
    source = find_source(load_paper(key), profile, device)
    paper, rows = source.paper, []
    lead = f"{paper.citation}. Records: {source.label}."
    blocks = [f"## {report.markdown(paper.title)}", report.markdown(lead)]
    blocks.append("\n".join(f"- {report.markdown(line)}" for line in story.setup(source)))
    for artefact in paper.artefacts.values():
        section = partial(_section, paper, artefact, path)
        results = source.look(artefact.name)
        written, judged = naming_bad_records(source, artefact, results, section)
        blocks += written
        rows += judged
    return blocks, rows


def _section(
    paper: Paper, artefact: Artefact, path: Path, results: Results
) -> tuple[list[str], list[Row]]:
    """Return an artefact's blocks of Markdown and its verdicts; write its figure."""
    judged = view.verdicts(paper, artefact, results)
    blocks = [f"### {report.markdown(f'{artefact.source}: {artefact.title}')}"]
    if artefact.draw:
        picture = Path(f"{path.stem}_files", f"{paper.key}-{artefact.name}.png")
        _write(path.parent / picture, report.figure_png(artefact.figure(results)))
        blocks.append(f"![{report.markdown(artefact.title)}]({quote(picture.as_posix())})")
    blocks.append(report.markdown(view.full_caption(artefact, results)))
    if rows := list(artefact.rows(results)):
        blocks.append(report.markdown_table(rows))
    if judged:
        blocks.append(report.markdown_table(judged, _CLAIM_COLUMNS))
    blocks += [
        f"**{report.markdown(row['claim'])}** {report.markdown(row['why_not'])}"
        for row in judged
        if row.get("why_not")
    ]
    if checked := view.checks(artefact, results):
        blocks += [f'<details markdown="1"><summary>Checks ({len(checked)})</summary>']
        blocks += [report.markdown_table(checked), "</details>"]
    return blocks, judged


def _provenance() -> str:
    """Return the versions and the commit that this report was made with."""
    commit, dirty = commit_state()
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    state = f"commit {commit}{' with changes' if dirty else ''}" if commit else "no checkout"
    return f"Report of {now()}; {state}; {versions}. Each record names its own."


_FAILURES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def naming_bad_records(
    source: Source, artefact: Artefact, results: Results, show: Callable[[Results], Shown]
) -> Shown:
    """Show an artefact, and name the record that it fails for, such as one without a metric.

    Raises:
        RecordError: It fails for one record alone, or only with this record among the others.
        Exception: As it was, where no record is to blame: a defect of ours.
    """
    every = results.records

    def fails(records: Sequence[Record]) -> bool:
        part = copy(results)
        part.records = [*records]
        try:
            show(part)
        except _FAILURES:
            return True
        return False

    try:
        return show(results)
    except _FAILURES as problem:
        if isinstance(problem, RecordError) or fails([]):
            raise
        alone = (record for record in every if fails([record]))
        missed = (one for one in every if not fails([other for other in every if other is not one]))
        if (guilty := next(itertools.chain(alone, missed), None)) is None:
            raise
        path = source.file_of(guilty)
        packed = path.suffix == ".gz"
        named = f"{path} (record {guilty.key})" if packed else path
        advice = "restore it from git" if packed else "move it away or delete it, then run again"
        raise RecordError(
            f"{source.paper.key}/{artefact.name} cannot be shown for what is in {named} "
            f"({type(problem).__name__}: {problem}); {advice}"
        ) from problem


def promise_rows(judged_here: Sequence[Row], profile: str | None) -> list[Row]:
    """Return a row for each promise of a paper: its verdict and first number, reference and here.

    Empty where this machine has no records of the profile.
    """
    if profile is None or not any(local_store(profile).holds(key) for key in PAPERS):
        return []
    here = {row["key"]: row for row in judged_here}
    rows = []
    for paper in dict.fromkeys(row["artefact"].partition("/")[0] for row in judged_here):
        judged_there = view.paper_verdicts(find_source(load_paper(paper), local=False))
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
    """Return how many artefacts of `status` have all their records."""
    if not rows:
        return (
            "This machine has no records yet: python -m repro run all computes them; show and "
            "report use the reference records."
        )
    profiles = ", ".join(dict.fromkeys(row["profile"] for row in rows))
    whole = sum(map(complete, rows))
    return f"{whole} of {len(rows)} artefacts have all their records (profile {profiles})."


def searched() -> str:
    """Return the folders in which records are looked for."""
    local = paths.results_dir() / LOCAL
    references = " and ".join(str(folder) for folder in reversed(paths.reference_dirs()))
    return f"Looked for records of this machine in {local}, for reference records in {references}."
