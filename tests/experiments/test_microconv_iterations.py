"""Whole iterations under limits that bind: what is judged of made records."""

import itertools
import math
from functools import partial

import made_microconv as made
import pytest
import torch
from made import check_row
from made_microconv import MIB, iterations, judge, table

from repro.experiments.microconv import iterating, settings

NAMES = ("AlexNet", "ResNet-50", "DenseNet-40", "ResNet-18")


def world(**by_network):
    """Return a maker: by network the forms' times over torch's own, `iterations`."""

    def make(run):
        if run.experiment != "iterations":
            return None
        own = by_network.get(run.config["role"].replace("-", ""), by_network.get("rest"))
        return None if own is None else iterations(run, **own)

    return make


class TestDividedFaster:
    @pytest.mark.parametrize(
        ("forms", "word"),
        [
            ({"WR_undivided": 1.3}, "reproduced"),
            ({"WR_undivided": 0.9}, "not reproduced"),
            ({"WR_undivided": (1.5, 1.0, 0.8)}, "undecided"),
            ({"WR_undivided": "9000000 bytes"}, "reproduced"),  # only divided it fits
            ({"WR_undivided": 1.3, "WR_powerOfTwo": "9000000 bytes"}, "not run"),
        ],
    )
    def test_words(self, forms, word):
        found, evidence = judge("iterations/divided_faster", world(rest=forms))
        assert found == word, evidence
        for name in NAMES:
            assert name in evidence

    def test_processes_are_what_is_compared_and_rounds_are_pairs(self):
        # Each process met another speed of the machine: its own ratio counts.
        forms = {"WR_undivided": (1.25, 1.26, 1.24)}
        found, evidence = judge("iterations/divided_faster", world(rest=forms))
        assert found == "reproduced" and "×1.25 [×1.2" in evidence

    @pytest.mark.parametrize(
        ("left", "word"), [(NAMES, "not run"), (("DenseNet-40",), "undecided")]
    )
    def test_where_no_limit_binds_there_is_nothing_to_judge(self, left, word):
        def make(run):
            made_ = world(rest={"WR_undivided": 1.3})(run)
            if made_ and run.config["ways"] and run.config["role"] in left:
                made_["metrics"]["forms"]["WR undivided"]["needed"] = 0
            return made_

        found, evidence = judge("iterations/divided_faster", make)
        assert found == word
        for name in left:
            assert f"no limit binds: all of {name} fits" in evidence


@pytest.mark.parametrize(("needed", "word"), [(7, "reproduced"), (8, "not run")])
def test_a_gain_that_may_be_over_our_own_fallback_is_told_and_not_judged(needed, word):
    """Of 14 kernels, those that the limit keeps from torch's own undivided."""

    def make(run):
        made_ = world(rest={"WR_undivided": 1.3})(run)
        if made_ and run.config["ways"]:
            made_["metrics"]["forms"]["WR undivided"]["needed"] = needed
        return made_

    found, evidence = judge("iterations/divided_faster", make)
    told = f"undivided, {needed} of 14 kernels fall back to NNPACK or our own torch:direct, "
    assert found == word and told in evidence
    assert "divided is ×1.00 [" in evidence and "×1.30 [" in evidence


@pytest.mark.parametrize(
    ("wd", "word"),
    [(0.9, "reproduced"), (1.1, "not reproduced"), ((0.8, 1.1, 1.0), "undecided")],
)
def test_wd_over_wr_with_the_same_workspace(wd, word):
    found, evidence = judge("iterations/wd_over_wr", world(AlexNet={"WD_82.5_MiB_powerOfTwo": wd}))
    assert found == word and "AlexNet, 82.5 MiB in all, both powerOfTwo: ×" in evidence
    assert "of torch's own speed without a limit" in evidence


@pytest.mark.parametrize(
    ("tuned", "word"),
    [
        (0.9, "reproduced"),
        (1.0, "reproduced"),
        (1.1, "not reproduced"),
        ((0.9, 1, 1.1), "undecided"),
    ],
)
def test_no_network_is_slower_tuned(tuned, word):
    found, evidence = judge("iterations/no_slower", world(rest={"tuned_no_limit": tuned}))
    assert found == word and "torch's own over itself" in evidence


def test_a_network_that_is_left_as_it_was_is_no_slower():
    def make(run, left=("DenseNet-40",)):
        made_ = world(rest={"tuned_no_limit": 1.0})(run)
        if made_ and run.config["role"] in left:
            made_["metrics"]["forms"]["tuned, no limit"]["divided"] = 0
            for sample in made_["metrics"]["samples_s"]:
                del sample["tuned, no limit"]  # nothing was timed
        return made_

    word, evidence = judge("iterations/no_slower", make)
    assert word == "reproduced" and "DenseNet-40 left as it was" in evidence
    every = partial(make, left=settings.iterated("quick"))
    assert judge("iterations/no_slower", every)[0] == "not run"
    frame = table("iterations", make).set_index(["network", "form"])
    narrow = "DenseNet-40 of growth 16 (for DenseNet-40)"
    assert frame.loc[narrow, "tuned, no limit"]["iteration (ms)"] == "left as it was"


