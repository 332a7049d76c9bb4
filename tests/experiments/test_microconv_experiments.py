"""μ-cuDNN's experiments at toy scale: what they measure."""

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from repro.experiments import load_paper
from repro.experiments import run as running
from repro.experiments.design import Outcome, Run
from repro.experiments.microconv import building, deepbench, experiments, settings
from repro.measure import machine as machine_module
from repro.measure.machine import machine
from repro.microconv import (
    BenchmarkCache,
    Convolution,
    Kernel,
    assign_workspaces,
    micro_batch_sizes,
)
from repro.microconv.backends import NATIVE
from repro.microconv.cache import Key
from repro.models import build
from repro.records import RecordStore

MIB = 2**20
PAPER = load_paper("microconv")

# By name: a run of the smoke profile, with changes to its configuration.
TOYS: dict[str, tuple[Run, dict[str, Any]]] = {
    "whole": (settings.candidates("smoke", "AlexNet", "all"), {}),
    "conv2": (settings.conv2("smoke"), {}),
    "WR": (settings.network("smoke", "AlexNet", "WR", 64, "all"), {}),
    "WR, undivided": (settings.network("smoke", "AlexNet", "WR", 8, "undivided"), {}),
    "WR, nothing": (settings.network("smoke", "AlexNet", "WR", 0, "powerOfTwo"), {}),
    "WD": (settings.network("smoke", "AlexNet", "WD", 8, "all"), {}),
    "WD, tight": (settings.network("smoke", "AlexNet", "WD", 8, "all"), {"limit_mib": 1}),
    "WD, nothing": (settings.network("smoke", "AlexNet", "WD", 0, "all"), {}),
    "ResNet-50": (settings.network("smoke", "ResNet-50", "WR", 64, "powerOfTwo"), {}),
    "DenseNet-40": (
        settings.network("smoke", "DenseNet-40", "WR", 64, "undivided"),
        {"model": {"name": "densenet40", "growth": 1}},
    ),
    "OCR": (settings.deepbench("smoke", "OCR", "fp32"), {}),
    "Face recognition": (
        settings.deepbench("smoke", "Face recognition", "fp32"),
        {"largest_mmacs": 105},
    ),
    "Vision": (settings.deepbench("smoke", "Vision", "fp32"), {"largest_mmacs": 1}),
    "iterations": (settings.iterations("smoke", "ResNet-50"), {"processes": 2}),
    "cluster": (settings.cluster("smoke"), {"repeats": 1}),
    "programme": (settings.programme("smoke"), {}),
    "solver": (settings.solver("smoke"), {"sizes": [[5, 20], [9, 40]], "repeats": 2}),
}
NETWORKS = [name for name, (run, _) in TOYS.items() if run.experiment == "network"]
LAYERS = [name for name, (run, _) in TOYS.items() if run.experiment == "deepbench"]


@dataclass(frozen=True)
class Toys:
    """What the toy runs returned."""

    outcomes: dict[str, Outcome]
    threads_after: dict[str, int]
    memory_kept: int  # how often freed memory was asked to be kept


def config_of(name: str) -> dict[str, Any]:
    run, changes = TOYS[name]
    return run.config | changes


@pytest.fixture(scope="module")
def toys() -> Iterator[Toys]:
    """Carry out every toy run once."""
    made = Toys({}, {}, 0)
    kept: list[int] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        # It would hold for the whole process, and so for all tests that follow.
        for module in (machine_module, experiments):
            patch.setattr(module, "keep_freed_memory", lambda: kept.append(1))
        patch.setattr(building, "caches", {})
        for name, (run, _) in TOYS.items():
            function = PAPER.experiments[run.experiment].function
            made.outcomes[name] = function(config_of(name), 0, None, "cpu")
            made.threads_after[name] = torch.get_num_threads()
    yield replace(made, memory_kept=len(kept))
    torch.set_num_threads(threads)


