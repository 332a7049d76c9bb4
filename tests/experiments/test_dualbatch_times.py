"""Times and predictions: what is read, drawn and judged."""

import made
import pytest
from made_dualbatch import World, figure, judge, legend_of, line, only, panel, panels, results, rows

from repro.experiments import load_paper
from repro.experiments.dualbatch import times
from repro.experiments.dualbatch.settings import CIFAR
from repro.experiments.dualbatch.trends import farthest
from repro.experiments.judge import NotRun, mean_of
from repro.report import DASH

OURS = ["ours: ResNet-18, 24 px", "ours: ResNet-18, 32 px"]
NO_RAW_DATA = World(status=only(role=CIFAR))


def published(**changes):
    """Return an edit of TensorFlow's fit, or of a list in it by a function."""

    def edit(metrics, config):
        fit = metrics["frameworks"]["TensorFlow"]
        for name, value in changes.items():
            fit[name] = value(fit) if callable(value) else value

    return {"published": edit}


class TestBend:
    def test_a_line_has_none_and_a_parabola_its_own(self):
        sizes = [8, 16, 24, 40, 72]
        assert times.bend({n: 2 * n + 5.0 for n in sizes}) == pytest.approx(0, abs=1e-9)
        # Half way, at 40, the chord from 8 to 72 lies 1024 above n².
        square = times.bend({n: float(n * n) for n in sizes})
        assert square == pytest.approx(-100 * 1024 / ((8**2 + 72**2) / 2))

    def test_three_sizes_say_nothing_of_a_line(self):
        with pytest.raises(NotRun, match="3 batch sizes"):
            times.bend({1: 1.0, 2: 2.0, 3: 3.0})


def test_doubling_is_the_exponent():
    assert times.doubling({n: n**-0.5 for n in (8, 16, 32, 64)}) == pytest.approx(0.5**0.5)


class TestFarthest:
    def test_it_reaches_farthest_and_is_widened_for_the_choice(self):
        near = mean_of([1.01, 1.011, 1.012], log=True)
        wide = mean_of([0.95, 1.0, 1.06], log=True)
        found, _ = farthest(["all"], lambda name: {"near": near, "wide": wide}).values()
        assert found.label == "farthest of 2: wide" and found.candidates == 2
        (low, high), (before, after) = found.interval(), wide.interval()
        assert low < before and after < high
        # Of one value no spread is known: it decides nothing.
        one = mean_of([1.0], log=True)
        first, second = farthest(["all"], lambda name: {"near": near, "one": one}).values()
        assert (first.label, second.label) == ("farthest of 2: one", "surest of 2: near")

    def test_a_wide_interval_hides_none_that_lies_beyond(self):
        off = mean_of([1.2, 1.201, 1.202], log=True)
        wide = mean_of([0.6, 1.0, 1.7], log=True)
        first, second = farthest(["all"], lambda name: {"off": off, "wide": wide}).values()
        assert (first.label, second.label) == ("farthest of 2: wide", "surest of 2: off")


def checked(artefact, position, **world):
    return made.check_row(f"dualbatch/{artefact}", position, results(artefact, World(**world)))


class TestFigure3:
    def test_line(self):
        bent = judge("figure3/line", step=lambda side, n: line(side, n) * (1 + n / 600))
        assert bent[0] == "not reproduced" and "24 px: -" in bent[1]
        one = judge(
            "figure3/line",
            step=lambda side, n: line(side, n) * (1 + n / 600 * (side == 32)),
        )
        assert one[0] == "partly"
        assert judge("figure3/line", noise=0.2)[0] == "undecided"

    def test_line_published(self):
        def bent(fit):
            pairs = zip(fit["batches"], fit["per_batch_s"], strict=True)
            return [seconds * (1 + n / 600) for n, seconds in pairs]

        row = checked("figure3", 0, edit=published(per_batch_s=bent))
        assert row["holds"] == "NO" and "PyTorch +0.0 %, TensorFlow -" in row["evidence"]
        assert checked("figure3", 0)["holds"] == "yes"

    def test_predictable(self):
        row = checked("figure3", 1, edit=published(median_error=0.03))
        assert row["holds"] == "NO" and "PyTorch: median 2.0 %" in row["evidence"]

    def test_without_the_raw_data(self):
        for artefact, here in (("figure3", ["line"]), ("figure4", ["falls", "equation2"])):
            found = results(artefact, NO_RAW_DATA, "long")
            for key in here:
                assert made.verdict(f"dualbatch/{artefact}/{key}", found).word == "reproduced"
            for check in load_paper("dualbatch").artefacts[artefact].checks:
                row = check.row(found)
                assert row["holds"] == "not run" and "not at hand" in row["evidence"]
            assert list(panels(figure(artefact, NO_RAW_DATA))) == OURS

    def test_table(self):
        found = rows("figure3")
        assert [row["where"] for row in found] == [
            "here, 24 px",
            "here, 32 px",
            "authors' raw data, PyTorch, GTX 1080, 32 px",
            "authors' raw data, TensorFlow, GTX 1080, 32 px",
            "gives the paper's Table 2",
        ]
        here, raw, inferred = found[1], found[3], found[4]
        assert float(here["b / a (samples)"]) == pytest.approx(3.2e-3 / (1e-6 * 32**2), rel=0.1)
        assert raw["largest error of a batch"] == "0.0 %"
        assert inferred["a (ms per sample)"] == "0.5661"
        assert "largest error of a batch" not in inferred
        assert len(rows("figure3", NO_RAW_DATA)) == 3

    def test_errors_are_of_a_batch(self):
        bent = World(step=lambda side, n: line(side, n) * (1 + 0.5 * (n == 16)), noise=0.0)
        of_epochs = World(epoch=lambda side, n: 1.5)
        assert rows("figure3", of_epochs)[1] == rows("figure3")[1]
        assert float(rows("figure3", bent)[1]["largest error of a batch"][:-2]) > 5

    def test_figure(self):
        drawn = figure("figure3", World(noise=0.0))
        assert list(panels(drawn)) == [
            *OURS,
            "paper: ResNet-18, GTX 1080,\nPyTorch, raw measurements",
            "paper: ResNet-18, GTX 1080,\nTensorFlow, raw measurements",
        ]
        assert drawn.axes[0].get_ylabel() == "time of a batch (ms)"
        for drawn_line in panels(drawn)[OURS[1]].get_lines():
            sizes, seconds = drawn_line.get_data()
            assert seconds == pytest.approx(1e3 * (1e-6 * 32**2 * sizes + 3.2e-3))


