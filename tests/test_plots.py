"""Every figure: labelled axes with units, a legend outside, nothing left open, the data drawn."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from repro import plots
from repro.experiments.judge import WORDS

QUANTITIES = {"training loss": "loss", "test accuracy (%)": "accuracy"}
ONE = {"loss": [2.0, 1.0], "accuracy": [10.0, 20.0]}
CURVES = {
    "ResNet-50": {"without": [ONE, {"loss": [2.2, 1.4], "accuracy": [30.0, 40.0]}], "with": []},
    "U-Net": {"without": [ONE], "with": [{"loss": [2.1, 1.1], "accuracy": [11.0, 21.0]}]},
}
NEUTRAL = {"gain (points)": 0.0, "time (ratio)": 1.0}
SIZES = {
    "ResNet-50": {
        "gain (points)": {
            "paper": [(16, 0.1, None), (64, 2.0, None)],
            "ours": [(16, -2.0, (-5.0, 1.0)), (32, 1.0, None)],
        },
        "time (ratio)": {"paper": [(16, 1.1, None)], "ours": []},
    },
    "U-Net": {"gain (points)": {"ours": []}, "time (ratio)": {}},
}
REFUSED = {"ResNet-50": [32, 64], "U-Net": []}

EFFECTS = [("gives: reach", 64.0, 32.0, None), ("costs: time", 1.03, 1.4, (1.2, 1.6))]
LEFT = ("b", 64.0, None, None)
COUNTS = {"MBS": (3, 1, 0, 0, 0, 2), "Another": (0, 0, 0, 0, 1, 0)}

# The arguments of each figure, and how many labels its legend has (0: it needs none).
FIGURES = {
    "learning_curves": ((CURVES, QUANTITIES), 2),
    "against_mini_batch": ((SIZES, REFUSED, NEUTRAL), 4),
    "effects": (([("MBS", None, None, None), *EFFECTS, LEFT], "ratio", ["MBS"]), 3),
    "gains_and_costs": (
        ({"MBS": [("gives", ("reach", 64.0, 32.0, None)), ("costs", EFFECTS[1]),
                  ("accuracy", ("ends", None, -1.5, (-2.0, -1.0)))],
          "Another": [("accuracy", ("unchanged", None, None, None))]},), 3
    ),
    "verdict_counts": (
        ({name: dict(zip(WORDS, row, strict=True)) for name, row in COUNTS.items()},), 6
    ),
}  # fmt: skip


def make(name):
    return getattr(plots, name)(*FIGURES[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_axes_have_units_and_one_legend_outside_of_them(name):
    style, figure = dict(plt.rcParams), make(name)
    FigureCanvasAgg(figure).draw()  # a missing glyph or a layout that does not fit warns here
    assert plt.get_fignums() == [] and dict(plt.rcParams) == style
    rows = max(axis.get_subplotspec().rowspan.stop for axis in figure.axes)
    for axis in figure.axes:
        spec = axis.get_subplotspec()
        # Words on an axis say what it is; shared rows and columns are labelled once.
        named_x = any(t.get_text().strip("−-0123456789. ") for t in axis.get_xticklabels())
        named_y = any(t.get_text().strip("−-0123456789. ,") for t in axis.get_yticklabels())
        assert spec.rowspan.stop < rows or axis.get_xlabel() or named_x
        assert not spec.is_first_col() or axis.get_ylabel() or named_y
        for label in (axis.get_xlabel(), axis.get_ylabel()):
            assert "(" in label or not {"time", "memory", "accuracy", "IoU"} & {*label.split()}
    renderer = figure.canvas.get_renderer()
    texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert len(texts) == len(set(texts)) == FIGURES[name][1]
    for legend in figure.legends if texts else ():
        box = legend.get_window_extent(renderer)
        assert not any(box.overlaps(axis.get_window_extent(renderer)) for axis in figure.axes)


def test_learning_curves_draw_mean_and_band():
    axis = make("learning_curves").axes[2]  # second row, first column
    (line,), (band,) = axis.get_lines(), axis.collections
    assert line.get_ydata() == pytest.approx([20.0, 30.0]) and list(line.get_xdata()) == [1, 2]
    heights, std = band.get_paths()[0].vertices[:, 1], np.std([10.0, 30.0], ddof=1)
    assert (heights.min(), heights.max()) == pytest.approx((20.0 - std, 30.0 + std))


def test_a_papers_points_are_hollow_and_ours_have_their_intervals():
    axis = make("against_mini_batch").axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    paper, ours = lines["paper, with MBS"], lines["ours, with MBS, 95 % interval"]
    assert paper.get_markerfacecolor() == "none" and paper.get_linestyle() == "--"
    assert list(paper.get_ydata()) == [0.1, 2.0] and list(ours.get_ydata()) == [-2.0, 1.0]
    (bars,) = axis.collections  # of the one point whose interval is known
    (segment,) = bars.get_segments()
    assert sorted(y for _, y in segment) == [-5.0, 1.0]


def test_what_is_drawn_has_the_values_that_were_given():
    ends = {}
    for patch in make("verdict_counts").axes[0].patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        ends[row] = max(ends.get(row, 0), patch.get_x() + patch.get_width())
    assert ends == {0: 6, 1: 1}


def test_a_signature_lies_below_all_that_is_drawn(tmp_path):
    figure = plots.learning_curves({"A": {"with": [ONE], "without": [ONE]}}, {"loss": "loss"})
    plots.sign(figure, "Ours: a device · " * 12)
    for suffix in ("png", "svg", "pdf"):
        figure.savefig(tmp_path / f"saved.{suffix}", bbox_inches="tight")
    signature = figure.texts[-1].get_window_extent()
    (legend,) = figure.legends
    assert "\n" in figure.texts[-1].get_text() and signature.y1 < legend.get_window_extent().y0
    assert all(signature.y1 < axis.get_tightbbox().y0 for axis in figure.axes)
    assert signature.x1 <= figure.get_tightbbox().x1 * figure.dpi + 1
