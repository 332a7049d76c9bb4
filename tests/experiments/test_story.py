"""What a notebook tells first: true of the records that are shown, and silent without them."""

import re

import pytest

from repro import notebooks, paths
from repro.experiments import PAPERS, load_paper, story, view
from repro.experiments.query import find_source

pytestmark = pytest.mark.usefixtures("reference_records")


@pytest.fixture(params=PAPERS)
def source(request):
    return find_source(load_paper(request.param), local=False)


def test_every_paper_is_told(source):
    told = story.story_of(source.paper)
    assert told.says.endswith(".") and told.look_for.endswith(".")
    assert source.paper.artefacts[told.figure].draw
    sentences = story.findings_of(source)
    assert len(sentences) == len(told.findings) in (3, 4)
    assert all(any(c.isdigit() for c in s) and s.endswith(".") for s in sentences), sentences
    assert story.effects_of(source)


def test_without_records_nothing_was_found(source, monkeypatch, tmp_path):
    monkeypatch.setenv("REPRO_RESULTS", str(tmp_path))
    monkeypatch.setattr(paths, "reference_dirs", lambda: [])
    empty = find_source(source.paper, "quick", local=True)
    assert story.findings_of(empty) == []
    assert "missing" in story.opening(empty) and "Nothing has been run" in story.setup(empty)[0]


def test_the_sentences_follow_the_records(monkeypatch):
    source = find_source(load_paper("mbs"), local=False)
    told = story.findings_of(source)
    for record in source.look("table4").gpu.select("overhead"):
        undivided = record.timings["undivided"]["samples_s"]
        monkeypatch.setitem(record.timings["halved"], "samples_s", undivided)
    changed = story.findings_of(source)
    assert changed != told and "1.000 times" in changed[1]


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("{table5.overhead_halved}", r"1\.\d{3} times$"),
        ("{table5.optimum_beyond[U-Net]}", r"\+\d\.\d\d points$"),
        ("{paper:table5.overhead_halved[U-Net]}", r"1\.014 times$"),
        ("{paper:table4.optimum_beyond[ResNet-50]}", r"\+2\.45$"),
        ("{verdict:table4.overhead_halved}", "not seen here$"),
    ],
)
def test_a_placeholder_is_the_number_of_a_claim(sentence, told):
    source = find_source(load_paper("mbs"), local=False)
    assert re.match(told, story.filled(sentence, source))
    with pytest.raises(ValueError, match="name one"):  # of several cases
        story.filled("{table4.overhead_halved}", source)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["00_overview", *(load_paper(key).notebook for key in PAPERS)])
def test_a_notebook_opens_with_what_the_reference_records_say(name):
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(paths.ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    kinds = [cell.cell_type for cell in book.cells]
    (place,) = [i for i, c in enumerate(book.cells) if "opening" in c.metadata.get("tags", ())]
    assert "code" not in kinds[:place]
    text, pictures = notebooks.opening(name)
    again = f"python -m repro notebooks --refresh {name}"
    assert book.cells[place].source == text, again
    assert set(book.cells[place].attachments) == set(pictures), again


def test_the_overview_has_a_row_for_each_paper():
    sources = {key: find_source(load_paper(key), local=False) for key in ("mbs", "together")}
    text = story.overview(sources, "there/")
    rows = [line for line in text.splitlines() if line.startswith("| **[")]
    assert len(rows) == 2
    for row, source in zip(rows, sources.values(), strict=True):
        assert f"({source.paper.notebook}.ipynb)" in row and "reproduced" in row
        assert "<br>".join(story.held(source.paper.key, view.paper_verdicts(source))) in row
    counted = view.of_papers(view.paper_verdicts(sources["mbs"]))
    assert f"{len(counted)} claims of five papers" in text
    for name in story.overview_figures(sources):
        assert f"](there/{name})" in text


def test_the_figure_of_all_papers_keeps_what_records_tell(monkeypatch):
    source = find_source(load_paper("mbs"), local=False)
    told = story.story_of(source.paper)
    known = {"label": "time", "claim": "table5.overhead_halved", "kind": "costs"}
    unknown = {"label": "reach", "claim": "table4.overhead_halved", "kind": "gives"}
    unknown["case"] = "U-Net"
    words = {"label": "unchanged", "kind": "accuracy"}
    told.effects = [known, unknown, words]
    monkeypatch.setattr(story, "story_of", lambda paper: told)
    figure = story.effects_figure({"mbs": source})
    gains, costs, accuracy = figure.axes
    labels = [[text.get_text() for text in axis.get_yticklabels()] for axis in figure.axes]
    assert labels[0] == [] and labels[2] == ["Micro-Batch Streaming", "unchanged"]
    assert labels[1][1].startswith("time: ×1.17") and not costs.texts
    assert not gains.lines[1:] and not accuracy.texts
    assert figure.texts[-1].get_text().startswith("Ours: ")


def test_gains_and_costs_are_ratios_and_accuracy_is_a_difference(monkeypatch):
    source = find_source(load_paper("mbs"), local=False)
    told = story.story_of(source.paper)
    row = {"label": "time", "claim": "table5.overhead_halved", "kind": "costs", "paper": 1.5}
    points = row | {"claim": "table4.same_result", "case": "ResNet-50", "kind": "accuracy"}
    monkeypatch.setattr(story, "story_of", lambda paper: told)
    monkeypatch.setattr(told, "effects", [row, row | {"inverse": True}, points])
    (_, (_, *plain)), (_, (_, *inverse)), (_, (_, *gap)) = story.effects_of(source)
    (paper, ours, (low, high)), (other, less, (least, most)) = plain, inverse
    assert paper == 1.5 and low < ours < high and least < less < most
    assert [paper * other, ours * less, low * most, high * least] == pytest.approx([1.0] * 4)
    assert gap[0] == 1.5 and gap[2][0] < gap[1] < 0 < gap[2][1]  # points, which are no ratio
    for wrong in (row | {"kind": "accuracy"}, points | {"kind": "gives"}):
        monkeypatch.setattr(told, "effects", [wrong])
        with pytest.raises(ValueError, match="ratio"):
            story.effects_of(source)
