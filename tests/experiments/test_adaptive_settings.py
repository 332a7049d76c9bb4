"""What is run under each profile; the paper's numbers; how records are picked and described."""

import itertools
import json
import math
import re

import matplotlib.pyplot as plt
import pytest
from made import FAILED, OUT_OF_MEMORY, WHOLE
from made_adaptive import CHOSEN, World, nothing, only_strategies, results_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from repro import datasets, report
from repro.adaptive import Saturation
from repro.experiments import arguments, design, load_paper
from repro.experiments.adaptive import building, describing, projection, settings
from repro.experiments.adaptive.settings import (
    CIFAR,
    DECAY,
    DIV2K,
    GIVEN,
    PAPER,
    PHANTOM,
    STRATEGIES,
    TASKS,
)
from repro.experiments.design import SEEDS
from repro.experiments.dry_run import try_first_steps

DESIGN = load_paper("adaptive")
EVERY = [*itertools.product(WHOLE, TASKS)]

# Tables I to III by hand: batch sizes and rates at the start and the largest; epochs of warm-up.
TABLES = {
    DIV2K: {
        "best": (16, 16, 1e-4),
        "linear": (256, 256, 16e-4),
        "scheduled": (64, 256, 4e-4),
        "theta": (64, 256, 4e-4),
    },
    PHANTOM: {
        "best": (16, 16, 1e-4),
        "linear": (128, 128, 8e-4),
        "scheduled": (32, 128, 2e-4),
        "theta": (32, 128, 2e-4),
    },
    CIFAR: {
        "best": (128, 128, 0.1),
        "linear": (2048, 2048, 1.6),
        "scheduled": (256, 2048, 0.2),
        "theta": (256, 2048, 0.2),
    },
}


def choices(profile):
    tasks = DESIGN.datasets[profile]
    for names in itertools.product(*((*names, "synthetic") for names in tasks.values())):
        yield dict(zip(tasks, names, strict=True))


def all_runs(profile, chosen=CHOSEN):
    return [run for artefact in DESIGN.artefacts.values() for run in artefact.runs(profile, chosen)]


def controller_of(config):
    """Return the controller, with a model that is never asked."""
    return building.build_controller(config, None, None, 0)


class TestPlans:
    @pytest.mark.parametrize("profile", WHOLE)
    def test_every_run_with_every_dataset(self, profile):
        for chosen in choices(profile):
            for run in all_runs(profile, chosen):
                assert json.loads(json.dumps(run.config)) == run.config
                assert run.label
                if run.experiment in ("parallel", "asleep"):
                    continue
                assert run.config["dataset"]["name"] == chosen[run.config["task"]]
                controller = controller_of(run.config)
                assert controller.initial_batch >= 2
                # Small stand-ins have fewer images than the paper's largest batch has samples.
                if (
                    settings.SCALE[profile][run.config["task"]]["samples"][0]
                    == (run.config["train_samples"])
                ):
                    assert controller.max_batch <= run.config["train_samples"]

    @pytest.mark.parametrize("profile", WHOLE)
    def test_no_artefact_asks_for_a_run_twice(self, profile):
        for artefact in DESIGN.artefacts.values():
            found = artefact.runs(profile, CHOSEN)
            assert found and len(set(found)) == len(found), artefact.name
        planned = arguments.plan(DESIGN, DESIGN.artefacts.values(), profile, CHOSEN)
        assert len(set(planned)) == len(planned) < len(all_runs(profile))

    @pytest.mark.parametrize("profile", WHOLE)
    def test_figures_share_their_runs(self, profile):
        def of(name):
            return DESIGN.artefacts[name].runs(profile, CHOSEN)

        def by(strategy, found):
            (run,) = [r for r in found if r.config["strategy"] == strategy]
            return run

        assert by("best", of("figure1")) == by("best", of("figure4"))
        assert by("linear", of("figure1")) == by("linear", of("figure4"))
        assert set(of("figure3")) == set(of("figure10"))
        assert by("theta", of("figure2")) == by("theta", of("figure10"))
        assert set(of("figure6")) & set(of("figure1")) == {
            run for run in of("figure1") if run.config["stands_for"] in (16, 64, 256)
        }
        assert of("figure7") == of("figure8") == of("figure9") == of("figure11")
        assert of("breakdown") == of("figure9") == [settings.parallel(profile)]
        assert len(of("figure10")) == 7
        assert {r for r in of("lars") if r.config["strategy"] in STRATEGIES} < set(of("figure10"))

    @pytest.mark.parametrize("profile", WHOLE)
    def test_every_profile_ends_in_data_that_is_always_there(self, profile):
        assert profile in SEEDS
        for names in DESIGN.datasets[profile].values():
            assert names[-1] in datasets.available() and set(names) <= set(datasets.NAMES)

    def test_smoke_asks_for_nothing_that_is_not_embedded(self):
        assert arguments.choose_datasets(DESIGN, "smoke") == {
            CIFAR: "digits",
            DIV2K: "photos",
            PHANTOM: "phantom",
        }

    @pytest.mark.parametrize("profile", ["smoke", "quick"])
    def test_there_are_as_many_images_as_are_asked_for(self, profile):
        chosen = {task: names[-1] for task, names in DESIGN.datasets[profile].items()}
        for task in TASKS:
            config = settings.training(profile, task, chosen, "best").config
            options = dict(config["dataset"])
            data = datasets.load(options.pop("name"), **options)
            assert len(data.train) >= config["train_samples"]
            assert len(data.test) >= config["test_samples"]
            if task != CIFAR:
                scale = config["model"].get("scale", 2)
                assert min(data.image_shape[1:]) >= scale * config["patch"]


