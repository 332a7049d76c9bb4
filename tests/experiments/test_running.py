"""Planning, carrying out, finding and gathering runs, on a paper made up for the purpose."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from repro import datasets, records
from repro.experiments import find_artefacts, load_paper, running, sources
from repro.experiments.design import (
    PROFILES,
    SEEDS,
    Artefact,
    Experiment,
    Outcome,
    Paper,
    Results,
    Run,
    Verdict,
)
from repro.experiments.running import Setting, UsageError
from repro.experiments.sources import Source
from repro.measure import Timing
from repro.records import RecordError, RecordStore


@dataclass
class Toy:
    """A paper with one experiment that adds, and a list of what was called."""

    calls: list[tuple[int, int]] = field(default_factory=list)
    trouble: Exception | None = None  # raised for x = 2
    measures: bool = False

    def add(self, config, seed, data, device) -> Outcome:
        self.calls.append((config["x"], seed))
        if config["x"] == 2 and self.trouble is not None:
            raise self.trouble
        return Outcome({"sum": config["x"] + seed}, {"add": Timing((0.1,), 2)}, 7)

    @property
    def paper(self) -> Paper:
        def artefact(name: str, *xs: int) -> Artefact:
            runs = [Run("add", {"x": x}) for x in xs]
            return Artefact(
                name,
                f"Sums of {name}",
                "Table 0",
                runs=lambda profile, chosen: runs,
                table=lambda results: None,
                caption=lambda results: "",
            )

        artefacts = {"a": artefact("a", 1, 2), "b": artefact("b", 2, 3, 3)}
        add = Experiment("add", self.add, lambda config: ["repro.paths"], self.measures)
        tasks = {"classification": ("flowers102", "flowers5", "digits")}
        return Paper(
            "toy",
            "Toy",
            "Nobody",
            "09_toy",
            {"add": add},
            artefacts,
            dict.fromkeys(PROFILES, tasks),
        )

    def plan(self) -> list[Run]:
        return running.plan(self.paper, self.paper.artefacts.values(), "smoke", {})


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def store(tmp_path) -> RecordStore:
    return RecordStore(tmp_path / "store")


@pytest.fixture
def code(monkeypatch):
    """Set the hash of the code, as if a module had been edited."""

    def change(text: str) -> None:
        running._source_hash.cache_clear()
        monkeypatch.setattr(running, "source_hash", lambda modules: text)

    yield change
    monkeypatch.undo()
    running._source_hash.cache_clear()


def execute(toy: Toy, store: RecordStore, **options):
    toy.calls.clear()
    lines: list[str] = []
    setting = Setting("smoke", "cpu", **{"seeds": (0, 1)} | options)
    tally = running.execute(toy.paper, toy.plan(), setting, store, lines.append)
    return tally, lines


class TestPlan:
    def test_each_run_once_in_order(self, toy):
        assert [run.config["x"] for run in toy.plan()] == [1, 2, 3]

    def test_runs_with_other_seeds_are_other_runs(self):
        runs = [Run("add", {"x": 1}), Run("add", {"x": 1}, (0,)), Run("add", {"x": 1}, (0,))]
        assert len(set(runs)) == 2

    def test_seeds_are_the_runs_own_then_those_asked_for_then_the_profiles(self):
        own = Run("add", {}, seeds=(5,))
        free = Run("add", {})
        asked = Setting("quick", "cpu", seeds=(1, 2))
        assert asked.seeds_of(own) == (5,)
        assert asked.seeds_of(free) == (1, 2)
        assert Setting("quick", "cpu").seeds_of(free) == SEEDS["quick"]


class TestExecute:
    def test_a_second_execution_computes_nothing(self, toy, store):
        tally, lines = execute(toy, store)
        assert toy.calls == [(x, seed) for seed in (0, 1) for x in (1, 2, 3)]
        assert (tally.done, tally.stood, tally.failed, tally.out_of_memory) == (6, 0, 0, 0)
        assert len(lines) == 6
        assert all("seed" in line and "ok" in line for line in lines)
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
        assert record.code == records.source_hash(["repro.paths"])
        assert record.device["type"] == "cpu" and torch.__version__.startswith(
            record.versions["torch"].split("+")[0]
        )
        assert record.started <= record.finished
        assert record.command.endswith("run toy --profile smoke --device cpu --seeds 4,")
        assert f"add-{record.key}.json" in [path.name for path in store.folder.rglob("*.json")]

    def test_the_dataset_is_loaded_once_and_named(self, store, monkeypatch):
        loads = []

        def load(name, root, **options):
            loads.append((name, root, options))
            return datasets.synthetic(8, num_classes=2, train=4, test=4)

        monkeypatch.setattr(running.datasets, "load", load)
        running._load_cached.cache_clear()
        toy = Toy()
        config = {"x": 1, "dataset": {"name": "digits", "image_size": 8}}
        runs = [Run("add", config), Run("add", config | {"x": 3})]
        running.load_data(runs, "folder")
        setting = Setting("smoke", "cpu", root="folder", seeds=(0, 1))
        running.execute(toy.paper, runs, setting, store, lambda line: None)
        running._load_cached.cache_clear()
        assert loads == [("digits", "folder", {"image_size": 8})]
        stored = store.load("toy")
        assert len(stored) == 4
        assert {record.dataset["kind"] for record in stored} == {"synthetic"}
        assert set(stored[0].dataset) == {"name", "fingerprint", "provenance", "kind"}

    @pytest.mark.parametrize(
        ("trouble", "status"),
        [
            (torch.OutOfMemoryError("no room"), "out_of_memory"),
            (MemoryError(), "out_of_memory"),
            (ValueError("x is 2"), "failed"),
            (ZeroDivisionError("by 0"), "failed"),
        ],
    )
    def test_trouble_is_recorded_and_the_others_go_on(self, toy, store, trouble, status):
        toy.trouble = trouble
        tally, lines = execute(toy, store)
        assert len(toy.calls) == 6 == tally.done
        assert getattr(tally, status) == 2
        assert tally.failed + tally.out_of_memory == 2
        assert sum(status in line for line in lines) == 2
        by_x = {record.config["x"]: record for record in store.load("toy")}
        assert by_x[1].status == by_x[3].status == "ok"
        assert by_x[2].status == status
        assert by_x[2].error.startswith(f"{type(trouble).__name__}: {trouble}")
        assert ("Traceback" in by_x[2].error or "line" in by_x[2].error) == (status == "failed")
        assert by_x[2].metrics == {} and by_x[2].peak_bytes is None
        # The same again: what ran out of memory stands, what failed is still counted.
        tally, _ = execute(toy, store)
        assert (toy.calls, tally.stood) == ([], 6)
        assert tally.failed == (2 if status == "failed" else 0)

    def test_interruption_is_no_result(self, toy, store):
        toy.trouble = KeyboardInterrupt()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            execute(toy, store)
        assert {record.config["x"] for record in store.load("toy")} == {1}
        toy.trouble = None
        tally, _ = execute(toy, store)
        assert (tally.done, tally.stood) == (5, 1)

    def test_retry_failed(self, toy, store):
        toy.trouble = ValueError("x is 2")
        execute(toy, store)
        toy.trouble = None
        tally, _ = execute(toy, store, retry_failed=True)
        assert toy.calls == [(2, 0), (2, 1)]
        assert (tally.done, tally.stood, tally.failed) == (2, 4, 0)
        assert {record.status for record in store.load("toy")} == {"ok"}

    def test_retry_failed_leaves_out_of_memory(self, toy, store):
        toy.trouble = torch.OutOfMemoryError("no room")
        execute(toy, store)
        assert execute(toy, store, retry_failed=True)[0].done == 0

    def test_changed_code_runs_again_and_keeps_the_old_records(self, toy, store, code):
        code("first")
        execute(toy, store)
        code("second")
        tally, _ = execute(toy, store)
        assert tally.done == 6
        assert len(store.load("toy")) == 12
        code("first")
        assert execute(toy, store)[0].done == 0

    @pytest.mark.parametrize("measures", [False, True])
    def test_torchs_version_counts_where_time_or_memory_is_measured(
        self, toy, store, monkeypatch, measures
    ):
        toy.measures = measures
        execute(toy, store)
        versions = records.library_versions() | {"torch": "0.0"}
        monkeypatch.setattr(running, "library_versions", lambda: versions)
        assert execute(toy, store)[0].done == (6 if measures else 0)

    def test_an_absent_device_is_said_before_anything_starts(self, toy, store):
        with pytest.raises(ValueError, match="allowed are 'cpu'"):
            running.execute(toy.paper, toy.plan(), Setting("smoke", "cuda:99"), store)
        assert toy.calls == [] and not store.folder.exists()

    def test_a_corrupt_record_stops_the_run_and_nothing_is_lost(self, toy, store):
        execute(toy, store)
        paths = sorted(store.folder.rglob("*.json"))
        by_x = {json.loads(path.read_text())["config"]["x"]: path for path in paths}
        by_x[2].write_text("{")
        by_x[3].unlink()
        with pytest.raises(RecordError, match=by_x[2].name):
            execute(toy, store)
        assert by_x[2].read_text() == "{"
        assert len(list(store.folder.rglob("*.json"))) == 5

    def test_leftovers_of_killed_processes_go(self, toy, store):
        leftover = store.folder / "toy" / ".add-key.json.999999999.tmp"
        leftover.parent.mkdir(parents=True)
        leftover.write_text("{")
        execute(toy, store)
        assert not leftover.exists()


class TestResults:
    def gather(self, toy: Toy, store: RecordStore, **options) -> Results:
        source = Source("local", "smoke", store)
        return sources.results_of(toy.paper, toy.paper.artefacts["a"], source, **options)

    def test_of_an_empty_store(self, toy, store):
        results = self.gather(toy, store)
        assert (results.records, results.missing, results.stale) == ([], 2, [])

    def test_only_the_artefacts_records_by_seed(self, toy, store):
        execute(toy, store)
        results = self.gather(toy, store)
        assert [r.metrics["sum"] for r in results.select("add", x=1)] == [1, 2]
        assert results.select("add", x=3) == [] and results.select("add", y=1) == []
        assert results.missing == 0 and results.failed == []

    def test_further_seeds_are_seen_and_can_be_left_out(self, toy, store):
        execute(toy, store, seeds=(5,))
        assert [r.seed for r in self.gather(toy, store).select("add", x=1)] == [5]
        assert self.gather(toy, store).missing == 2  # seed 0 of the smoke profile
        assert self.gather(toy, store, seeds=(0,)).records == []

    def test_stale_records_count_until_there_are_current_ones(self, toy, store, code):
        code("first")
        execute(toy, store, seeds=(0,))
        assert self.gather(toy, store).stale == []
        code("second")
        results = self.gather(toy, store)
        assert len(results.stale) == len(results.records) == 2
        runs = [run for run in toy.plan() if run.config["x"] == 1]
        setting = Setting("smoke", "cpu", seeds=(0,))
        running.execute(toy.paper, runs, setting, store, lambda line: None)
        results = self.gather(toy, store)
        assert [r.config["x"] for r in results.stale] == [2]
        assert {r.config["x"]: r.code for r in results.records} == {1: "second", 2: "first"}

    def test_a_real_edit_makes_records_stale_and_a_comment_does_not(
        self, toy, store, tmp_path, monkeypatch
    ):
        package = tmp_path / "repro"
        package.mkdir()
        (package / "paths.py").write_text("A = 1\n")
        monkeypatch.setattr(records.paths, "PACKAGE", package)
        running._source_hash.cache_clear()
        execute(toy, store, seeds=(0,))
        for text, stale in (("# why\nA = 1\n", 0), ("A = 2\n", 2)):
            (package / "paths.py").write_text(text)
            running._source_hash.cache_clear()
            assert len(self.gather(toy, store).stale) == stale
        running._source_hash.cache_clear()

    @pytest.mark.parametrize("later_first", [False, True])
    def test_current_before_stale_and_later_before_earlier(self, toy, make_record, later_first):
        def made(day: int, code: str):
            finished = f"2026-01-0{day}T00:00:00+00:00"
            return make_record("add", config={"x": 1}, code=code, finished=finished, key=str(day))

        old, new = made(1, "now"), made(2, "now")
        stale = made(3, "before")
        given = [old, new, stale]
        results = Results([Run("add", {"x": 1})], (0,), given, lambda r: r.code == "now")
        assert results.records == [new]
        assert results.stale == []
        results = Results([Run("add", {"x": 1})], (0,), [old, stale], lambda r: False)
        assert results.records == results.stale == [stale]

    def test_an_unknown_experiment_in_the_store_is_no_obstacle(self, toy, store, make_record):
        execute(toy, store, seeds=(0,))
        store.write(make_record("removed", paper="toy", config={"x": 1}, key="k"))
        assert self.gather(toy, store).missing == 0

    def test_a_record_of_an_older_configuration_is_no_obstacle(self, smoke, store):
        # A release that renames a field of the configuration must still read the folder.
        paper = load_paper("mbs")
        for record in smoke.store.load("mbs"):
            store.write(record)
        old = smoke.store.load("mbs")[0]
        store.write(replace(old, key="old", config={"mini_batch": 4}))
        source = Source("local", "smoke", store)
        for artefact in paper.artefacts.values():
            assert sources.results_of(paper, artefact, source).missing == 0


class TestChoice:
    @pytest.fixture
    def present(self, monkeypatch):
        def provide(*names: str) -> None:
            found = dict.fromkeys(("digits", "photos", "synthetic", *names), "here")
            monkeypatch.setattr(running.datasets, "available", lambda root: found)

        return provide

    def test_the_best_at_hand(self, toy, present):
        for at_hand, expected in [
            ((), "digits"),
            (("flowers5",), "flowers5"),
            (("flowers5", "flowers102"), "flowers102"),
        ]:
            present(*at_hand)
            assert running.choose_datasets(toy.paper, "gpu") == {"classification": expected}

    def test_by_name_whatever_is_at_hand(self, toy, present):
        present("flowers102")
        for name in ("digits", "flowers5", "synthetic"):
            chosen = running.choose_datasets(toy.paper, "gpu", [name])
            assert chosen == {"classification": name}

    def test_a_name_that_serves_one_task_leaves_the_others(self, present):
        present("flowers5")
        chosen = running.choose_datasets(load_paper("mbs"), "quick", ["camvid"])
        assert chosen == {"classification": "flowers5", "segmentation": "camvid"}

    def test_unknown_and_unfit_names(self, toy, present):
        present()
        with pytest.raises(UsageError, match=r"unknown dataset 'mnist'.*flowers5"):
            running.choose_datasets(toy.paper, "gpu", ["mnist"])
        with pytest.raises(UsageError, match=r"'camvid' serves no experiment.*flowers5.*synthetic"):
            running.choose_datasets(toy.paper, "gpu", ["digits", "camvid"])

    def test_a_task_that_nothing_serves_is_left_empty(self, present, tmp_path, monkeypatch):
        present("cifar10")
        monkeypatch.setattr(running.datasets, "find_times", lambda root: None)
        paper = load_paper("dualbatch")
        chosen = running.choose_datasets(paper, "paper")
        assert chosen == {"CIFAR": "cifar10", "times": "", "ImageNet": ""}
        # What is left can be planned: nothing asks for a dataset without a name.
        runs = running.plan(paper, paper.artefacts.values(), "paper", chosen)
        used = {run.config["dataset"]["name"] for run in runs if run.config.get("dataset")}
        assert used == {"cifar10"}
        monkeypatch.setattr(running.datasets, "find_times", lambda root: tmp_path)
        assert running.choose_datasets(paper, "quick")["times"] == datasets.TIMES
        assert running.choose_datasets(paper, "smoke") == {"CIFAR": "digits", "times": ""}

    def test_every_profile_ends_in_data_that_is_always_there(self):
        for profile, tasks in load_paper("mbs").datasets.items():
            assert profile in PROFILES
            for names in tasks.values():
                assert names[-1] in ("digits", "photos", "synthetic")
                assert set(names) <= set(datasets.NAMES)


class TestArguments:
    @pytest.mark.parametrize(
        ("text", "seeds"),
        [(None, None), ("", None), ("  ", None), ("1", (0,)), ("3", (0, 1, 2)), (" 2 ", (0, 1)),
         ("0,5,7", (0, 5, 7)), ("7, 5", (7, 5)), ("0,1", (0, 1)), ("5,", (5,))],
    )  # fmt: skip
    def test_seeds(self, text, seeds):
        assert running.parse_seeds(text) == seeds

    @pytest.mark.parametrize(
        "text", ["0", "-1", "a", "1.5", "1,1", "1,-2", ",", "5,,", "1;2", "3 4", "9" * 21]
    )
    def test_wrong_seeds(self, text):
        with pytest.raises(UsageError, match=r"give how many \(3\), or a list") as caught:
            running.parse_seeds(text)
        assert repr(text) in str(caught.value)

    def test_only_mini_batches(self):
        runs = [Run("train", {"mini_batch": n}) for n in (4, 8, 16, 8)] + [Run("size", {})]
        assert running.only_mini_batches(runs, []) == runs
        kept = running.only_mini_batches(runs, [8, 4])
        assert [run.config["mini_batch"] for run in kept] == [4, 8, 8]

    @pytest.mark.parametrize("size", [0, -8, 5])
    def test_a_mini_batch_that_is_not_in_the_plan(self, size):
        runs = [Run("train", {"mini_batch": n}) for n in (16, 4, 8)]
        with pytest.raises(UsageError, match=rf"size {size} .*choose among 4, 8, 16$"):
            running.only_mini_batches(runs, [8, size])

    def test_a_plan_without_mini_batches_says_so(self):
        with pytest.raises(UsageError) as caught:
            running.only_mini_batches([Run("size", {})], [16])
        assert not str(caught.value).rstrip().endswith("among")

    def test_another_engine(self):
        runs = [Run("train", {"engine": "local"}), Run("train", {"engine": "ray"}), Run("size", {})]
        assert running.with_engine(runs, None) == runs
        assert running.with_engine(runs, "local") == [runs[0], runs[2]]  # each once
        assert running.with_engine(runs, "ray") == [runs[1], runs[2]]
        assert runs[0].config == {"engine": "local"}
        seeded = Run("train", {"engine": "local", "x": 1}, (7,))
        assert running.with_engine([seeded], "ray") == [
            Run("train", {"engine": "ray", "x": 1}, (7,))
        ]

    def test_an_engine_that_is_not_there(self):
        with pytest.raises(UsageError, match=r"unknown engine 'dask'; choose among local, ray$"):
            running.with_engine([Run("train", {"engine": "local"})], "dask")
        with pytest.raises(UsageError, match=r"none of these runs has an engine.*dualbatch"):
            running.with_engine([Run("size", {})], "ray")

    def test_profiles(self):
        for profile in ("smoke", "quick", "gpu", "paper"):
            assert running.check_profile(profile) == profile
        assert running.check_profile("view", computing=False) == "view"
        with pytest.raises(UsageError, match=r"'fast'; choose smoke, quick, gpu, paper$"):
            running.check_profile("fast")
        with pytest.raises(UsageError, match="'view' shows records and computes none"):
            running.check_profile("view")

    def test_defaults_follow_the_machine(self, monkeypatch):
        for present, profile, device in ((True, "gpu", "cuda"), (False, "quick", "cpu")):
            monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
            assert (running.default_profile(), running.default_device()) == (profile, device)

    def test_papers_and_artefacts(self):
        paper, artefacts = find_artefacts("mbs")
        assert [a.name for a in artefacts] == list(paper.artefacts)
        assert find_artefacts("mbs/table4")[1] == [paper.artefacts["table4"]]
        with pytest.raises(UsageError, match=r"unknown paper 'vgg'; choose among .*mbs"):
            find_artefacts("vgg/table1")
        with pytest.raises(UsageError, match=r"'mbs/table9'; choose among .*mbs/table1, "):
            find_artefacts("mbs/table9")

    def test_a_verdict_is_one_of_four_words(self):
        for word in Verdict.WORDS:
            assert Verdict(word, "why").word == word
        with pytest.raises(ValueError, match="'maybe'; allowed are reproduced, partly"):
            Verdict("maybe", "")


class TestFindSource:
    @pytest.fixture
    def provide(self, results_folder: Path, make_record):
        def provide(where: str) -> None:
            RecordStore(results_folder / where).write(make_record(paper="toy"))

        return provide

    def test_ranks(self, toy, provide):
        """This machine's own before a GPU's before a CPU's; each the most thorough first.

        Toy records come after all others.
        """
        names = [
            "reference/cpu-2-cores/smoke",
            "local/smoke",
            "reference/cpu-2-cores/quick",
            "reference/nvidia-h200/quick",
            "reference/nvidia-h200/gpu",
            "local/quick",
            "local/gpu",
            "local/paper",
        ]
        for name in names:  # each one provided goes before all earlier ones
            provide(name)
            source = sources.find_source(toy.paper)
            device, profile = name.removeprefix("reference/").split("/")
            assert (source.device, source.profile) == (device, profile)
            assert len(source.store.load("toy")) == 1

    def test_by_profile_by_device_and_without_this_machine(self, toy, provide):
        for name in ("local/quick", "reference/nvidia-h200/gpu", "reference/cpu-2-cores/quick"):
            provide(name)

        def found(*arguments, **options) -> tuple[str, str]:
            source = sources.find_source(toy.paper, *arguments, **options)
            return source.device, source.profile

        assert found() == ("local", "quick")
        assert found("gpu") == ("nvidia-h200", "gpu")
        assert found(None, "cpu-2-cores") == ("cpu-2-cores", "quick")
        assert found(local=False) == ("nvidia-h200", "gpu")
        assert found("quick", local=False) == ("cpu-2-cores", "quick")
        with pytest.raises(UsageError, match=r"'tpu'; choose among local, .*nvidia-h200"):
            found(None, "tpu")

    def test_none_at_all(self, toy, results_folder):
        source = sources.find_source(toy.paper)
        assert (source.device, source.profile) == ("local", running.default_profile())
        assert not results_folder.exists()

    def test_a_folder_that_is_no_profile_is_no_obstacle(self, toy, provide, results_folder):
        provide("reference/nvidia-h200/gpu")
        (results_folder / "reference" / "nvidia-h200" / "logs").mkdir()
        assert sources.find_source(toy.paper).profile == "gpu"

    def test_labels(self, tmp_path):
        store = RecordStore(tmp_path)
        assert Source("local", "quick", store).label == "this machine, profile quick"
        label = Source("nvidia-h200", "gpu", store).label
        assert label == "reference records, nvidia-h200, profile gpu"
