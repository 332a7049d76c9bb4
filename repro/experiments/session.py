"""A paper in a notebook: compute or look up its records, and show them."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from repro import report
from repro.experiments import arguments, load_paper, query, story, view
from repro.experiments.design import LONG, SETTINGS, Artefact, paper_toml
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
        here = arguments.check_device(device or arguments.default_device())
        setting = Setting(profile, here, data or None, arguments.parse_seeds(seeds))
        named = [(self.paper, list(self.paper.artefacts.values()))]
        compute(
            named, setting, workers=1, tell=lambda line: display(Markdown(report.markdown(line)))
        )
        # Artefacts that `long` does not run may be a reference's.
        self.source = query.find_source(self.paper, profile, None if profile == LONG else LOCAL)
        # The text above this cell tells of the reference records.
        display(Markdown(story.opening(self.source)))
        opened = self.paper.artefacts[story.story_of(self.paper).figure]
        show_figure(opened.figure(self.results(opened.name)), opened.title)

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
        rows = list(artefact.rows(results))
        checked = view.checks(artefact, results)
        promised = [
            f"{self.paper.key}/{row['claim']}" for row in paper_toml(self.paper.key)["promises"]
        ]
        judged = view.verdicts(self.paper, artefact, results)
        judged.sort(key=lambda row: row["key"] not in promised)
        if judged:
            display(report.shown_verdicts(judged[:MOST_VERDICTS]))
        _show(artefact, results, drawn=not opened)
        if not artefact.draw and len(rows) <= 9 and len(report.cells_of(rows)) <= 6:
            display(report.shown_table(rows))
            rows = []
        parts: dict[str, report.Shown] = {}
        if rows:
            parts[f"table of {len(rows)} rows"] = report.shown_table(rows)
        if checked:
            parts[f"{len(checked)} check{'s' * (len(checked) > 1)}"] = report.shown_table(checked)
        if more := judged[MOST_VERDICTS:]:
            parts[f"{len(more)} further claim{'s' * (len(more) > 1)}"] = report.shown_verdicts(more)
        if parts:
            display(report.folded(", ".join(parts).capitalize(), *parts.values()))
        if failed := [row for row in checked if row["holds"] == "NO"]:
            display(report.shown_table(failed))

    def fold(self, *names: str) -> None:
        """Show artefacts behind a line each: verdicts, figure, caption, table, checks."""
        for name in names:
            artefact, results = self.paper.artefacts[name], self.results(name)
            title = f"{artefact.source}: {artefact.title}"
            parts: list[report.Shown | str] = []
            if judged := view.verdicts(self.paper, artefact, results):
                parts.append(report.shown_verdicts(judged))
            if artefact.draw:
                png = report.figure_png(artefact.figure(results), dpi=85)
                parts.append(report.picture(png, title))
            parts += [view.full_caption(artefact, results)]
            parts += [report.shown_table(list(artefact.rows(results)))]
            if checked := view.checks(artefact, results):
                parts.append(report.shown_table(checked))
            display(report.folded(title, *parts))

    def on_gpu(self, name: str) -> None:
        """Show a GPU's records of an artefact of which `show` shows others; nothing without any."""
        artefact, results = self.paper.artefacts[name], self.results(name).gpu
        if results is not None:
            _show(artefact, results, ", on a GPU")
            rows = list(artefact.rows(results))
            display(report.folded(f"Table of {len(rows)} rows", report.shown_table(rows)))

    def explore(self, place: int = 0) -> None:
        """Show a widget of the paper, the first or another; nothing where it has no records."""
        module = import_module(f"repro.experiments.{self.paper.key}.widget")
        for explorer in module.explorers(self.results)[place : place + 1]:
            explorer.show()

    def appendix(self) -> None:
        """Show, each folded: the setup, all claims, what failed, the recipe, the records."""
        display(report.folded("Setup: devices, data, stand-ins", *story.setup(self.source)))
        judged = view.paper_verdicts(self.source)
        columns = ("artefact", "claim", "setting", "expected", "verdict", "evidence", "repeats")
        title = f"{_counted(judged)}, each with its evidence"
        display(report.folded(title, report.shown_table(judged, columns)))
        if failed := [row for row in judged if "why_not" in row]:
            why = report.shown_table(failed, ("claim", "why_not"))
            display(report.folded(f"{len(failed)} that did not hold, and why", why))
        recipe = report.shown_table(story.recipe(self.paper))
        display(report.folded("Recipe: the paper's, and each profile's", recipe))
        display(self._provenance())

    def claims(self) -> None:
        """Show, folded: each claim of the paper with its verdict and one number."""
        judged = view.paper_verdicts(self.source)
        table = report.shown_table(judged, ("artefact", "claim", "verdict", "number"))
        display(report.folded(f"{self.paper.title}: {_counted(judged)}", table))

    def _provenance(self) -> report.Shown:
        """Return the origin of the records: devices, versions, commits, datasets, commands."""
        records = [record for group in self.source.records.values() for record in group]
        origin = {
            "device": {record.device["name"] for record in records},
            "torch": {record.versions["torch"] for record in records},
            "code": {
                (record.commit or "no checkout")[:10] + " with changes" * bool(record.dirty)
                for record in records
            },
            "data": {record.dataset["name"] for record in records if record.dataset},
            "command": {record.command for record in records},
        }
        lines = [f"{name}: {', '.join(sorted(values))}" for name, values in origin.items()]
        return report.folded(f"{len(records)} records: {self.source.label}", *lines)


def _show(artefact: Artefact, results: Results, where: str = "", drawn: bool = True) -> None:
    """Show an artefact's figure, if it has one and it is to be `drawn`, and its caption."""
    caption = report.markdown(view.full_caption(artefact, results))
    if artefact.draw and drawn:
        show_figure(artefact.figure(results), f"{artefact.source}: {artefact.title}")
    if not drawn:
        caption += " Its figure is at the top of this notebook."
    display(Markdown(f"**{report.markdown(artefact.source)}{where}.** {caption}"))


def _counted(judged: Sequence[dict[str, Any]]) -> str:
    """Say how many claims of the paper's, and questions of our own, were judged."""
    own = sum(row["own"] for row in judged)
    return view.in_words(
        {"claims": len(judged) - own, f"question{'s' * (own > 1)} of our own": own}
    )


def show_figure(figure: Figure, alt: str) -> None:
    """Show a figure as PNG, sharp on a dense screen; `alt` is for those who do not see it."""
    png = report.figure_png(figure, dpi=105)
    across = int.from_bytes(png[16:20])  # pixels; a legend may be wider than the figure
    display(Image(png, width=across * 85 // 105, alt=report.printable(alt)))


def definitions() -> report.Shown:
    """Return the meaning of each verdict and setting."""
    return report.shown_table(
        [{"word": word, "means": said} for word, said in {**WORDS, **SETTINGS}.items()]
    )
