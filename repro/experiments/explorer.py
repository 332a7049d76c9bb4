"""A figure with sliders: live in a notebook, and computed beforehand for a page without a kernel.

The text and the figure follow from choices. In a notebook `Explorer.show` computes them as they
are asked for; ``docs/explorers.py`` computes a few choices of each control, for the site.
"""

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from repro import report

WAITS = "It answers once no other cell runs."


@dataclass(frozen=True)
class Control:
    """A slider, or a list of choices."""

    label: str  # its name, in words and with its unit
    choices: Mapping[str, Any]  # what is computed with, by the text that is shown
    first: str  # the text that is chosen at first
    written: int = 1  # how many choices a page without a kernel offers; 1 leaves the first alone
    listed: bool = False  # whether it is a list that drops down


@dataclass(frozen=True)
class Explorer:
    """A text and a figure that follow from choices."""

    name: str  # of its place in a notebook and on the site, such as mbs
    controls: Mapping[str, Control]  # by the argument of `computed`
    computed: Callable[..., tuple[str, Figure]]  # from a value of each control
    height: int = 335  # pixels of text and figure, so that a notebook does not jump

    def show(self) -> None:
        """Show it in a notebook: with controls where a kernel runs, else as it is at first."""
        import ipywidgets as widgets
        from IPython.display import clear_output, display

        from repro.experiments.session import show_figure

        said, figure = self.computed(**{k: c.choices[c.first] for k, c in self.controls.items()})
        made = {key: _widget(control) for key, control in self.controls.items()}
        state = widgets.Label(WAITS)
        view = widgets.Output(layout={"min_height": f"{self.height}px"})

        def fill(said: str, figure: Figure) -> None:
            clear_output(wait=True)
            print(said)
            show_figure(figure, said)

        def update(_: object) -> None:
            state.value = "computing …"
            with view:  # which shows an error, too
                fill(*self.computed(**{key: own.value for key, own in made.items()}))
            state.value = ""

        for own in made.values():
            own.observe(update, "value")
        row = widgets.HBox([*made.values(), state], layout={"flex_flow": "row wrap"})
        with view:
            fill(said, figure)
        live = widgets.VBox([row, view])._repr_mimebundle_()
        still = report.picture(report.figure_png(figure), said).page
        words = f"<pre>{html.escape(said)}</pre>"
        page = f'<div data-explorer="{self.name}">{words}{still}</div>'
        display({**live, "text/html": page, "text/plain": said}, raw=True)


def _widget(control: Control) -> Any:
    import ipywidgets as widgets

    kind = widgets.Dropdown if control.listed else widgets.SelectionSlider
    slow = {} if control.listed else {"continuous_update": False}
    return kind(
        options=list(control.choices.items()),
        value=control.choices[control.first],
        description=control.label,
        style={"description_width": "initial"},
        layout={"width": "440px"},
        **slow,
    )
