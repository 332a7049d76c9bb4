"""Any plan, live: what is said of it, and what every worker does when."""

import itertools

import matplotlib.pyplot as plt
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from repro.dualbatch import DualBatchPlan, largest_k
from repro.experiments.dualbatch import explorer
from repro.experiments.dualbatch.explorer import describe, draw, draw_choices, paper_setting, solve
from repro.measure import TimeModel

PAPER = paper_setting()


def legend_of(drawn: Figure) -> list[str]:
    (legend,) = drawn.legends
    return [text.get_text() for text in legend.get_texts()]


def steps_of(drawn: Figure) -> dict[float, list[tuple[float, float]]]:
    """Return (start, end) of every step, by the height of the worker's lane."""
    (axis,) = drawn.axes
    found = {}
    for collection in axis.collections:
        spans = []
        for path in collection.get_paths():
            box = path.get_extents()
            spans.append((box.x0, box.x1))
            lane = (box.y0 + box.y1) / 2
        found[round(lane)] = spans
    return found


class TestSolve:
    @pytest.mark.parametrize("k", [1.05, 1.1])
    def test_table_2(self, k):
        plans = [solve(PAPER, k, n, 500) for n in (1, 2, 3, 4)]
        assert [(plan.small_batch, plan.small_samples) for plan in plans] == {
            1.05: [(83, 10625), (154, 11875), (205, 12291), (242, 12500)],
            1.1: [(38, 8750), (87, 11250), (127, 12083), (160, 12500)],
        }[k]

    @pytest.mark.parametrize("k", [1.05, 1.1])
    def test_close_to_table_2(self, k):
        plans = [solve(PAPER, k, n, 500) for n in (1, 2, 3, 4)]
        sizes = {1.05: [83, 154, 205, 242], 1.1: [38, 87, 127, 160]}[k]
        assert [plan.small_batch for plan in plans] == pytest.approx(sizes, abs=1)

    def test_the_baseline(self):
        plan = solve(PAPER, 1.0, 0, 500)
        assert plan.small_batch is None and plan.large_samples == 12_500

    @pytest.mark.parametrize("k", [0.5, 1.0, 3.0, float("nan")])
    def test_the_infeasible_is_said_in_words(self, k):
        said = solve(PAPER, k, 1, 500)
        assert isinstance(said, str)
        assert f"k is {k:g}" in said and "feasible k are above 1 and at most" in said
        assert f"{largest_k(PAPER.times, 1, 3, 500):.6g}" in said

    def test_a_device_without_a_cost_of_a_step(self):
        setting = explorer.Setting("ideal", TimeModel(1e-3, 0.0), 1000)
        assert "b = 0" in solve(setting, 1.1, 2, 100)


class TestDescribe:
    @pytest.mark.parametrize("n_small", range(5))
    def test_every_number_of_workers(self, n_small):
        plan = solve(PAPER, 1.05, n_small, 500)
        said = describe(plan)
        assert f"({n_small}, {4 - n_small})" in said
        assert ("B_S" in said) == (n_small > 0) and ("B_L" in said) == (n_small < 4)
        assert said.count(" and ") == (0 < n_small < 4)
        assert "nan" not in said and "None" not in said

    def test_numbers(self):
        plan = solve(PAPER, 1.05, 1, 500)
        said = describe(plan)
        for text in (
            "k = 1.05",
            f"B_S = {plan.small_batch}, d_S = 10,625",
            "B_L = 500, d_L = 13,125",
            "factor 0.810",
        ):
            assert text in said
        predicted = PAPER.times.pass_time(plan.small_batch, 10_625)
        assert f"predicted {predicted:.3f} and " in said


