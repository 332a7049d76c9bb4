"""Whole iterations under limits that bind: what is judged of made records, and how they are run."""

import pytest
import torch
from made_microconv import iterations, judge, table

from repro.experiments.microconv import iterating, runs

NAMES = ("AlexNet", "ResNet-50", "DenseNet-40", "ResNet-18")
PLAIN, AGAIN, FREE = "plain", "plain again", "tuned, no limit"


def world(change=lambda run, forms: None, **relative):
    """A maker: the forms' times over torch's own, as of `iterations`, changed by a function."""

    def make(run):
        outcome = iterations(run, **relative)
        change(run, outcome["metrics"]["forms"])
        return outcome

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
        found, evidence = judge("iterations/divided_faster", world(**forms))
        assert found == word, evidence
        assert all(name in evidence for name in NAMES)

    @pytest.mark.parametrize(
        ("needed", "left", "word"),
        [(0, NAMES, "not run"), (0, ("DenseNet-40",), "undecided"),
         (7, NAMES, "reproduced"), (8, NAMES, "not run")],
    )  # fmt: skip
    def test_a_limit_that_does_not_bind_or_leaves_most_to_us(self, needed, left, word):
        """Of 14 kernels, those that the limit keeps from torch's own undivided."""

        def change(run, forms):
            if run.config["role"] in left:
                forms["WR undivided"]["needed"] = needed

        found, evidence = judge("iterations/divided_faster", world(change, WR_undivided=1.3))
        assert found == word
        told = f"undivided, {needed} of 14 kernels fall back to NNPACK or our own torch:direct, "
        told = told if needed else "no limit binds: all of DenseNet-40 fits"
        assert told in evidence


@pytest.mark.parametrize(
    ("wd", "word"), [(0.9, "reproduced"), (1.1, "not reproduced"), ((0.8, 1.1, 1.0), "undecided")]
)
def test_wd_over_wr_with_the_same_workspace(wd, word):
    found, evidence = judge("iterations/wd_over_wr", world(**{"WD_82_5_MiB_powerOfTwo": wd}))
    assert found == word and "AlexNet, 82.5 MiB in all, both powerOfTwo: ×" in evidence


class TestNoSlower:
    @pytest.mark.parametrize(
        ("tuned", "word"),
        [(1.0, "reproduced"), (1.1, "not reproduced"), ((0.9, 1, 1.1), "undecided")],
    )
    def test_words(self, tuned, word):
        found, evidence = judge("iterations/no_slower", world(tuned_no_limit=tuned))
        assert found == word and "torch's own over itself" in evidence

    def test_a_network_that_is_left_as_it_was(self):
        def make(run, left=("DenseNet-40",)):
            made_ = iterations(run)
            if run.config["role"] in left:
                made_["metrics"]["forms"][FREE]["divided"] = 0
                for sample in made_["metrics"]["samples_s"]:
                    del sample[FREE]  # nothing was timed
            return made_

        word, evidence = judge("iterations/no_slower", make)
        assert word == "reproduced" and "DenseNet-40 left as it was" in evidence
        assert judge("iterations/no_slower", lambda run: make(run, NAMES))[0] == "not run"
        frame = table("iterations", make).set_index(["network", "form"])
        narrow = "DenseNet-40 of growth 16 (for DenseNet-40)"
        assert frame.loc[narrow, FREE]["iteration (ms)"] == "left as it was"


class TestRivals:
    """Torch's own convolutions under other settings, beside our gains."""

    def rows(self, **forms):
        frame = table("iterations", world(WR_undivided=1.3, **forms), "gpu")
        frame = frame[frame["form"].str.startswith("torch's own, cudnn.benchmark")]
        return frame.set_index(["network", "form"])

    def test_rows(self):
        rows = self.rows(cudnn_benchmark="failed", cudnn_benchmark_all_plans=0.8)
        assert set(rows.index.levels[0]) == {runs.CAFFE, "ResNet-50"} and len(rows) == 5
        assert set(rows["limit (MiB)"]) == {"64 each", "–"}
        row = rows.loc[runs.CAFFE, "torch's own, cudnn.benchmark, all plans"]
        assert row["over torch's own"].startswith("×1.25") and row["largest seen (MiB)"] == "100.0"
        failed = rows.loc["ResNet-50", "torch's own, cudnn.benchmark"]
        assert (failed["iteration (ms)"], failed["over torch's own"]) == ("failed", "–")

    def test_no_claim_takes_them_for_the_methods_own(self):
        make = world(WR_undivided=1.3)
        only = lambda run: make(run) if run.config.get("rivals") else None  # noqa: E731
        assert judge("iterations/divided_faster", only, "gpu")[0] == "not run"

    def test_each_setting_has_processes_of_its_own(self, monkeypatch):
        every = list(iterating.SETTINGS)
        config = runs.rivals("gpu")[0].config | {"processes": 2, "rivals": every[1:]}
        asked = []

        def answer(function, arguments, environment):
            asked.append((arguments[2], dict(environment)))
            if "legacy" in arguments[2]:
                raise RuntimeError("no such function")
            return {"samples_s": [0.1, 0.2], "seen_bytes": len(asked)}

        monkeypatch.setattr(iterating, "in_a_process", answer)
        metrics = iterating.iterations(config, 0, None, "cpu").metrics
        assert [name for name, _ in asked] == [*every, *reversed(every)]
        capped = {"CUDNN_CONV_WSCAP_DBG": "64"}
        assert dict(asked)[every[0]] == {} and dict(asked)[every[3]] == capped
        assert dict(asked)[every[4]] == capped | {"TORCH_CUDNN_V8_API_DISABLED": "1"}
        assert "no such function" in metrics["rivals"][every[4]]["error"]
        assert [len(sample) for sample in metrics["samples_s"]] == [4, 4]

    @pytest.fixture(autouse=True)
    def settings_are_put_back(self, monkeypatch):
        for name in ("benchmark", "benchmark_limit"):
            monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))

    def test_a_rival_runs_on_a_cpu(self):
        config = runs.iterations("smoke", runs.CAFFE).config
        found = iterating.rival(config, "cpu", "cudnn.benchmark")
        assert len(found["samples_s"]) == config["repeats"] and found["seen_bytes"] == 0

    @pytest.mark.gpu
    def test_the_workspace_of_a_device_is_watched(self, device):
        config = runs.iterations("smoke", runs.CAFFE).config
        found = iterating.rival(config, str(device), "cudnn.benchmark")
        assert len(found["samples_s"]) == config["repeats"] and found["seen_bytes"] >= 0