class TestThePapersSettings:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("task", TASKS)
    @pytest.mark.parametrize("profile", ["paper", "gpu"])
    def test_tables_1_to_3(self, profile, task, strategy):
        size, largest, rate = TABLES[task][strategy]
        controller = controller_of(settings.training(profile, task, CHOSEN, strategy).config)
        assert (controller.initial_batch, controller.max_batch) == (size, largest)
        assert controller.initial_lr == pytest.approx(rate)
        assert controller.growth == 2
        assert controller.warmup == (
            5 if strategy == "linear" and profile == "paper" else controller.warmup
        )
        assert (controller.warmup > 0) == (strategy == "linear")
        if strategy == "linear":
            assert controller.warmup_from == pytest.approx(TABLES[task]["best"][2])
        if strategy == "theta":
            assert (controller.tolerance, controller.fixed_interval) == (0.10, None)
            assert controller.lr_exponent == 1
        if strategy == "scheduled":
            assert controller.lr_growth == 1

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_section_6c_epochs_and_decays(self, strategy):
        for profile in ("paper", "gpu"):
            config = settings.training(profile, CIFAR, CHOSEN, strategy).config
            controller = controller_of(config)
            assert config["epochs"] == 140 and config["stop"] is None
            assert config["train_samples"] == 50_000 and config["test_samples"] == 10_000
            assert config["model"] == {"name": "resnet20"}
            if strategy == "scheduled":  # swaps the decays for growths of the batch
                assert (controller.every, controller.decay_at) == (30, ())
            else:
                assert (controller.decay, controller.decay_at) == (0.1, (80, 120))
            assert controller.warmup == (5 if strategy == "linear" else 0)

    @pytest.mark.parametrize("task", [DIV2K, PHANTOM])
    def test_section_6a(self, task):
        config = settings.training("paper", task, CHOSEN, "theta").config
        assert config["stop"] == {"least": 0.1, "patience": 50}
        assert config["optimizer"] == {"name": "Adam", "betas": [0.9, 0.999], "eps": 1e-8}
        if task == DIV2K:
            assert config["model"] == {"name": "edsr"} and config["patch"] == 48
            assert config["train_samples"] == 800
        else:
            assert config["model"]["blocks"] == 16 and config["patch"] == 32
            assert config["dataset"] == {
                "name": "phantom",
                "image_size": 256,
                "train": 1600,
                "test": config["test_samples"],
            }
        for strategy in STRATEGIES:  # no training is cut short before the paper's ended
            own = settings.training("paper", task, CHOSEN, strategy).config
            assert own["epochs"] >= PAPER[task][strategy]["epochs"]

    @pytest.mark.slow
    @pytest.mark.thorough
    def test_every_kind_of_training_starts(self):
        """One with a rate for each layer, and one that decays on saturation."""
        runs = [settings.layerwise("paper", CHOSEN, "LARS", "theta")]
        runs.append(settings.training("gpu", PHANTOM, CHOSEN, DECAY))
        assert [try_first_steps(DESIGN, run).result for run in runs] == ["starts", "starts"]

    @pytest.mark.parametrize("profile", ["paper", "gpu"])
    def test_what_the_paper_leaves_open_can_be_chosen(self, profile):
        runs = DESIGN.artefacts["figure4"].runs(profile, CHOSEN)
        runs += DESIGN.artefacts["figure10"].runs(profile, CHOSEN)
        assert {run.config["last_batch"] for run in runs} == {"full_rate"}
        assert {run.config.get("psnr") for run in runs} == {"rgb", None}
        changes = [("psnr", "y_shaved"), ("last_batch", "in_proportion")]
        changed = arguments.with_changes(DESIGN, runs, changes)
        assert {run.config.get("psnr") for run in changed} == {"y_shaved", None}
        assert {run.config["last_batch"] for run in changed} == {"in_proportion"}
        with pytest.raises(arguments.UsageError, match="choose among rgb, rgb_shaved, y_shaved"):
            arguments.with_changes(DESIGN, runs, [("psnr", "best")])
        said = " ".join(describing.choices(results_of("figure4", None, profile, seeds=(0,))))
        assert "all colours of whole crops" in said and "trained at the full rate" in said
        said = " ".join(describing.choices(results_of("figure10", None, profile, seeds=(0,))))
        assert "PSNR is over" not in said

    @pytest.mark.parametrize("task", TASKS)
    def test_the_papers_k_and_growths_under_paper(self, task):
        """Section VI: K of 5, 10 and 60; growths as the projections have them."""
        given, scheduled, decay = (
            settings.training("paper", task, CHOSEN, name).config
            for name in (GIVEN, "scheduled", DECAY)
        )
        k, every = {CIFAR: (5, 30), DIV2K: (10, 244), PHANTOM: (60, 272)}[task]
        assert controller_of(given).interval == k
        assert controller_of(scheduled).every == every
        assert projection.paper_schedule(task, "scheduled")[0][1] == every
        theta = settings.training("paper", task, CHOSEN, "theta").config
        assert {**given["controller"], "interval": None} == theta["controller"] | {"interval": None}
        # Section III-E: by saturation, and then as the steps of CIFAR-10's decays are.
        ruled = controller_of(decay)
        assert ruled.decay_at == Saturation(10, 0.01) and ruled.decay == 0.1
        assert ruled.fixed_interval is None

    def test_the_noise_scale_has_the_same_start(self):
        noise, theta = (
            settings.training("paper", CIFAR, CHOSEN, name).config["controller"]
            for name in ("noise", "theta")
        )
        theta = {name: value for name, value in theta.items() if name != "tolerance"}
        assert noise == theta | {"kind": "noise", "batches": 8}

    @pytest.mark.parametrize("profile", ["paper", "gpu"])
    def test_section_3es_large_batch(self, profile):
        """SGD at 2048 without linear scaling and warm-up; all else as the best fixed batch."""
        large, best = (
            settings.training(profile, CIFAR, CHOSEN, name).config for name in ("large", "best")
        )
        own = controller_of(large)
        assert (own.initial_batch, own.max_batch, own.initial_lr) == (2048, 2048, 0.1)
        assert (own.warmup, own.decay, own.decay_at) == (0, 0.1, (80, 120))
        assert large == best | {
            "strategy": "large",
            "stands_for": 2048,
            "controller": best["controller"] | {"batch": 2048},
        }
        assert PAPER[CIFAR]["large"]["value"] == 46.29

    @pytest.mark.parametrize("profile", WHOLE)
    def test_the_papers_k_everywhere_and_what_else_by_the_task(self, profile):
        for name in ("figure3", "figure10", "figure4", "figure5"):
            found = [r.config["strategy"] for r in DESIGN.artefacts[name].runs(profile, CHOSEN)]
            more = ["large", "noise"] if name in ("figure3", "figure10") else [DECAY]
            assert found == [*STRATEGIES, GIVEN, *more]

    def test_figures_1_2_and_6(self):
        def sizes(name, task):
            found = DESIGN.artefacts[name].runs("paper", CHOSEN)
            return sorted(
                r.config["controller"]["batch"]
                for r in found
                if r.config["task"] == task and "stands_for" in r.config
            )

        assert sizes("figure1", DIV2K) == [16, 32, 64, 128, 256]
        assert sizes("figure2", CIFAR) == [128, 256, 2048]
        assert sizes("figure6", DIV2K) == [16, 64, 256]
        assert sizes("figure6", PHANTOM) == [16, 32, 128]

    def test_reported_values_by_hand(self):
        values = {(task, s): PAPER[task][s].get("value") for task in TASKS for s in STRATEGIES}
        assert values == {
            (CIFAR, "best"): 91.51,
            (CIFAR, "linear"): None,
            (CIFAR, "scheduled"): None,
            (CIFAR, "theta"): 90.79,
            (DIV2K, "best"): 33.59,
            (DIV2K, "linear"): 31.35,
            (DIV2K, "scheduled"): 33.51,
            (DIV2K, "theta"): 33.49,
            (PHANTOM, "best"): 52.47,
            (PHANTOM, "linear"): 49.84,
            (PHANTOM, "scheduled"): 52.51,
            (PHANTOM, "theta"): 52.47,
        }
        epochs = [[PAPER[task][s]["epochs"] for s in STRATEGIES] for task in (DIV2K, PHANTOM)]
        assert epochs == [[1020, 1340, 1140, 1100], [930, 1390, 1270, 1130]]
        assert [PAPER[task]["interval"] for task in TASKS] == [5, 10, 60]
        speedups = [[pair[1] for pair in PAPER[task]["speedups"].values()] for task in TASKS]
        assert speedups == [[3.49, 20.01, 64.64], [9.54, 71.40, 81.71], [5.64, 30.79, 42.96]]