def fastest(batch: int, ways: dict[int, list[list[Any]]], limit: int) -> float:
    """Return the least time of a division within a limit, by trying every first part."""
    times = [0.0]
    for b in range(1, batch + 1):
        options = [
            way[1] + times[b - size]
            for size, found in ways.items()
            if size <= b
            for way in found
            if way[2] <= limit
        ]
        times.append(min(options, default=math.inf))
    return times[batch]


def measured(toys: Toys) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the whole network's kernels by layer and kind."""
    kernels = toys.outcomes["whole"].metrics["kernels"]
    return {(kernel["layer"], kernel["kind"]): kernel for kernel in kernels}


def ways_of(kernel: dict[str, Any], policy: str) -> dict[int, list[list[Any]]]:
    sizes = micro_batch_sizes(kernel["batch"], policy)
    return {int(b): ways for b, ways in kernel["candidates"].items() if int(b) in sizes}


class TestEveryRun:
    def test_every_experiment_is_here(self):
        assert {run.experiment for run, _ in TOYS.values()} == set(PAPER.experiments)

    def test_the_number_of_threads_is_put_back(self, toys):
        assert toys.threads_after == dict.fromkeys(TOYS, 2)

    def test_freed_memory_is_kept_where_a_cpu_is_measured(self, toys):
        assert toys.memory_kept == len(TOYS) - 1  # the solver computes, and allocates little

    def test_metrics_and_timings_can_be_written(self, toys, tmp_path, make_record):
        store, expected = RecordStore(tmp_path), {}
        for name, outcome in toys.outcomes.items():
            timings = {
                k: {"samples_s": list(t.samples_s), "warmup": t.warmup}
                for k, t in outcome.timings.items()
            }
            values = {"metrics": outcome.metrics, "timings": timings, "config": config_of(name)}
            record = make_record(TOYS[name][0].experiment, paper="microconv", key=name, **values)
            store.write(record)
            expected[name] = outcome.metrics, timings
        read = {record.key: (record.metrics, record.timings) for record in store.load("microconv")}
        assert read == expected