def test_more_rounds_count_where_there_are_any():
    def make(run):
        made_ = world(rest={"tuned_no_limit": 1.2})(run)
        for sample in made_["metrics"]["samples_s"] if made_ else ():
            for name in ("plain", "plain again", "tuned, no limit"):
                sample[f"{name}, more rounds"] = [0.1] * 12
        return made_

    word, evidence = judge("iterations/no_slower", make)
    assert word == "reproduced" and "36 rounds in 3 processes" in evidence


def test_one_process_decides_nothing():
    def make(run):
        made_ = iterations(run, WR_undivided=2.0)
        made_["metrics"]["samples_s"] = made_["metrics"]["samples_s"][:1]
        return made_

    assert judge("iterations/divided_faster", make)[0] == "undecided"


class TestChecks:
    def holds(self, position, make):
        row = check_row("microconv/iterations", position, made.results("iterations", make))
        return row["holds"] == "yes"

    @pytest.mark.parametrize(("name", "extra", "holds"), [
        ("seen_bytes", 0, True), ("seen_bytes", 1, False), ("workspace_bytes", 1, False),
    ])  # fmt: skip
    def test_a_byte_beyond_the_limit_is_found(self, name, extra, holds):
        def make(run):
            made_ = iterations(run)
            if not run.config["ways"]:
                return made_
            limit = int(run.config["limit_mib"] * MIB)
            made_["metrics"]["forms"]["WR powerOfTwo"][name] = limit + extra
            return made_

        assert self.holds(0, make) == holds


class TestResults:
    def row(self, position, make):
        row = check_row("microconv/iterations", position, made.results("iterations", make))
        return row["holds"], row["evidence"]

    @pytest.mark.parametrize(
        ("errors", "loss", "gradients"),
        [
            ([(1e-7, 1e-6, 0.0)], "yes", "yes"),
            ([(1e-7, 2e-2, 2e-2)], "yes", "yes"),  # as far as torch's own are apart
            ([(1e-7, 2e-2, 1e-2)], "yes", "NO"),
            ([(2e-4, 1e-6, 0.0)], "NO", "yes"),
            ([(1e-7, 1e-6, 0.0), (2e-4, 2e-2, 0.0)], "NO", "NO"),
            ([(math.nan, math.nan, 0.0)], "NO", "NO"),
        ],
    )
    def test_they_do_not_change(self, errors, loss, gradients):
        names = ("loss_error", "gradient_error", "own_gradient_error")
        given = itertools.cycle(errors)

        def make(run):
            made_ = iterations(run)
            for told in made_["metrics"]["forms"].values():
                told |= dict(zip(names, next(given), strict=True))
            return made_

        for position, holds in ((1, loss), (2, gradients)):
            found, evidence = self.row(position, make)
            assert found == holds, evidence
        assert ("edge of its ReLU" in evidence) == any(not gap <= 1e-4 for _, gap, _ in errors)

    def test_networks_left_to_torch_say_nothing(self):
        def make(run):
            made_ = iterations(run)
            for told in made_["metrics"]["forms"].values():
                told["divided"] = 0
            return made_

        for position in (1, 2):
            found, evidence = self.row(position, make)
            assert found == "not run" and "no kernel of them left torch's own" in evidence


def test_the_table():
    frame = table("iterations", world(rest={"WR_undivided": "3145728 bytes"}))
    frame = frame.set_index(["network", "form"])
    row = frame.loc["AlexNet", "WR undivided"]
    assert row["iteration (ms)"] == "cannot be held: 3.0 MiB would do"
    row = frame.loc["AlexNet", "WR powerOfTwo"]
    assert row["limit (MiB)"] == "5.5 each" and row["at the paper's mini-batch"] == "176"
    assert row["paper"] == "1.23×" and row["kernels alone"] == "1.20×"
    assert row["divided kernels"] == "5 of 14" and row["for the limit"] == "2"
    assert row["over torch's own"].startswith("×1.00")
    narrow = "ResNet-18 of width 16 (for ResNet-18)"
    assert frame.loc[narrow, "WR powerOfTwo"]["paper"] == "1.21×"
    assert frame.loc["AlexNet", "WD 82.5 MiB powerOfTwo"]["limit (MiB)"] == "82.5 in all"
    shown = list(dict.fromkeys(frame.index.get_level_values(0)))
    assert [name.partition("(for ")[2].rstrip(")") or name for name in shown] == [*NAMES]