class TestScaled:
    @pytest.mark.parametrize(("profile", "task"), EVERY)
    def test_batches_and_rates_keep_their_ratios(self, profile, task):
        share = settings.SCALE[profile][task]["batches"]
        factor = settings.SCALE[profile][task]["lr"]
        for strategy, (size, largest, rate) in TABLES[task].items():
            controller = controller_of(settings.training(profile, task, CHOSEN, strategy).config)
            assert controller.initial_batch == size * share
            assert controller.max_batch == largest * share
            assert controller.initial_lr == pytest.approx(factor * rate)

    @pytest.mark.parametrize(("profile", "task"), EVERY)
    def test_epochs_keep_their_shares(self, profile, task):
        configs = {s: settings.training(profile, task, CHOSEN, s).config for s in STRATEGIES}
        assert len({config["epochs"] for config in configs.values()}) == 1
        epochs = configs["best"]["epochs"]
        paper = PAPER[task]["epochs"]
        for strategy in ("best", "linear", "theta"):
            decays = configs[strategy]["controller"]["decay_at"]
            wanted = [80, 120] if task == CIFAR else []
            assert decays == [max(1, round(n * epochs / paper)) for n in wanted]
            assert all(0 < n < epochs for n in decays)
        every = configs["scheduled"]["controller"]["every"]
        # Where a training may last longer than the paper's, by its stop rule, nothing is stretched.
        share = min(1, epochs / paper)
        assert every == pytest.approx(share * PAPER[task]["scheduled"]["every"], abs=0.51)
        assert "decay_at" not in configs["scheduled"]["controller"]
        # Five epochs as Goyal's, where that is no more than a quarter of the training.
        wanted = {4: 1, 16: 4, 20: 5, 140: 5, 250: 5, 600: 5, 1400: 5}[epochs]
        assert configs["linear"]["controller"]["warmup"] == wanted

    @pytest.mark.parametrize(("profile", "task"), EVERY)
    def test_fixed_batches_have_rates_in_proportion(self, profile, task):
        best = settings.fixed(profile, task, CHOSEN, PAPER[task]["best"]["batch"]).config
        share = settings.SCALE[profile][task]["batches"]
        for size in (n for n in (16, 32, 64, 128, 256, 512) if n * share >= 2):
            config = settings.fixed(profile, task, CHOSEN, size).config
            controller = controller_of(config)
            ratio = controller.initial_batch / best["controller"]["batch"]
            assert controller.initial_lr / best["controller"]["lr"] == pytest.approx(ratio)
            assert config["stands_for"] == size
            assert settings.batch(profile, task, size) == controller.initial_batch

    @pytest.mark.parametrize(("profile", "task"), EVERY)
    def test_norms(self, profile, task):
        config = settings.norms(profile, task, CHOSEN).config
        sizes, paper = config["sizes"], PAPER[task]
        assert sizes[0] == settings.batch(profile, task, paper["best"]["batch"])
        assert sizes[-1] == settings.batch(profile, task, paper["linear"]["batch"])
        assert settings.batch(profile, task, paper["theta"]["batch"]) in sizes
        assert all(b == 2 * a for a, b in itertools.pairwise(sizes))
        assert config["after"] == [0, 2]

    @pytest.mark.parametrize("profile", WHOLE)
    def test_processes(self, profile):
        run = settings.parallel(profile)
        assert run.seeds == (0,) and run.config["processes"] == 2
        # On CPUs everywhere, of the quick profile's small models: one measurement for three.
        assert "device" not in run.config
        at = "smoke" if profile == "smoke" else "quick"
        assert (run == settings.parallel("quick")) == (at == "quick")
        for task, job in run.config["jobs"].items():
            assert job["model"] == settings.SCALE[at][task]["model"]
            share = settings.SCALE[at][task]["batches"]
            needed = {n for s in projection.SCALED for n, _ in projection.paper_schedule(task, s)}
            assert {round(n * share) for n in needed} <= set(job["sizes"])
            assert len(job["sizes"]) >= 3 and job["sizes"][0] >= 2
            assert (job["target"] is None) == (task == CIFAR)
            if job["target"]:
                up = job["model"].get("scale", 2)
                assert job["target"] == [
                    job["input"][0],
                    up * job["input"][1],
                    up * job["input"][2],
                ]
        sizes = run.config["messages"]
        assert len(sizes) >= 2 and all(size % 4 == 0 for size in sizes)


