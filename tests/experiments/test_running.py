"""Planning, carrying out, finding and gathering runs, on a paper made up for the purpose."""

import errno
import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from invented import CPU, toy_paper

from repro import datasets, records
from repro.experiments import UsageError, arguments, load_paper, one_run, query
from repro.experiments import run as running
from repro.experiments.design import LONG, Artefact, Experiment, Outcome, Paper, Run
from repro.experiments.judge import NotRun
from repro.experiments.query import LOCAL, Results, Source
from repro.experiments.run import Setting
from repro.measure import Timing, accelerator
from repro.records import RecordError, RecordStore


@dataclass
class Toy:
    """A paper with one experiment that adds, and a list of what was called."""

    calls: list[tuple[int, int]] = field(default_factory=list)
    trouble: Exception | None = None  # raised for x = 2
    measures: bool = False
    version: int = 1

    @property
    def paper(self) -> Paper:
        added = Experiment("add", f"{__name__}:add", self.measures, version=self.version)
        return toy_paper(added, artefacts={"a": A, "b": B}, options={"way": ("plain", "fancy")})

    def plan(self) -> list[Run]:
        return arguments.plan(self.paper, self.paper.artefacts.values(), "smoke", {})


TOY = Toy()


def add(config, seed, data, device) -> Outcome:
    TOY.calls.append((config["x"], seed))
    if config["x"] == 2 and TOY.trouble is not None:
        raise TOY.trouble
    return Outcome({"sum": config["x"] + seed}, {"add": Timing((0.1,), 2)}, 7)


def tell_of_cudnn(config, seed, data, device) -> Outcome:
    return Outcome({"benchmark": torch.backends.cudnn.benchmark})


def sums(name: str, *xs: int) -> Artefact:
    runs = [Run("add", {"x": x}, label=f"of {x}") for x in xs]
    return Artefact(name, "Table 0", f"Sums {name}", "Sums.", lambda *_: runs, lambda _: [])


A, B = sums("a", 1, 2), sums("b", 2, 3, 3)
H200 = CPU | {"type": "cuda", "name": "NVIDIA H200"}


@pytest.fixture
def toy() -> Toy:
    TOY.__init__()  # type: ignore[misc]
    return TOY


def execute(toy: Toy, store: RecordStore, **options):
    toy.calls.clear()
    lines: list[str] = []
    setting = Setting("smoke", "cpu", **{"seeds": (0, 1)} | options)
    return running.execute(toy.paper, toy.plan(), setting, store, lines.append), lines


