"""Section III-D: the maximum stable batch by gradient norms."""

import pytest
from made_adaptive import World, judge, nothing, only_strategies, paper_final, results_of

from repro.experiments import load_paper
from repro.experiments.adaptive import experiments, stable
from repro.experiments.adaptive.settings import CIFAR, PAPER, TASKS

DESIGN = load_paper("adaptive")
KEEPS, SIMILAR, LOWER = (
    f"stable/{key}" for key in ("keeps_accuracy", "similar_up_to", "lower_beyond")
)


def lower_at_start(config):
    """B_s ends far below the best batch."""
    start = PAPER[config["task"]]["theta"]["batch"]
    return paper_final(config) - 5 * (config.get("stands_for") == start)


def norms(up_to, beyond, scatter=0.01):
    """The norm up to B_s (of the smallest it is 1, by every seed), and beyond."""

    def norm(ratio, seed):
        own = up_to if ratio == 1 else beyond
        return 1.0 if ratio < 1 else own * (1 + scatter * (seed - 1))

    return norm


class TestClaims:
    @pytest.mark.parametrize("target", [KEEPS, SIMILAR, LOWER])
    def test_the_papers_numbers_on_the_papers_networks(self, target):
        found = judge(target, World(spread=0.01), profile="paper")
        assert found.word == "reproduced", found.evidence
        assert all(f"{task}" in found.evidence for task in TASKS)

    @pytest.mark.parametrize(
        ("target", "world", "word"),
        [
            (KEEPS, World(final=lower_at_start, spread=0.01), "not reproduced"),
            (KEEPS, World(scatter=3.0), "undecided"),
            (SIMILAR, World(norm=norms(0.7, 0.5)), "not reproduced"),
            (SIMILAR, World(norm=norms(0.93, 0.5, 0.05)), "undecided"),
            (LOWER, World(norm=norms(1.0, 0.97)), "not reproduced"),
            (LOWER, World(norm=norms(1.0, 0.87, 0.05)), "undecided"),
        ],
    )
    def test_refuted_and_open(self, target, world, word):
        found = judge(target, world, profile="paper")
        assert found.word == word, found.evidence

    def test_not_run(self):
        for target in (KEEPS, SIMILAR, LOWER):
            assert judge(target, World(status=nothing)).word == "not run"

    @pytest.mark.parametrize("target", [SIMILAR, LOWER])
    def test_other_networks_say_nothing_of_the_papers_sizes(self, target):
        found = judge(target, profile="quick")
        assert found.word == "not run" and "another network" in found.evidence
        found = judge(target)
        assert found.word == "reproduced" and "CIFAR, after 0 epochs" in found.evidence

    @pytest.mark.parametrize("profile", ["smoke", "quick"])
    def test_that_it_keeps_up_is_judged_on_any_network(self, profile):
        assert judge(KEEPS, World(spread=0.01), profile=profile).word == "reproduced"

    def test_where_too_little_is_learned_nothing_is_said(self):
        """The best batch of Phantom ends 20 dB below the paper's."""

        def final(config):
            return paper_final(config) - 20 * (config["task"] == "Phantom")

        found = judge(KEEPS, World(final=final, scatter=0.01), profile="paper")
        assert found.word == "undecided" and "Phantom: our best fixed batch ends" in found.evidence

    def test_no_larger_stable_batch_is_nothing_to_judge(self):
        found = judge(KEEPS, World(norm=lambda ratio, seed: 1 / ratio))
        assert found.word == "not run" and "no batch above the smallest" in found.evidence

    def test_without_the_trainings(self):
        found = judge(KEEPS, World(status=only_strategies("norms", "best")))
        assert found.word == "not run" and "CIFAR: no records" in found.evidence


class TestStableByNorms:
    @pytest.mark.parametrize(
        ("norms_", "size"),
        [
            ([1.0, 1.0, 1.0], 16),
            ([1.0, 0.91, 0.89], 8),
            ([1.0, 0.89, 1.0], 4),
            ([1.0, 1.3, 0.95], 16),
        ],
    )
    def test_by_hand(self, norms_, size):
        found = {n: [value, value] for n, value in zip((4, 8, 16), norms_, strict=True)}
        assert stable.stable_by_norms(found) == size

    def test_it_is_what_the_experiment_takes_for_similar(self):
        assert stable.SIMILAR == experiments.STABLE


class TestShown:
    def test_table(self):
        rows = stable.table(results_of("stable"))
        assert list(dict.fromkeys(row["task"] for row in rows)) == list(TASKS)
        assert {row["n"] for row in rows} == {3} and rows[0]["after epochs"] == 0
        for row in rows:
            assert row["B_s"] == str(row["B_s, paper"]) == str(row["B_s, paper, at scale"])
        quick = stable.table(results_of("stable", profile="quick"))
        assert quick[0]["B_s, paper, at scale"] == 16
        assert rows[0]["‖∇w‖ by batch size"].startswith("128: 1, 256: 1, 512: 0.25")

    def test_figure(self):
        drawn = stable.figure(results_of("stable"))
        assert [axis.get_title() for axis in drawn.axes] == [
            "ours: ResNet-20, cifar10",
            "ours: EDSR, div2k",
            "ours: EDSR, phantom",
        ]
        assert all(axis.get_xlabel() == "batch size B" for axis in drawn.axes)

    def test_the_trainings_of_the_other_figures_are_shared(self):
        chosen = {task: names[0] for task, names in DESIGN.datasets["quick"].items()}
        runs = DESIGN.artefacts["stable"].runs("quick", chosen)
        shared = {
            run
            for name in ("figure1", "figure2", "figure6")
            for run in DESIGN.artefacts[name].runs("quick", chosen)
        }
        assert len(set(runs)) == len(runs)
        assert {run for run in runs if run.experiment == "train"} < shared
        assert sum(run.experiment == "norms" for run in runs) == 3
        assert any(run.config["task"] == CIFAR for run in runs)
