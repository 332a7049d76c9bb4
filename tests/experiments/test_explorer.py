"""A figure with sliders."""

from importlib import import_module

import IPython.display
import pytest
from matplotlib.figure import Figure

from repro import notebooks
from repro.experiments import PAPERS, load_paper
from repro.experiments.explorer import Control, Explorer
from repro.experiments.query import find_source


def computed(size, kind):
    return f"{size} of <{kind}>", Figure(figsize=(1, 1))


def explorer():
    sizes = {f"{n} MiB": n for n in range(11)}
    controls = {
        "size": Control("size", sizes, "3 MiB"),
        "kind": Control("kind", {"one": 1, "two": 2}, "two", listed=True),
    }
    return Explorer(controls, computed)


def test_shown_with_controls_and_as_it_is_at_first(monkeypatch):
    import ipywidgets

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **_: shown.append(data))
    explorer().show()
    *_, bundle = shown
    assert bundle["text/plain"] == "3 of <2>" and "3 of &lt;2&gt;" in bundle["text/html"]
    assert notebooks.WIDGET in bundle and "data:image/png" in bundle["text/html"]
    sliders = ipywidgets.widgets.Widget.get_manager_state()["state"].values()
    assert "SelectionSliderModel" in {own["model_name"] for own in sliders}


@pytest.mark.parametrize("key", [key for key in PAPERS if key != "together"])
def test_every_paper_has_one(key, monkeypatch):
    monkeypatch.delenv("REPRO_RESULTS")  # for the reference records
    source = find_source(load_paper(key), local=False)
    made = import_module(f"repro.experiments.{key}.widget").explorers(source.look)
    assert made and all(c.first in c.choices for own in made for c in own.controls.values())
