"""The golden rerun: a changed result is found and named, rounding and times are not."""

import sys
from dataclasses import replace

import pytest
import torch
from invented import toy_paper
from torch import nn
from torch.optim import optimizer

from repro import datasets, microconv
from repro.adaptive import ThetaController
from repro.dualbatch import plan as planning
from repro.experiments import PAPERS, golden, load_paper
from repro.experiments import run as running
from repro.experiments.design import Artefact, Experiment, Outcome, Paper, Run
from repro.experiments.golden import Differs, NotCompared, computed_again
from repro.experiments.one_run import STEPS, recording
from repro.measure import Timing
from repro.microconv import optimize
from repro.records import RecordStore

HERE = sys.modules[__name__]
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
    metrics = {"losses": losses, "updates": len(losses), "time_s": [torch.rand(()).item()]}
    return Outcome(metrics, {"epoch": Timing((0.1,), 0)})


def _step(model, optimizer, inputs) -> float:
    optimizer.zero_grad()
    loss = (model(inputs) - 1).square().mean() + PENALTY * next(model.parameters()).square().sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def measure(config, seed, data, device) -> Outcome:
    seconds = torch.rand(()).item() + 1
    return Outcome(
        {"count": 2 + int(LR > 0.5), "rows": [{"rate": 1 / seconds, "size": 3}], "run_s": seconds,
         "double": 2 * seconds, "seconds": seconds}, peak_bytes=512,
    )  # fmt: skip


def doubled(config, metrics):
    return {"double": (2 + int(LR > 0.5)) * metrics["seconds"]}


RUNS = [Run("train", {"steps": n}) for n in (12, 3)] + [Run("measure", {"way": "a"}, (0,))]
TABLE = Artefact("table", "Table 0", "Toys", "", lambda *_: RUNS, lambda _: [])


@pytest.fixture
def paper() -> Paper:
    timed, here = ("rate", "double", "seconds"), __name__
    return toy_paper(
        Experiment("train", f"{here}:train", measures=False, trains=True, planned=("updates",)),
        Experiment("measure", f"{here}:measure", timed=timed, derive=f"{here}:doubled"),
        artefacts={"table": TABLE},
    )


@pytest.fixture
def computed(paper, results_folder, monkeypatch) -> RecordStore:
    """Records of all runs."""
    monkeypatch.setattr(golden, "default_count", lambda profile, device: 1)
    store = RecordStore(results_folder / "local" / "quick")
    setting = running.Setting("quick", "cpu", seeds=(0,))
    running.execute(paper, RUNS, setting, store, lambda line: None)
    return store


@pytest.fixture
def training(computed):
    """The record of the longer training."""
    return next(r for r in computed.load("toy") if r.first_steps)


def long(record):
    """Return a record of a training that took an hour."""
    hour = {"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T01:00:00+00:00"}
    return replace(record, **hour)


def lines(paper: Paper, **options) -> dict[str, bool]:
    return dict(golden.verify([paper], everything=True, device="local", **options))


class TestFirstSteps:
    def test_the_training_is_told_from_the_probe_and_ends_where_it_is_asked(self):
        with recording() as whole:
            outcome = train({"steps": 12}, 0, None, "cpu")
        assert [loss for (loss,) in whole["losses"]] == outcome.metrics["losses"][:STEPS]
        with recording(stop=True) as short:
            train({"steps": 10**9}, 0, None, "cpu")
        assert short == whole
        with recording() as other:
            train({"steps": 12}, 1, None, "cpu")
        assert other["digest"] != whole["digest"]

    def test_a_training_whose_passes_are_replayed_has_none(self):
        model = nn.Linear(2, 1)
        updates = torch.optim.SGD(model.parameters(), LR)
        with recording() as first:
            for _ in range(3):  # before the capture
                model(torch.ones(4, 2)).mean().backward()
            for _ in range(2 * STEPS):
                updates.step()
            assert not first
            outcome = train({"steps": STEPS}, 0, None, "cpu")
        assert [loss for (loss,) in first["losses"]] == outcome.metrics["losses"]

    def test_nothing_is_left_behind(self):
        backward = torch.Tensor.backward
        with pytest.raises(ZeroDivisionError), recording():
            assert torch.Tensor.backward is not backward
            raise ZeroDivisionError
        assert torch.Tensor.backward is backward and not optimizer._global_optimizer_post_hooks