class TestCandidates:
    def test_keys(self, toys):
        for name in ("whole", "conv2"):
            metrics = toys.outcomes[name].metrics
            assert set(metrics) == {
                "checked",
                "benchmark_s",
                "optimise_s",
                "measured",
                "infeasible_at_64_mib",
                "kernels",
            }
            assert metrics["benchmark_s"] > 0 and metrics["optimise_s"] > 0
            assert metrics["measured"] > 0 and metrics["infeasible_at_64_mib"] == 0
            for kernel in metrics["kernels"]:
                assert set(kernel) == {
                    "layer",
                    "kind",
                    "batch",
                    "shape",
                    "data_bytes",
                    "filter_bytes",
                    "native_s",
                    "native_bytes",
                    "candidates",
                }

    def test_three_kernels_for_each_convolution_but_the_firsts_data_gradient(self, toys):
        model = build("resnet_cifar", depth=8, width=4)
        count = sum(isinstance(module, nn.Conv2d) for module in model.modules())
        found = list(measured(toys))
        assert len(found) == len(toys.outcomes["whole"].metrics["kernels"]) == 3 * count - 1
        assert ("conv1", "backward_data") not in found
        assert list(dict.fromkeys(layer for layer, _ in found)) == [
            f"conv{n}" for n in range(1, count + 1)
        ]

    def test_candidates_rise_in_workspace_and_fall_in_time(self, toys):
        for name in ("whole", "conv2"):
            for kernel in toys.outcomes[name].metrics["kernels"]:
                assert [int(b) for b in kernel["candidates"]] == [1, 2, 3, 4]
                for ways in kernel["candidates"].values():
                    assert ways
                    needs, times = [w[2] for w in ways], [w[1] for w in ways]
                    assert needs == sorted(set(needs)) and times == sorted(set(times), reverse=True)
                    assert all(w[0] in ("torch:native", "torch:im2col") for w in ways)
                fastest_whole = kernel["candidates"]["4"][-1][1]
                assert 0 < fastest_whole <= kernel["native_s"]
                assert kernel["native_bytes"] >= 0

    def test_a_layer_alone_is_the_one_asked_for(self, toys):
        (kernel,) = toys.outcomes["conv2"].metrics["kernels"]
        assert (kernel["layer"], kernel["kind"], kernel["batch"]) == ("conv2", "forward", 4)
        assert kernel["shape"] == measured(toys)["conv2", "forward"]["shape"]
        assert kernel["shape"] == "4×16×16 to 4, 3×3, stride 1, padding 1"

    def test_what_was_checked_of_conv2(self, toys):
        assert toys.outcomes["whole"].metrics["checked"] == []
        (kernel,) = toys.outcomes["conv2"].metrics["kernels"]
        rows = toys.outcomes["conv2"].metrics["checked"]
        cells = [(row["limit_mib"], row["policy"]) for row in rows]
        policies = ("undivided", "powerOfTwo", "all")
        assert sorted(cells) == sorted((limit, p) for limit in (8, 64) for p in policies)
        for row in rows:
            sizes = [size for size, _ in row["parts"]]
            assert sum(sizes) == 4
            assert set(sizes) <= set(micro_batch_sizes(4, row["policy"]))
            assert row["workspace_bytes"] <= row["limit_mib"] * MIB
            best = fastest(4, ways_of(kernel, row["policy"]), row["limit_mib"] * MIB)
            assert row["predicted_s"] == pytest.approx(best)
            assert row["time_s"] > 0 and row["native_s"] > 0

    def test_it_starts_from_an_empty_cache_and_leaves_its_own(self, monkeypatch):
        monkeypatch.setattr(machine_module, "keep_freed_memory", lambda: None)
        monkeypatch.setattr(building, "caches", {})
        config = settings.candidates("smoke", "AlexNet", "undivided").config
        first = experiments.candidates(config, 0, None, "cpu")
        again = experiments.candidates(config, 0, None, "cpu")
        assert first.metrics["measured"] == again.metrics["measured"] > 0
        (cache,) = building.caches.values()
        conv2 = dict(settings.conv2("smoke").config) | {"policy": "undivided"}
        experiments.candidates(conv2, 0, None, "cpu")  # another batch size, kept to itself
        assert list(building.caches.values()) == [cache]


