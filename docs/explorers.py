"""Compute the notebooks' widgets beforehand, for the site: ``python docs/explorers.py``.

Writes a folder of pictures for each, and the HTML that shows them, beside the report's files.
"""

import html
import itertools
import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from urllib.parse import quote

from repro import report
from repro.experiments import PAPERS, load_paper
from repro.experiments.explorer import Control, Explorer
from repro.experiments.processes import Workers
from repro.experiments.query import find_source

FOLDER = Path(__file__).parents[1] / "build" / "report" / "explorers"


def few(control: Control) -> list[str]:
    """Return the choices of a control on the site: evenly spread, the first one among them."""
    texts = list(control.choices)
    if control.written == 1:
        return [control.first]
    last, steps = len(texts) - 1, min(control.written, len(texts)) - 1
    places = [round(last * step / steps) for step in range(steps + 1)]
    own = texts.index(control.first)
    places[min(range(len(places)), key=lambda i: abs(places[i] - own))] = own
    return [texts[place] for place in places]


def page_of(explorer: Explorer, folder: Path, link: str) -> str:
    """Write a picture for each of the few choices, and return the HTML that shows them.

    Args:
        explorer: The widget.
        folder: For the pictures.
        link: From the page to that folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    choices = {key: few(control) for key, control in explorer.controls.items()}
    texts = {}
    for chosen in itertools.product(*choices.values()):
        named = dict(zip(choices, chosen, strict=True))
        values = {key: explorer.controls[key].choices[text] for key, text in named.items()}
        said, figure = explorer.computed(**values)
        name = "-".join(str(choices[key].index(text)) for key, text in named.items())
        folder.joinpath(f"{name}.png").write_bytes(report.figure_png(figure, dpi=100))
        texts[name] = said
    inputs = [_input(control, choices[key]) for key, control in explorer.controls.items()]
    start = "-".join(
        str(choices[k].index(control.first)) for k, control in explorer.controls.items()
    )
    shown = html.escape(texts[start])
    return (
        f'<div class="explorer" data-texts="{html.escape(json.dumps(texts))}" '
        f'data-folder="{quote(link)}">{"".join(inputs)}<pre>{shown}</pre>'
        f'<img src="{quote(link)}/{start}.png" alt="{shown}"></div>'
    )


def _input(control: Control, choices: Sequence[str]) -> str:
    """Return the HTML of a control with few choices."""
    first, label = choices.index(control.first), html.escape(control.label)
    if control.listed:
        options = "".join(
            f"<option value={place}{' selected' * (place == first)}>{html.escape(text)}"
            for place, text in enumerate(choices)
        )
        return f"<label>{label} <select>{options}</select></label>"
    shown = html.escape(json.dumps(choices))
    return (
        f'<label{" hidden" * (len(choices) == 1)}>{label} <input type="range" min="0" '
        f'max="{len(choices) - 1}" value="{first}" data-shown="{shown}"><output></output></label>'
    )


def write(key: str) -> list[str]:
    """Write the widgets of a paper, by its reference records, and return their names."""
    module = import_module(f"repro.experiments.{key}.widget")
    explorers: list[Explorer] = module.explorers(find_source(load_paper(key), local=False).look)
    for explorer in explorers:
        page = page_of(explorer, FOLDER / explorer.name, f"../explorers/{explorer.name}")
        FOLDER.joinpath(f"{explorer.name}.html").write_text(page, encoding="utf-8")
    return [explorer.name for explorer in explorers]


if __name__ == "__main__":
    with Workers(max(2, os.cpu_count() or 1)) as workers:
        for _, names in workers.map(write, [key for key in PAPERS if key != "together"]):
            print(f"widgets: {', '.join(names)}", flush=True)