class TestComparison:
    def test_equal_results_agree_to_the_bit_and_times_do_not_count(self, paper, computed):
        found = lines(paper)
        assert all(found.values()) and len(found) == 4
        said = sorted(line.partition(" agrees ")[2] for line in found)
        assert said == [
            "in what follows from measurements of 1 records: double",
            "to the bit: count, rows, peak_bytes",
            "to the bit: first 8 steps, losses, updates",
            "to the bit: losses, updates",
        ]

    def test_a_planted_change_is_found_and_named(self, paper, computed, monkeypatch):
        monkeypatch.setattr(HERE, "LR", 0.1 + 1e-5)
        wrong = [line.partition("DIFFERS: ")[2] for line, agrees in lines(paper).items()
                 if not agrees]  # fmt: skip
        assert len(wrong) == 2
        assert any(text.startswith("the loss of step 2[0] is ") for text in wrong)
        assert any(text.startswith("losses[1] is ") for text in wrong)
        monkeypatch.setattr(HERE, "LR", 0.6)
        wrong = [line for line, agrees in lines(paper).items() if not agrees]
        assert any("DIFFERS: count is 3, and was 2" in line for line in wrong)
        assert any("DIFFERS, derived from its measurements: double is" in line for line in wrong)

    def test_a_raised_version_leaves_the_old_records_alone(self, paper, computed, monkeypatch):
        monkeypatch.setattr(HERE, "LR", 0.2)
        newer = {n: replace(e, version=2) for n, e in paper.experiments.items()}
        assert lines(replace(paper, experiments=newer)) == {
            "toy train not compared: no record of its version 2": None,
            "toy measure not compared: no record of its version 2": None,
        }

    def test_a_long_training_is_compared_by_its_first_steps(self, paper, training, monkeypatch):
        steps, whole = [], _step

        def counting(*arguments):
            steps.append(0)
            return whole(*arguments)

        monkeypatch.setattr(HERE, "_step", counting)
        # What comes after them is not compared, and so may be anything.
        record = long(replace(training, metrics={"losses": []}))
        assert computed_again(paper, record) == f"to the bit: first {STEPS} steps"
        assert len(steps) == 1 + STEPS  # the probe's and the training's
        monkeypatch.setattr(HERE, "PENALTY", 1e-6)
        with pytest.raises(Differs, match=r"the loss of step 1\[0\]"):
            computed_again(paper, record)
        with pytest.raises(NotCompared, match="more than 60 s and keeps no first steps"):
            computed_again(paper, replace(record, first_steps=None))

    def test_on_another_kind_of_processor_rounding_does_not_count(self, paper, training):
        far = replace(training, device=training.device | {"name": "another CPU"})
        near = [[loss * (1 + 4e-6) for loss in losses] for losses in training.first_steps["losses"]]
        steps = training.first_steps | {"losses": near, "digest": "0"}
        # Losses at the end drift further apart; what was planned does not.
        drifted = training.metrics | {"losses": [0.0]}
        rounded = replace(far, first_steps=steps, metrics=drifted)
        said = computed_again(paper, rounded)
        assert said == "to 1e-05 (another kind of processor): first 8 steps to 4e-06, updates"
        with pytest.raises(Differs, match="the loss of step 1"):
            computed_again(paper, replace(training, first_steps=steps))
        wrong = steps | {"losses": [near[0], [2 * near[1][0]], *near[2:]]}
        with pytest.raises(Differs, match="the loss of step 2"):
            computed_again(paper, replace(rounded, first_steps=wrong))
        drifting = steps | {"losses": [[x * (1 + 1e-7 * 9**n)] for n, (x,) in enumerate(near)]}
        told = computed_again(paper, replace(rounded, first_steps=drifting))
        assert "first 8 steps to 3e-01" in told
        late = steps | {"losses": [*near[:5], [1.01 * near[5][0]], *near[6:]]}
        with pytest.raises(Differs, match="the loss of step 6"):
            computed_again(paper, replace(rounded, first_steps=late))
        with pytest.raises(Differs, match="the norm of the weights"):
            computed_again(paper, replace(rounded, first_steps=steps | {"norm": 1.0}))
        with pytest.raises(Differs, match="updates is 12, and was 13"):
            computed_again(paper, replace(rounded, metrics=drifted | {"updates": 13}))

    def test_how_a_run_ends_is_compared(self, paper, computed, monkeypatch):
        record = next(r for r in computed.load("toy") if r.experiment == "measure")
        with pytest.raises(Differs, match="ends ok, and ended out_of_memory"):
            computed_again(paper, replace(record, status="out_of_memory"))

        def full(config, seed, data, device):
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(HERE, "measure", full)
        text = computed_again(paper, replace(record, status="out_of_memory"))
        assert text == "in that it ends out_of_memory"
        with pytest.raises(Differs, match="out_of_memory, and ended ok: OutOfMemoryError: no room"):
            computed_again(paper, record)

    def test_what_is_not_here_is_not_compared(self, paper, training, computed):
        elsewhere = replace(training, device=training.device | {"type": "xpu"}, key="x")
        data = {"name": "cifar10", "fingerprint": "f", "provenance": "", "kind": "real"}
        config = training.config | {"dataset": {"name": "cifar10"}}
        absent = replace(training, config=config, dataset=data, key="y")
        for record in (elsewhere, absent):
            computed.write(record)
        assert len(lines(paper)) == 4
        with pytest.raises(NotCompared, match="another set of the same name"):
            computed_again(paper, replace(training, dataset=data))

    @pytest.mark.parametrize(
        ("before", "after", "place"),
        [({"a": [1, 2]}, {"a": [1]}, "a has 1 values"), ({"a": 1}, {}, "a is gone"),
         ({}, {"a": 1}, "a is new"), ({"a": {"b": 1}}, {"a": {"b": True}}, "a.b is True"),
         ({"a": 1.0}, {"a": None}, "a is None"), ({"a": float("nan")}, {"a": 1.0}, "a is 1.0"),
         ({"a": 10**6}, {"a": 10**6 + 1}, "a is 1000001"), ({"a": "x"}, {"a": "y"}, "a is 'y'")],
    )  # fmt: skip
    def test_the_first_difference_is_named(self, before, after, place):
        for closeness in (0.0, 1e-5):
            with pytest.raises(Differs) as caught:
                golden.compare("", before, after, closeness)
            assert str(caught.value).startswith(place)
        golden.compare("", {"a": [float("nan"), 1e-15]}, {"a": [float("nan"), 3e-16]}, 1e-5)


