"""What Micro-Batch Streaming runs under each profile, and the numbers that the paper reports."""

import itertools
import json

import pytest

from repro.experiments import load_paper, running
from repro.experiments.design import COMPUTING_PROFILES, PROFILES, SEEDS, reported
from repro.experiments.mbs import grids

PAPER = load_paper("mbs")

# Copied from the paper by hand: Tables 2, 4 and 5 ("Batch size" and "μ-batch size").
MICRO_BATCHES = {
    "ResNet-50": {16: 8, 32: 16, 64: 16, 128: 16, 256: 16, 512: 16, 1024: 16},
    "ResNet-101": {8: 4, 16: 8, 32: 8, 64: 8, 128: 8, 256: 8, 512: 8, 1024: 8},
    "AmoebaNet-D": {32: 16, 64: 32, 128: 32, 256: 32, 512: 32, 1024: 32},
    "U-Net": {16: 8, 32: 16, 64: 16, 128: 16, 256: 16, 512: 16, 1024: 16},
}
INITIAL = {"ResNet-50": 16, "ResNet-101": 8, "AmoebaNet-D": 32, "U-Net": 16}


def choices(profile: str):
    tasks = PAPER.datasets[profile]
    for names in itertools.product(*((*names, "synthetic") for names in tasks.values())):
        yield dict(zip(tasks, names, strict=True))


def all_runs(profile: str, chosen):
    return [run for artefact in PAPER.artefacts.values() for run in artefact.runs(profile, chosen)]


