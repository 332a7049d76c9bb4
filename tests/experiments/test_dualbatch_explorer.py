"""Any plan, live: what is said of it, and what every worker does when."""

import itertools

import matplotlib.pyplot as plt
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from repro.dualbatch import DualBatchPlan, largest_k
from repro.experiments.dualbatch import explorer
from repro.experiments.dualbatch.explorer import describe, draw, paper_setting, solve
from repro.measure import TimeModel

PAPER = paper_setting()


def legend_of(drawn: Figure) -> list[str]:
    (legend,) = drawn.legends
    return [text.get_text() for text in legend.get_texts()]


def drawn_steps(drawn: Figure) -> dict[float, list[tuple[float, float]]]:
    """Return (start, end) of every step, by the height of the worker's lane."""
    found = {}
    for collection in drawn.axes[0].collections:
        for path in collection.get_paths():
            box = path.get_extents()
            found.setdefault(round((box.y0 + box.y1) / 2), []).append((box.x0, box.x1))
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
        said = describe(solve(PAPER, 1.05, n_small, 500))
        assert (f"{n_small} small" in said) == (n_small > 0)
        assert (f"{4 - n_small} large" in said) == (n_small < 4)
        assert said.count(" and ") == (0 < n_small < 4)
        assert "nan" not in said and "None" not in said

    def test_numbers(self):
        plan = solve(PAPER, 1.05, 1, 500)
        said = describe(plan)
        small = f"B_S = {plan.small_batch}, d_S = 10,625"
        for text in ("k = 1.05", small, "B_L = 500, d_L = 13,125", "factor 0.810"):
            assert text in said
        predicted = PAPER.times.pass_time(plan.small_batch, 10_625)
        assert f"{predicted:.3f} and " in said

    def test_no_plan(self):
        assert describe(solve(PAPER, 3.0, 1, 500)).startswith("no such plan: k is 3")


class TestWorkers:
    @pytest.mark.parametrize("n_small", range(5))
    def test_every_worker_has_its_steps(self, n_small):
        plan = solve(PAPER, 1.05, n_small, 500)
        plt.close("all")
        drawn = draw(PAPER, 500, plan)
        FigureCanvasAgg(drawn).draw()
        assert plt.get_fignums() == []
        lanes = drawn_steps(drawn)
        assert sorted(lanes) == [0, 1, 2, 3]
        for number, kind in enumerate(plan.kinds):
            spans = lanes[number]
            assert len(spans) == -(-plan.share_of(kind) // plan.batch_of(kind))
            assert spans[0][0] == 0
            for (_, end), (start, _) in itertools.pairwise(spans):
                assert start == pytest.approx(end, abs=1e-9)
            assert spans[-1][1] == pytest.approx(plan.time_of(kind))

    def test_the_line_is_the_baselines_epoch(self):
        (line,) = draw(PAPER, 500, solve(PAPER, 1.1, 2, 500)).axes[0].get_lines()
        baseline = solve(PAPER, 1.0, 0, 500)
        assert line.get_xdata()[0] == pytest.approx(baseline.time_of("large"))

    def test_no_plan_is_said(self):
        drawn = draw(PAPER, 500, solve(PAPER, 3.0, 1, 500))
        assert drawn_steps(drawn) == {}
        assert [text.get_text() for text in drawn.axes[0].texts] == ["no such plan"]


class TestChoices:
    def test_smaller_for_more_time(self):
        for points in explorer.choices(PAPER, 500).values():
            ks, sizes = zip(*points, strict=True)
            assert len(ks) > 20 and min(ks) > 1 and max(ks) <= explorer.MOST_TIME
            assert all(b <= a for a, b in itertools.pairwise(sizes))
            assert min(sizes) >= 1 and max(sizes) <= 500

    def test_the_plan_lies_on_its_line(self):
        for n_small in range(1, 5):
            plan = solve(PAPER, 1.1, n_small, 500)
            lines = draw(PAPER, 500, plan).axes[1].get_lines()
            ks, sizes = lines[n_small - 1].get_data()
            nearest = min(range(len(ks)), key=lambda i: abs(ks[i] - 1.1))
            assert sizes[nearest] == pytest.approx(plan.small_batch, rel=0.15)
            assert [list(data) for data in lines[-1].get_data()] == [[1.1], [plan.small_batch]]

    def test_nothing_feasible(self):
        """B_L = 2 leaves next to no choice: lines stay empty, nothing fails."""
        setting = explorer.Setting("toy", TimeModel(1.0, 1e-12), 8)
        drawn = draw(setting, 2, "no plan")
        FigureCanvasAgg(drawn).draw()
        assert all(len(line.get_xdata()) == 0 for line in drawn.axes[1].get_lines())


def test_axes_and_names_stay_whatever_the_sliders_say():
    """So that what moves is the plan alone."""
    least, most = explorer.BATCHES
    frames = [(1.01, 4, least), (explorer.MOST_TIME, 2, most), (3.0, 1, most), (1.1, 0, 500)]
    seen = []
    for k, n_small, large_batch in frames:
        plan = solve(PAPER, k, n_small, large_batch)
        drawn = draw(PAPER, large_batch, plan)
        seen.append([*(axis.axis() for axis in drawn.axes), legend_of(drawn)])
        if not isinstance(plan, str):
            assert max(map(plan.time_of, plan.kinds)) <= drawn.axes[0].get_xlim()[1]
    assert all(frame == seen[0] for frame in seen)


def test_the_papers_setting():
    assert PAPER.samples == 50_000 and "GTX 1080" in PAPER.name
    assert isinstance(solve(PAPER, 1.05, 2, 500), DualBatchPlan)