class TestDraw:
    @pytest.mark.parametrize("n_small", range(5))
    def test_every_worker_has_its_steps(self, n_small):
        plan = solve(PAPER, 1.05, n_small, 500)
        plt.close("all")
        drawn = draw(plan)
        assert isinstance(drawn, Figure)
        FigureCanvasAgg(drawn).draw()
        assert plt.get_fignums() == []
        lanes = steps_of(drawn)
        assert sorted(lanes) == [0, 1, 2, 3]
        for number, kind in enumerate(plan.kinds):
            spans = lanes[number]
            assert len(spans) == -(-plan.share_of(kind) // plan.batch_of(kind))
            assert spans[0][0] == 0
            for (_, end), (start, _) in itertools.pairwise(spans):
                assert start == pytest.approx(end, abs=1e-9)
            assert spans[-1][1] == pytest.approx(plan.time_of(kind))
        kinds = set(plan.kinds)
        assert len(legend_of(drawn)) == len(kinds) + 1
        (axis,) = drawn.axes
        names = [text.get_text() for text in axis.get_yticklabels()]
        assert names == [f"worker {i}, {kind}" for i, kind in enumerate(plan.kinds)]
        assert axis.get_xlabel().endswith("(s)")

    def test_the_line_is_the_baselines_epoch(self):
        drawn = draw(solve(PAPER, 1.1, 2, 500))
        (line,) = drawn.axes[0].get_lines()
        baseline = solve(PAPER, 1.0, 0, 500)
        assert line.get_xdata()[0] == pytest.approx(baseline.time_of("large"))


class TestDrawChoices:
    def test_a_line_for_every_number_of_workers(self):
        plan = solve(PAPER, 1.05, 2, 500)
        drawn = draw_choices(PAPER, 500, plan)
        FigureCanvasAgg(drawn).draw()
        assert legend_of(drawn) == [*(f"n_S = {n}" for n in range(1, 5)), "chosen"]
        for line in drawn.axes[0].get_lines()[:-1]:
            ks, sizes = line.get_data()
            assert len(ks) > 20 and min(ks) > 1 and max(ks) <= 1.3 + 1e-9
            assert all(b <= a for a, b in itertools.pairwise(sizes))  # smaller for larger k
            assert min(sizes) >= 1 and max(sizes) <= 500
        chosen = drawn.axes[0].get_lines()[-1]
        assert [list(data) for data in chosen.get_data()] == [[1.05], [plan.small_batch]]

    def test_on_its_line(self):
        for n_small in range(1, 5):
            plan = solve(PAPER, 1.1, n_small, 500)
            ks, sizes = draw_choices(PAPER, 500, plan).axes[0].get_lines()[n_small - 1].get_data()
            nearest = min(range(len(ks)), key=lambda i: abs(ks[i] - 1.1))
            assert sizes[nearest] == pytest.approx(plan.small_batch, rel=0.15)

    @pytest.mark.parametrize("plan", [None, "baseline"])
    def test_nothing_chosen(self, plan):
        chosen = solve(PAPER, 1.0, 0, 500) if plan else None
        assert "chosen" not in legend_of(draw_choices(PAPER, 500, chosen))

    def test_nothing_feasible(self):
        """B_L = 2 leaves next to no choice: lines without points are left out, nothing fails."""
        setting = explorer.Setting("toy", TimeModel(1.0, 1e-12), 8)
        drawn = draw_choices(setting, 2, None)
        assert isinstance(drawn, Figure)
        FigureCanvasAgg(drawn).draw()

    def test_drawn_without_any_line(self):
        drawn = explorer.draw_frontier({"n_S = 1": []}, None)
        assert len(drawn.axes[0].get_lines()) == 0


def test_each_kind_of_worker_is_named_once():
    spans = [{"kind": "small", "steps": [(0.0, 1.0)]}, {"kind": "large", "steps": [(0, 2.0)]}]
    drawn = explorer.draw_workers(spans, ["a", "b"], 1.5)
    assert len(legend_of(drawn)) == 3


def test_the_papers_setting():
    assert PAPER.samples == 50_000 and "GTX 1080" in PAPER.name
    assert isinstance(solve(PAPER, 1.05, 2, 500), DualBatchPlan)