class TestNetwork:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_keys(self, toys, name):
        outcome = toys.outcomes[name]
        assert set(outcome.metrics) == {"kernels", "own", "variables", "optimise_s"}
        assert not outcome.timings

    @pytest.mark.parametrize("name", NETWORKS)
    def test_torchs_own_is_timed_against_itself_whatever_the_divisions(self, toys, name):
        """Else the error of comparisons is unknown where no kernel is left to torch."""
        metrics = toys.outcomes[name].metrics
        assert all(row["parts"] == [[row["batch"], NATIVE]] for row in metrics["own"])
        scatter = settings.own_scatter([*metrics["kernels"], *metrics["own"]])
        assert scatter.dof >= 6 and 0 < scatter.sd < math.inf

    @pytest.mark.parametrize("name", NETWORKS)
    def test_parts_make_the_batch_of_sizes_of_the_policy(self, toys, name):
        config = config_of(name)
        for row in toys.outcomes[name].metrics["kernels"]:
            assert row["batch"] == config["batch"]
            if "parts" in row:
                sizes = [size for size, _ in row["parts"]]
                assert sum(sizes) == row["batch"]
                assert set(sizes) <= set(micro_batch_sizes(row["batch"], config["policy"]))

    @pytest.mark.parametrize("name", NETWORKS)
    def test_workspace_is_within_the_limit_each_or_in_sum(self, toys, name):
        config = config_of(name)
        held = [row for row in toys.outcomes[name].metrics["kernels"] if "time_s" in row]
        needs = [row["workspace_bytes"] for row in held]
        assert all(need >= 0 for need in needs)
        taken = max(needs, default=0) if config["mode"] == "WR" else sum(needs)
        assert taken <= config["limit_mib"] * MIB

    @pytest.mark.parametrize("name", ["WR", "WR, undivided", "WR, nothing"])
    def test_wr_takes_the_fastest_of_what_was_measured(self, toys, name):
        config = config_of(name)
        rows = toys.outcomes[name].metrics["kernels"]
        assert [(r["layer"], r["kind"]) for r in rows] == list(measured(toys))
        for row in rows:
            kernel = measured(toys)[row["layer"], row["kind"]]
            best = fastest(4, ways_of(kernel, config["policy"]), config["limit_mib"] * MIB)
            assert ("time_s" in row) == math.isfinite(best)
            if "time_s" in row:
                assert row["predicted_s"] == pytest.approx(best)
                times = {
                    (int(b), way[0]): way[1]
                    for b, ways in kernel["candidates"].items()
                    for way in ways
                }
                parts = sum(times[size, name] for size, name in row["parts"])
                assert row["predicted_s"] == pytest.approx(parts)

    @pytest.mark.parametrize("name", ["WD", "WD, tight"])
    def test_wd_is_no_slower_than_an_even_share(self, toys, name):
        metrics = toys.outcomes[name].metrics
        rows = metrics["kernels"]
        assert all("time_s" in row for row in rows)
        assert metrics["variables"] >= len(rows)
        share = config_of(name)["limit_mib"] * MIB // len(rows)
        even = [
            fastest(4, ways_of(measured(toys)[row["layer"], row["kind"]], "all"), share)
            for row in rows
        ]
        assert sum(row["predicted_s"] for row in rows) <= sum(even) * (1 + 1e-9)

    def test_where_wd_fits_not_even_at_its_least_no_kernel_is_divided(self, toys):
        rows = toys.outcomes["WD, nothing"].metrics["kernels"]
        needs = [
            min(w[2] for w in ways)
            for kernel in measured(toys).values()
            for ways in [kernel["candidates"]["1"]]
        ]
        assert all("time_s" in row for row in rows) == (max(needs) == 0)
        assert len({"time_s" in row for row in rows}) == 1

    def test_only_wd_has_variables(self, toys):
        for name in NETWORKS:
            if config_of(name)["mode"] == "WR":
                assert toys.outcomes[name].metrics["variables"] == 0

    def test_densenets_39_convolutions(self, toys):
        rows = toys.outcomes["DenseNet-40"].metrics["kernels"]
        assert len(rows) == 3 * 39 - 1
        assert rows[-1]["layer"] == "conv39"

    def test_measured_times_are_shared_within_a_network(self, monkeypatch):
        monkeypatch.setattr(machine_module, "keep_freed_memory", lambda: None)
        monkeypatch.setattr(building, "caches", {})
        config = settings.network("smoke", "AlexNet", "WR", 8, "undivided").config
        found = [experiments.network(config, 0, None, "cpu").metrics["kernels"] for _ in range(2)]
        assert found[0] == found[1] and len(building.caches) == 1


class Broken(Exception):
    pass