class TestReading:
    def test_by_batch(self):
        found = settings.by_batch(results_of("figure1"), DIV2K)
        assert list(found) == [16, 32, 64, 128, 256]
        assert [r.seed for r in found[64]] == [0, 1, 2]
        assert {r[0].config["strategy"] for r in found.values()} == {"best", "fixed", "linear"}

    def test_curves_are_cut_to_the_shortest(self):
        results = results_of("figure1", World(length=lambda c, seed: [7, 3, 5][seed]))
        rows = settings.curves(settings.trained(results, DIV2K, "best"), "psnr")
        assert [len(row) for row in rows] == [3, 3, 3]
        assert settings.by_batch(results, DIV2K) == {}  # they diverged
        assert settings.curves([], "psnr") == []

    def test_schedules(self):
        assert settings.consecutive([1, 1, 2, 1]) == [(1, 2), (2, 1), (1, 1)]
        (record,) = settings.trained(results_of("figure4", seeds=(0,)), DIV2K, "theta")
        assert settings.updates_of([record]) == [10 * 13 + 10 * 7 + 230 * 4]

    def test_a_value_that_is_not_defined_is_no_number(self):
        def edit(metrics, config):
            metrics["theta"][0] = None

        results = results_of("figure4", World(edit={"train": edit}), seeds=(0,))
        records = settings.trained(results, DIV2K, "theta")
        assert math.isnan(settings.curves(records, "theta")[0][0])

    def test_trainings_that_never_completed_an_epoch(self):
        results = results_of("figure4", World(length=lambda c, seed: 0 if seed == 1 else 4))
        assert [r.seed for r in settings.trained(results, DIV2K, "best")] == [0, 2]
        assert settings.diverged(results, DIV2K, "best") == 3

    def test_the_margins_are_the_papers(self):
        margins = [settings.kept_up(task) for task in TASKS]
        assert margins == pytest.approx([1.0, 0.1, 0.1], abs=1e-8)


