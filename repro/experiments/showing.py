"""One artefact on the terminal, its figure in a file, or all of them as a Markdown report."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from repro import paths, report, terminal
from repro.experiments import PAPERS, find_artefacts, load_paper, story, summary, view
from repro.experiments.arguments import Choices, check_target, user_path, with_changes
from repro.experiments.design import SETTINGS, Artefact, UsageError
from repro.experiments.judge import WORDS
from repro.experiments.query import Results, Source, find_source, results_of
from repro.experiments.summary import Row
from repro.experiments.workers import Workers
from repro.measure.files import replacing
from repro.measure.host import cores
from repro.records import commit_state, identity, library_versions, now

FORMATS = ("svg", "pdf", "png")
OVERVIEW = "overview"
_CLAIM_COLUMNS = ("verdict", "claim", "in the paper", "setting", "expected", "evidence")
_RECORD_COLUMNS = ("run", "seed", "ended", "record", "file")


def found(
    target: str, profile: str | None, device: str | None, changes: Choices = ()
) -> Iterator[tuple[Source, Artefact, Results]]:
    """Yield each artefact that is named, with its best records and where they are.

    Raises:
        UsageError: There is no such artefact or device, or no run of any has a key of `changes`.
    """
    paper, artefacts = find_artefacts(target)
    source = find_source(paper, profile, device)
    gathered = [results_of(artefact, source, changes=changes) for artefact in artefacts]
    runs = [run for results in gathered for run, _ in results.expected]
    with_changes(paper, runs, changes)  # refuses a key that none of them has
    for artefact, results in zip(artefacts, gathered, strict=True):
        yield source, artefact, results


MOST_LINES = 60  # of an artefact with many rows, unless its evidence is asked for
FEWEST_ROWS, FOLDED = 10, 40  # rows shown in any case, and lines over which few rows may fold
_AROUND = 10  # lines: the head of a table, what is left out, and the hint at the end


def text(source: Source, artefact: Artefact, results: Results, evidence: bool = False) -> str:
    """Return an artefact's verdicts, table and caption, as wide as the terminal.

    With `evidence` the table is whole, and the numbers behind each verdict and check follow it.
    """
    paper = source.paper
    with summary.naming_bad_records(source, artefact, results):
        rows = list(artefact.rows(results))
        caption = terminal.prose(view.full_caption(artefact, results))
        checked = summary.checks(artefact, results)
        judged = summary.verdicts(paper, artefact, results)
    title = f"{paper.key}/{artefact.name}: {artefact.title}"
    if not evidence:
        around = [title, "\n".join(map(_in_short, judged)), caption]
        taken = sum(len(part.splitlines()) + 1 for part in around)
        room = max(FEWEST_ROWS, MOST_LINES - _AROUND - taken)
        table = terminal.table(rows[:room], lines=max(room, FOLDED), advice="--evidence folds more")
        if len(rows) > room:
            table += f"\n{len(rows) - room} more rows: --evidence"
        if results.gpu is not None:
            devices = report.printable(summary.devices(results.gpu))
            table += f"\nThe rows of {devices}: --profile {results.gpu.profile}"
        return "\n\n".join(filter(None, [*around[:2], table, caption]))
    parts = [terminal.table(rows, title), caption]
    if checked:
        parts.append(terminal.table(checked, "Checks: what no run here could change"))
    if judged:
        claims = [
            {"claim": f"{row['claim']}\n{_where(row)}"}
            | {column: row[column] for column in ("setting", "expected", "verdict", "evidence")}
            for row in judged
        ]
        parts.append(terminal.table(claims, "Claims"))
        parts.append(terminal.prose(summary.whereabouts(paper, artefact)))
    return "\n\n".join(parts)


def _in_short(row: Row) -> str:
    """Return a verdict: the word and the claim, then one number, whole, on a line of its own."""
    where = ", ".join(filter(None, (row["setting"], row["device"])))
    said = f"{row['verdict']} ({where}): {row['claim']}\n  {summary.one_number(row)}"
    return terminal.prose(report.printable(said), indent="  ")


def _where(row: Row) -> str:
    return "our own question" if row["own"] else str(row["in the paper"])


def setup(target: str, profile: str | None, device: str | None) -> str:
    """Return the sentences on all artefacts of a paper, as wide as the terminal."""
    paper, _ = find_artefacts(target)
    sentences = story.setup(find_source(paper, profile, device))
    return terminal.prose("\n".join(["Setup", *map(report.printable, sentences)]))


def write_figure(
    target: str,
    out: str,
    form: str | None = None,
    profile: str | None = None,
    device: str | None = None,
    changes: Choices = (),
) -> Path:
    """Write the figure of an artefact, and return its path.

    Args:
        target: ``PAPER/ARTEFACT``, or ``overview`` for the main effects of all papers.
        out: Path of the file.
        form: One of `FORMATS`; by default the one that the path ends in.
        profile: Only records of it, as in `found`.
        device: Only records of it.
        changes: Of the runs, by ``--set``.

    Raises:
        UsageError: There is no such artefact, it has no figure or no records, the format is
            unknown, or no file can be written there.
    """
    path = user_path(out, "--out")
    form = form or path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        given = f"--format is {form!r}" if form else f"--out is {out!r}, which names no format"
        raise UsageError(f"{given}; give --format {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if target == OVERVIEW:
        check_target(path, "the figure")
        sources = {key: find_source(load_paper(key), profile, device) for key in PAPERS}
        _write(path, report.figure_file(story.effects_figure(sources), form))
        return path
    paper, artefacts = find_artefacts(target)
    drawn = ", ".join(f"{paper.key}/{a.name}" for a in paper.artefacts.values() if a.draw)
    if "/" not in target:
        raise UsageError(f"{target!r} is a whole paper; give one of its figures: {drawn}")
    if not artefacts[0].draw:
        raise UsageError(f"{target} has no figure; these have one: {drawn}")
    check_target(path, "the figure")
    ((source, artefact, results),) = found(target, profile, device, changes)
    if not results.records:
        raise UsageError(
            f"there are no records of {target}, so nothing to draw: python -m repro run {target}, "
            "or give another --profile or --from"
        )
    with summary.naming_bad_records(source, artefact, results):
        drawing = artefact.figure(results)
    _write(path, report.figure_file(drawing, form))
    return path


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_report(
    profile: str | None = None, device: str | None = None, output: str | None = None
) -> tuple[list[Row], Path]:
    """Write the report as Markdown, its figures into a folder beside it.

    Returns:
        The verdicts, and the path of the Markdown.

    Raises:
        UsageError: It cannot be written there. Of a symbolic link the file is written that it
            leads to.
    """
    path = target(output)
    check_target(path, "the report")  # before it is made
    made: dict[str, _Chapter] = {}
    folder = Path(f"{path.stem}_files")
    asked = [(key, profile, device, folder) for key in PAPERS]
    with (
        terminal.Bar("report", len(asked), sys.stderr.isatty()) as bar,
        Workers(min(len(asked), cores())) as workers,
    ):
        chapters = workers.map(_chapter, asked) if workers else ((a, _chapter(a)) for a in asked)
        for (key, *_), chapter in chapters:
            made[key] = chapter
            bar.advance()
    rows = [row for key in PAPERS for row in made[key].rows]
    words = [
        f"- **{word}**: {report.markdown(said)}." for word, said in {**WORDS, **SETTINGS}.items()
    ]
    head = [
        "# Five papers, checked",
        report.markdown(summary.lead_of(rows)),
        report.markdown_table(summary.frame(summary.count_rows(rows))),
        "\n".join([*words, "- **expected**: the verdict, as written down before the records."]),
    ]
    blocks = [block for key in PAPERS for block in made[key].blocks]
    whole = "\n\n".join([*head, *blocks, report.markdown(provenance())])
    for key in PAPERS:
        for name, png in made[key].pictures.items():
            _write(path.parent / folder / name, png)
    # A record may hold half of a pair of UTF-16, which JSON can write and UTF-8 cannot.
    _write(path, f"{whole}\n".encode(errors="backslashreplace"))
    return rows, path


@dataclass
class _Chapter:
    """A paper's part of the report: blocks of Markdown, verdicts, and figures by file name."""

    blocks: list[str]
    rows: list[Row]
    pictures: dict[str, bytes]


