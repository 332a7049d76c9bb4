"""The explorer of one kernel: what a limit chooses, and what is said and drawn of it."""

import random
import re
from itertools import product

import pytest
from made_microconv import FAILED, MIB, candidates, entry, nowhere, plausible, results
from matplotlib.backends.backend_agg import FigureCanvasAgg

from repro.experiments.microconv import explorer, settings
from repro.microconv import Candidate, best_division


def random_entry(seed: int) -> dict:
    """Return a kernel with four algorithms of random times and workspaces."""
    generator = random.Random(seed)
    batch = generator.randint(1, 9)
    ways = {
        str(b): [
            [f"a{k}", b**0.9 * generator.uniform(0.5, 2) * 1e-3, generator.randrange(4 * MIB) * b]
            for k in range(4)
        ]
        for b in range(1, batch + 1)
    }
    return entry(batch=batch) | {"candidates": ways}


@pytest.mark.parametrize("seed", range(8))
def test_the_chosen_point_is_the_best_division(seed):
    kernel = random_entry(seed)
    found = {int(b): [Candidate(*way) for way in ways] for b, ways in kernel["candidates"].items()}
    front = settings.front(kernel)
    least, most = explorer.limits_mib(kernel)
    needs = [division.workspace_bytes / MIB for division in front]
    limits = [0.0, least / 2, *needs, *(need - 1e-5 for need in needs), most + 1, 1e4]
    for limit in limits:
        number = explorer.chosen_point(kernel, limit)
        if limit < least:
            assert number is None
            with pytest.raises(ValueError, match="the smallest limit that would work"):
                best_division(kernel["batch"], found, int(limit * MIB))
        else:
            best = best_division(kernel["batch"], found, int(limit * MIB))
            assert front[number].time_s == pytest.approx(best.time_s, rel=1e-12)
            assert front[number].workspace_bytes == best.workspace_bytes <= limit * MIB


