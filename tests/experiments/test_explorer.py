"""A figure with sliders: live, and computed beforehand."""

import html
import itertools
import json
import re
import runpy
from importlib import import_module

import pytest
from matplotlib.figure import Figure

from repro import notebooks, paths
from repro.experiments import PAPERS, load_paper
from repro.experiments.explorer import Control, Explorer
from repro.experiments.query import find_source

display_module = pytest.importorskip("IPython.display")
SITE = runpy.run_path(str(paths.ROOT / "docs" / "explorers.py"))


def explorer(written=3):
    sizes = {f"{n} MiB": n for n in range(11)}
    kinds = Control("kind", {"one": 1, "two": 2}, "two", 2, listed=True)
    controls = {"size": Control("size", sizes, "3 MiB", written), "kind": kinds}
    figure = lambda size, kind: (f"{size} of <{kind}>", Figure(figsize=(1, 1)))  # noqa: E731
    return Explorer("made", controls, figure)


@pytest.mark.parametrize(
    ("written", "texts"), [(1, [3]), (2, [3, 10]), (3, [0, 3, 10]), (99, range(11))]
)
def test_few_choices_are_spread_and_hold_the_first(written, texts):
    assert SITE["few"](explorer(written).controls["size"]) == [f"{n} MiB" for n in texts]


def test_written_for_a_page_without_a_kernel(tmp_path):
    page = SITE["page_of"](explorer(), tmp_path / "made", "../made")
    names = {"-".join(map(str, places)) for places in itertools.product(range(3), range(2))}
    assert {path.stem for path in (tmp_path / "made").iterdir()} == names
    texts = json.loads(html.unescape(re.search(r'data-texts="([^"]*)"', page)[1]))
    assert set(texts) == names and texts["1-1"] == "3 of <2>"
    assert 'value="1"' in page and "<option value=1 selected>two" in page
    assert '<img src="../made/1-1.png" alt="3 of &lt;2&gt;">' in page and "<2>" not in page


def test_shown_with_controls_and_as_it_is_at_first(monkeypatch):
    import ipywidgets

    shown = []
    monkeypatch.setattr(display_module, "display", lambda data, **_: shown.append(data))
    explorer().show()
    *_, bundle = shown
    assert bundle["text/plain"] == "3 of <2>"
    assert '<div data-explorer="made">' in bundle["text/html"]
    assert notebooks.WIDGET in bundle and "data:image/png" in bundle["text/html"]
    sliders = ipywidgets.widgets.Widget.get_manager_state()["state"].values()
    assert "SelectionSliderModel" in {own["model_name"] for own in sliders}


@pytest.mark.parametrize("key", [key for key in PAPERS if key != "together"])
def test_every_paper_has_one(key, monkeypatch):
    monkeypatch.delenv("REPRO_RESULTS")  # for the reference records
    source = find_source(load_paper(key), local=False)
    made = import_module(f"repro.experiments.{key}.widget").explorers(source.look)
    assert made and all(c.first in SITE["few"](c) for own in made for c in own.controls.values())
