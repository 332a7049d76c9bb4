"""All artefacts of dual-batch learning: what is shown and judged of whatever records there are."""

import made
import matplotlib.pyplot as plt
import pytest
from made_dualbatch import (
    CHOSEN,
    GPU,
    PAPER,
    REPORTED,
    World,
    caption,
    judge,
    legend_of,
    nothing,
    only,
    panels,
    results,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg

from repro import report
from repro.experiments.design import claims_of
from repro.experiments.dualbatch import describing
from repro.experiments.dualbatch.settings import CIFAR, IMAGENET

CLAIMS = [f"{name}/{key}" for name, a in PAPER.artefacts.items() for key in a.exhibit.claims]
FIGURES = [name for name, artefact in PAPER.artefacts.items() if artefact.draws]
QUESTIONS = sorted({artefact.question.partition(":")[0] for artefact in PAPER.artefacts.values()})
TRAINED = ["table3", "table5", "table8", "engines"]
# ImageNet is trained under `paper`; engines are compared where a training is small.
# Three rounds of one process say too little of the farthest of many batch sizes.
PROFILES = {"table10": "paper", "engines": "quick", "figure4": "long"}
WORLDS = {
    "full": World(),
    "nothing": World(status=nothing),
    "all failed": World(status=lambda run: made.FAILED),
    "all out of memory": World(status=lambda run: made.OUT_OF_MEMORY),
    "one in two": World(status=lambda run: made.FAILED if len(str(run.config)) % 2 else {}),
    "trainings alone": World(status=lambda run: {} if run.experiment == "train" else None),
    "measurements alone": World(status=lambda run: None if run.experiment == "train" else {}),
    "three small": World(status=only(n_small=3)),
}


def of_question(question: str) -> list[str]:
    return [name for name, a in PAPER.artefacts.items() if a.question.partition(":")[0] == question]


class TestClaims:
    @pytest.mark.parametrize("target", CLAIMS)
    def test_the_papers_own_numbers_reproduce_it(self, target):
        word, evidence = judge(target, PROFILES.get(target.partition("/")[0], "gpu"))
        assert word == "reproduced", evidence
        assert any(letter.isdigit() for letter in evidence)

    @pytest.mark.parametrize("question", QUESTIONS)
    def test_without_records_that_ended_it_is_not_run(self, question):
        for world in ("nothing", "all failed", "all out of memory"):
            for name in of_question(question):
                found = results(name, WORLDS[world], "paper")
                for key in PAPER.artefacts[name].exhibit.claims:
                    verdict = made.verdict(f"dualbatch/{name}/{key}", found)
                    assert verdict.word == "not run" and verdict.evidence, key
                for check in PAPER.artefacts[name].checks:
                    assert check.row(found)["holds"] == "not run"

    def test_every_claim_is_written_down_and_at_most_22_are_the_papers(self):
        written = {
            f"{name}/{key}": claim
            for name, rows in claims_of("dualbatch").items()
            for key, claim in rows.items()
        }
        assert set(written) == set(CLAIMS)
        assert len([claim for claim in written.values() if not claim.own]) <= 22

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_checks_hold_in_the_papers_world(self, artefact):
        for check in PAPER.artefacts[artefact].checks:
            found = results(artefact, profile=PROFILES.get(artefact, "gpu"))
            assert check.row(found)["holds"] == "yes"


class TestWhateverThereIs:
    @pytest.mark.parametrize("kind", WORLDS)
    @pytest.mark.parametrize("profile", ["quick", "paper"])
    def test_table_and_caption(self, kind, profile):
        for artefact in PAPER.artefacts.values():
            found = results(artefact.name, WORLDS[kind], profile)
            text = repr(report.TableView(artefact.table(found)))
            assert "nan" not in text.lower() and "None" not in text, artefact.name
            assert artefact.caption(found)

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_the_papers_values_stand_without_records(self, artefact):
        frame = PAPER.artefacts[artefact].table(results(artefact, WORLDS["nothing"]))
        if artefact in ("engines", "table7", "table9", "figure1", "figure2"):
            assert frame.empty  # not in the paper; and what the schedule yields, beside it
            return
        if artefact in ("synchronisation", "flatness", "rates"):  # the ways, without numbers
            assert len(frame) in (10, 3, 12)
            return
        numbers = {
            "figure3": "0.5661",
            "figure4": "29.708",  # of the line that gives Table 2
            "table1": "(B_S1, B_L1)",
            "own_plan": "70.5",
            "table2": "0.936",
            "table3": "1.383",
            "table4": "8.222",
            "table5": "1.372",
            "table6": "314,954",
            "table8": "1.729",
            "table10": "22,161",
            "updates": "+0.2",
            "gains": "+3.2",
            "figure13": "11,147",
        }
        assert numbers[artefact] in repr(report.TableView(frame))

    @pytest.mark.thorough
    @pytest.mark.parametrize("artefact", FIGURES)
    def test_figure(self, artefact):
        plt.close("all")  # of a test that failed
        for kind in ("full", "nothing", "one in two"):
            drawn = PAPER.artefacts[artefact].figure(results(artefact, WORLDS[kind]))
            if kind != "nothing":
                FigureCanvasAgg(drawn).draw()  # a missing glyph, a layout that does not fit warns
            assert plt.get_fignums() == []
            if kind == "full":
                assert all(panels(drawn))
                last = [a for a in drawn.axes if a.get_subplotspec().is_last_row()]
                assert last and all(axis.get_xlabel() for axis in last)
                first = [a for a in drawn.axes if a.get_subplotspec().is_first_col()]
                for axis in first:
                    words = [text.get_text() for text in axis.get_yticklabels()]
                    assert axis.get_ylabel() or any(any(map(str.isalpha, w)) for w in words)
                named = {n for axis in drawn.axes for n in axis.get_legend_handles_labels()[1]}
                assert set(legend_of(drawn)) == named

    @pytest.mark.parametrize("artefact", FIGURES)
    def test_the_image_says_whose_numbers_each_panel_shows(self, artefact):
        tasks = {task: CHOSEN[task] for task in PAPER.datasets["quick"]} | {CIFAR: "cifar10"}
        drawn = PAPER.artefacts[artefact].exhibit.figure(
            results(artefact, profile="quick", chosen=tasks)
        )
        above = drawn.get_suptitle()
        for title in panels(drawn):
            said = " ".join(f"{above} {title}".split())
            assert "ours" in title or "paper:" in title, title
            if "ours: " in said:
                assert "ours: ResNet-8 for ResNet-18" in said

    def test_the_reported_numbers_are_not_changed_by_showing_them(self):
        before = str(REPORTED)
        for artefact in PAPER.artefacts.values():
            artefact.table(results(artefact.name))
        assert str(REPORTED) == before


def details(artefact: str, **options) -> str:
    """Return what the notebook's setup says of an artefact's records."""
    return " ".join(describing.described(results(artefact, **options).records))


class TestCaptions:
    @pytest.mark.parametrize("artefact", TRAINED)
    def test_the_simulated_server_is_named(self, artefact):
        assert "SIMULATED workers" in caption(artefact)
        assert "virtual clock" in details(artefact)

    def test_measured_and_solved_are_not_simulated(self):
        for artefact in ("figure3", "table2", "table4", "table6", "table7"):
            assert "SIMULATED" not in caption(artefact)
        for artefact in ("table2", "table6", "table7", "table9"):
            assert "Solved, not measured" in caption(artefact)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("cifar100", "STAND-IN: ResNet-8 for ResNet-18."),
            ("cifar10", "STAND-IN: ResNet-8 for ResNet-18, cifar10 for CIFAR-100."),
            ("synthetic", "STAND-IN: ResNet-8 for ResNet-18, SYNTHETIC synthetic for CIFAR-100."),
        ],
    )
    def test_stand_in_and_synthetic_data(self, name, said):
        for artefact in TRAINED:
            assert said in caption(artefact, profile="quick", chosen={CIFAR: name})

    def test_the_papers_own_network_and_data_are_no_stand_ins(self):
        assert "STAND-IN" not in caption("table5")
        assert caption("table5", chosen={CIFAR: "cifar10"}).endswith("cifar10 for CIFAR-100.")

    def test_a_stand_in_for_imagenet_is_called_that(self):
        chosen = CHOSEN | {IMAGENET: "synthetic"}
        assert "SYNTHETIC synthetic for ImageNet" in caption(
            "table10", profile="paper", chosen=chosen
        )

    def test_enlarged_images_are_called_that(self):
        chosen = {"profile": "quick", "chosen": {CIFAR: "digits"}}
        assert "ENLARGED to 16 pixels" in details("table5", **chosen)

    def test_times_and_memory_are_of_random_images(self):
        for artefact in ("figure3", "figure4", "table4", "table8", "table10", "figure13"):
            assert "SYNTHETIC images" in caption(artefact)
            assert "SYNTHETIC images (random numbers)" in details(artefact)

    @pytest.mark.parametrize("device", [None, GPU])
    def test_the_simulated_limit(self, device):
        assert "SIMULATED limit" in caption("figure13", World(device=device))
        said = details("figure13", world=World(device=device))
        assert "SIMULATED" in said and "24,576 MiB" in said

    def test_model_and_extent(self):
        said = details("table5")
        stem = "with a stem of 3×3 and stride 1 (our choice)"
        assert f"Models: resnet18, bfloat16, channels last, {stem}." in said
        assert "50,000 samples" in said and "80/40/20 (train)" in said
        assert "b is scaled" not in said
        said = details("table5", profile="quick")
        assert f"resnet_cifar (depth 8, width 8), a STAND-IN for ResNet-18, {stem}" in said
        assert "An epoch is 1,000 samples" in said and "4/2/2 (train)" in said
        assert "b is scaled like the batch sizes" in said
        # Digits have 355 test images.
        few = details("table5", profile="quick", chosen={CIFAR: "digits"})
        assert "tests are on 355" in few

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_at_most_forty_words(self, artefact):
        """Also where all is a stand-in, but for what went wrong."""
        tasks = {task: CHOSEN[task] for task in PAPER.datasets["quick"]} | {CIFAR: "synthetic"}
        assert len(caption(artefact, profile="quick", chosen=tasks).split()) <= 40

    def test_figures_3_and_4_do_not_show_one_table_twice(self):
        batches, epochs = (
            PAPER.artefacts[name].table(results(name)) for name in ("figure3", "figure4")
        )
        assert set(batches.columns) & set(epochs.columns) == {"where"}
        assert "29.7" in repr(report.TableView(epochs))  # seconds of an epoch

    def test_two_workers_are_not_called_four(self):
        assert "four workers" not in caption("engines", profile="quick")

    def test_gaps_are_said(self):
        for name, artefact in PAPER.artefacts.items():
            assert caption(name, WORLDS["nothing"]).endswith("Not run yet.")
            failed = results(name, WORLDS["all failed"])
            assert f"{len(failed.records)} runs FAILED." in artefact.caption(failed)
        assert "21 of 27 runs are missing." in caption("table5", World(status=only(n_small=2)))
        assert "ran out of memory" in caption("figure13", WORLDS["all out of memory"])