def test_against_every_division_of_a_small_kernel():
    """Two samples: undivided or one by one, with either algorithm."""
    kernel = random_entry(1) | {"batch": 2}
    kernel["candidates"] = {
        "1": [["slow", 3e-3, 0], ["fast", 1e-3, MIB]],
        "2": [["slow", 4e-3, MIB // 2], ["fast", 1.5e-3, 2 * MIB]],
    }
    singles, wholes = kernel["candidates"]["1"], kernel["candidates"]["2"]
    every = [(t, need) for _, t, need in wholes]
    every += [(a[1] + b[1], max(a[2], b[2])) for a, b in product(singles, repeat=2)]
    for limit in (0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3):
        number = explorer.chosen_point(kernel, limit)
        fitting = [t for t, need in every if need <= limit * MIB]
        assert settings.front(kernel)[number].time_s == pytest.approx(min(fitting))


def test_limits_are_the_ends_of_the_front():
    assert explorer.limits_mib(entry()) == (0.0, 16.0)
    assert explorer.limits_mib(entry(slow_mib=0.5)) == (0.5, 16.0)
    assert explorer.limits_mib(entry(gain=0.5, fast_mib=7.0)) == (0.0, 0.0)


def test_kernels_by_name_and_later_ones_win():
    def make(run):
        if run.config.get("layer"):
            return candidates(entry(batch=32), entry(batch=8, gain=3.0))
        return candidates(entry(batch=8), entry("conv1", "backward_filter", 8))

    found = explorer.kernels(results("figure6", make))
    assert set(found) == {
        "conv2 forward, mini-batch 32",
        "conv2 forward, mini-batch 8",
        "conv1 filter gradient, mini-batch 8",
    }
    for name, kernel in found.items():
        assert name.endswith(f"mini-batch {kernel['batch']}") and kernel["layer"] in name


def test_only_kernels_that_were_measured_are_offered():
    def make(run):
        return FAILED if run.config.get("layer") else plausible(run)

    assert len(explorer.kernels(results("figure6", make))) == 14
    assert explorer.kernels(results("figure6", lambda run: FAILED)) == {}
    assert explorer.kernels(results("figure6", lambda run: None)) == {}
    assert explorer.kernels(results("figure9", plausible)) == {}


class TestDescription:
    def test_a_division(self):
        # Within 8 MiB: two calls of four samples, 4.002 ms, against 8 ms slow and undivided.
        assert explorer.describe(entry(native=(5e-3, 3.0)), 8) == (
            f"8.00 MiB: 2×4 fast, 4.0 ms with 8.0 MiB; {8 / 4.002:.2f}× over 8 slow; torch's own "
            "5.0 ms with 3.0 MiB"
        )

    def test_undivided(self):
        text = explorer.describe(entry(), 16)
        assert text.startswith("16.00 MiB: 8 fast, 4.0 ms with 16.0 MiB; 1.00× over 8 fast;")

    def test_nothing_undivided_fits(self):
        text = explorer.describe(entry(slow_mib=2.0, fast_mib=3.0), 4.5)
        assert text.startswith(
            "4.50 MiB: 8×1 fast, 4.0 ms with 3.0 MiB; no undivided algorithm fits"
        )

    def test_nothing_fits(self):
        text = explorer.describe(entry(slow_mib=2.0, fast_mib=3.0), 1)
        assert text == "1.00 MiB: nothing fits; the smallest division needs 2.00 MiB"


@pytest.mark.parametrize(("limit", "chosen"), [(0.0, 1), (9.5, 5), (1000.0, 6), (None, None)])
def test_the_drawing_marks_what_is_chosen(limit, chosen):
    kernel = (entry() if limit is not None else entry(slow_mib=2.0)) | {"device": "a toy"}
    drawn = explorer.draw(kernel, 1.0 if limit is None else limit)
    FigureCanvasAgg(drawn).draw()
    assert drawn.texts[-1].get_text() == "Computed from times measured on a toy."
    curve, bars = drawn.axes
    marks = [line for line in curve.get_lines() if line.get_label() == "chosen"]
    bold = [t.get_text() for t in bars.get_yticklabels() if t.get_fontweight() == "bold"]
    if chosen is None:
        assert not marks and not bold
        return
    division = settings.front(kernel)[chosen - 1]
    assert bold == [str(chosen)]
    (mark,) = marks
    assert mark.get_xdata()[0] == pytest.approx(division.workspace_bytes / MIB)
    assert mark.get_ydata()[0] == pytest.approx(1e3 * division.time_s)


def test_the_axes_do_not_move_with_the_limit():
    kernel = entry() | {"device": "a toy"}
    shown = [explorer.draw(kernel, limit).axes[0] for limit in (0.0, 8.0, 16.0)]
    assert len({axis.get_xlim() for axis in shown}) == len({axis.get_ylim() for axis in shown}) == 1


class TestSharing:
    """AlexNet's 14 kernels: the fast algorithm takes 2 MiB a sample, the slow one nothing."""

    def record(self, outcome=plausible):
        return explorer.network(results("figure12", outcome))

    def test_totals_are_the_ends_of_all_fronts(self):
        # Six kernels of conv2 and conv3 want 16 MiB each, the others nothing.
        assert explorer.totals_mib(self.record()) == (0.0, 96.0)
        assert explorer.network(results("figure12", lambda run: FAILED)) is None

    @pytest.mark.parametrize(
        ("total", "wr", "wd"),
        # Eight kernels take 8 ms whatever they have; fast, six more take 8, and 4 ms and calls.
        [(0.0, 112.0, 112.0), (12.0, 112.0, 88.0), (28.0, 88.0, 88.0), (96.0, 88.0, 88.0)],
    )
    def test_times(self, total, wr, wd):
        told = explorer.describe_sharing(self.record(), total)
        alone, shared = (float(part.split(" ms")[0]) for part in re.findall(r"[\d.]+ ms", told))
        assert (alone, shared) == (pytest.approx(wr, abs=0.1), pytest.approx(wd, abs=0.1))

    def test_the_axis_does_not_move_and_no_value_of_the_paper_is_there(self):
        record = self.record()
        drawn = [explorer.draw_sharing(record, total) for total in (0.0, 40.0, 96.0)]
        assert len({figure.axes[0].get_xlim() for figure in drawn}) == 1
        labels = [t.get_text() for f in drawn for legend in f.legends for t in legend.get_texts()]
        assert not any("paper" in label for label in labels)
        assert all(" measured on " in figure.texts[-1].get_text() for figure in drawn)

    def test_what_does_not_fit_is_said(self):
        told = explorer.describe_sharing(self.record(nowhere), 100.0)
        assert "14 of 14 kernels do not fit" in told and told.endswith("WD: does not fit")
