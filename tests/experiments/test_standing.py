"""Whether a record stands under changed code: by its definitions, its first steps, or run again."""

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import optimizer

from repro import paths, source_code
from repro.experiments import replay, running, standing
from repro.experiments.design import Artefact, Exhibit, Experiment, Outcome, Paper, Run, by_name
from repro.experiments.replay import STEPS, recording
from repro.measure import Timing
from repro.records import RecordStore

LR = 0.1
PENALTY = 0.0


def train(config, seed, data, device) -> Outcome:
    """A training with a probe before it, of another model."""
    torch.manual_seed(seed)
    probe = nn.Linear(2, 1)
    _step(probe, torch.optim.SGD(probe.parameters(), LR), torch.ones(1, 2))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    losses = [_step(model, optimizer, torch.randn(16, 4)) for _ in range(config["steps"])]
    return Outcome({"losses": losses, "time_s": [0.1]}, {"epoch": Timing((0.1,), 0)})


def _step(model, optimizer, inputs) -> float:
    optimizer.zero_grad()
    loss = (model(inputs) - 1).square().mean() + PENALTY * next(model.parameters()).square().sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def count(config, seed, data, device) -> Outcome:
    return Outcome({"count": 2 + int(LR > 0.5), "time_s": torch.rand(()).item()})


RUNS = [Run("train", {"steps": n}) for n in (12, 3)] + [Run("count", {}, (0,))]
TABLE = Exhibit(
    runs=lambda profile, chosen: RUNS, table=lambda results: [], caption=lambda results: ""
)


@pytest.fixture
def paper(monkeypatch) -> Paper:
    monkeypatch.setattr(running, "code_of", lambda experiment, config: "before")
    return Paper(
        "toy", "Toy", "Nobody", "09_toy",
        by_name(
            Experiment("train", f"{__name__}:train", trains=True),
            Experiment("count", f"{__name__}:count"),
        ),
        by_name(Artefact("table", "Table 0", "Toys", f"{__name__}:TABLE")),
        {"smoke": {}, "quick": {}, "gpu": {}, "paper": {}},
    )  # fmt: skip


@pytest.fixture
def computed(paper, results_folder) -> RecordStore:
    """Records of all runs, made by the code before."""
    store = RecordStore(results_folder / "local" / "quick")
    setting = running.Setting("quick", "cpu", seeds=(0,))
    running.execute(paper, RUNS, setting, store, lambda line: None)
    return store


@pytest.fixture
def changed(monkeypatch, computed):
    """Another code, whose definitions nobody can compare: no commit is known."""
    for module in (running, standing):
        monkeypatch.setattr(module, "code_of", lambda experiment, config: "after")


def long(record):
    """Return a record of a training that took an hour."""
    hour = {"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T01:00:00+00:00"}
    return replace(record, **hour)


def counted(step, steps: list):
    def counting(*arguments):
        loss = step(*arguments)
        steps.append(loss)
        return loss

    return counting


def ran(*places):
    @contextmanager
    def executed(names):
        names.update(places)
        yield

    return executed


class FakeTree:
    def __init__(self, found):
        self.found = found

    def reached(self, entry, config):
        return self.found


def lines(paper: Paper) -> list[tuple[str, bool]]:
    found = list(standing.verify(paper, list(paper.artefacts.values())))
    return [(line.split(": ", 1)[1], agrees) for line, agrees in found]


