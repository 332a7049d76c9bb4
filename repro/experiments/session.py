"""A paper in a notebook: compute or look up its records, and show them."""

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pandas as pd
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from repro import report
from repro.experiments import (
    arguments,
    load_paper,
    query,
    story,
    summary,
    view,
)
from repro.experiments.design import LONG, SETTINGS
from repro.experiments.judge import WORDS
from repro.experiments.query import LOCAL, Results
from repro.experiments.run import Setting, compute

MOST_VERDICTS = 3  # of an artefact, in sight


class Session:
    """A paper in a notebook.

    Args:
        paper: Key of the paper.
        profile: ``view`` shows the reference records and computes nothing; another profile first
            computes the records that are missing on this machine.
        device: ``cpu``, or an accelerator such as ``cuda``; empty takes the one that is present.
        data: Folder searched first for datasets; empty for none.
        seeds: How many (``"3"``), or which (``"0,5,7"``); empty for the profile's.
        reference: For ``view``, a folder under ``results/reference``; empty for all.

    Raises:
        UsageError: An argument is not one of its choices.
    """

    def __init__(
        self,
        paper: str,
        profile: str = "view",
        device: str = "",
        data: str = "",
        seeds: str = "",
        reference: str = "",
    ) -> None:
        arguments.check_profile(profile, computing=False)
        arguments.check_data(data or None)
        self.paper = load_paper(paper)
        if profile == "view":
            self.source = query.find_source(self.paper, None, reference or None, local=False)
            return
        setting = Setting(
            profile,
            arguments.check_device(device or arguments.default_device()),
            data or None,
            arguments.parse_seeds(seeds),
        )
        named = [(self.paper, list(self.paper.artefacts.values()))]
        compute(named, setting, workers=1, tell=self._tell)
        # Artefacts that `long` does not run may be a reference's.
        self.source = query.find_source(self.paper, profile, None if profile == LONG else LOCAL)
        # The text above this cell tells of the reference records.
        display(Markdown(story.opening(self.source)))
        opened = self.paper.artefacts[story.story_of(self.paper).figure]
        show_figure(opened.figure(self.results(opened.name)), opened.title)

    @staticmethod
    def _tell(line: str) -> None:
        display(Markdown(report.markdown(line)))

    def results(self, name: str) -> Results:
        """Return the records of an artefact."""
        return self.source.look(name)

    def show(self, name: str) -> None:
        """Show an artefact: verdicts on three of its claims, promises first, figure and caption.

        The figure that opens the notebook is not shown again. Table, checks and further verdicts
        are folded; a check that does not hold is not.
        """
        artefact, results = self.paper.artefacts[name], self.results(name)
        opened = name == story.story_of(self.paper).figure
        table = artefact.table(results)
        checked = summary.checks(artefact, results)
        judged = summary.verdicts(self.paper, artefact, results)
        promised = {f"{self.paper.key}/{claim}" for _, claim in story.promises(self.paper.key)}
        judged.sort(key=lambda row: row["key"] not in promised)
        if judged:
            display(report.VerdictList(judged[:MOST_VERDICTS]))
        if artefact.draw and not opened:
            show_figure(artefact.figure(results), f"{artefact.source}: {artefact.title}")
        caption = artefact.caption(results)
        if len(results.places) > 1:
            caption = view.full_caption(artefact, results)
        if opened:
            caption += " Its figure is at the top of this notebook."
        display(Markdown(f"**{report.markdown(artefact.source)}.** {_in_markdown(caption)}"))
        if not artefact.draw and len(table) <= 9 and len(table.columns) <= 6:
            display(report.TableView(table))
            table = table[:0]
        if folded := _folded(table, checked, judged[MOST_VERDICTS:]):
            display(folded)
        if failed := [row for row in checked if row["holds"] == "NO"]:
            display(report.TableView(summary.frame(failed)))

    def fold(self, *names: str) -> None:
        """Show artefacts behind a line each: verdicts, figure, caption, table, checks."""
        for name in names:
            artefact, results = self.paper.artefacts[name], self.results(name)
            title = f"{artefact.source}: {artefact.title}"
            parts: list[report.Part] = []
            if judged := summary.verdicts(self.paper, artefact, results):
                parts.append(report.VerdictList(judged))
            if artefact.draw:
                png = report.figure_png(artefact.figure(results), dpi=85)
                parts.append(report.Picture(png, title))
            parts += [view.full_caption(artefact, results)]
            parts += [report.TableView(artefact.table(results))]
            if checked := summary.checks(artefact, results):
                parts.append(report.TableView(summary.frame(checked)))
            display(report.Folded(title, *parts))

    def on_gpu(self, name: str) -> None:
        """Show a GPU's records of an artefact of which `show` shows others; nothing without any."""
        artefact, results = self.paper.artefacts[name], self.results(name).gpu
        if results is None:
            return
        if artefact.draw:
            show_figure(artefact.figure(results), f"{artefact.source}: {artefact.title}")
        text = _in_markdown(view.full_caption(artefact, results))
        display(Markdown(f"**{report.markdown(artefact.source)}, on a GPU.** {text}"))
        display(_folded(artefact.table(results)))

    def explore(self, place: int = 0) -> None:
        """Show a widget of the paper, the first or another; nothing where it has no records."""
        module = import_module(f"repro.experiments.{self.paper.key}.widget")
        for explorer in module.explorers(self.results)[place : place + 1]:
            explorer.show()

    def appendix(self) -> None:
        """Show, each folded: the setup, all claims, what failed, the recipe, the records."""
        display(report.Folded("Setup: devices, data, stand-ins", *story.setup(self.source)))
        judged = summary.paper_verdicts(self.source)
        columns = ("artefact", "claim", "setting", "expected", "verdict", "evidence")
        claims = report.TableView(summary.frame(judged, columns))
        display(report.Folded(f"{_counted(judged)}, each with its evidence", claims))
        if failed := [row for row in judged if "why_not" in row]:
            why = report.TableView(summary.frame(failed, ("claim", "why_not")))
            display(report.Folded(f"{len(failed)} that did not hold, and why", why))
        recipe = report.TableView(summary.frame(story.recipe(self.paper)))
        display(report.Folded("Recipe: the paper's, and each profile's", recipe))
        display(self.provenance())

    def claims(self) -> None:
        """Show, folded: each claim of the paper with its verdict and one number."""
        judged = summary.paper_verdicts(self.source)
        table = report.TableView(summary.frame(judged, ("artefact", "claim", "verdict", "number")))
        display(report.Folded(f"{self.paper.title}: {_counted(judged)}", table))

    def provenance(self) -> report.Folded:
        """Return the origin of the records: devices, versions, commits, datasets, commands."""
        records = [record for group in self.source.records.values() for record in group]
        lines = []
        for title, values in {
            "device": {record.device["name"] for record in records},
            "torch": {record.versions["torch"] for record in records},
            "Python": {record.versions["python"] for record in records},
            "code": {
                f"{(record.commit or 'no checkout')[:10]}{' with changes' if record.dirty else ''}"
                for record in records
            },
            "data": {r.dataset["name"] for r in records if r.dataset},
            "command": {record.command for record in records},
        }.items():
            lines.append(f"{title}: {', '.join(sorted(values)) or 'none'}")
        return report.Folded(f"{len(records)} records: {self.source.label}", *lines)