class TestGrids:
    def test_every_computing_profile_has_seeds_and_data(self):
        assert set(SEEDS) == set(COMPUTING_PROFILES) == set(PAPER.datasets)
        assert ("view", *COMPUTING_PROFILES) == PROFILES

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_every_grid_builds_with_every_dataset(self, profile):
        for chosen in choices(profile):
            for run in all_runs(profile, chosen):
                assert json.loads(json.dumps(run.config)) == run.config
                assert run.experiment in PAPER.experiments
                name = run.config["dataset"]["name"]
                assert name == chosen[grids.task_of(run.config["role"])]
                modules = PAPER.experiments[run.experiment].modules(run.config)
                assert len(set(modules)) == len(modules)

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_no_artefact_asks_for_a_run_twice(self, profile):
        chosen = next(choices(profile))
        for artefact in PAPER.artefacts.values():
            runs = artefact.runs(profile, chosen)
            assert runs and len(set(runs)) == len(runs), artefact.name
        planned = running.plan(PAPER, PAPER.artefacts.values(), profile, chosen)
        assert len(set(planned)) == len(planned) < len(all_runs(profile, chosen))

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_streamed_sizes_are_the_papers_rows(self, profile):
        for run in all_runs(profile, next(choices(profile))):
            if run.experiment in ("train", "overhead") and run.config["micro_batch"] is not None:
                rows = MICRO_BATCHES[run.config["role"]]
                assert run.config["micro_batch"] == rows[run.config["mini_batch"]]

    def test_the_papers_profile_streams_every_row(self):
        profile = "paper"
        chosen = next(choices(profile))
        for role, rows in MICRO_BATCHES.items():
            table = "table5" if role == "U-Net" else "table4"
            trainings = [
                (run.config["mini_batch"], run.config["micro_batch"])
                for run in PAPER.artefacts[table].runs(profile, chosen)
                if run.experiment == "train" and run.config["role"] == role
            ]
            assert set(trainings) == set(rows.items()) | {(size, None) for size in rows}

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_every_model_has_its_pair_at_the_initial_size(self, profile):
        chosen = next(choices(profile))
        for role, initial in INITIAL.items():
            first, second = grids.initial_pair(profile, role, chosen)
            assert first.config["micro_batch"] is None
            assert second.config["micro_batch"] == initial // 2
            assert first.config["mini_batch"] == second.config["mini_batch"] == initial
            # They differ in nothing else, and are among the runs of Table 4 or 5.
            assert first.config | {"micro_batch": initial // 2} == second.config
            assert {first, second} <= set(grids.pairs(profile, role, chosen))

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_without_streaming_some_size_beyond_the_limit_is_tried(self, profile):
        chosen = next(choices(profile))
        for role, initial in INITIAL.items():
            sizes = [
                run.config["mini_batch"]
                for run in grids.pairs(profile, role, chosen)
                if run.config["micro_batch"] is None
            ]
            assert min(sizes) == initial < max(sizes)
            samples = grids.EXTENT[profile][role]["train_samples"]
            assert samples is None or max(sizes) <= samples

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_table1_compares_two_resolutions(self, profile):
        for chosen in choices(profile):
            for role in ("ResNet-50", "U-Net"):
                sides = {}
                for run in grids.resolution_grid(profile, role, chosen):
                    size = run.config["augment"].get("crop_size")
                    size = size or run.config["dataset"]["image_size"]
                    sides.setdefault(run.config["resolution"], set()).add(size)
                assert len(sides["low"]) == len(sides["high"]) == 1
                assert max(sides["low"]) < min(sides["high"]), (role, chosen)

    def test_published_models_and_settings(self):
        chosen = {"classification": "flowers102", "segmentation": "carvana"}
        configs = {}
        for run in all_runs("paper", chosen):
            if run.config["resolution"] == "high":
                configs[run.config["role"]] = run.config
        assert configs["ResNet-50"]["model"] == {"name": "torchvision/resnet50"}
        assert configs["ResNet-101"]["model"] == {"name": "torchvision/resnet101"}
        assert configs["AmoebaNet-D"]["model"]["num_layers"] == 6
        assert configs["AmoebaNet-D"]["model"]["num_filters"] == 190
        for role in ("ResNet-50", "ResNet-101"):
            optimizer = configs[role]["optimizer"]
            assert (optimizer["lr"], optimizer["momentum"]) == (0.01, 0.9)
            assert optimizer["weight_decay"] == 5e-4
        assert configs["U-Net"]["optimizer"]["name"] == "adam"
        assert all(config["limit_fits"] is None for config in configs.values())
        assert configs["ResNet-50"]["dataset"]["image_size"] == 224
        assert configs["U-Net"]["augment"]["crop_size"] == 384

    def test_micro_batches(self):
        for role, rows in MICRO_BATCHES.items():
            assert {size: grids.micro_batch_of(role, size) for size in rows} == rows


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

    def test_table2(self):
        table = reported("mbs")["table2"]
        for role, initial in INITIAL.items():
            assert table[role] == {"mini_batch": initial, "micro_batch": initial // 2}

    def test_table3(self):
        assert reported("mbs")["table3"] == {"without": [95.48, 0.13], "with": [95.45, 0.26]}

    @pytest.mark.parametrize(
        ("role", "size", "accuracy", "seconds"),
        [
            ("ResNet-50", 16, [87.04, 1.04], [233.0, 0.01]),
            ("ResNet-50", 128, [89.61, 0.14], [227.5, 0.02]),
            ("ResNet-50", 1024, [77.63, 0.86], [238.2, 0.02]),
            ("ResNet-101", 8, [83.54, 2.51], [405.0, 0.01]),
            ("ResNet-101", 128, [88.14, 0.42], [382.1, 0.01]),
            ("ResNet-101", 1024, [75.14, 0.67], [392.8, 0.02]),
            ("AmoebaNet-D", 32, [75.92, 1.59], [100.1, 0.22]),
            ("AmoebaNet-D", 256, [75.80, 0.17], [98.9, 0.17]),
            ("AmoebaNet-D", 1024, [72.49, 1.10], [111.1, 0.06]),
            ("U-Net", 16, [95.45, 0.26], [183.2, 0.20]),
            ("U-Net", 128, [97.51, 0.06], [187.0, 0.24]),
            ("U-Net", 1024, [94.18, 0.44], [228.0, 0.07]),
        ],
    )
    def test_tables_4_and_5_with_mbs(self, role, size, accuracy, seconds):
        rows = reported("mbs")["table5" if role == "U-Net" else "table4"]
        (row,) = [r for r in rows if (r["model"], r["mini_batch"]) == (role, size)]
        assert (row["with"], row["time_with"]) == (accuracy, seconds)

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
        rows = [
            row
            for table in ("table4", "table5")
            for row in reported("mbs")[table]
            if row["model"] == role
        ]
        assert {row["mini_batch"]: row["micro_batch"] for row in rows} == MICRO_BATCHES[role]
        assert (rows[0]["without"], rows[0]["time_without"]) == (metric, seconds)
        assert rows[0]["mini_batch"] == INITIAL[role]
        assert not any("without" in row or "time_without" in row for row in rows[1:])

    def test_overhead_of_section_433(self):
        assert reported("mbs")["overhead_percent"] == {
            "ResNet-50": [0.3, 1.1],
            "AmoebaNet-D": [4.0, 5.1],
            "U-Net": [3.5, 3.5],
        }