class TestTrouble:
    @pytest.fixture(autouse=True)
    def quiet(self, monkeypatch) -> Iterator[None]:
        monkeypatch.setattr(machine_module, "keep_freed_memory", lambda: None)
        monkeypatch.setattr(experiments, "keep_freed_memory", lambda: None)
        monkeypatch.setattr(building, "caches", {})
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(threads)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "run",
        [
            Run("candidates", settings.conv2("smoke").config | {"policy": "undivided"}, seeds=(0,)),
            settings.network("smoke", "AlexNet", "WR", 64, "undivided"),
            settings.deepbench("smoke", "OCR", "fp32"),
        ],
        ids=lambda run: run.experiment,
    )
    def test_a_comparison_that_fails(self, monkeypatch, run):
        def refuse(*arguments):
            raise Broken("no comparison")

        monkeypatch.setattr(experiments.Bench, "compare", refuse)
        precision = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
        with pytest.raises(Broken, match="no comparison"):
            PAPER.experiments[run.experiment].function(run.config, 0, None, "cpu")
        assert torch.get_num_threads() == 2
        assert precision == (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled)

    @pytest.mark.slow
    def test_it_is_recorded_as_failed_and_the_others_go_on(self, monkeypatch, tmp_path):
        def refuse(*arguments):
            raise Broken("no comparison")

        monkeypatch.setattr(experiments.Bench, "compare", refuse)
        store = RecordStore(tmp_path)
        solver = settings.solver("smoke")
        small = replace(
            solver, config=solver.config | {"sizes": [[2, 5]], "repeats": 1}, seeds=(0,)
        )
        plan = [
            Run("candidates", settings.conv2("smoke").config | {"policy": "undivided"}, seeds=(0,)),
            small,
        ]
        setting = running.Setting("smoke", "cpu")
        tally = running.execute(PAPER, plan, setting, store, lambda line: None)
        assert (tally.done, tally.failed) == (2, 1)
        found = {record.experiment: record for record in store.load("microconv")}
        assert found["candidates"].status == "failed"
        assert found["candidates"].error.startswith("Broken: no comparison")
        assert found["candidates"].metrics == {} and found["solver"].status == "ok"
        assert all(record.dataset is None for record in found.values())
        assert all("--dataset" not in record.command for record in found.values())

    def test_a_cluster_that_fails(self, monkeypatch):
        def refuse(*arguments, **options):
            assert torch.get_num_threads() in (1, 2)
            raise Broken("no time")

        torch.set_num_threads(3)
        monkeypatch.setattr(experiments, "time_interleaved", refuse)
        monkeypatch.setattr(experiments, "tune", lambda *a, **k: SimpleNamespace(kernels=[]))
        with pytest.raises(Broken):
            experiments.cluster(config_of("cluster"), 0, None, "cpu")
        assert torch.get_num_threads() == 3

    def test_an_unknown_model(self):
        config = settings.network("smoke", "AlexNet", "WR", 8, "undivided").config
        with pytest.raises(ValueError, match="vgg"):
            experiments.network(config | {"model": {"name": "vgg"}}, 0, None, "cpu")
        assert torch.get_num_threads() == 2

    @pytest.mark.parametrize(("wanted", "expected"), [(1, 1), (None, 2), (10_000, None)])
    def test_threads_of_a_configuration(self, wanted, expected):
        import os

        with machine({"threads": wanted}, "cpu"):
            cores = len(os.sched_getaffinity(0))
            assert torch.get_num_threads() == (cores if expected is None else expected)
        assert torch.get_num_threads() == 2

    def test_a_gpus_host_is_left_alone(self, monkeypatch):
        monkeypatch.setattr(machine_module, "keep_freed_memory", lambda: pytest.fail("on a GPU"))
        with machine({"threads": 1}, "cuda"):
            assert torch.get_num_threads() == 2