def by_processes(artefact, change, **world):
    """Return results of several processes, after `change` of each one's timings by its number."""
    found = results(artefact, World(**world), "long")
    timed = [record for record in found.records if record.experiment == "times"]
    assert len(timed) == 5
    for record in timed:
        for name, timing in record.timings.items():
            timing["samples_s"] = [
                change(record.seed, name, second) for second in timing["samples_s"]
            ]
        for fit in record.metrics["fits"]:  # of the steps' medians
            fit["seconds"] = [change(record.seed, "step of", second) for second in fit["seconds"]]
    return found


def verdict(target, found):
    judged = made.verdict(f"dualbatch/{target}", found)
    return judged.word, judged.evidence


class TestSeveralProcesses:
    def test_a_slow_process_is_slow_in_all_and_no_error_of_predictions(self):
        found = by_processes("figure4", lambda seed, name, s: s * 1.5**seed, noise=0.0)
        word, evidence = verdict("figure4/equation2", found)
        assert word == "reproduced" and evidence.count("farthest of 9: ") == 2

    def test_a_round_counts_no_more_than_its_process(self):
        def one_is_odd(seed, name, seconds):
            return seconds * (1.5 if seed == 0 and "step of" not in name else 1)

        odd = by_processes("figure4", one_is_odd, noise=0.0)
        word, evidence = verdict("figure4/equation2", odd)
        assert word == "undecided" and "processes a cell" in evidence
        all_are = by_processes("figure4", lambda seed, name, s: s * (1 + 0.1 * ("step of" in name)),
                               noise=0.0)  # fmt: skip
        assert verdict("figure4/equation2", all_are)[0] == "not reproduced"

    def test_a_line_is_of_each_process(self):
        def slow(seed, name, seconds):  # and straight: no process says anything of a bend
            return seconds * 1.5**seed

        word, evidence = verdict("figure3/line", by_processes("figure3", slow, noise=0.0))
        assert word == "reproduced" and "[-0.0, +0.0" in evidence
        falls = verdict("figure4/falls", by_processes("figure4", slow, noise=0.0))
        assert falls[0] == "reproduced"

    def test_bars_are_of_processes(self):
        found = by_processes("figure3", lambda seed, name, s: s * (1 + seed), noise=0.0)
        from repro.experiments.dualbatch.times import figure3

        drawn = figure3(found)
        assert any("all processes" in text for text in legend_of(drawn))
        assert legend_of(drawn).count("ours: median (bar: all processes)") == 1

    def test_shares_are_of_each_process_own_plan(self):
        found = results("table4", World(noise=0.0), "long")
        word, evidence = verdict("table4/shares_predicted", found)
        assert word == "reproduced"
        (late, *_) = (r for r in found.records if r.experiment == "times")
        rows_ = [row for row in late.metrics["shares"] if "batch" in row]
        timed = {(row["k"], row["batch"], row["samples"]) for row in rows_}
        assert evidence.count(f"farthest of {len(timed) // 2}: ") == 2, rows_
        for row in late.metrics["shares"]:
            if "measured_s" in row:
                row["measured_s"] *= 2
        assert verdict("table4/shares_predicted", found)[0] == "undecided"


