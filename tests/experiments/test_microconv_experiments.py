"""The experiments of μ-cuDNN at toy scale: what they measure."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from repro.experiments import arguments, load_paper
from repro.experiments import run as running
from repro.experiments.design import Outcome, Run
from repro.experiments.microconv import building, experiments, measured, runs
from repro.measure import machine as machine_module
from repro.microconv import micro_batch_sizes
from repro.records import RecordStore

MIB = 2**20
PAPER = load_paper("microconv")


def network(mode: str, limit_mib: int, policy: str) -> Run:
    return runs.Cell(limit_mib, policy, mode=mode).run("smoke")


# By name: a run of the smoke profile, with changes to its configuration.
TOYS: dict[str, tuple[Run, dict[str, Any]]] = {
    "whole": (runs.alexnet_kernels("smoke")[0], {}),
    "conv2": (runs.conv2("smoke"), {}),
    "WR": (network("WR", 64, "all"), {}),
    "WR, undivided": (network("WR", 8, "undivided"), {}),
    "WR, nothing": (network("WR", 0, "powerOfTwo"), {}),
    "WD": (network("WD", 8, "all"), {}),
    "WD, tight": (network("WD", 8, "all"), {"limit_mib": 1}),
    "WD, nothing": (network("WD", 0, "all"), {}),
    "OCR": (runs.deepbench("smoke", "OCR", "fp32"), {}),
    "Face recognition": (
        runs.deepbench("smoke", "Face recognition", "fp32"),
        {"largest_mmacs": 105},
    ),
    "Vision": (runs.deepbench("smoke", "Vision", "fp32"), {"largest_mmacs": 1}),
    "iterations": (runs.iterations("smoke", "ResNet-50"), {"processes": 2}),
    "cluster": (runs.cluster("smoke"), {"repeats": 1}),
    "programme": (runs.optimisation("smoke", {})[-1], {}),
    "solver": (runs.optimisation("smoke", {})[-2], {"sizes": [[5, 20], [9, 40]]}),
}
NETWORKS = [name for name, (run, _) in TOYS.items() if run.experiment == "network"]
LAYERS = [name for name, (run, _) in TOYS.items() if run.experiment == "deepbench"]


def config_of(name: str) -> dict[str, Any]:
    run, changes = TOYS[name]
    return run.config | changes


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Keep from tests that follow what would hold for the whole process."""
    monkeypatch.setattr(machine_module, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(building, "caches", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def toys() -> dict[str, Outcome]:
    """The outcome of every toy run, each carried out once, with two threads before and after."""
    outcomes, kept = {}, set()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "caches", {})
        for name, (run, _) in TOYS.items():
            patch.setattr(machine_module, "keep_freed_memory", partial(kept.add, name))
            function = PAPER.experiments[run.experiment].function
            outcomes[name] = function(config_of(name), 0, None, "cpu")
            assert torch.get_num_threads() == 2, name
    torch.set_num_threads(threads)
    assert kept == TOYS.keys() - {"solver"}  # it computes, and allocates little
    return outcomes


def fastest(batch: int, kernel: dict[str, Any], policy: str, limit_mib: float) -> float:
    """The least time of a division within a limit, by trying every first part."""
    times = [0.0]
    for b in range(1, batch + 1):
        options = [
            way[1] + times[b - size]
            for size in micro_batch_sizes(batch, policy)
            if size <= b
            for way in kernel["candidates"][str(size)]
            if way[2] <= limit_mib * MIB
        ]
        times.append(min(options, default=math.inf))
    return times[batch]


class TestCandidates:
    def kernels(self, toys, name="whole"):
        kernels = toys[name].metrics["kernels"]
        return {(kernel["layer"], kernel["kind"]): kernel for kernel in kernels}

    def test_divisions_of_conv2_that_were_run(self, toys):
        metrics = toys["conv2"].metrics
        cells = [(row["limit_mib"], row["policy"]) for row in metrics["checked"]]
        assert sorted(cells) == sorted((limit, p) for limit in (8, 64) for p in runs.POLICIES)
        for row in metrics["checked"]:
            assert sum(size for size, _ in row["parts"]) == 4
            best = fastest(4, metrics["kernels"][0], row["policy"], row["limit_mib"])
            assert row["predicted_s"] == pytest.approx(best) and row["time_s"] > 0
        # The golden rerun derives from the measured times what was derived then.
        again = measured.divided_again(config_of("conv2"), metrics)
        assert again["infeasible_at_64_mib"] == metrics["infeasible_at_64_mib"] == 0
        for row, before in zip(again["checked"], metrics["checked"], strict=True):
            assert [list(part) for part in row["parts"]] == before["parts"]

    def test_it_starts_from_an_empty_cache_and_leaves_its_own(self):
        (run,) = runs.alexnet_kernels("smoke", "undivided")
        first, again = (experiments.candidates(run.config, 0, None, "cpu") for _ in range(2))
        assert first.metrics["measured"] == again.metrics["measured"] > 0
        assert first.metrics["checked"] == []
        (cache,) = building.caches.values()
        conv2 = runs.conv2("smoke").config | {"policy": "undivided"}
        experiments.candidates(conv2, 0, None, "cpu")  # a layer keeps its times to itself
        assert list(building.caches.values()) == [cache]
        found = [
            experiments.network(config_of("WR, undivided"), 0, None, "cpu").metrics["kernels"]
            for _ in range(2)
        ]
        assert len(building.caches) == 1 and len(found[0]) == len(found[1])


class TestCluster:
    def test_threads_are_put_back_after_an_error(self, monkeypatch):
        def refuse(*arguments, **options):
            raise Broken("no time")

        torch.set_num_threads(3)
        monkeypatch.setattr(experiments, "tune", refuse)
        with pytest.raises(Broken):
            experiments.cluster(config_of("cluster"), 0, None, "cpu")
        assert torch.get_num_threads() == 3


class Broken(Exception):
    pass


class TestBuilding:
    CONFIG = runs.Cell(8, role="ResNet-50").run("smoke").config

    def networks(self) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
        model, images, labels = building.build_network(self.CONFIG, "cpu")
        return model, copy.deepcopy(model), images, labels

    def test_differences(self):
        one, other, images, labels = self.networks()
        assert building.difference(one, other, images, labels) == (0.0, 0.0)
        with torch.no_grad():
            next(one.parameters())[0].mul_(-1.5)
        loss, gradient = building.difference(one, other, images, labels)
        assert loss > 1e-6 and gradient > 1e-3
        dropout = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 10))
        images, labels = torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 3])
        same = building.difference(dropout, copy.deepcopy(dropout), images, labels)
        assert same == (0.0, 0.0)  # the same dropout on both sides


@pytest.mark.gpu
def test_each_experiment_runs_on_an_accelerator(device, tmp_path):
    store = RecordStore(tmp_path)
    plan = arguments.plan(PAPER, PAPER.artefacts.values(), "smoke", {})
    # One of each, but for the solver, which no device has to do with.
    first = {(r.experiment, r.config.get("mode")): r for r in reversed(plan)}
    wanted = [run for (name, _), run in first.items() if name != "solver"]
    setting = running.Setting("smoke", str(device))
    tally = running.execute(PAPER, wanted, setting, store, report=lambda line: None)
    assert (tally.done, tally.failed) == (7, 0), [r.error for r in store.load("microconv")]
    records = store.load("microconv")
    assert {record.device["type"] for record in records} == {device.type}
    for record in (record for record in records if record.experiment == "network"):
        for row in (row for row in record.metrics["kernels"] if "parts" in row):
            assert {name for _, name in row["parts"]} <= {*record.config["algorithms"]}
            assert row["workspace_bytes"] <= record.config["limit_mib"] * MIB
