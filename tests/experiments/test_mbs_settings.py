"""What Micro-Batch Streaming runs under each profile, its captions, and the paper's numbers."""

import itertools
import json
from typing import ClassVar

import matplotlib.pyplot as plt
import pytest
from invented import DIGITS
from made import FAILED, OUT_OF_MEMORY, WHOLE
from made_mbs import INITIAL, PAPER, plausible, results
from matplotlib.figure import Figure

from repro.experiments import arguments
from repro.experiments.design import reported
from repro.experiments.mbs import settings
from repro.experiments.mbs.describing import facts, side
from repro.experiments.query import Source, results_of
from repro.experiments.summary import checks, verdicts
from repro.report import figure_png

PAPER_NUMBERS = reported("mbs")

# Copied from the paper by hand: Tables 2, 4 and 5 ("Batch size" and "μ-batch size").
MICRO_BATCHES = {
    "ResNet-50": {16: 8, 32: 16, 64: 16, 128: 16, 256: 16, 512: 16, 1024: 16},
    "ResNet-101": {8: 4, 16: 8, 32: 8, 64: 8, 128: 8, 256: 8, 512: 8, 1024: 8},
    "AmoebaNet-D": {32: 16, 64: 32, 128: 32, 256: 32, 512: 32, 1024: 32},
    "U-Net": {16: 8, 32: 16, 64: 16, 128: 16, 256: 16, 512: 16, 1024: 16},
}


def choices(profile):
    """Give every choice of datasets, the best first."""
    tasks = PAPER.datasets[profile]
    for names in itertools.product(*((*names, "synthetic") for names in tasks.values())):
        yield dict(zip(tasks, names, strict=True))


def all_runs(profile, chosen):
    return [run for artefact in PAPER.artefacts.values() for run in artefact.runs(profile, chosen)]


