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
from repro.experiments.microconv.measured import NATIVE
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


def test_every_experiment_is_here_and_its_outcome_can_be_written(toys, tmp_path, make_record):
    assert {run.experiment for run, _ in TOYS.values()} == set(PAPER.experiments)
    store = RecordStore(tmp_path)
    for name, outcome in toys.items():
        timings = {k: {"samples_s": list(t.samples_s)} for k, t in outcome.timings.items()}
        values = {"metrics": outcome.metrics, "timings": timings, "config": config_of(name)}
        store.write(make_record(TOYS[name][0].experiment, paper="microconv", key=name, **values))
    read = {record.key: record.metrics for record in store.load("microconv")}
    assert read == {name: outcome.metrics for name, outcome in toys.items()}


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


class TestNetwork:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_divisions(self, toys, name):
        config, metrics = config_of(name), toys[name].metrics
        assert set(metrics) == {"kernels", "own", "variables", "optimise_s"}
        assert not metrics["variables"] or config["mode"] == "WD"
        held = [row for row in metrics["kernels"] if "time_s" in row]
        for row in held:
            sizes = [size for size, _ in row["parts"]]
            assert sum(sizes) == row["batch"] == config["batch"]
            assert set(sizes) <= set(micro_batch_sizes(row["batch"], config["policy"]))
        needs = [row["workspace_bytes"] for row in held]
        taken = max(needs, default=0) if config["mode"] == "WR" else sum(needs)
        assert taken <= config["limit_mib"] * MIB
        # Torch's own is timed against itself: else the error may be unknown.
        assert all(row["parts"] == [[row["batch"], NATIVE]] for row in metrics["own"])
        estimate = measured.compared(0.1, 1.0, [*metrics["kernels"], *metrics["own"]])
        assert estimate.dof >= 6 and 0 < estimate.error < math.inf

    @pytest.mark.parametrize("name", ["WR", "WR, undivided", "WR, nothing"])
    def test_wr_takes_the_fastest_of_what_was_measured(self, toys, name):
        config = config_of(name)
        for row, kernel in zip(
            toys[name].metrics["kernels"], toys["whole"].metrics["kernels"], strict=True
        ):
            best = fastest(4, kernel, config["policy"], config["limit_mib"])
            assert ("time_s" in row) == math.isfinite(best)
            assert "time_s" not in row or row["predicted_s"] == pytest.approx(best)


class TestLayers:
    @pytest.mark.parametrize("name", LAYERS)
    def test_rows_are_the_chosen_layers_within_the_limit(self, toys, name):
        config, metrics = config_of(name), toys[name].metrics
        chosen, left_out = building.layers(config)
        assert metrics["left_out"] == left_out
        assert len(chosen) == {"OCR": 1, "Face recognition": 2, "Vision": 0}[name]
        assert len(chosen) + left_out == {"OCR": 4, "Face recognition": 23, "Vision": 19}[name]
        for row, (conv, batch) in zip(metrics["layers"], chosen, strict=True):
            assert row["batch"] == batch
            assert row["kernel_size"] == "×".join(map(str, conv.kernel_size))
            for form in {"undivided", "divided"} & set(row):
                assert set(row[form]) == {"parts", "workspace_bytes", "time_s", "native_s"}
                assert sum(size for size, _ in row[form]["parts"]) == row["batch"]
                assert 0 <= row[form]["workspace_bytes"] <= config["limit_mib"] * MIB
            assert "undivided" not in row or len(row["undivided"]["parts"]) == 1


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


class TestSolver:
    def test_a_networks_own_kernels_within_both_totals(self, toys):
        told = toys["programme"].metrics
        assert told["variables"] >= told["kernels"] == 3 * 13 - 1  # resnet_cifar of depth 14
        assert set(toys["programme"].timings) == {"as in the paper", "binding"}
        for name, total in told["total_bytes"].items():
            assert 0 <= told["taken_bytes"][name] <= total
        assert told["total_bytes"]["as in the paper"] == 5088 * MIB > told["wanted_bytes"]


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
