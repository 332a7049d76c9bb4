"""Any θ curve, live: the schedule that follows from it, at the ends of every slider."""

import itertools
import math
import re

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from repro.adaptive import ThetaController
from repro.experiments.adaptive import explorer
from repro.experiments.adaptive.explorer import Curve, describe, draw, follow, rising
from repro.experiments.adaptive.settings import CIFAR, DIV2K, PAPER, PHANTOM, TASKS

CORNERS = [*itertools.product(TASKS, (1, 80), (0.0, 0.5), (2**5, 2**13))]


def by_hand(curve, tolerance, max_batch):
    """Algorithm 1 with section III-E, written out: the batch size and rate of every epoch, K."""
    own = PAPER[curve.task]["theta"]
    size, rate, largest = own["batch"], own["lr"], max(max_batch, own["batch"])
    found, interval, before, decayed = [(size, rate)], None, None, False
    for n, theta in enumerate(curve.theta[: curve.epochs - 1], 1):
        if interval is None and before is not None and abs(theta - before) <= tolerance * before:
            interval = n
        before = theta
        if interval and n % interval == 0 and size < largest:
            grown = min(2 * size, largest)
            size, rate = grown, rate * grown / size
        if n in curve.decay_at:
            rate = (rate if decayed else own["lr"]) * 0.1
            decayed = True
        found.append((size, rate))
    return found, interval


class TestCurve:
    @pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
    @pytest.mark.parametrize("peak", [1, 5, 80])
    @pytest.mark.parametrize("task", TASKS)
    def test_it_rises_to_the_peak_and_then_falls(self, task, peak, sharpness):
        curve = rising(task, peak, sharpness)
        assert curve.epochs == len(curve.theta) == PAPER[task]["epochs"]
        assert curve.theta.index(max(curve.theta)) == peak - 1
        assert max(curve.theta) == pytest.approx(1.0)
        up, down = curve.theta[:peak], curve.theta[peak - 1 :]
        assert all(b > a for a, b in itertools.pairwise(up))
        assert all(b <= a for a, b in itertools.pairwise(down))
        assert min(curve.theta) > 0
        assert tuple(curve.decay_at) == ((80, 120) if task == CIFAR else ())


class TestFollow:
    @pytest.mark.parametrize(("task", "peak", "tolerance", "largest"), CORNERS)
    def test_algorithm_1_by_hand(self, task, peak, tolerance, largest):
        curve = rising(task, peak)
        steps = follow(curve, tolerance, largest)
        found, interval = by_hand(curve, tolerance, largest)
        assert [step.epoch for step in steps] == list(range(1, curve.epochs + 1))
        assert [step.batch_size for step in steps] == [size for size, _ in found]
        assert [step.lr for step in steps] == pytest.approx([rate for _, rate in found])
        assert steps[-1].interval == interval
        assert [step.theta for step in steps[1:]] == pytest.approx(curve.theta[:-1])
        assert steps[-1].batch_size <= max(largest, PAPER[task]["theta"]["batch"])

    def test_a_controller_run_with_other_distances_and_costs(self):
        """θ alone decides: the same θ from other costs and distances gives the same schedule."""
        curve = rising(CIFAR, 7)
        controller = ThetaController(256, 2048, 0.2, tolerance=0.10, decay=0.1, decay_at=(80, 120))
        start = torch.zeros(3, dtype=torch.float64)
        steps = [controller.observe(2.3, [start])]
        for n, theta in enumerate(curve.theta[:-1], 1):
            moved = torch.full((3,), 0.1 * n / math.sqrt(3), dtype=torch.float64)
            steps.append(controller.observe(2.3 - theta * 0.1 * n, [moved]))
        ours = follow(curve, 0.10, 2048)
        assert [s.batch_size for s in ours] == [s.batch_size for s in steps]
        assert [s.lr for s in ours] == pytest.approx([s.lr for s in steps])
        assert {s.batch_size for s in ours} == {256, 512, 1024, 2048}

    def test_a_measured_curve_that_is_shorter(self):
        steps = follow(Curve(DIV2K, [0.1, 0.2, 0.2], 4), 0.1, 256)
        assert [step.batch_size for step in steps] == [64, 64, 64, 128]
        assert follow(Curve(CIFAR, [1.0] * 4, 5, (80, 120)), 0.1, 2048)[-1].lr > 0