class TestChoice:
    def test_the_cheapest_and_short_ones_that_show_another_word(self, paper, training):
        def made(seconds, key, experiment="train", **changes):
            ended = f"2026-01-01T00:{seconds // 60:02}:{seconds % 60:02}+00:00"
            times = {"started": "2026-01-01T00:00:00+00:00", "finished": ended}
            return replace(training, key=key, experiment=experiment, **times | changes)

        elsewhere = training.device | {"name": "another CPU"}
        records = [
            made(2, "a", config={"way": "one", "size": 3}),
            made(1, "b", config={"way": "one", "size": 4}, device=elsewhere),
            made(3, "c", config={"way": "two", "size": 5}),
            made(3, "d", config={"way": "one", "size": 5}),  # shows nothing else
            made(9, "e", config={"way": "three"}),  # too long
            made(0, "f", status="out_of_memory"),
            made(0, "g", config={"dataset": {"name": "cifar10"}}),  # which is not here
            made(0, "h", device=training.device | {"type": "xpu"}),
            made(90, "i", "measure", config={}),
            made(30, "j", "measure", config={}, device=elsewhere),
        ]
        assert [r.key for r in golden.golden(paper, records)] == ["a", "c", "j"]

    def test_every_experiment_with_reference_records_has_one(self, reference_records, monkeypatch):
        monkeypatch.setattr("repro.datasets.available", lambda root: datasets.NAMES)
        for paper in map(load_paper, PAPERS):
            source = golden.find_source(paper, local=False)
            records = [record for held in source.records.values() for record in held]
            chosen = golden.golden(paper, records)
            # The authors' own times are not here, and no GPU.
            on_a_cpu = [record for record in records if record.device["type"] == "cpu"]
            expected = {record.experiment for record in on_a_cpu} - {"published"}
            assert {record.experiment for record in chosen} == expected
            assert sum(map(golden.seconds_of, chosen)) < 240


@pytest.mark.parametrize(
    ("key", "experiment", "owner", "name", "planted"),
    [
        ("adaptive", "train", ThetaController, "_grown", lambda self: self._batch + 1),
        ("microconv", "candidates", microconv, "pareto_front",
         lambda *given, whole=optimize.pareto_front, **named: whole(*given, **named)[:1]),
        ("dualbatch", "solve", planning, "_rounded", lambda rounding, value: int(value) + 1),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("reference_records")
def test_a_line_of_a_method_changed(monkeypatch, key, experiment, owner, name, planted):
    """Of the reference records, by what needs no data."""
    monkeypatch.setattr(golden, "default_count", lambda profile, device: 1)
    paper = load_paper(key)
    alone = replace(paper, experiments={experiment: paper.experiments[experiment]})
    monkeypatch.setattr(owner, name, planted)
    assert any(agrees is False and "DIFFERS" in line for line, agrees in golden.verify([alone]))