def caption(artefact, world=None, profile="gpu", **options):
    return DESIGN.artefacts[artefact].caption(results_of(artefact, world, profile, **options))


CURVES = ("figure1", "figure2", "figure3", "figure4", "figure5", "figure6", "figure10")

GPU = {"type": "cuda", "name": "NVIDIA X", "slug": "x", "memory_bytes": 2**36}


class TestCaptions:
    @pytest.mark.parametrize("artefact", [*CURVES, "stable"])
    def test_trainings_are_not_simulated(self, artefact):
        assert "SIMULATED" not in caption(artefact)

    @pytest.mark.parametrize(
        ("artefact", "task", "name", "stand_in", "synthetic"),
        [
            ("figure10", CIFAR, "cifar10", False, False),
            ("figure10", CIFAR, "digits", True, False),
            ("figure2", CIFAR, "synthetic", True, True),
            ("figure4", DIV2K, "div2k", False, False),
            ("figure1", DIV2K, "bsds500", True, False),
            ("figure4", DIV2K, "synthetic", True, True),
            ("figure5", PHANTOM, "synthetic", True, True),
        ],
    )
    def test_the_data(self, artefact, task, name, stand_in, synthetic):
        said = caption(artefact, profile="quick", chosen=CHOSEN | {task: name})
        paper = "CIFAR-10" if task == CIFAR else task
        assert (f"{name} for {paper}" in said) == stand_in
        assert (f"SYNTHETIC: {name}." in said) == synthetic

    @pytest.mark.parametrize("artefact", CURVES)
    @pytest.mark.parametrize("profile", WHOLE)
    def test_networks_that_stand_in_are_named_alike_in_caption_and_image(self, artefact, profile):
        results = results_of(artefact, None, profile, seeds=(0,))
        said = DESIGN.artefacts[artefact].caption(results)
        resnet = artefact in ("figure2", "figure3", "figure10")
        whole = profile in ("gpu", "paper")
        assert ("STAND-IN" in said) == (not whole)
        role = "ResNet-20" if resnet else "EDSR"
        drawn = DESIGN.artefacts[artefact].exhibit.figure(results)
        titles = [axis.get_title() for axis in drawn.axes]
        ours = [title for title in titles if title.startswith("ours: ")]
        assert len(ours) + sum(title.startswith("paper: ") for title in titles) == len(titles)
        assert ours and all((f" for {role}" in title) == (not whole) for title in ours)

    def test_the_device(self):
        assert "Ours: NVIDIA X" in signed("figure4", World(device=GPU))

    def test_trainings_that_diverged_are_told(self):
        said = caption("figure4", World(length=lambda c, seed: 0 if seed == 1 else None))
        assert "6 trainings DIVERGED" in said

    @pytest.mark.parametrize("artefact", DESIGN.artefacts)
    def test_gaps_are_said(self, artefact):
        assert "Not run yet." in caption(artefact, World(status=nothing))
        count = len(results_of(artefact).records)
        assert f"{count} runs FAILED." in caption(artefact, World(status=lambda run: FAILED))
        lost = caption(artefact, World(status=lambda run: OUT_OF_MEMORY))
        assert f"{count} runs ran out of memory." in lost

    def test_missing_runs_are_counted(self):
        some = World(status=only_strategies("theta"))
        assert "15 of 18 runs are missing." in caption("figure4", some)

    def test_what_is_assumed_is_told(self):
        for artefact in ("figure4", "figure5"):
            assert "fixed μ, adaptive b: ASSUMED" in caption(artefact)