def _chapter(asked: tuple[str, str | None, str | None, Path]) -> _Chapter:
    """Make a paper's chapter: of its key, profile and device; its figures go into the folder."""
    key, profile, device, folder = asked
    source = find_source(load_paper(key), profile, device)
    paper, look = source.paper, story.looking(source)
    made = _Chapter([], [], {})
    lead = f"{paper.citation}. Records: {source.label}."
    made.blocks += [f"## {report.markdown(paper.title)}", report.markdown(lead)]
    made.blocks.append(
        "\n".join(f"- {report.markdown(line)}" for line in story.setup(source, look))
    )
    for artefact in paper.artefacts.values():
        results = look(artefact.name)
        with summary.naming_bad_records(source, artefact, results):
            judged = summary.verdicts(paper, artefact, results)
            made.blocks.append(f"### {report.markdown(f'{artefact.source}: {artefact.title}')}")
            if artefact.draw:
                name = f"{key}-{artefact.name}.png"
                made.pictures[name] = report.figure_png(artefact.figure(results), small=False)
                link = quote((folder / name).as_posix())
                made.blocks.append(f"![{report.markdown(artefact.title)}]({link})")
            made.blocks += _section(source, artefact, results, judged)
        made.rows += judged
    return made


def _section(source: Source, artefact: Artefact, results: Results, judged: list[Row]) -> list[str]:
    """Return the Markdown blocks of an artefact below its title and figure."""
    parts = [report.markdown(view.full_caption(artefact, results))]
    claims = [{name: row[name] for name in _CLAIM_COLUMNS} for row in judged]
    tables = [artefact.table(results), summary.frame(claims)]
    parts += [report.markdown_table(frame) for frame in tables if len(frame)]
    parts += [
        f"**{report.markdown(row['claim'])}** {report.markdown(row['why_not'])}"
        for row in judged
        if row.get("why_not")
    ]
    for name, frame in (
        ("Checks", summary.frame(summary.checks(artefact, results))),
        ("Records", summary.frame(record_rows(source, results), _RECORD_COLUMNS)),
    ):
        if len(frame):
            parts += [f'<details markdown="1"><summary>{name} ({len(frame)})</summary>']
            parts += [report.markdown_table(frame), "</details>"]
    return parts


def record_rows(source: Source, results: Results) -> list[Row]:
    """Return a row for each record of an artefact: the run, its end, the file."""
    runs = {identity(run.experiment, run.config, seed): run for run, seed in results.expected}
    records = results.records
    files = source.paths(records)
    return [
        {
            "run": str(runs.get(record.identity, record.experiment)),
            "seed": record.seed,
            "ended": record.status.replace("_", " "),
            "record": record.key,
            "file": "/".join(files[id(record)].parts[-5:]),
        }
        for record in records
    ]


def target(output: str | None) -> Path:
    """Return where the report is written: where it was asked for, else among the results."""
    if output is None:
        return paths.results_dir() / "local" / "report.md"
    if output.endswith("/"):
        raise UsageError(f"--output is {output!r}, a folder; give the path of a file")
    return user_path(output, "--output")


def provenance() -> str:
    """Return the versions and the commit that this report was made with."""
    commit, dirty = commit_state()
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    state = f"commit {commit}{' with changes' if dirty else ''}" if commit else "no checkout"
    return f"Report of {now()}; {state}; {versions}. Each record names its own."
