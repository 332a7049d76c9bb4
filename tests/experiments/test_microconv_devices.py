"""Unequal devices together: Figure 13."""

import made_microconv as made
import pytest
from made import check_row
from made_microconv import cluster, fastest_split
from matplotlib.backends.backend_agg import FigureCanvasAgg

from repro.experiments import load_paper
from repro.experiments.microconv import devices
from repro.report import DASH

FIGURE13 = load_paper("microconv").artefacts["figure13"]
SIZES = (1, 2, *range(4, 33, 4))


def fast(b):
    return 0.010 + 1e-3 * b


def slow(b):
    return 0.005 + 3e-3 * b


def table(make=lambda run: cluster(fast, slow)):
    return FIGURE13.table(made.results("figure13", make))


class TestEvenSplit:
    def test_the_papers_two_times(self):
        """750Ti and K20Xm take 168.43 and 83.03 ms for 16 each: the best split, by trying all."""
        times = [{b: ms * b / 16 for b in range(4, 33, 4)} for ms in (168.43, 83.03)]
        best = fastest_split(32, times)
        split, even_s = devices.published_split()
        assert 1e3 * devices.slowest(split) == pytest.approx(best)
        assert even_s == pytest.approx(0.16843)
        assert sum(size for size, _ in split.values()) == 32
        row = self.row()
        assert row["holds"] == "yes" and row["evidence"].startswith(f"{168.43 / best:.2f}×")

    def row(self):
        return check_row("microconv/figure13", 2, made.results("figure13", lambda run: None))

    @pytest.mark.parametrize("times", [(83.03, 83.03), (100.0, 83.03), (115.0, 83.03)])
    def test_other_times_would_not_lead_to_it(self, monkeypatch, times):
        other = dict(zip(devices.FIGURE["even_ms"], times, strict=True))
        monkeypatch.setitem(devices.FIGURE, "even_ms", other)
        assert self.row()["holds"] == "NO"


class TestChecks:
    def rows(self, fast, slow):
        results = made.results("figure13", lambda run: cluster(fast, slow))
        return [check_row("microconv/figure13", position, results) for position in (0, 1)]

    def test_they_hold_for_any_devices(self):
        together, even = self.rows(lambda b: 4e-3 * b, lambda b: 1e-3 * b)
        assert together["holds"] == even["holds"] == "yes"
        # 32 ms alone; 24 there and 4 on each of the others takes 24.
        assert f"2 fast + slow {32 / 24:.2f}×" in together["evidence"]
        assert "two GK210 and a K20Xm 2.12×" in together["evidence"]
        assert f"fast + slow: even takes {64 / 28:.2f}×" in even["evidence"]

    def test_a_split_that_is_not_the_best_is_found(self, monkeypatch):
        def worst(results):
            alone = {"fast": (32, 1.0)}
            both = {"fast": (16, 3.0), "slow": (16, 0.1)}, {"fast": (16, 2.0), "slow": (16, 0.1)}
            return {
                "fast": (alone, None),
                "slow": (alone, None),
                "fast + slow": both,
                devices.ALL: both,
            }

        monkeypatch.setattr(devices, "splits", worst)
        together, even = self.rows(fast, slow)
        assert together["holds"] == even["holds"] == "NO"

    def test_not_run(self):
        results = made.results("figure13", lambda run: None)
        assert check_row("microconv/figure13", 0, results)["holds"] == "not run"


class TestFigure13:
    def test_every_split_is_the_best_by_trying_all(self):
        frame = table()
        one, other = ({b: device(b) for b in SIZES} for device in (fast, slow))
        base = one[32]
        combinations = ([one], [other], [one, other], [one, one, other])
        for row, times in zip(frame.to_dict("records"), combinations, strict=False):
            best = fastest_split(32, times)
            assert row["slowest (ms)"] == f"{1e3 * best:,.1f}"
            assert row["over the best one"] == f"{base / best:.2f}×"
            shares = [int(part.split(": ")[1]) for part in row["batch sizes"].split(", ")]
            assert sum(shares) == 32
        together, three = frame.iloc[2], frame.iloc[3]
        assert together["even split (ms)"] == f"{1e3 * other[16]:.1f}"
        ratio = other[16] / fastest_split(32, [one, other])
        assert together["even is slower by"] == f"{ratio:.2f}×"
        assert three["even split (ms)"] == three["even is slower by"] == DASH  # 32 / 3 is no size
        own = frame.set_index("devices")
        assert own.loc["the paper's K80 (two GK210) + K20Xm"]["paper"] == "2.12×"
        shares = own.loc["the paper's K80 (two GK210) + K20Xm"]["batch sizes"]
        assert shares == "K20Xm: 8, GK210 (1): 12, GK210 (2): 12"
        assert own.loc["the paper's all its GPUs"]["paper"] == "2.20×"
        assert three["paper"] == together["paper"] == DASH
        assert "CPU, 2 threads" in three["devices"] and "CPU, 1 thread" in together["devices"]

    def test_the_papers_own_row_is_there_without_records(self):
        *_, row = table(lambda run: None).to_dict("records")
        assert "750Ti" in row["devices"] and row["even split (ms)"] == "168.4"
        times = [{b: t * b / 16 for b in range(4, 33, 4)} for t in (168.43, 83.03)]
        assert row["slowest (ms)"] == f"{fastest_split(32, times):.1f}"

    def test_the_figure_marks_the_slowest(self):
        drawn = FIGURE13.figure(made.results("figure13", lambda run: cluster(fast, slow)))
        FigureCanvasAgg(drawn).draw()
        axis = drawn.axes[0]
        slowest = [line.get_ydata()[0] for line in axis.get_lines()]
        assert slowest[:2] == pytest.approx([1e3 * fast(32), 1e3 * slow(32)])
        assert axis.get_ylabel().endswith("(ms)") and "share" in axis.get_xlabel()
        labels = [label.get_text() for label in axis.get_xticklabels()]
        assert [label.split(",")[0] for label in labels[2:]] == [
            "fast + slow",
            "fast + slow",
            "2 fast + slow",
        ]
        assert labels[3].endswith("\neven")
        assert axis.get_title().startswith("ours: ") and "SIMULATED" in axis.get_title()

    def test_the_papers_pair_is_hollow_and_by_itself(self):
        drawn = FIGURE13.figure(made.results("figure13", lambda run: cluster(fast, slow)))
        ours, papers = drawn.axes
        assert papers.get_title().startswith("paper: ")
        assert {patch.get_facecolor()[3] for patch in papers.patches} == {0.0}
        assert {patch.get_facecolor()[3] for patch in ours.patches} == {1.0}
        heights = [patch.get_height() for patch in papers.patches]
        assert heights[2:] == pytest.approx([168.43, 83.03])

    def test_a_device_that_gets_nothing_is_said_to_be_idle(self):
        made_ = cluster(fast, lambda b: 10.0 * b)
        drawn = FIGURE13.figure(made.results("figure13", lambda run: made_))
        labels = [label.get_text() for label in drawn.axes[0].get_xticklabels()]
        assert "fast + slow,\nslow idle" in labels