def signed(artefact, world=None):
    """The grey line in the image."""
    return DESIGN.artefacts[artefact].figure(results_of(artefact, world)).texts[-1].get_text()


def in_full(artefact, profile):
    return " ".join(describing.in_full(results_of(artefact, None, profile, seeds=(0,))))


class TestSetup:
    """What captions of all artefacts would repeat."""

    @pytest.mark.parametrize("artefact", ["figure4", "figure5", "figure10"])
    @pytest.mark.parametrize("profile", WHOLE)
    def test_extent(self, artefact, profile):
        said = in_full(artefact, profile)
        task = {"figure4": DIV2K, "figure5": PHANTOM, "figure10": CIFAR}[artefact]
        scaled = settings.SCALE[profile][task]["batches"] != 1
        assert bool(re.search(r"Batch sizes are [\d.]+ of the paper's", said)) == scaled
        assert "epochs (the paper: " in said and said.count("to train on") == 1
        assert ("bfloat16" in said) == (profile == "gpu")
        whole = profile in ("gpu", "paper")
        assert bool(re.search("a STAND-IN for (EDSR|ResNet-20)", said)) == (not whole)

    def test_restoration_is_told_in_full(self):
        said = in_full("figure4", "quick")
        assert "rates are 5 times the paper's" in said
        assert "Batch sizes are 0.25 of the paper's" in said
        assert "0.1 dB for 50 epochs" in said and "validated by one crop" in said
        assert "rates are 1 times the paper's" in in_full("figure4", "paper")

    def test_the_phantoms_noise_is_ours(self):
        said = in_full("figure5", "gpu")
        assert "noise of 0.1 of the full range (our choice, SYNTHETIC)" in said