class TestLayers:
    @pytest.mark.parametrize("name", LAYERS)
    def test_rows_are_the_chosen_layers(self, toys, name):
        config, metrics = config_of(name), toys.outcomes[name].metrics
        rules = config["factor"], config["largest_mmacs"], config["of_each_size"]
        chosen = deepbench.choose(config["role"], *rules)
        assert set(metrics) == {"layers", "left_out"}
        assert len(metrics["layers"]) == len(chosen)
        assert len(chosen) + metrics["left_out"] == len(deepbench.layers(config["role"]))
        for row, layer in zip(metrics["layers"], chosen, strict=True):
            assert row["batch"] == layer.batch * config["factor"]
            assert row["kernel_size"] == "×".join(map(str, layer.conv.kernel_size))
            assert str(layer.conv.in_channels) in row["shape"]

    def test_they_are_not_all_empty(self, toys):
        counts = {name: len(toys.outcomes[name].metrics["layers"]) for name in LAYERS}
        assert counts == {"OCR": 1, "Face recognition": 2, "Vision": 0}

    @pytest.mark.parametrize("name", LAYERS)
    def test_divisions_are_within_the_limit(self, toys, name):
        config = config_of(name)
        for row in toys.outcomes[name].metrics["layers"]:
            assert "divided" in row or "undivided" not in row
            for way in ("undivided", "divided"):
                if way not in row:
                    continue
                sizes = [size for size, _ in row[way]["parts"]]
                assert sum(sizes) == row["batch"]
                assert set(sizes) <= set(micro_batch_sizes(row["batch"], config["policy"]))
                assert 0 <= row[way]["workspace_bytes"] <= config["limit_mib"] * MIB
                assert row[way]["time_s"] > 0 and row[way]["native_s"] > 0
            if "undivided" in row:
                assert len(row["undivided"]["parts"]) == 1

    def test_the_same_layer_twice_is_measured_once(self, monkeypatch):
        monkeypatch.setattr(machine_module, "keep_freed_memory", lambda: None)
        seen = []

        def row(bench, kernel, batch, limit, policy):
            seen.append((kernel, batch))
            return {"kernel_size": "1×1", "batch": batch}

        monkeypatch.setattr(experiments, "_layer_row", row)
        config = settings.deepbench("paper", "ResNet", "fp32").config
        config |= {"algorithms": ["torch"], "threads": 1}
        metrics = experiments.bench_layers(config, 0, None, "cpu").metrics
        assert (len(metrics["layers"]), metrics["left_out"], len(seen)) == (32, 0, 30)
        assert {row["batch"] for row in metrics["layers"]} == {4 * 8, 4 * 16}


class TestCluster:
    def test_times_of_every_size_on_both_devices(self, toys):
        metrics = toys.outcomes["cluster"].metrics
        batch = config_of("cluster")["batch"]
        assert set(metrics) == {"times", "devices", "divided"}
        assert set(metrics["divided"]) == {"fast", "slow"} and min(metrics["divided"].values()) >= 0
        assert set(metrics["times"]) == set(metrics["devices"]) == {"fast", "slow"}
        for times in metrics["times"].values():
            assert [int(size) for size in times] == [1, 2, 4, batch]
            assert all(seconds > 0 for seconds in times.values())

    def test_each_device_is_tuned_within_64_mib_under_wr(self, monkeypatch):
        monkeypatch.setattr(experiments, "keep_freed_memory", lambda: None)
        tuned = []

        def tune(model, images, limit, policy, **options):
            tuned.append((torch.get_num_threads(), limit, policy, options.get("mode", "WR")))
            return SimpleNamespace(kernels=[SimpleNamespace(division=None)])

        monkeypatch.setattr(experiments, "tune", tune)
        outcome = experiments.cluster(config_of("cluster"), 0, None, "cpu")
        assert [row[1:] for row in tuned] == [(64 * MIB, "powerOfTwo", "WR")] * 2
        assert tuned[1][0] == 1 and outcome.metrics["divided"] == {"fast": 0, "slow": 0}

    def test_devices_are_described_as_they_are(self, toys):
        devices = toys.outcomes["cluster"].metrics["devices"]
        assert devices["slow"] == "CPU, 1 thread"
        assert devices["fast"] in ("CPU, 2 threads", "CPU, 1 thread")

    @pytest.mark.parametrize("batch", [8, 10, 32])
    def test_sizes_are_multiples_of_four_and_the_smallest(self, monkeypatch, batch):
        monkeypatch.setattr(experiments, "keep_freed_memory", lambda: None)
        asked = []

        class Timing:
            median_s = 1.0

        def timed(steps, **options):
            asked.append((torch.get_num_threads(), [int(size) for size in steps]))
            return dict.fromkeys(steps, Timing)

        monkeypatch.setattr(experiments, "time_interleaved", timed)
        monkeypatch.setattr(experiments, "tune", lambda *a, **k: SimpleNamespace(kernels=[]))
        experiments.cluster(config_of("cluster") | {"batch": batch}, 0, None, "cpu")
        expected = sorted({1, 2, batch} | {n for n in range(4, batch + 1) if n % 4 == 0})
        assert [sizes for _, sizes in asked] == [expected] * 2
        assert asked[1][0] == 1