class TestDescribe:
    @pytest.mark.parametrize(("task", "peak", "tolerance", "largest"), CORNERS)
    def test_it_adds_up(self, task, peak, tolerance, largest):
        curve = rising(task, peak)
        steps = follow(curve, tolerance, largest)
        said = describe(curve, steps)
        assert "nan" not in said and "inf" not in said and "None" not in said
        assert f"K = {steps[-1].interval or 'not found'}; " in said
        count = sum(math.ceil(PAPER[task]["samples"] / step.batch_size) for step in steps)
        assert f";\n{count:,} updates, " in said
        best = PAPER[task]["best"]["batch"]
        before = curve.epochs * math.ceil(PAPER[task]["samples"] / best)
        assert f"{before / count:.1f} times fewer than at {best}" in said
        listed = [(int(n), int(e)) for n, e in re.findall(r"(\d+) for (\d+) epochs", said)]
        assert sum(epochs for _, epochs in listed) == curve.epochs
        assert [n for n, _ in listed] == sorted({step.batch_size for step in steps})
        assert "simulated" in said
        assert float(re.search(r"speed-up ([\d.]+)", said)[1]) >= 1
        nodes = int(re.search(r"on (\d+) nodes", said)[1])
        assert nodes <= steps[-1].batch_size

    def test_earlier_growth_is_fewer_updates_and_less_time(self):
        said = [describe(c, follow(c, 0.1, 2048)) for c in (rising(CIFAR, 4), rising(CIFAR, 20))]
        counts = [int(re.search(r"([\d,]+) updates", text)[1].replace(",", "")) for text in said]
        shares = [float(re.search(r"([\d.]+) % of", text)[1]) for text in said]
        assert counts[0] < counts[1] and shares[0] < shares[1]


class TestDraw:
    @pytest.mark.slow
    @pytest.mark.parametrize(("task", "peak", "tolerance", "largest"), CORNERS[::3])
    def test_every_corner(self, task, peak, tolerance, largest):
        plt.close("all")
        curve = rising(task, peak)
        steps = follow(curve, tolerance, largest)
        drawn = draw(curve, steps)
        assert isinstance(drawn, Figure) and plt.get_fignums() == []
        FigureCanvasAgg(drawn).draw()
        theta, batches, rates, speed = drawn.axes
        labels = [axis.get_ylabel() for axis in drawn.axes]
        assert labels[1:3] == ["mini-batch size", "learning rate"] and "SIMULATED" in labels[3]
        assert {axis.get_xlabel() for axis in drawn.axes[:3]} == {"epoch"}
        assert list(theta.get_lines()[0].get_ydata()) == curve.theta
        lines = {line.get_label(): list(line.get_ydata()) for line in batches.get_lines()}
        assert lines["θ-adaptive"] == [step.batch_size for step in steps]
        assert {len(values) for values in lines.values()} == {curve.epochs}
        assert set(lines) == {"θ-adaptive", "best fixed batch", "fixed μ, adaptive b"}
        assert list(rates.get_lines()[0].get_ydata()) == [step.lr for step in steps]
        assert max(speed.get_lines()[0].get_xdata()) <= steps[-1].batch_size
        (legend,) = drawn.legends
        texts = [text.get_text() for text in legend.get_texts()]
        told = f"epoch K = {steps[-1].interval}" if steps[-1].interval else "epoch K (not found)"
        assert told in texts

    @pytest.mark.slow
    @pytest.mark.parametrize("task", TASKS)
    def test_axes_stay_whatever_a_slider_does(self, task):
        """So that what moves is what changed; and all of it is seen."""
        ends = set()
        for peak, tolerance, largest in [
            (1, 0.0, 2**5),
            (80, 0.5, 2**13),
            (1, 0.5, 2**5),
            (80, 0.0, 2**13),
        ]:
            curve = rising(task, peak)
            drawn = draw(curve, follow(curve, tolerance, largest))
            if not ends:
                FigureCanvasAgg(drawn).draw()  # a layout that does not fit warns
            ends.add(tuple((axis.get_xlim(), axis.get_ylim()) for axis in drawn.axes))
            for axis in drawn.axes[1:3]:
                low, high = axis.get_ylim()
                for line in axis.get_lines():
                    assert all(low < value < high for value in line.get_ydata())
        assert len(ends) == 1

    def test_the_others_are_the_papers(self):
        curve = rising(PHANTOM, 55)
        drawn = draw(curve, follow(curve, 0.1, 128))
        lines = {line.get_label(): list(line.get_ydata()) for line in drawn.axes[1].get_lines()}
        assert set(lines["best fixed batch"]) == {16}
        assert lines["fixed μ, adaptive b"][:545] == [32] * 272 + [64] * 272 + [128]
        hollow = [
            line for line in drawn.axes[3].get_lines() if line.get_markerfacecolor() == "none"
        ]
        points = [tuple(v[0] for v in line.get_data()) for line in hollow if len(line.get_xdata())]
        assert sorted(points) == sorted(map(tuple, PAPER[PHANTOM]["speedups"].values()))

    def test_a_measured_curve(self):
        curve = Curve(CIFAR, [0.01, 0.02, 0.019], 4, (2,))
        FigureCanvasAgg(draw(curve, follow(curve, 0.1, 2048))).draw()
        assert "K = 3" in describe(curve, follow(curve, 0.1, 2048))


def test_the_sliders_of_the_notebook_know_their_tasks():
    with pytest.raises(KeyError):
        rising("MNIST", 3)
    assert explorer.Curve.__dataclass_params__.frozen