WORLDS = {
    "full": World(spread=0.1),
    "nothing": World(status=nothing),
    "all failed": World(status=lambda run: FAILED),
    "one in two": World(status=lambda run: FAILED if len(str(run.config)) % 2 else {}),
    "one diverges": World(length=lambda c, seed: 3 if seed == 1 else None),
    "all diverge at once": World(length=lambda config, seed: 0),
    "K not found": World(interval=lambda c, seed: None),
    "measurements alone": World(status=lambda run: None if run.experiment == "train" else {}),
}


class TestWhateverThereIs:
    @pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
    @pytest.mark.parametrize("kind", WORLDS)
    def test_tables_captions_and_verdicts(self, kind, seeds):
        for artefact in DESIGN.artefacts.values():
            results = results_of(artefact.name, WORLDS[kind], "quick", seeds=seeds)
            frame = artefact.table(results)
            assert len(set(frame.columns)) == len(frame.columns)
            text = repr(report.TableView(frame))
            assert "nan" not in text.lower() and "None" not in text, artefact.name
            assert "inf" not in text, artefact.name
            assert artefact.caption(results)
            for claim in design.claims_of("adaptive").get(artefact.name, {}).values():
                assert artefact.exhibit.judge(claim, results).evidence
            for check in artefact.checks:
                assert check.row(results)["evidence"]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "kind",
        [
            "one in two",
            *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("nothing", "one diverges")),
        ],
    )
    def test_figures(self, kind):
        plt.close("all")  # of a test that failed
        for artefact in DESIGN.artefacts.values():
            drawn = artefact.figure(results_of(artefact.name, WORLDS[kind], "quick"))
            assert isinstance(drawn, Figure)
            FigureCanvasAgg(drawn).draw()  # a missing glyph or a layout that does not fit warns
        assert plt.get_fignums() == []


@pytest.mark.parametrize("artefact", DESIGN.artefacts)
def test_panels_are_labelled(artefact):
    drawn = DESIGN.artefacts[artefact].exhibit.figure(results_of(artefact))
    assert all(axis.get_xlabel() for axis in drawn.axes)
    assert all(axis.get_title() for axis in drawn.axes if axis.get_visible())
    first = [axis for axis in drawn.axes if axis.get_subplotspec().is_first_col()]
    assert all(axis.get_ylabel() or axis.get_yticklabels() for axis in first)
    labels = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
    assert labels and len(set(labels)) == len(labels)


def test_the_reported_numbers_are_not_changed_by_showing_them():
    before = str(PAPER)
    for artefact in DESIGN.artefacts.values():
        artefact.table(results_of(artefact.name))
    assert str(PAPER) == before