class TestProgramme:
    def test_a_networks_own_kernels_within_both_totals(self, toys):
        outcome = toys.outcomes["programme"]
        told = outcome.metrics
        assert told["variables"] >= told["kernels"] == 3 * 13 - 1  # resnet_cifar of depth 14
        assert set(told["total_bytes"]) == set(outcome.timings) == {"as in the paper", "binding"}
        for name, total in told["total_bytes"].items():
            assert 0 <= told["taken_bytes"][name] <= total
        assert told["total_bytes"]["as in the paper"] == 5088 * MIB > told["wanted_bytes"]


class TestSolver:
    def test_timings_by_size(self, toys):
        outcome = toys.outcomes["solver"]
        assert set(outcome.timings) == {
            "WD, 20 variables",
            "WD, 40 variables",
            "front, B = 256, 6 algorithms, all",
            "WR, B = 256, 6 algorithms, all",
        }
        for timing in outcome.timings.values():
            assert len(timing.samples_s) == 2
        assert outcome.metrics == {"fronts": "made up at random"}

    @pytest.mark.parametrize(("kernels", "variables"), [(1, 1), (3, 3), (5, 40), (159, 562)])
    def test_made_up_fronts(self, kernels, variables):
        fronts, total = experiments.made_up_fronts(random.Random(3), kernels, variables)
        assert len(fronts) == kernels and sum(map(len, fronts.values())) == variables
        for front in fronts.values():
            needs = [division.workspace_bytes for division in front]
            times = [division.time_s for division in front]
            assert needs == sorted(set(needs)) and times == sorted(times, reverse=True)
        least = sum(front[0].workspace_bytes for front in fronts.values())
        most = sum(front[-1].workspace_bytes for front in fronts.values())
        assert least <= total <= most and abs(2 * total - least - most) <= 1
        if kernels < 10:
            chosen = assign_workspaces(fronts, total)
            assert sum(division.workspace_bytes for division in chosen.values()) <= total

    def test_they_are_a_function_of_the_seed(self):
        def made(seed):
            generator = random.Random(seed)
            return experiments.made_up_fronts(generator, 3, 9), experiments.made_up_kernel(
                generator
            )

        assert made(1) == made(1) != made(2)

    def test_a_made_up_kernel(self):
        found = experiments.made_up_kernel(random.Random(0))
        assert list(found) == list(range(1, 257))
        assert all(len({way.algorithm for way in ways}) == 6 for ways in found.values())