@pytest.mark.parametrize("profile", WHOLE)
class TestEveryProfile:
    def test_every_grid_builds_with_every_dataset(self, profile):
        for chosen in choices(profile):
            for run in all_runs(profile, chosen):
                assert json.loads(json.dumps(run.config)) == run.config
                assert run.experiment in PAPER.experiments
                if run.experiment == "foretell":  # without data
                    continue
                name = run.config["dataset"]["name"]
                assert name == chosen[settings.task_of(run.config["role"])]
                assert run.config["role"] in run.label

    def test_no_artefact_asks_for_a_run_twice(self, profile):
        chosen = next(choices(profile))
        for artefact in PAPER.artefacts.values():
            runs = artefact.runs(profile, chosen)
            assert runs and len(set(runs)) == len(runs), artefact.name
        planned = arguments.plan(PAPER, PAPER.artefacts.values(), profile, chosen)
        assert len(set(planned)) == len(planned) < len(all_runs(profile, chosen))

    def test_progress_tells_runs_apart(self, profile):
        planned = arguments.plan(PAPER, PAPER.artefacts.values(), profile, next(choices(profile)))
        assert len({str(run) for run in planned}) == len(planned)

    def test_streamed_sizes_are_the_papers_rows(self, profile):
        for run in all_runs(profile, next(choices(profile))):
            if run.experiment in ("train", "overhead") and run.config["micro_batch"] is not None:
                rows = MICRO_BATCHES[run.config["role"]]
                whole = run.config["mini_batch"] in (6551, 4080)  # all that there is to train on
                size = 1024 if whole else run.config["mini_batch"]
                assert run.config["micro_batch"] == rows[size]

    def test_every_model_has_its_pair_at_the_initial_size(self, profile):
        chosen = next(choices(profile))
        for role, initial in INITIAL.items():
            if profile == "gpu" and role not in settings.TRAINED_ON_GPU:
                assert settings.initial_pair(profile, role, chosen) == []
                continue
            first, second = settings.initial_pair(profile, role, chosen)
            assert first.config["micro_batch"] is None
            assert second.config["micro_batch"] == initial // 2
            assert first.config["mini_batch"] == second.config["mini_batch"] == initial
            # They differ in nothing else, and are among the runs of Table 4 or 5.
            assert first.config | {"micro_batch": initial // 2} == second.config
            assert {first, second} <= set(settings.pairs(profile, role, chosen))

    def test_without_streaming_some_size_beyond_the_limit_is_tried(self, profile):
        chosen = next(choices(profile))
        for role, initial in INITIAL.items():
            sizes = [
                run.config["mini_batch"]
                for run in settings.pairs(profile, role, chosen)
                if run.config["micro_batch"] is None
            ]
            assert min(sizes) == initial < max(sizes)
            samples = settings.EXTENT[profile][role]["train_samples"]
            assert samples is None or max(sizes) <= samples

    def test_table1_compares_two_resolutions(self, profile):
        for chosen in choices(profile):
            for role in ("ResNet-50", "U-Net"):
                sides = {"low": set(), "high": set()}
                for run in PAPER.artefacts["table1"].runs(profile, chosen):
                    if run.config["role"] == role:
                        size = run.config["augment"].get("crop_size")
                        size = size or run.config["dataset"]["image_size"]
                        sides[run.config["resolution"]].add(size)
                assert len(sides["low"]) == len(sides["high"]) == 1
                assert max(sides["low"]) < min(sides["high"]), (role, chosen)


class TestTheProfileOfAGpu:
    CHOSEN: ClassVar = {"classification": "flowers102", "segmentation": "carvana"}

    def runs(self, *experiments):
        return [run for run in all_runs("gpu", self.CHOSEN) if run.experiment in experiments]

    def test_memory_and_time_are_of_the_papers_sides_in_float32(self):
        for run in self.runs("size", "step", "overhead", "epochs", "timeline"):
            config = run.config
            assert side(config) == settings.PAPER_SIDES[config["role"], "high"]
            assert config["channels_last"] and "autocast" not in config
            # Where memory is measured, trials of algorithms would take more than a training.
            assert config.get("benchmark", False) == (run.experiment in ("overhead", "epochs"))
            if "limit_bytes" in config:
                assert config["limit_bytes"] == 24 * 2**30

    def test_accuracy_is_of_smaller_images_beside_others(self):
        for run in self.runs("train"):
            config = run.config
            assert config["role"] in settings.TRAINED_ON_GPU and config["timed"] is False
            assert side(config) < settings.PAPER_SIDES[config["role"], "high"]
            assert config["autocast"] == "bfloat16" and config["channels_last"]

    def test_what_does_not_fit_is_tried_once(self):
        for role, initial in INITIAL.items():
            steps = [run for run in self.runs("step") if run.config["role"] == role]
            undivided = {r.config["mini_batch"] for r in steps if not r.config["micro_batch"]}
            assert min(undivided) == initial and 2 * initial in undivided
            assert max(undivided) == 1024
            assert {run.seeds for run in steps} == {(0,)}

    def test_an_epoch_that_is_timed_fills_its_largest_mini_batch(self):
        for run in self.runs("epochs"):
            sizes = [mini for mini, _ in run.config["ways"].values()]
            assert max(sizes) == run.config["train_samples"]
            named = map(int, PAPER_NUMBERS["overhead_percent"].get(run.config["role"], {}))
            assert set(named) <= set(sizes)

    def test_other_profiles_compute_as_before(self):
        for profile in ("smoke", "quick", "long", "paper"):
            for run in all_runs(profile, next(choices(profile))):
                assert not {"channels_last", "autocast", "benchmark"} & run.config.keys()


class TestThePapersProfile:
    def test_every_row_is_streamed(self):
        chosen = next(choices("paper"))
        for role, rows in MICRO_BATCHES.items():
            table = "table5" if role == "U-Net" else "table4"
            trainings = [
                (run.config["mini_batch"], run.config["micro_batch"])
                for run in PAPER.artefacts[table].runs("paper", chosen)
                if run.experiment == "train" and run.config["role"] == role
            ]
            whole = {"flowers102": 6551, "carvana": 4080}[chosen[settings.task_of(role)]]
            expected = set(rows.items()) | {(size, None) for size in rows}
            assert set(trainings) == expected | {(whole, rows[1024])}

    def test_published_models_and_settings(self):
        chosen = {"classification": "flowers102", "segmentation": "carvana"}
        configs = {}
        for run in all_runs("paper", chosen):
            if run.config["resolution"] == "high" and run.experiment == "train":
                configs[run.config["role"]] = run.config
        assert configs["ResNet-50"]["model"] == {"name": "resnet50"}
        assert configs["ResNet-101"]["model"] == {"name": "resnet101"}
        assert configs["AmoebaNet-D"]["model"]["num_layers"] == 6
        assert configs["AmoebaNet-D"]["model"]["num_filters"] == 190
        for role in ("ResNet-50", "ResNet-101"):
            optimizer = configs[role]["optimizer"]
            assert (optimizer["lr"], optimizer["momentum"]) == (0.01, 0.9)
            assert optimizer["weight_decay"] == 5e-4
        assert configs["U-Net"]["optimizer"]["name"] == "adam"
        assert all(config["limit_bytes"] == 24 * 2**30 for config in configs.values())
        assert configs["ResNet-50"]["dataset"]["split"] == "random"
        assert configs["AmoebaNet-D"]["dataset"]["image_size"] == 416
        assert configs["ResNet-50"]["dataset"]["image_size"] == 224
        assert configs["U-Net"]["augment"]["crop_size"] == 384


class TestReported:
    """A handful of cells of every table, copied from the paper by hand."""

    def test_table1_and_the_gains_that_section_1_names(self):
        table = reported("mbs")["table1"]
        resnet, unet = table["ResNet-50"], table["U-Net"]
        assert (resnet["low_size"], resnet["high_size"]) == (32, 224)
        assert (unet["low_size"], unet["high_size"]) == (96, 384)
        assert resnet["high_large"] - resnet["high_small"] == pytest.approx(21.88)
        assert resnet["high_large"] - resnet["low_large"] == pytest.approx(21.64)
        assert unet["high_large"] - unet["high_small"] == pytest.approx(2.01)
        assert unet["high_large"] - unet["low_large"] == pytest.approx(2.01)

    def test_tables_2_and_3_and_the_overhead_of_section_433(self):
        numbers = reported("mbs")
        for role, initial in INITIAL.items():
            assert numbers["table2"][role] == {"mini_batch": initial, "micro_batch": initial // 2}
        assert numbers["table3"] == {"without": [95.48, 0.13], "with": [95.45, 0.26]}
        assert numbers["overhead_percent"] == {
            "ResNet-50": {"32": 1.1, "128": 0.3},
            "AmoebaNet-D": {"32": 5.1, "256": 4.0},
            "U-Net": {"128": 3.5},
        }

    def test_tables_4_and_5_with_mbs(self):
        rows = {(row["model"], row["mini_batch"]): row for role in INITIAL
                for row in settings.paper_rows(role)}  # fmt: skip
        for (role, size), (metric, seconds) in {
            ("ResNet-50", 16): ([87.04, 1.04], [233.0, 0.01]),
            ("ResNet-50", 128): ([89.61, 0.14], [227.5, 0.02]),
            ("ResNet-50", 1024): ([77.63, 0.86], [238.2, 0.02]),
            ("ResNet-101", 8): ([83.54, 2.51], [405.0, 0.01]),
            ("ResNet-101", 128): ([88.14, 0.42], [382.1, 0.01]),
            ("ResNet-101", 1024): ([75.14, 0.67], [392.8, 0.02]),
            ("AmoebaNet-D", 32): ([75.92, 1.59], [100.1, 0.22]),
            ("AmoebaNet-D", 256): ([75.80, 0.17], [98.9, 0.17]),
            ("AmoebaNet-D", 1024): ([72.49, 1.10], [111.1, 0.06]),
            ("U-Net", 16): ([95.45, 0.26], [183.2, 0.20]),
            ("U-Net", 128): ([97.51, 0.06], [187.0, 0.24]),
            ("U-Net", 1024): ([94.18, 0.44], [228.0, 0.07]),
        }.items():
            row = rows[role, size]
            assert (row["with"], row["time_with"]) == (metric, seconds)

    @pytest.mark.parametrize(
        ("role", "metric", "seconds"),
        [
            ("ResNet-50", [87.16, 0.33], [226.8, 0.01]),
            ("ResNet-101", [85.82, 1.84], [385.5, 0.02]),
            ("AmoebaNet-D", [74.51, 0.67], [95.2, 0.01]),
            ("U-Net", [95.48, 0.13], [180.7, 0.18]),
        ],
    )
    def test_without_mbs_only_the_initial_size_is_reported(self, role, metric, seconds):
        rows = settings.paper_rows(role)
        assert {row["mini_batch"]: row["micro_batch"] for row in rows} == MICRO_BATCHES[role]
        assert (rows[0]["without"], rows[0]["time_without"]) == (metric, seconds)
        assert rows[0]["mini_batch"] == INITIAL[role]
        assert not any("without" in row or "time_without" in row for row in rows[1:])
        assert {n: settings.micro_batch_of(role, n) for n in MICRO_BATCHES[role]} == (
            MICRO_BATCHES[role]
        )


class TestEveryArtefact:
    MAKERS: ClassVar = {
        "plausible": plausible,
        "nothing": lambda run, seed: None,
        "all failed": lambda run, seed: FAILED,
        "all out of memory": lambda run, seed: OUT_OF_MEMORY,
        "one seed": lambda run, seed: plausible(run, seed) if seed == 0 else None,
    }

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "kind",
        [
            "plausible",
            *(
                pytest.param(k, marks=pytest.mark.thorough)
                for k in ("nothing", "all out of memory")
            ),
            *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("all failed", "one seed")),
        ],
    )
    def test_whatever_there_is_can_be_shown_and_judged(self, kind):
        for artefact in PAPER.artefacts.values():
            found = results(artefact.name, self.MAKERS[kind])
            frame = artefact.table(found)
            assert len(frame) and len(set(frame.columns)) == len(frame.columns)
            assert "nan" not in frame.to_string().lower()
            assert artefact.caption(found)
            if artefact.draws:
                figure = artefact.figure(found)
                assert isinstance(figure, Figure)
                assert figure_png(figure, dpi=50)
            for row in verdicts(PAPER, artefact, found):
                assert row["evidence"] and "nan" not in row["evidence"]
                if kind not in ("plausible", "one seed"):
                    assert row["verdict"] in ("not run", "not reproduced"), row
        assert plt.get_fignums() == []

    def test_every_table_has_the_papers_column_and_n(self):
        """And none subtracts the paper's value from that of another network on other data."""
        for artefact in PAPER.artefacts.values():
            columns = [str(c) for c in artefact.table(results(artefact.name, plausible)).columns]
            assert "n" in columns and "difference" not in columns
            if artefact.name != "figure2":  # a drawing, without numbers
                assert any("paper" in column for column in columns), artefact.name
                assert any("ours" in column or "fits" in column for column in columns)

    def test_on_the_smoke_records(self, smoke):
        source = Source(PAPER, {("local", "smoke"): smoke.store})
        for artefact in PAPER.artefacts.values():
            found = results_of(artefact, source)
            assert found.missing == 0 and not found.failed
            cells = artefact.table(found).astype(str).to_numpy().ravel()
            assert "error" not in cells and "nan" not in cells
            caption = artefact.caption(found)
            assert "missing" not in caption
            for row in verdicts(PAPER, artefact, found):
                told = row["evidence"]
                assert row["verdict"] == "not run" or any(c.isdigit() for c in told)
                assert "nan" not in told
            # Which mini-batch learns most such toys do not say.
            # Algorithm 1's gradient is not the mini-batch's where the division is uneven.
            allowed = {"yes", "not run", *(["NO"] if artefact.name == "normalisation" else [])}
            assert {row["holds"] for row in checks(artefact, found)} <= allowed, artefact.name