class TestFigure:
    def drawn(self):
        return made.figure("iterations", world(rest={"WR_undivided": 1.5}))

    def test_the_papers_dots_are_hollow_and_ours_have_an_interval(self):
        drawn = self.drawn()
        speedups, over_own = drawn.axes
        papers = [1.23, 1.05, 1.10, 1.21]
        assert made.hollow_of(drawn) == pytest.approx(papers, abs=0.01)
        ours = [line for line in speedups.get_lines() if line.get_label() == "ours"]
        lines = [line for line in speedups.get_lines() if "interval" in line.get_label()]
        assert len(ours) == len(lines) == 4
        for dot, line in zip(ours, lines, strict=True):
            low, high = line.get_xdata()
            assert low < dot.get_xdata()[0] < high
        assert "paper" in speedups.get_title() and over_own.get_title().startswith("ours: ")

    def test_a_stand_in_is_marked_in_the_image(self):
        names = [label.get_text() for label in self.drawn().axes[0].get_yticklabels()]
        marked = ["(for " in name for name in names]
        assert names[0] == "AlexNet, 5.5 MiB" and marked == [False, True, True, True]

    def test_a_network_without_a_limit_has_no_speed_up(self):
        drawn = made.figure("iterations", world(rest={"WR_undivided": 1.5}), "paper")
        texts = made.texts_of(drawn)
        assert [text.strip() for text in texts].count("no limit was set") == 2


class TestRivals:
    """Torch's own convolutions under other settings, beside our gains."""

    def rows(self, **forms):
        frame = table("iterations", world(rest={"WR_undivided": 1.3, **forms}), "gpu")
        frame = frame[frame["form"].str.startswith("torch's own, cudnn.benchmark")]
        return frame.set_index(["network", "form"])

    def test_each_has_a_row_over_torchs_own_choice(self):
        rows = self.rows()
        assert set(rows.index.levels[0]) == {settings.CAFFE, "ResNet-50"} and len(rows) == 5
        assert all(cell.startswith("×1.25") for cell in rows["over torch's own"])
        assert set(rows["largest seen (MiB)"]) == {"100.0"}
        capped = rows.index.get_level_values("form").str.contains("capped")
        assert set(rows["limit (MiB)"][capped]) == {"64 each"}
        assert set(rows["limit (MiB)"][~capped]) == {"–"}

    def test_one_that_failed_says_so(self):
        rows = self.rows(cudnn_benchmark="failed")
        failed = rows.xs("torch's own, cudnn.benchmark", level="form")
        assert set(failed["iteration (ms)"]) == {"failed"}
        assert set(failed["over torch's own"]) == {"–"}

    def test_no_claim_takes_them_for_the_methods_own(self):
        for claim in ("divided_faster", "wd_over_wr"):
            make = world(rest={"WR_undivided": 1.3, "WD_960_MiB_all": 0.9})
            assert judge(f"iterations/{claim}", make, "gpu")[0] == "reproduced", claim
        only = lambda run: made.plausible(run) if run.config.get("rivals") else None  # noqa: E731
        assert judge("iterations/divided_faster", only, "gpu")[0] == "not run"

    def test_settings_are_put_back(self):
        cudnn = torch.backends.cudnn
        before = cudnn.benchmark, cudnn.benchmark_limit
        with pytest.raises(KeyError), iterating.benchmarking(0):
            assert cudnn.benchmark and cudnn.benchmark_limit == 0
            raise KeyError
        assert (cudnn.benchmark, cudnn.benchmark_limit) == before
        with iterating.benchmarking(None):
            assert not cudnn.benchmark

    def test_each_setting_has_processes_of_its_own(self, monkeypatch):
        config = settings.rivals("gpu")[0].config | {"processes": 2}
        config |= {"rivals": list(settings.RIVALS)}
        asked = []

        def answer(function, arguments, environment):
            asked.append((arguments[2], dict(environment)))
            if "legacy" in arguments[2]:
                raise RuntimeError("no such function")
            return {"samples_s": [0.1, 0.2], "seen_bytes": len(asked)}

        monkeypatch.setattr(iterating, "_in_a_process", answer)
        metrics = iterating.iterations(config, 0, None, "cpu").metrics
        names = ["plain", *settings.RIVALS]
        assert [name for name, _ in asked] == [*names, *reversed(names)]
        variables = dict(asked)
        assert variables["cudnn.benchmark"] == {} == variables["plain"]
        assert variables[settings.RIVALS[2]] == {"CUDNN_CONV_WSCAP_DBG": "64"}
        assert variables[settings.RIVALS[3]].keys() == {
            "CUDNN_CONV_WSCAP_DBG",
            "TORCH_CUDNN_V8_API_DISABLED",
        }
        assert "no such function" in metrics["rivals"][settings.RIVALS[3]]["error"]
        assert [len(sample) for sample in metrics["samples_s"]] == [4, 4]
        assert set(settings.RIVALS) < set(iterating.RIVALS)

    def test_a_rival_runs_on_a_cpu(self):
        config = settings.iterations("smoke", settings.CAFFE).config
        found = iterating.rival(config, "cpu", "cudnn.benchmark")
        assert len(found["samples_s"]) == config["repeats"] and found["seen_bytes"] == 0

    @pytest.mark.gpu
    def test_the_workspace_of_a_device_is_watched(self, device):
        config = settings.iterations("smoke", settings.CAFFE).config
        found = iterating.rival(config, str(device), "cudnn.benchmark")
        assert len(found["samples_s"]) == config["repeats"] and found["seen_bytes"] >= 0