def _in_markdown(caption: str) -> str:
    """Return a caption, in which sentences on what takes the paper's place are small."""
    marks = "|".join(view.MARKS)
    sentence = rf"(?<=\. )((?:\w+: )?(?:{marks})\b[^.]*\.)"
    return re.sub(sentence, r"<small>\1</small>", report.markdown(caption))


def _folded(
    table: pd.DataFrame,
    checked: Sequence[dict[str, Any]] = (),
    judged: Sequence[dict[str, Any]] = (),
) -> report.Folded | None:
    """Return a table, checks and verdicts behind a line; None where there are none."""
    parts: dict[str, report.Part] = {}
    if len(table):
        parts[f"table of {len(table)} rows"] = report.TableView(table)
    if checked:
        parts[f"{len(checked)} checks"] = report.TableView(summary.frame(checked))
    if judged:
        parts[f"{len(judged)} further claims"] = report.VerdictList(judged)
    title = ", ".join(parts)
    return report.Folded(title[:1].upper() + title[1:], *parts.values()) if parts else None


def _counted(judged: Sequence[dict[str, Any]]) -> str:
    """Say how many claims of the paper's, and questions of our own, were judged."""
    own = sum(row["own"] for row in judged)
    counts = {"claims": len(judged) - own, "questions of our own": own}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def show_figure(figure: Figure, alt: str) -> None:
    """Show a figure as PNG, sharp on a dense screen; `alt` is for those who do not see it."""
    png = report.figure_png(figure, dpi=105)
    across = int.from_bytes(png[16:20])  # pixels; a legend may be wider than the figure
    display(Image(png, width=across * 85 // 105, alt=report.printable(alt)))


def definitions() -> report.TableView:
    """Return the meaning of each verdict and setting."""
    rows = [{"word": word, "means": said} for word, said in {**WORDS, **SETTINGS}.items()]
    return report.TableView(summary.frame(rows))