class TestFirstSteps:
    def test_the_training_is_told_from_the_probe_and_ends_where_it_is_asked(self):
        with recording() as whole:
            outcome = train({"steps": 12}, 0, None, "cpu")
        assert [loss for (loss,) in whole.losses] == outcome.metrics["losses"][:STEPS]
        with recording(stop=True) as short:
            train({"steps": 10**9}, 0, None, "cpu")
        assert short.fingerprint() == whole.fingerprint() is not None
        with recording() as other:
            train({"steps": 12}, 1, None, "cpu")
        assert other.fingerprint()["digest"] != whole.fingerprint()["digest"]

    def test_a_shorter_training_keeps_none(self):
        with recording() as first:
            train({"steps": STEPS - 1}, 0, None, "cpu")
        assert first.fingerprint() is None

    def test_micro_batches_are_losses_of_one_step(self):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())
        with recording() as first:
            for _ in range(STEPS):
                for half in (1.0, 2.0):
                    model(torch.tensor([[half]])).sum().backward()
                optimizer.step()
        assert [len(losses) for losses in first.losses] == [2] * STEPS

    def test_nothing_is_left_behind(self):
        backward = torch.Tensor.backward
        with pytest.raises(ZeroDivisionError), recording():
            assert torch.Tensor.backward is not backward
            raise ZeroDivisionError
        assert torch.Tensor.backward is backward
        assert not optimizer._global_optimizer_post_hooks

    def test_the_weights_are_seen_whatever_their_layout_and_type(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            model = nn.Conv2d(3, 4, 3).to(dtype).to(memory_format=torch.channels_last)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with recording() as first:
                for _ in range(STEPS):
                    model(torch.ones(1, 3, 4, 4, dtype=dtype)).sum().backward()
                    optimizer.step()
            weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
            expected = float(weights.norm())
            assert first.norm == pytest.approx(expected, rel=1e-12)


class TestReplay:
    def test_equal_steps_stand_and_say_so(self, paper, computed, changed):
        (head, *rest) = lines(paper)
        assert head == ("0 records stand already, 3 are stale", True)
        assert all(agrees for _, agrees in rest)
        told = sorted(text for text, _ in rest)
        assert told == [
            "stands, run again whole, to the bit",  # what counts
            *["stands, run again whole, to the bit, times aside"] * 2,  # short trainings
        ]
        records = computed.load("toy")
        assert all(r.codes == ["before", "after"] for r in records)
        assert {r.stands[0]["entry"] for r in records} == {f"{__name__}:{n}" for n in
                                                           ("train", "count")}  # fmt: skip
        assert lines(paper) == [("3 records stand already, 0 are stale", True)]
        assert running.execute(
            paper, RUNS, running.Setting("quick", "cpu", seeds=(0,)), computed, print
        ).done == 0  # fmt: skip

    def test_a_planted_change_is_found_and_its_step_named(
        self, paper, computed, changed, monkeypatch
    ):
        monkeypatch.setattr(sys.modules[__name__], "LR", 0.1 + 1e-5)
        found = dict(lines(paper)[1:])
        differing = [text for text, agrees in found.items() if not agrees]
        assert len(differing) == 2
        assert any(text.startswith("DIFFERS: step 2, loss") for text in differing)
        assert any(text.startswith("DIFFERS: metrics, losses") for text in differing)
        assert all(r.codes == ["before"] for r in computed.load("toy") if r.experiment == "train")

    def test_a_change_of_the_first_loss_is_found_at_once(
        self, paper, computed, changed, monkeypatch
    ):
        monkeypatch.setattr(sys.modules[__name__], "PENALTY", 1e-6)
        assert any("DIFFERS: step 1, loss[0]" in text for text, _ in lines(paper))

    def test_another_count_is_found(self, paper, computed, changed, monkeypatch):
        monkeypatch.setattr(sys.modules[__name__], "LR", 0.6)
        assert any("DIFFERS: metrics, count: 3 for 2" in text for text, _ in lines(paper))

    def test_a_long_training_is_judged_by_its_first_steps(
        self, paper, computed, changed, monkeypatch
    ):
        record = long(next(r for r in computed.load("toy") if r.first_steps))
        steps = []
        monkeypatch.setattr(sys.modules[__name__], "_step", counted(_step, steps))
        text, kept = standing.verified(paper, record)
        assert text == f"its first {STEPS} steps run again, to the bit"
        assert kept == record.first_steps and len(steps) == STEPS  # and one of the probe's
        # What comes after them is not compared, and so may be anything.
        other = replace(record, metrics={"losses": [], "time_s": []})
        assert standing.verified(paper, other)[0] == text

    def test_what_first_steps_do_not_run_must_not_have_changed(
        self, paper, computed, changed, monkeypatch
    ):
        record = long(next(r for r in computed.load("toy") if r.first_steps))
        before = {"def train\n0": ("a.py", "train"), "def evaluate\n0": ("a.py", "evaluate")}
        after = before | {"def evaluate, changed\n1": ("b.py", "evaluate")}
        trees = [FakeTree(before), FakeTree(after)]
        monkeypatch.setattr(standing, "_known", lambda record: [("c", trees[0], "a:train")])
        monkeypatch.setattr(standing, "same_definitions", lambda experiment, record: None)
        monkeypatch.setattr(standing, "present", lambda: trees[1])
        with pytest.raises(standing.CannotTell, match=r"do not run b\.py:evaluate, which changed"):
            standing.verified(paper, record)
        monkeypatch.setattr(standing, "_executed", ran(("b.py", "evaluate")))
        assert "first 8 steps" in standing.verified(paper, record)[0]

    def test_a_training_that_makes_an_error_of_its_end_is_judged_all_the_same(
        self, paper, computed, changed, monkeypatch
    ):
        record = long(next(r for r in computed.load("toy") if r.first_steps))
        whole = train

        def wrapped(*arguments):
            try:
                return whole(*arguments)
            except BaseException as error:
                raise RuntimeError("it ended") from error

        monkeypatch.setattr(sys.modules[__name__], "train", wrapped)
        assert "first 8 steps" in standing.verified(paper, record)[0]

    def test_another_kind_of_machine_is_compared_to_1e_5(self, paper, computed, changed):
        record = long(next(r for r in computed.load("toy") if r.first_steps))
        far = replace(record, device=record.device | {"name": "another CPU"})
        near = [[loss * (1 + 4e-6) for loss in losses] for losses in record.first_steps["losses"]]
        steps = record.first_steps | {"losses": near, "digest": "0"}
        text, kept = standing.verified(paper, replace(far, first_steps=steps))
        assert kept == steps and text.endswith("to 1e-05, on another kind of machine")
        with pytest.raises(standing.Differs, match="step 1, loss"):
            standing.verified(paper, replace(record, first_steps=steps))
        steps = steps | {"norm": record.first_steps["norm"] * 1.001}
        with pytest.raises(standing.Differs, match=f"weights after step {STEPS}, norm"):
            standing.verified(paper, replace(far, first_steps=steps))

    def test_a_run_that_ran_out_of_memory_is_to_do_so_again(
        self, paper, computed, changed, monkeypatch
    ):
        record = replace(computed.load("toy")[0], status="out_of_memory", first_steps=None)
        with pytest.raises(standing.Differs, match="ends ok, and ended out_of_memory"):
            standing.verified(paper, record)

        def full(config, seed, data, device):
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(sys.modules[__name__], record.experiment, full)
        text, _ = standing.verified(paper, record)
        assert text == "run again, it ends out_of_memory as before"
        with pytest.raises(standing.Differs, match="it ends out_of_memory, and ended ok: no room"):
            standing.verified(paper, replace(record, status="ok"))
        with pytest.raises(standing.Differs, match="it ends out_of_memory"):
            standing.verified(paper, replace(record, status="failed"))

    def test_a_record_without_first_steps_gets_those_of_a_whole_run(self, paper, computed, changed):
        (record,) = (r for r in computed.load("toy") if r.first_steps)
        older = replace(record, first_steps=None)
        text, kept = standing.verified(paper, older)
        assert text.startswith("run again whole, to the bit") and kept == record.first_steps
        # Of another machine they would be others than those that were trained.
        elsewhere = replace(older, device=record.device | {"name": "another CPU"})
        assert standing.verified(paper, elsewhere)[1] is None

    def test_a_shorter_training_than_before_differs(self, paper, computed, changed, monkeypatch):
        record = long(next(r for r in computed.load("toy") if r.first_steps))
        monkeypatch.setattr(replay, "STEPS", 100)
        with pytest.raises(standing.Differs, match=f"ends before step {STEPS}"):
            standing.verified(paper, record)


PACKAGE = {
    "repro/paths.py": "ROOT = 1\n",
    "repro/experiments/mbs/runs.py": "from repro.paths import ROOT\n\n\ndef train():\n"
    "    return ROOT\n",
}
MOVED = {
    "repro/experiments/mbs/runs.py": None,
    "repro/experiments/mbs/experiments.py": PACKAGE["repro/experiments/mbs/runs.py"],
}


class TestDefinitions:
    """A record is compared with the commit it was made at, whatever the files are called now."""

    @pytest.fixture
    def checkout(self, tmp_path, monkeypatch):
        def git(*arguments: str) -> str:
            settings = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
            command = ["git", "-C", str(tmp_path), *settings, *arguments]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            return done.stdout.strip()

        def change(files) -> str:
            for name, content in files.items():
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink() if content is None else path.write_text(content)
            git("add", "-A")
            git("commit", "-q", "-m", "change")
            source_code.present.cache_clear()
            return git("rev-parse", "HEAD")

        git("init", "-q")
        monkeypatch.setattr(paths, "PACKAGE", tmp_path / "repro")
        monkeypatch.setattr(paths, "ROOT", tmp_path)
        yield change
        source_code.present.cache_clear()

    OLD, NEW = "repro.experiments.mbs.runs:train", "repro.experiments.mbs.experiments:train"

    def record(self, make_record, commit: str, **changes):
        code = source_code.at_commit(commit).hash_of(self.OLD, {})
        return make_record(**{"commit": commit, "entry": self.OLD, "code": code} | changes)

    def test_what_moved_stands(self, checkout, make_record):
        commit = checkout(PACKAGE)
        record = self.record(make_record, commit)
        checkout(MOVED)
        experiment = Experiment("train", self.NEW)
        assert standing.same_definitions(experiment, record) == commit
        checkout({"repro/paths.py": "ROOT = 2\n"})
        assert standing.same_definitions(experiment, record) is None

    def test_a_record_made_with_uncommitted_changes_is_not_its_commits(self, checkout, make_record):
        record = self.record(make_record, checkout(PACKAGE), code="0" * 24)
        assert standing.same_definitions(Experiment("train", self.OLD), record) is None

    def test_the_commit_it_was_last_verified_at_counts_too(self, checkout, make_record):
        first = checkout(PACKAGE)
        record = self.record(make_record, first)
        second = checkout({"repro/paths.py": "ROOT = 2\n"})
        code = source_code.at_commit(second).hash_of(self.OLD, {})
        entry = {"code": code, "entry": self.OLD, "commit": second, "dirty": False, "by": "steps"}
        record = replace(record, stands=[entry])
        checkout(MOVED)
        assert standing.same_definitions(Experiment("train", self.NEW), record) == second

    def test_without_the_commit_nothing_is_claimed(self, checkout, make_record):
        record = self.record(make_record, checkout(PACKAGE))
        for commit in (None, "0" * 40):
            unknown = replace(record, commit=commit)
            assert standing.same_definitions(Experiment("train", self.OLD), unknown) is None

    def test_more_of_the_papers_numbers_do_not_matter_and_others_do(self):
        old = {"table1": {"best": 1, "rows": [1, 2]}}
        assert standing._within(old, {"table1": {"best": 1, "rows": [1, 2], "n": 3}, "x": 1})
        assert not standing._within(old, {"table1": {"best": 2, "rows": [1, 2]}})
        assert not standing._within(old, {"table1": {"best": 1, "rows": [1, 2, 3]}})
        assert not standing._within(old, {})