class TestBuilding:
    CONFIG = settings.base("smoke", "ResNet-50")

    def networks(self) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
        model, images, labels = building.build_network(self.CONFIG, "cpu")
        return model, copy.deepcopy(model), images, labels

    def test_a_network_is_the_same_each_time_and_in_training_mode(self):
        one, other = (building.build_network(self.CONFIG, "cpu") for _ in range(2))
        assert one[0].training
        assert torch.equal(one[1], other[1]) and torch.equal(one[2], other[2])
        for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
            assert torch.equal(a, b)
        assert one[1].shape == (2, 3, 16, 16)
        low = building.build_network(self.CONFIG | {"dtype": "bfloat16"}, "cpu")
        assert {p.dtype for p in low[0].parameters()} == {low[1].dtype} == {torch.bfloat16}

    def test_the_same_network_does_not_differ(self):
        assert building.difference(*self.networks()) == (0.0, 0.0)

    def test_dropout_is_the_same_on_both_sides(self):
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 10))
        images, labels = torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 3])
        assert building.difference(model, copy.deepcopy(model), images, labels) == (0.0, 0.0)

    def test_a_changed_weight_is_seen(self):
        one, other, images, labels = self.networks()
        with torch.no_grad():
            next(one.parameters())[0].mul_(-1.5)
        loss, gradient = building.difference(one, other, images, labels)
        assert loss > 1e-6 and gradient > 1e-3

    def test_the_difference_is_relative_to_the_largest_element(self):
        one, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        one.weight.grad = torch.tensor([[8.0, 3.0]])
        other.weight.grad = torch.tensor([[10.0, 3.5]])
        assert building._gradient_gap(one, other) == pytest.approx(0.2)

    def test_gradients_that_are_no_numbers_are_not_the_same(self):
        one, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        one.weight.grad = torch.tensor([[float("nan"), 3.0]])
        other.weight.grad = torch.tensor([[10.0, 3.0]])
        assert not building._gradient_gap(one, other) <= 1e-4

    def test_torchs_two_convolutions_differ_by_rounding_alone(self):
        plain, _, images, labels = self.networks()
        enabled = torch.backends.mkldnn.enabled
        assert 0 <= building.own_difference(plain, images, labels) < 1e-2
        assert torch.backends.mkldnn.enabled == enabled

    def test_the_library_is_put_back_after_an_error(self):
        enabled = torch.backends.mkldnn.enabled
        with pytest.raises(Broken), building._without_library("cpu"):
            assert not torch.backends.mkldnn.enabled
            raise Broken
        assert torch.backends.mkldnn.enabled == enabled

    def test_what_measured_times_depend_on(self):
        base = settings.network("gpu", "AlexNet", "WR", 8, "all").config
        key = building.cache_key(base, "cuda")
        same = settings.network("gpu", "AlexNet", "WD", 64, "undivided").config
        assert building.cache_key(same, "cuda") == key
        others = [
            (settings.network("gpu", "AlexNet", "WR", 8, "all", "tf32").config, "cuda"),
            (settings.network("gpu", "ResNet-50", "WR", 8, "all").config, "cuda"),
            (settings.network("quick", "AlexNet", "WR", 8, "all").config, "cuda"),
            (base | {"batch": 8}, "cuda"),
            (base, "cuda:1"),
        ]
        assert len({key, *(building.cache_key(*other) for other in others)}) == 6


class TestTimesOfOtherProcesses:
    @pytest.mark.parametrize("accelerator", [True, False])
    def test_are_found_on_an_accelerator(self, accelerator, monkeypatch, tmp_path):
        monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
        monkeypatch.setattr(building, "caches", {})
        monkeypatch.setattr(building, "is_accelerator", lambda device: accelerator)
        config = settings.network("gpu", "AlexNet", "WR", 8, "all").config
        cache = BenchmarkCache(None)
        kernel = Kernel("forward", Convolution(3, 8, 8, 4, (3, 3)))
        cache.store_times(Key.of(kernel, "torch"), 4, {"torch:native": [0.1]})
        building.share(config, "cpu", cache)
        assert len(building.shared(config, "cpu")) == 1
        building.caches.clear()  # another process
        assert len(building.shared(config, "cpu")) == accelerator
        assert building.kept_times().exists() == accelerator

    def test_a_layers_forward_pass_is_what_is_run(self):
        config = settings.base("smoke", "AlexNet") | {"policy": "powerOfTwo", "layer": "conv2"}
        config |= {"kinds": list(settings.KINDS)}
        metrics = experiments.candidates(config, 0, None, "cpu").metrics
        assert [entry["kind"] for entry in metrics["kernels"]] == list(settings.KINDS)
        assert metrics["checked"]
