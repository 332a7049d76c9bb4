"""Figures 3, 4, 5 and 10 and section V: what growing the batch costs and saves, by strategy."""

import math

import pytest
from made_adaptive import (
    World,
    checked,
    interval_of,
    judge,
    nothing,
    only_strategies,
    paper_final,
    results_of,
)

from repro.experiments import load_paper
from repro.experiments.adaptive import strategies
from repro.experiments.adaptive.runs import CIFAR, DECAY, DIV2K, GIVEN, PAPER, PHANTOM, PROFILES

DESIGN = load_paper("adaptive")
TASKS = {"figure4": DIV2K, "figure5": PHANTOM, "figure10": CIFAR}
CLAIMS = [
    f"{name}/{key}" for name in ("figure3", *TASKS, "lars") for key in DESIGN.artefacts[name].claims
]
LOSING = [target for target in CLAIMS if target.endswith("_ends_lower")]
KEEPING = [target for target in CLAIMS if target.endswith("keeps_up") and "lars" not in target]
GROWING = {
    "keeps_up": "theta",
    "given_keeps_up": GIVEN,
    "scheduled_keeps_up": "scheduled",
    "decay_keeps_up": DECAY,
}


def parts_of(target):
    """Return the task and the strategy that a claim compares."""
    artefact, key = target.split("/")
    return TASKS[artefact], GROWING.get(key) or key.removesuffix("_ends_lower")


def over(target, gap, scatter=0.0, **options):
    """Return a world in which a strategy ends by so much above the best fixed batch.

    θ-adaptive training ends as high as that where it is compared with.
    """
    task, strategy = parts_of(target)
    end = PAPER[task]["best"]["value"]

    def final(config):
        if config["strategy"] == strategy:
            return end + gap
        return end if config["strategy"] == "theta" else paper_final(config)

    return World(final=final, scatter=scatter, **options)


def lost(*names, epochs=3, seeds=(1,)):
    return lambda c, seed: epochs if c["strategy"] in names and seed in seeds else None


class TestClaims:
    @pytest.mark.parametrize("target", CLAIMS)
    def test_the_papers_numbers(self, target):
        found = judge(target)
        assert found.word == "reproduced", found.evidence

    @pytest.mark.parametrize("world", [World(status=nothing), World(length=lambda c, seed: 0)])
    def test_without_trainings_nothing_is_judged(self, world):
        targets = [target for target in CLAIMS if "lars" not in target or world.status is nothing]
        assert {judge(target, world).word for target in targets} == {"not run"}


@pytest.mark.parametrize("target", KEEPING)
class TestKeepsUp:
    def test_one_diverged_seed_is_enough(self, target):
        """Whether it completed an epoch or none, and whatever the other seeds reach."""
        _, strategy = parts_of(target)
        for epochs in (0, 3):
            found = judge(target, World(length=lost(strategy, epochs=epochs)))
            assert found.word == "not reproduced"
            assert "1 training diverged" in found.evidence
        best = judge(target, World(length=lost("best")))
        assert best.word == "not run" and "1 training diverged" in best.evidence


def test_where_no_cost_saturated_nothing_is_said_of_the_decay():
    def edit(metrics, config):
        metrics["lr"] = sorted(metrics["lr"])

    found = judge("figure4/decay_keeps_up", World(edit={"train": edit}))
    assert found.word == "not run" and "no rate decayed" in found.evidence


@pytest.mark.parametrize("target", LOSING)
class TestEndsLower:
    def test_who_diverges_has_lost(self, target):
        """With all its seeds; one alone leaves it open, as who diverged too does."""
        _, strategy = parts_of(target)
        for epochs in (0, 5):
            every = lost(strategy, epochs=epochs, seeds=(0, 1, 2))
            found = judge(target, over(target, 50.0, length=every))
            assert found.word == "reproduced" and "3 trainings diverged" in found.evidence
            found = judge(target, over(target, 50.0, length=lost(strategy, epochs=epochs)))
            assert found.word == "not run" and "1 training diverged, and others" in found.evidence
        both = judge(target, World(length=lambda c, seed: 3 if seed else None))
        assert both.word == "not run" and "2 trainings diverged" in both.evidence


class TestDecay:
    def test_a_training_that_ended_before_its_decay_has_no_rise(self):
        """Its last epoch would be compared with itself, and be flat for sure."""
        early = World(length=lambda c, seed: 20 if c["strategy"] == "theta" else None)
        assert judge("figure3/theta_rises_less", early).word == "not run"


class TestLayers:
    def ending(self, values, scatter=0.1):
        return World(final=lambda c: values.get(c["strategy"], paper_final(c)), scatter=scatter)

    @pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
    def test_above_the_large_batch(self, optimizer):
        target = f"lars/theta_above_{optimizer.lower()}"
        grown, large = f"theta_{optimizer}", f"linear_{optimizer}"
        assert judge(target, self.ending({grown: 79, large: 80})).word == "not reproduced"
        every = {"epochs": 0, "seeds": (0, 1, 2)}
        assert judge(target, World(length=lost(large, **every))).word == "reproduced"
        assert judge(target, World(length=lost(grown, large, **every))).word == "not reproduced"
        gone = World(length=lost(large, **every), status=only_strategies(large))
        assert judge(target, gone).word == "not run"


class TestUpdates:
    def test_they_are_those_of_the_schedule(self):
        paper, epochs = PAPER[CIFAR], PROFILES["gpu"][CIFAR]["epochs"]
        best = epochs * math.ceil(paper["samples"] / paper["best"]["batch"])
        k, own = interval_of({"task": CIFAR, "epochs": epochs}), paper["theta"]
        sizes = [min(own["max_batch"], own["batch"] * 2 ** (n // k)) for n in range(epochs)]
        ours = sum(math.ceil(paper["samples"] / size) for size in sizes)
        row = checked("figure10")
        assert row["holds"] == "yes"
        assert row["evidence"] == "; ".join(f"seed {n}: {best:,} and {ours:,}" for n in range(3))
        assert checked("figure10", World(status=nothing))["holds"] == "not run"

    def test_one_update_more_is_found(self):
        def edit(metrics, config):
            if config["strategy"] == "theta":
                metrics["updates"][-1] += 1

        assert checked("figure10", World(edit={"train": edit}))["holds"] == "NO"


def test_the_metric_is_drawn_against_the_updates():
    """The paper's hollow, by its own schedules; ours solid, with an interval each."""
    artefact, task = "figure10", CIFAR
    results = results_of(artefact, World(spread=0.5))
    paper, ours = DESIGN.artefacts[artefact].draw(results).axes[-2:]
    assert paper.get_title().startswith("paper: ") and ours.get_title().startswith("ours: ")
    points = {tuple(float(axis[0]) for axis in line.get_data()) for line in paper.get_lines()}
    best, epochs = PAPER[task]["best"], PAPER[task]["best"].get("epochs", PAPER[task]["epochs"])
    count = epochs * math.ceil(PAPER[task]["samples"] / best["batch"])
    assert (count, best["value"]) in points
    assert all(line.get_markerfacecolor() == "none" for line in paper.get_lines())
    marks = [line for line in ours.get_lines() if line.get_markeredgecolor() == "white"]
    assert len(marks) == len(strategies.by_strategy(results, task))
    value = PAPER[task]["theta"]["value"]
    intervals = [list(line.get_ydata()) for line in ours.get_lines() if line.get_ls() == "-"]
    assert any(low < value < high for low, high in intervals if low < high)