class TestExecute:
    def test_a_second_execution_computes_nothing(self, toy, store):
        tally, lines = execute(toy, store)
        assert toy.calls == [(x, seed) for seed in (0, 1) for x in (1, 2, 3)]
        assert (tally.done, tally.stood, tally.failed, tally.out_of_memory) == (6, 0, 0, 0)
        assert len(lines) == 6 and all("seed" in line and "ok" in line for line in lines)
        before = {path: path.stat().st_mtime_ns for path in store.folder.rglob("*.json")}
        tally, lines = execute(toy, store)
        assert toy.calls == [] and lines == []
        assert (tally.done, tally.stood) == (0, 6)
        assert {p: p.stat().st_mtime_ns for p in store.folder.rglob("*.json")} == before

    def test_a_record_says_what_ran(self, toy, store):
        execute(toy, store, seeds=(4,))
        (record,) = (record for record in store.load("toy") if record.config["x"] == 1)
        assert (record.paper, record.experiment, record.config) == ("toy", "add", {"x": 1})
        assert (record.seed, record.metrics, record.peak_bytes) == (4, {"sum": 5}, 7)
        assert record.timings == {"add": {"samples_s": [0.1], "warmup": 2}}
        assert record.dataset is None and record.error is None
        assert record.version == 1 and record.first_steps is None
        assert record.device["type"] == "cpu"
        assert torch.__version__.startswith(record.versions["torch"].split("+")[0])
        assert record.started <= record.finished
        assert record.command.endswith("run toy --profile smoke --device cpu --seeds 4,")
        assert f"add-{record.key}.json" in [path.name for path in store.folder.rglob("*.json")]

    def test_the_dataset_is_loaded_once_and_named(self, toy, store, monkeypatch):
        loads = []

        def load(name, root, **options):
            loads.append((name, root, options))
            return datasets.phantom(8, train=4, test=4)

        monkeypatch.setattr(datasets, "load", load)
        one_run._load_cached.cache_clear()
        config = {"x": 1, "dataset": {"name": "digits", "image_size": 8}}
        runs = [Run("add", config), Run("add", config | {"x": 3})]
        setting = Setting("smoke", "cpu", root="folder", seeds=(0, 1))
        running.execute(toy.paper, runs, setting, store, lambda line: None)
        one_run._load_cached.cache_clear()
        assert loads == [("digits", "folder", {"image_size": 8})]
        stored = store.load("toy")
        assert len(stored) == 4
        assert {record.dataset["kind"] for record in stored} == {"synthetic"}
        assert set(stored[0].dataset) == {"name", "fingerprint", "provenance", "kind"}

    @pytest.mark.parametrize(
        ("trouble", "status"),
        [
            (torch.OutOfMemoryError("no room"), "out_of_memory"),
            (accelerator.HostMemoryError("the host has no room"), "out_of_memory"),
            (ValueError("x is 2"), "failed"),
        ],
    )
    def test_trouble_is_recorded_and_the_others_go_on(self, toy, store, trouble, status):
        toy.trouble = trouble
        tally, lines = execute(toy, store)
        assert len(toy.calls) == 6 == tally.done and getattr(tally, status) == 2
        assert tally.failed + tally.out_of_memory == 2
        told = [line for line in lines if status in line]
        assert all(line.startswith("toy add of 2 seed") for line in told)
        if status == "failed":  # and why
            assert all(f"{type(trouble).__name__}: {trouble}" in line for line in told)
        by_x = {record.config["x"]: record for record in store.load("toy")}
        assert by_x[1].status == by_x[3].status == "ok" and by_x[2].status == status
        assert by_x[2].error.startswith(f"{type(trouble).__name__}: {trouble}")
        assert ("Traceback" in by_x[2].error or "line" in by_x[2].error) == (status == "failed")
        assert by_x[2].metrics == {} and by_x[2].peak_bytes is None
        # The same again: what ran out of memory stands, what failed is still counted and said.
        tally, lines = execute(toy, store)
        assert (toy.calls, tally.stood) == ([], 6)
        assert (tally.failed, tally.failed_before) == (0, 2 if status == "failed" else 0)
        again = [line for line in lines if "failed before, again with --retry-failed" in line]
        assert len(again) == tally.failed_before == len(lines)
        assert all("x is 2" in line for line in again)
        assert all("\n" not in line for line in again)  # the error's first line
        told = "2 failed before, --retry-failed computes them again"
        assert (told in str(tally)) == (status == "failed")

    @pytest.mark.parametrize("told", [False, True])
    def test_interruption_that_a_method_turns_into_an_error_is_no_result(self, toy, store, told):
        class Ended(Exception):
            def __str__(self):
                return "a worker was lost"

        def interrupted(config, seed, data, device):
            toy.calls.append((config["x"], seed))
            if config["x"] == 2:
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(10)
                except KeyboardInterrupt as error:
                    raise Ended from (error if told else None)
            return Outcome({})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                execute(toy, store)
        assert {record.config["x"] for record in store.load("toy")} == {1}
        assert sorted(p.suffix for p in store.folder.rglob("*") if p.is_file()) == [".json"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_what_stands_needs_no_place_to_write(self, toy, store, monkeypatch):
        execute(toy, store)

        def fail(*arguments):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(os, "fsync", fail)
        assert execute(toy, store)[0].stood == 6
        with pytest.raises(RecordError, match=r"Read-only file system.*make the folder writable"):
            execute(toy, store, seeds=(2,))
        assert toy.calls == []

    def test_a_raised_version_runs_again_and_keeps_the_old_records(self, toy, store):
        execute(toy, store)
        toy.version = 2
        tally, _ = execute(toy, store)
        assert tally.done == 6
        assert sorted(record.version for record in store.load("toy")) == [1] * 6 + [2] * 6
        toy.version = 1
        assert execute(toy, store)[0].done == 0

    @pytest.mark.parametrize("measures", [False, True])
    def test_torchs_version_counts_for_measurements(self, toy, store, monkeypatch, measures):
        toy.measures = measures
        execute(toy, store)
        versions = records.library_versions() | {"torch": "0.0"}
        monkeypatch.setattr(running, "library_versions", lambda: versions)
        assert execute(toy, store)[0].done == (6 if measures else 0)


class TestResults:
    def gather(self, toy: Toy, store: RecordStore, **options) -> Results:
        source = Source(toy.paper, {(LOCAL, "smoke"): store}, "smoke")
        return query.results_of(toy.paper.artefacts["a"], source, **options)

    def test_a_measurement_of_several_processes_is_one_of_their_medians(self, make_record):
        run = Run("add", {"x": 1}, seeds=(0, 1, 2))
        made = [
            make_record(
                "add",
                paper="toy",
                key=f"{seed:024d}",
                config=run.config,
                seed=seed,
                timings={"step": {"samples_s": [seconds, seconds, 9.0], "warmup": 1}},
                metrics={"fit": {"a": a, "side": 16}, "rows": [a, "x"], "held": True, "odd": odd},
            )
            for seed, seconds, a, odd in ((0, 1.0, 5, [1]), (1, 2.0, 1, [2, 3]), (2, 8.0, 4, [4]))
        ]
        merged = Results([run], (0,), made).measured("add", x=1)
        assert merged.timings == {"step": {"samples_s": [1.0, 2.0, 8.0], "warmup": 1}}
        assert merged.metrics == {
            "fit": {"a": 4, "side": 16}, "rows": [4, "x"], "held": True, "odd": [1]}  # fmt: skip
        assert Results([run], (0,), made[:1]).measured("add", x=1) is made[0]
        one = Results([run], (0,), made[:1]).measured("add", several=True, x=1)
        assert one.timings["step"]["samples_s"] == [1.0]
        with pytest.raises(NotRun):
            Results([run], (0,), []).measured("add", x=1)

    def test_only_the_artefacts_records_by_seed(self, toy, store):
        execute(toy, store)
        results = self.gather(toy, store)
        assert [r.metrics["sum"] for r in results.select("add", x=1)] == [1, 2]
        assert results.select("add", x=3) == [] and results.select("add", y=1) == []
        assert results.missing == 0

    def test_only_the_present_version_counts(self, toy, store):
        execute(toy, store, seeds=(0,))
        toy.version = 2
        assert self.gather(toy, store).missing == 2
        runs = [run for run in toy.plan() if run.config["x"] == 1]
        setting = Setting("smoke", "cpu", seeds=(0,))
        running.execute(toy.paper, runs, setting, store, lambda line: None)
        (record,) = self.gather(toy, store).records
        assert (record.config, record.version) == ({"x": 1}, 2)

    def test_records_of_an_older_release_are_no_obstacle(self, toy, store, make_record):
        execute(toy, store, seeds=(0,))
        store.write(make_record("removed", paper="toy", config={"x": 1}, key="k"))
        store.write(make_record("add", paper="toy", config={"renamed": 1}, key="l"))
        assert self.gather(toy, store).missing == 0


class TestChoice:
    @pytest.fixture
    def present(self, monkeypatch):
        def provide(*names: str) -> None:
            found = dict.fromkeys(("digits", "photos", *names), "here")
            monkeypatch.setattr(datasets, "available", lambda root: found)

        return provide

    def test_a_task_that_nothing_serves_is_left_empty(self, present, tmp_path, monkeypatch):
        present("cifar10")
        monkeypatch.setattr(datasets, "find_times", lambda root: None)
        paper = load_paper("dualbatch")
        monkeypatch.setenv(arguments.STAND_IN, "1")
        chosen = arguments.choose_datasets(paper, "paper")
        assert chosen == {"CIFAR": "cifar10", "times": "", "ImageNet": ""}
        # What is left can be planned: nothing asks for a dataset without a name.
        runs = arguments.plan(paper, paper.artefacts.values(), "paper", chosen)
        used = {run.config["dataset"]["name"] for run in runs if run.config.get("dataset")}
        assert used == {"cifar10"}
        monkeypatch.setattr(datasets, "find_times", lambda root: tmp_path)
        assert arguments.choose_datasets(paper, "quick")["times"] == datasets.TIMES
        assert arguments.choose_datasets(paper, "smoke") == {"CIFAR": "digits", "times": ""}

    def test_the_papers_profile_takes_the_papers_own_data(self, present, monkeypatch):
        present("cifar10", "flowers5")
        own = {"CIFAR": "cifar100", "ImageNet": "imagenet"}
        chosen = arguments.choose_datasets(load_paper("dualbatch"), "paper")
        assert {task: chosen[task] for task in own} == own
        asked = arguments.choose_datasets(load_paper("mbs"), "paper", ["flowers5"])
        assert asked == {"classification": "flowers5", "segmentation": "carvana"}
        monkeypatch.setenv(arguments.STAND_IN, "0")
        assert arguments.choose_datasets(load_paper("mbs"), "paper")["segmentation"] == "carvana"


class TestArguments:
    @pytest.mark.parametrize(
        ("text", "seeds"),
        [(None, None), ("", None), ("  ", None), ("1", (0,)), ("3", (0, 1, 2)), (" 2 ", (0, 1)),
         ("0,5,7", (0, 5, 7)), ("7, 5", (7, 5)), ("0,1", (0, 1)), ("5,", (5,))],
    )  # fmt: skip
    def test_seeds(self, text, seeds):
        assert arguments.parse_seeds(text) == seeds

    RUNS = (
        *(Run("train", {"mini_batch": n, "way": "plain"}) for n in (4, 8, 16)),
        Run("train", {"mini_batch": 8, "way": "fancy", "lr": 0.1}),
        Run("size", {"largest": 32}),
    )

    def test_only(self):
        assert arguments.only(self.RUNS, []) == list(self.RUNS)
        kept = arguments.only(self.RUNS, [("mini_batch", "8"), ("mini_batch", "4")])
        assert [run.config["mini_batch"] for run in kept] == [4, 8, 8]
        kept = arguments.only(self.RUNS, [("mini_batch", "8"), ("way", "fancy")])
        assert kept == [self.RUNS[3]]

    def test_changes(self, toy):
        changed = arguments.with_changes(toy.paper, self.RUNS, [("way", "fancy")])
        # Each once, and what has no such key as it is.
        assert [run.config.get("way") for run in changed] == ["fancy"] * 4 + [None]
        assert self.RUNS[0].config["way"] == "plain"
        runs = [Run("train", {"lr": 0.1}, (7,), "mine")]
        (seeded,) = arguments.with_changes(toy.paper, runs, [("lr", "1")])
        assert (seeded.config, seeded.seeds, seeded.label) == ({"lr": 1}, (7,), "mine")

    def test_what_lies_deeper_is_named_with_its_outer_key(self, toy):
        runs = [Run("train", {"data": {"split": side, "name": "d"}}) for side in ("a", "b")]
        assert arguments.only(runs, [("data.split", "b")]) == runs[1:]
        changed = arguments.with_changes(toy.paper, runs, [("data.split", "b")])
        assert [run.config for run in changed] == [runs[1].config]
        assert runs[0].config["data"]["split"] == "a"
        for key in ("data.side", "data", "name", "data.split.a"):
            with pytest.raises(UsageError, match=f"no run of the plan has a {key!r} to set"):
                arguments.with_changes(toy.paper, runs, [(key, "b")])

    def test_a_device_has_one_name(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(accelerator, "present", lambda: "cuda")
        given = {"cpu": "cpu", "cpu:0": "cpu", "cuda": "cuda:0", "cuda:0": "cuda:0"}
        for device, name in (given | {"cuda:1": "cuda:1"}).items():
            assert arguments.check_device(device) == name
        for device in ("cpu:7", "cuda:2", "cuda:01", "CPU ", "", 0, None, torch.device("cpu")):
            with pytest.raises(UsageError, match=r"allowed are 'cpu' and 'cuda:0' to 'cuda:1'$"):
                arguments.check_device(device)


class TestSources:
    """Of every run the best record, wherever it is."""

    @pytest.fixture
    def provide(self, results_folder: Path, make_record):
        def provide(where: str, *xs: int, seeds=(0,), **changes) -> None:
            for x, seed in itertools.product(xs, seeds):
                key = f"{where}{x}-{seed}".replace("/", "-")
                values = {"paper": "toy", "config": {"x": x}, "key": key, "seed": seed}
                RecordStore(results_folder / where).write(make_record("add", **values | changes))

        return provide

    def shown(self, toy, *arguments, **options):
        source = query.find_source(toy.paper, *arguments, **options)
        return query.results_of(toy.paper.artefacts["a"], source)

    def test_a_record_of_ones_own_hides_no_reference_of_another_run(self, toy, provide):
        provide("reference/cpu-2-cores/quick", 1, 2, metrics={"from": "reference"})
        provide("local/quick", 1, metrics={"from": "here"})
        found = {r.config["x"]: r.metrics["from"] for r in self.shown(toy).records}
        assert found == {1: "here", 2: "reference"}
        own = {"reference records, cpu-2-cores", "this machine"}
        assert set(self.shown(toy).places) == {f"{place}, profile quick" for place in own}
        only = self.shown(toy, None, "cpu-2-cores")
        assert {r.metrics["from"] for r in only.records} == {"reference"}

    def test_records_of_other_data_do_not_stand_beside_each_other(self, toy, provide):
        data = {"name": "cifar10", "provenance": "an archive", "kind": "real"}
        theirs, ours = data | {"fingerprint": "theirs"}, data | {"fingerprint": "ours"}
        provide("reference/cpu-2-cores/quick", 1, 2, dataset=theirs)
        provide("local/quick", 8, 9, dataset=ours)  # of no run
        provide("local/quick", 2, dataset=ours)
        shown = self.shown(toy)
        assert {record.dataset["fingerprint"] for record in shown.records} == {"theirs"}
        assert len(shown.records) == 2
        provide("local/quick", 1, dataset=ours, status="failed")
        assert {record.dataset["fingerprint"] for record in self.shown(toy).records} == {"theirs"}
        provide("local/quick", 1, dataset=ours)
        assert {record.dataset["fingerprint"] for record in self.shown(toy).records} == {"ours"}
        local = self.shown(toy, None, "local").records
        assert {record.dataset["fingerprint"] for record in local} == {"ours"}

    def test_a_gpus_reference_before_a_cpus_and_ones_own_before_both(self, toy, provide):
        for place in ("cpu-2-cores", "nvidia-h200"):
            provide(f"reference/{place}/gpu", 1, metrics={"from": place})
        assert self.shown(toy).records[0].metrics["from"] == "nvidia-h200"
        provide("local/gpu", 1, metrics={"from": "here"})
        assert self.shown(toy).records[0].metrics["from"] == "here"
        assert self.shown(toy, local=False).records[0].metrics["from"] == "nvidia-h200"

    @pytest.mark.parametrize(("measures", "second"), [(True, 100), (False, 200)])
    def test_measurements_are_of_the_gpu_with_most_of_them(self, toy, provide, measures, second):
        toy.measures = measures
        provide("reference/nvidia-h100/gpu", 1, 2, metrics={"from": 100})
        provide("reference/nvidia-h200/gpu", 2, 8, 9, metrics={"from": 200})  # 8, 9: of no run
        found = {record.config["x"]: record.metrics["from"] for record in self.shown(toy).records}
        assert found == {1: 100, 2: second}

    def test_the_profile_with_most_of_the_runs_then_the_most_thorough(self, toy, provide):
        provide("local/smoke", 1, 2)
        assert self.shown(toy).profile == "smoke"
        provide("reference/cpu-2-cores/quick", 1)
        assert self.shown(toy).profile == "quick"  # toy records hide nothing
        provide("reference/cpu-2-cores/quick", 1, 2, seeds=(0, 1, 2))
        provide("local/gpu", 1)
        assert self.shown(toy).profile == "quick" and self.shown(toy, "gpu").profile == "gpu"
        provide("local/gpu", 1, 2, seeds=(0, 1, 2))
        assert self.shown(toy).profile == "gpu"

    @pytest.mark.parametrize(("seeds", "shown"), [(6, LONG), (2, LONG), (1, "quick")])
    def test_long_is_shown_from_two_seeds_on(self, toy, provide, seeds, shown):
        artefact = replace(A, long=True)
        provide("local/quick", 1, 2, seeds=range(3))
        provide(f"local/{LONG}", 1, 2, seeds=range(seeds))
        for profile, expected in ((None, shown), ("quick", "quick")):
            source = query.find_source(toy.paper, profile)
            assert query.results_of(artefact, source).profile == expected

    def test_a_gpus_reference_of_some_runs_stands_beside_a_cpus(self, toy, provide):
        provide("reference/cpu-2-cores/quick", 1, 2, seeds=(0, 1, 2))
        assert self.shown(toy).gpu is None
        provide("reference/nvidia-h200/gpu", 1, device=H200)
        shown = self.shown(toy)
        assert (shown.profile, shown.gpu.profile, len(shown.gpu.records)) == ("quick", "gpu", 1)
        assert self.shown(toy, "quick").gpu is None
        provide("reference/nvidia-h200/gpu", 1, 2, seeds=(0, 1), device=H200)
        assert (self.shown(toy).profile, self.shown(toy).gpu) == ("gpu", None)
        provide("local/quick", 1)
        assert (self.shown(toy, "quick").profile, self.shown(toy, "quick").gpu) == ("quick", None)

    def test_a_gpus_reference_without_a_network_hides_none(self, toy, provide):
        configs = [{"x": x, "role": f"network {x}"} for x in (1, 2, 3, 4)]
        runs = [Run("add", config, label=str(config)) for config in configs]
        artefact = replace(A, plan=lambda *_: runs)
        for config in configs:
            provide("reference/cpu-2-cores/quick", config["x"], seeds=(0, 1), config=config)
        shown = []
        for config in configs:
            made = {"config": config, "device": H200}
            provide("reference/nvidia-h200/gpu", config["x"], seeds=(0, 1), **made)
            found = query.results_of(artefact, query.find_source(toy.paper))
            shown.append((found.profile, found.gpu and found.gpu.profile))
        assert shown == [("quick", "gpu")] * 3 + [("gpu", None)]


def test_cudnn_times_its_algorithms_where_the_configuration_says_so():
    paper = toy_paper(Experiment("tell", f"{__name__}:tell_of_cudnn", False))
    for config, seen in (({"benchmark": True}, True), ({}, False)):
        step = running.Step(Run("tell", config), 0, "key")
        record = running.carry_out(paper, step, Setting("smoke", "cpu"))
        assert record.metrics == {"benchmark": seen} and not torch.backends.cudnn.benchmark