class TestCaptions:
    def caption(self, artefact="table5", make=plausible, profile="quick"):
        return PAPER.artefacts[artefact].caption(results(artefact, make, profile))

    def test_nothing_run(self):
        for artefact in PAPER.artefacts:
            assert self.caption(artefact, lambda run, seed: None).endswith("Not run yet.")

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_what_takes_the_place_of_the_papers(self, artefact):
        """Digits, photographs and small networks are not the paper's, and the caption says so."""

        def with_data(**changes):
            return lambda run, seed: plausible(run, seed) | {"dataset": DIGITS | changes}

        caption = self.caption(artefact)
        assert "STAND-IN: digits for " in caption and "SYNTHETIC" not in caption
        assert "smaller networks" in caption
        synthetic = with_data(name="synthetic", kind="synthetic", provenance="Made up.")
        assert "SYNTHETIC data" in self.caption(artefact, synthetic)
        own = with_data(name="carvana" if artefact in ("table3", "table5") else "flowers102")
        others = ("table1", "table2", "normalisation")  # of U-Net, too
        assert ("STAND-IN" in self.caption(artefact, own, "paper")) == (artefact in others)

    @pytest.mark.parametrize("artefact", ["table2", "table3", "table4", "table5", "figure3"])
    @pytest.mark.parametrize("profile", ["quick", "paper"])
    def test_a_simulated_limit_is_named(self, artefact, profile):
        assert "SIMULATED memory limit" in self.caption(artefact, plausible, profile)

    def test_a_simulated_limit_is_named_where_nothing_fitted(self):
        """The words "out of memory" in a table are then the limit's, all the more."""
        assert "SIMULATED" in self.caption("table4", lambda run, seed: OUT_OF_MEMORY)

    def test_shortcomings_are_counted(self):
        def make(run, seed):
            return (None, FAILED, plausible(run, seed))[seed]

        found = results("table3", make)
        caption = PAPER.artefacts["table3"].caption(found)
        assert "2 runs FAILED" in caption and "2 of 6 runs are missing" in caption


class TestFacts:
    def facts(self, artefact, profile="quick"):
        return " ".join(facts(results(artefact, plausible, profile).records))

    def test_networks_sides_and_epochs(self):
        told = self.facts("table4")
        assert "ResNet-8 for ResNet-50 (resnet_cifar, depth 8, width 8)" in told
        assert "digits takes the place of Flowers-102" in told
        assert "ResNet-50 16 px (paper 224)" in told
        assert "ResNet-101, AmoebaNet-D: 3 epochs of 256 training samples." in told
        assert "The paper's networks" not in told

    def test_the_papers_networks_are_no_stand_ins(self):
        told = self.facts("table4", "paper")
        assert "The paper's networks: ResNet-50, ResNet-101, AmoebaNet-D." in told
        assert "Networks (STAND-IN)" not in told

    def test_a_simulated_limit_has_its_size(self):
        told = self.facts("table5")
        assert "MemoryBudget" in told and "half way" in told and ", 3.0 MiB." in told

    def test_the_papers_card_is_named_for_the_limit(self):
        told = self.facts("table5", "paper")
        assert "the paper's card's, 24 GiB (SIMULATED" in told and "half way" not in told