class TestFigure4:
    def test_table(self):
        slow = World(epoch=lambda side, n: 1.1, noise=0.0)
        found = rows("figure4", slow)
        here = [row for row in found if row["where"].startswith("here, 32 px")]
        assert len(here) == 11 and {row["error"] for row in here} == {"+10.0 %"}
        raw = [row for row in found if "TensorFlow" in row["where"]]
        assert [row["batch size"] for row in raw] == [100, 200, 300, 400, 500, "all 500"]
        assert raw[-1]["error"] == "median 1.0 %, at most 3.0 %"
        # By hand: (5.6607e-4 · 500 + 0.0140412) · 100.
        assert (found[-1]["equation 2 (s)"], found[-1]["measured (s)"]) == ("29.708", DASH)

    def test_falls(self):
        assert judge("figure4/falls", step=lambda side, n: n**1.2)[0] == "not reproduced"
        mixed = judge("figure4/falls", step=lambda side, n: n**1.2 if side == 24 else n**0.5)
        assert mixed[0] == "partly"
        proportional = judge("figure4/falls", step=lambda side, n: 1e-3 * n, noise=0.05)
        assert proportional[0] == "undecided"

    def test_falls_published(self):
        def rising(fit):
            return [1.0 + n for n in fit["batches"]]

        row = checked("figure4", 0, edit=published(epoch_s=rising))
        assert row["holds"] == "NO" and "PyTorch: twice the batch ×0.8" in row["evidence"]

    def test_equation2(self):
        slow = judge("figure4/equation2", "long", epoch=lambda side, n: 1.1)
        assert slow[0] == "not reproduced"
        far = (12, 8)
        one = judge(
            "figure4/equation2", "long", epoch=lambda side, n: 1.1 if (side, n) == far else 1.0
        )
        assert one[0] == "partly" and "12 px, batch size 8: ×1.098" in one[1]
        assert judge("figure4/equation2", noise=0.05)[0] == "undecided"
        word, evidence = judge("figure4/equation2", noise=2.0)
        assert word == "undecided" and "a fitted line predicts one of 0 or less" in evidence

    def test_equation2_published(self):
        edit = published(largest_error=0.05, largest_at=7, share_beyond=0.1)
        row = checked("figure4", 1, edit=edit)
        assert row["holds"] == "NO"
        assert "at batch size 7; 10.0 % of 500 batch sizes" in row["evidence"]

    def test_figure(self):
        drawn = figure("figure4", World(epoch=lambda side, n: 1.01, noise=0.0))
        assert legend_of(drawn) == [
            "ours: median (bar: all turns)",
            "ours: equation 2",
            "paper's raw measurements",
            "paper's: equation 2",
        ]
        points, _ = panel(drawn, "paper: ResNet-18, GTX 1080,\nPyTorch").get_lines()
        assert points.get_markerfacecolor() == "none"
        measured, predicted = panels(drawn)[OURS[0]].get_lines()
        assert measured.get_ydata() == pytest.approx(1.01 * predicted.get_ydata())


class TestTable4:
    def off(self, percent, which=lambda row: True, noise=0.002):
        def edit(metrics, config):
            for row in metrics["shares"]:
                if "batch" in row and which(row):
                    row["measured_s"] = row["predicted_s"] * (1 + percent / 100)

        return judge("table4/shares_predicted", edit={"times": edit}, noise=noise)

    def test_verdicts(self):
        assert self.off(3.0)[0] == self.off(-3.0)[0] == "reproduced"
        assert self.off(4.0)[0] == self.off(-4.0)[0] == "not reproduced"
        word, evidence = self.off(9.0, lambda row: row["batch"] == 20)
        assert word == "not reproduced" and "batch size 20" in evidence
        assert self.off(0.0, noise=0.1)[0] == "undecided"

    def test_plans_without_a_solution(self):
        found = [row for row in rows("table4") if row["where"] != "paper, GTX 1080"]
        assert {row["where"] for row in found} == {
            "here, small",
            "here, large",
            "here, (4, 0): no plan",
        }

        def edit(metrics, config):
            metrics["shares"] = [row for row in metrics["shares"] if "error" in row]

        assert judge("table4/shares_predicted", edit={"times": edit})[0] == "not run"

    def test_table(self):
        found = rows("table4")
        paper = [row for row in found if row["where"] == "paper, GTX 1080"]
        assert [row["error"] for row in paper][:3] == ["+3.5 %", "+0.1 %", "-2.6 %"]
        assert len(paper) == 10
        ours = [row["error"] for row in found[10:] if "error" in row]
        assert set(ours) == {"+2.0 %"}

        def twice(metrics, config):
            metrics["shares"] += [dict(row) for row in metrics["shares"]]

        # A share that two plans have is shown once.
        assert len(rows("table4", World(edit={"times": twice}))) == len(found)
