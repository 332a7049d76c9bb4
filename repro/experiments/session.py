"""A paper in a notebook: compute or look up its records, and show them."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from IPython.display import Image, Markdown, clear_output, display
from matplotlib.figure import Figure

from repro import report
from repro.experiments import (
    arguments,
    load_paper,
    query,
    recipes,
    story,
    summary,
    view,
)
from repro.experiments import run as running
from repro.experiments.design import LONG
from repro.experiments.query import LOCAL, Results
from repro.experiments.run import Setting

Shown = TypeVar("Shown")


class Session:
    """A paper in a notebook.

    Args:
        paper: Key of the paper.
        profile: ``view`` shows the reference records and computes nothing; another profile first
            computes the records that are missing on this machine.
        device: ``cpu``, or an accelerator such as ``cuda``; empty takes the one that is present.
        data: Folder searched first for datasets, which has to exist; empty for none.
        seeds: How many (``"3"``), or which (``"0,5,7"``); empty for the profile's.
        reference: For ``view``, a folder under ``results/reference``; empty takes a GPU's before
            a CPU's.

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
        else:
            setting = Setting(
                profile,
                arguments.check_device(device or arguments.default_device()),
                data or None,
                arguments.parse_seeds(seeds),
            )
            chosen = arguments.choose_datasets(self.paper, profile, (), setting.root)
            runs = arguments.plan(self.paper, self.paper.artefacts.values(), profile, chosen)
            if profile == "paper":
                arguments.require_data([(self.paper, runs)], setting.root)
            running.load_data(runs, setting.root)
            tally = running.execute(self.paper, runs, setting)
            # Artefacts that `long` does not run may be a reference's.
            only_device = None if profile == LONG else LOCAL
            self.source = query.find_source(self.paper, profile, only_device)
            if failed := tally.failed + tally.failed_before:
                again = f"python -m repro run {paper} --profile {profile} --retry-failed"
                display(
                    Markdown(f"**{failed} runs failed**; `{again}` computes what failed again.")
                )
            for lacks in tally.missing:
                display(Markdown(f"**Runs were left out**: {lacks}"))
            # The text above this cell tells of the reference records.
            display(Markdown(story.opening(self.source)))
            show_figure(self._figure(story.story_of(self.paper).figure))

    def setup(self) -> None:
        """Show device, data, stand-ins and the meaning of marks, which hold for all cells."""
        sentences = [report.markdown(sentence) for sentence in story.setup(self.source)]
        display(Markdown("> **Setup.** " + "\n>\n> ".join(sentences)))

    def results(self, name: str) -> Results:
        """Return the records of an artefact."""
        return query.results_of(self.paper.artefacts[name], self.source)

    def show(self, name: str) -> None:
        """Show an artefact: the verdicts on its claims, figure, caption, and table if it is short.

        Long tables come at the end: `tables` and `verdicts`.
        """
        artefact, results = self.paper.artefacts[name], self.results(name)
        with summary.naming_bad_records(self.source, artefact, results):
            caption = artefact.caption(results)
            if len(results.places) > 1:
                caption = view.full_caption(artefact, results)
            figure = artefact.figure(results) if artefact.draw else None
            table = artefact.table(results)
            failed = [row for row in summary.checks(artefact, results) if row["holds"] == "NO"]
            judged = summary.verdicts(self.paper, artefact, results)
        if judged:
            display(report.VerdictList(judged))
        if figure is not None:
            show_figure(figure)
        long = len(table) > report.LONG
        where = f" Its table of {len(table)} rows is at the end." if long else ""
        text = f"{report.markdown(caption)}{where}"
        display(Markdown(f"**{report.markdown(artefact.source)}.** {text}"))
        if not long:
            display(report.TableView(table))
        if failed:
            display(report.TableView(summary.frame(failed)))

    def on_gpu(self, name: str) -> None:
        """Show a GPU's records of an artefact of which `show` shows others; nothing without any."""
        artefact, results = self.paper.artefacts[name], self.results(name).gpu
        if results is None:
            return
        if artefact.draw:
            show_figure(artefact.figure(results))
        text = report.markdown(view.full_caption(artefact, results))
        display(Markdown(f"**{report.markdown(artefact.source)}, on a GPU.** {text}"))
        display(report.TableView(artefact.table(results)))

    def _figure(self, name: str) -> Figure:
        return self.paper.artefacts[name].figure(self.results(name))

    def tables(self) -> None:
        """Show the long tables, and the checks."""
        for name, artefact in self.paper.artefacts.items():
            results = self.results(name)
            with summary.naming_bad_records(self.source, artefact, results):
                table = artefact.table(results)
                checked = summary.checks(artefact, results)
            title = report.markdown(f"{artefact.source}: {artefact.title}")
            shown = [table] if len(table) > report.LONG else []
            shown += [summary.frame(checked)] if checked else []
            if shown:
                display(Markdown(f"**{title}**"))
            for frame in shown:
                display(report.TableView(frame))

    def recipe(self) -> report.TableView:
        """Return the paper's recipe and each profile's, and why they differ."""
        return report.TableView(summary.frame(recipes.recipe(self.paper)))

    def verdicts(self) -> report.TableView:
        """Return the verdicts on all claims."""
        rows = summary.paper_verdicts(self.source)
        return report.TableView(
            summary.frame(rows, ("artefact", "claim", "setting", "expected", "verdict", "evidence"))
        )

    def failures(self) -> None:
        """Show a paragraph for each claim that certainly fails: why, and the conclusion."""
        rows = [row for row in summary.paper_verdicts(self.source) if "why_not" in row]
        paragraphs = [
            f"- **{report.markdown(row['claim'])}** (`{row['artefact']}`). "
            f"{report.markdown(row['why_not'])}"
            for row in rows
        ]
        display(Markdown("\n".join(paragraphs) or "All that was run is reproduced or open."))

    def counts(self) -> dict[str, int]:
        """Return how many claims got each verdict."""
        rows = summary.paper_verdicts(self.source)
        return summary.counts(summary.of_papers(rows) or rows)

    def provenance(self) -> None:
        """Show the origin of the records: devices, versions, commits, time, datasets."""
        records = [record for group in self.source.records.values() for record in group]
        lines = [f"- {len(records)} records: {report.markdown(self.source.label)}"]
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
            lines.append(f"- {title}: {report.markdown(', '.join(sorted(values)) or 'none')}")
        display(Markdown("\n".join(lines)))


def show_figure(figure: Figure) -> None:
    """Show a figure as PNG, sharp on a dense screen."""
    png = report.figure_png(figure, dpi=105)
    display(Image(png, width=int(figure.get_figwidth() * 85)))


_called: set[tuple[str, Hashable]] = set()


def once(said: str, function: Callable[..., Shown], *arguments: Hashable) -> Shown:
    """Call a function that takes seconds the first time, and say so in the notebook meanwhile."""
    call = (function.__qualname__, arguments)
    if call not in _called:
        print(said, flush=True)
    returned = function(*arguments)
    _called.add(call)
    clear_output(wait=True)  # which goes when the next output is shown
    return returned


def definitions() -> report.TableView:
    """Return the meaning of each verdict and setting."""
    return report.TableView(summary.frame(summary.definitions()))
