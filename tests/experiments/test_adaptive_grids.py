"""What is run under each profile; the paper's numbers; the model of strong scaling."""

import itertools
import json
import math

import pytest
from test_adaptive_checks import measured_task

from repro import datasets, paths
from repro.adaptive import ScalingModel, updates
from repro.experiments import load_paper, running
from repro.experiments.adaptive import building, grids, projection
from repro.experiments.adaptive.grids import CIFAR, DIV2K, PAPER, PHANTOM, STRATEGIES, TASKS
from repro.experiments.design import COMPUTING_PROFILES, SEEDS

DESIGN = load_paper("adaptive")
CHOSEN = {CIFAR: "cifar10", DIV2K: "div2k", PHANTOM: "phantom"}
EVERY = [*itertools.product(COMPUTING_PROFILES, TASKS)]

# Tables I to III by hand: batch sizes and rates at the start and the largest; epochs of warm-up.
TABLES = {
    DIV2K: {"best": (16, 16, 1e-4), "linear": (256, 256, 16e-4),
            "scheduled": (64, 256, 4e-4), "theta": (64, 256, 4e-4)},
    PHANTOM: {"best": (16, 16, 1e-4), "linear": (128, 128, 8e-4),
              "scheduled": (32, 128, 2e-4), "theta": (32, 128, 2e-4)},
    CIFAR: {"best": (128, 128, 0.1), "linear": (2048, 2048, 1.6),
            "scheduled": (256, 2048, 0.2), "theta": (256, 2048, 0.2)},
}  # fmt: skip


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
    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_every_run_with_every_dataset(self, profile):
        for chosen in choices(profile):
            for run in all_runs(profile, chosen):
                assert json.loads(json.dumps(run.config)) == run.config
                modules = DESIGN.experiments[run.experiment].modules(run.config)
                assert len(set(modules)) == len(modules)
                for module in modules:
                    assert (paths.PACKAGE.parent / f"{module.replace('.', '/')}.py").exists()
                if run.experiment == "parallel":
                    continue
                assert run.config["dataset"]["name"] == chosen[run.config["task"]]
                controller = controller_of(run.config)
                assert controller.initial_batch >= 2
                # Small stand-ins have fewer images than the paper's largest batch has samples.
                if (
                    grids.SCALE[profile][run.config["task"]]["samples"][0]
                    == (run.config["train_samples"])
                ):
                    assert controller.max_batch <= run.config["train_samples"]

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_no_artefact_asks_for_a_run_twice(self, profile):
        for artefact in DESIGN.artefacts.values():
            found = artefact.runs(profile, CHOSEN)
            assert found and len(set(found)) == len(found), artefact.name
        planned = running.plan(DESIGN, DESIGN.artefacts.values(), profile, CHOSEN)
        assert len(set(planned)) == len(planned) < len(all_runs(profile))

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
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
        assert of("breakdown") == of("figure9") == [grids.parallel(profile)]
        assert len(of("stable")) == 3 and len(of("figure10")) == 6

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_every_profile_ends_in_data_that_is_always_there(self, profile):
        assert profile in SEEDS
        for names in DESIGN.datasets[profile].values():
            assert names[-1] in datasets.available() and set(names) <= set(datasets.NAMES)

    def test_smoke_asks_for_nothing_that_is_not_embedded(self):
        assert running.choose_datasets(DESIGN, "smoke") == {
            CIFAR: "digits", DIV2K: "photos", PHANTOM: "phantom"
        }  # fmt: skip

    @pytest.mark.parametrize("profile", ["smoke", "quick"])
    def test_there_are_as_many_images_as_are_asked_for(self, profile):
        chosen = {task: names[-1] for task, names in DESIGN.datasets[profile].items()}
        for task in TASKS:
            config = grids.training(profile, task, chosen, "best").config
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
        controller = controller_of(grids.training(profile, task, CHOSEN, strategy).config)
        assert (controller.initial_batch, controller.max_batch) == (size, largest)
        assert controller.initial_lr == pytest.approx(rate)
        assert controller.growth == 2
        assert controller.warmup == (5 if strategy == "linear" and profile == "paper" else
                                     controller.warmup)  # fmt: skip
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
            config = grids.training(profile, CIFAR, CHOSEN, strategy).config
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
        config = grids.training("paper", task, CHOSEN, "theta").config
        assert config["stop"] == {"least": 0.1, "patience": 50}
        assert config["optimizer"] == {"name": "Adam", "betas": [0.9, 0.999], "eps": 1e-8}
        if task == DIV2K:
            assert config["model"] == {"name": "edsr"} and config["patch"] == 48
            assert config["train_samples"] == 800
        else:
            assert config["model"]["blocks"] == 16 and config["patch"] == 32
            assert config["dataset"] == {"name": "phantom", "image_size": 256, "train": 1600,
                                         "test": config["test_samples"]}  # fmt: skip
        for strategy in STRATEGIES:  # no training is cut short before the paper's ended
            own = grids.training("paper", task, CHOSEN, strategy).config
            assert own["epochs"] >= PAPER[task][strategy]["epochs"]

    def test_the_noise_scale_has_the_same_start(self):
        noise, theta = (
            grids.training("paper", CIFAR, CHOSEN, name).config["controller"]
            for name in ("noise", "theta")
        )
        theta = {name: value for name, value in theta.items() if name != "tolerance"}
        assert noise == theta | {"kind": "noise", "batches": 8}

    @pytest.mark.parametrize("profile", ["paper", "gpu"])
    def test_section_3es_large_batch(self, profile):
        """SGD at 2048 without linear scaling and warm-up; all else as the best fixed batch."""
        large, best = (
            grids.training(profile, CIFAR, CHOSEN, name).config for name in ("large", "best")
        )
        own = controller_of(large)
        assert (own.initial_batch, own.max_batch, own.initial_lr) == (2048, 2048, 0.1)
        assert (own.warmup, own.decay, own.decay_at) == (0, 0.1, (80, 120))
        assert large == best | {"strategy": "large", "stands_for": 2048,
                                "controller": best["controller"] | {"batch": 2048}}  # fmt: skip
        assert PAPER[CIFAR]["large"]["value"] == 46.29

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_cifar_alone_has_two_more_strategies(self, profile):
        for name in ("figure3", "figure10", "figure4", "figure5"):
            found = [r.config["strategy"] for r in DESIGN.artefacts[name].runs(profile, CHOSEN)]
            more = ["large", "noise"] if name in ("figure3", "figure10") else []
            assert found == [*STRATEGIES, *more]

    def test_figures_1_2_and_6(self):
        def sizes(name, task):
            found = DESIGN.artefacts[name].runs("paper", CHOSEN)
            return sorted(r.config["controller"]["batch"] for r in found
                          if r.config["task"] == task and "stands_for" in r.config)  # fmt: skip

        assert sizes("figure1", DIV2K) == [16, 32, 64, 128, 256]
        assert sizes("figure2", CIFAR) == [128, 256, 2048]
        assert sizes("figure6", DIV2K) == [16, 64, 256]
        assert sizes("figure6", PHANTOM) == [16, 32, 128]

    def test_reported_values_by_hand(self):
        values = {(task, s): PAPER[task][s].get("value") for task in TASKS for s in STRATEGIES}
        assert values == {
            (CIFAR, "best"): 91.51, (CIFAR, "linear"): None, (CIFAR, "scheduled"): None,
            (CIFAR, "theta"): 90.79, (DIV2K, "best"): 33.59, (DIV2K, "linear"): 31.35,
            (DIV2K, "scheduled"): 33.51, (DIV2K, "theta"): 33.49, (PHANTOM, "best"): 52.47,
            (PHANTOM, "linear"): 49.84, (PHANTOM, "scheduled"): 52.51, (PHANTOM, "theta"): 52.47,
        }  # fmt: skip
        epochs = [[PAPER[task][s]["epochs"] for s in STRATEGIES] for task in (DIV2K, PHANTOM)]
        assert epochs == [[1020, 1340, 1140, 1100], [930, 1390, 1270, 1130]]
        assert [PAPER[task]["interval"] for task in TASKS] == [5, 10, 60]
        speedups = [[pair[1] for pair in PAPER[task]["speedups"].values()] for task in TASKS]
        assert speedups == [[3.49, 20.01, 64.64], [9.54, 71.40, 81.71], [5.64, 30.79, 42.96]]


class TestScaled:
    @pytest.mark.parametrize(("profile", "task"), EVERY)
    def test_batches_and_rates_keep_their_ratios(self, profile, task):
        share = grids.SCALE[profile][task]["batches"]
        factor = grids.SCALE[profile][task]["lr"]
        for strategy, (size, largest, rate) in TABLES[task].items():
            controller = controller_of(grids.training(profile, task, CHOSEN, strategy).config)
            assert controller.initial_batch == size * share
            assert controller.max_batch == largest * share
            assert controller.initial_lr == pytest.approx(factor * rate)

    @pytest.mark.parametrize(("profile", "task"), EVERY)
    def test_epochs_keep_their_shares(self, profile, task):
        configs = {s: grids.training(profile, task, CHOSEN, s).config for s in STRATEGIES}
        assert len({config["epochs"] for config in configs.values()}) == 1
        epochs = configs["best"]["epochs"]
        paper = PAPER[task]["epochs"]
        for strategy in ("best", "linear", "theta"):
            decays = configs[strategy]["controller"]["decay_at"]
            wanted = [80, 120] if task == CIFAR else []
            assert decays == [max(1, round(n * epochs / paper)) for n in wanted]
            assert all(0 < n < epochs for n in decays)
        every = configs["scheduled"]["controller"]["every"]
        assert every == pytest.approx(epochs * PAPER[task]["scheduled"]["every"] / paper, abs=0.51)
        assert "decay_at" not in configs["scheduled"]["controller"]
        # Five epochs as Goyal's, where that is no more than a quarter of the training.
        wanted = {4: 1, 16: 4, 20: 5, 120: 5, 140: 5, 1400: 5}[epochs]
        assert configs["linear"]["controller"]["warmup"] == wanted

    @pytest.mark.parametrize(("profile", "task"), EVERY)
    def test_fixed_batches_have_rates_in_proportion(self, profile, task):
        best = grids.fixed(profile, task, CHOSEN, PAPER[task]["best"]["batch"]).config
        share = grids.SCALE[profile][task]["batches"]
        for size in (n for n in (16, 32, 64, 128, 256, 512) if n * share >= 2):
            config = grids.fixed(profile, task, CHOSEN, size).config
            controller = controller_of(config)
            ratio = controller.initial_batch / best["controller"]["batch"]
            assert controller.initial_lr / best["controller"]["lr"] == pytest.approx(ratio)
            assert config["stands_for"] == size
            assert grids.batch(profile, task, size) == controller.initial_batch

    @pytest.mark.parametrize(("profile", "task"), EVERY)
    def test_norms(self, profile, task):
        config = grids.norms(profile, task, CHOSEN).config
        sizes, paper = config["sizes"], PAPER[task]
        assert sizes[0] == grids.batch(profile, task, paper["best"]["batch"])
        assert sizes[-1] == grids.batch(profile, task, paper["linear"]["batch"])
        assert grids.batch(profile, task, paper["theta"]["batch"]) in sizes
        assert all(b == 2 * a for a, b in itertools.pairwise(sizes))
        assert config["after"] == [0, 2]

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_processes(self, profile):
        run = grids.parallel(profile)
        assert run.seeds == (0,) and run.config["processes"] == 2
        # On CPUs everywhere, of the quick profile's small models: one measurement for three.
        assert "device" not in run.config
        at = "smoke" if profile == "smoke" else "quick"
        assert (run == grids.parallel("quick")) == (at == "quick")
        for task, job in run.config["jobs"].items():
            assert job["model"] == grids.SCALE[at][task]["model"]
            share = grids.SCALE[at][task]["batches"]
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


@pytest.fixture
def uncached():
    """Forget the fits to numbers that a test has changed, afterwards too."""
    projection.fitted_to_paper.cache_clear()
    yield
    projection.fitted_to_paper.cache_clear()


class TestProjection:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("task", TASKS)
    def test_the_papers_schedules(self, task, strategy):
        own = PAPER[task][strategy]
        schedule = projection.paper_schedule(task, strategy)
        assert sum(epochs for _, epochs in schedule) == own.get("epochs", PAPER[task]["epochs"])
        sizes = [size for size, _ in schedule]
        assert (sizes[0], sizes[-1]) == TABLES[task][strategy][:2]
        assert all(b == 2 * a for a, b in itertools.pairwise(sizes))
        assert all(epochs > 0 for _, epochs in schedule)
        every = {"theta": PAPER[task]["interval"]}.get(strategy, own.get("every"))
        assert all(epochs == every for _, epochs in schedule[:-1])

    def test_schedules_by_hand(self):
        assert projection.paper_schedule(CIFAR, "theta") == [
            (256, 5), (512, 5), (1024, 5), (2048, 125)
        ]  # fmt: skip
        assert projection.paper_schedule(CIFAR, "scheduled") == [
            (256, 30), (512, 30), (1024, 30), (2048, 50)
        ]  # fmt: skip
        assert projection.paper_schedule(DIV2K, "theta") == [(64, 10), (128, 10), (256, 1080)]
        assert projection.nodes_of(DIV2K, "best") == [1, 2, 4, 8, 16]
        assert projection.nodes_of(PHANTOM, "theta")[-1] == 128

    def test_section_6bs_overhead(self):
        """(0.0038 - 0.0026) s a sample leave 0.0014 s a step: 7 / 6 of a sample."""
        assert projection.overhead() == pytest.approx(7 / 6)

    @pytest.mark.parametrize("left_out", [None, *projection.SCALED])
    @pytest.mark.parametrize("task", TASKS)
    def test_what_is_left_out_is_not_seen(self, task, left_out, monkeypatch, uncached):
        seen = []
        fit = ScalingModel.fit_speedups

        def spy(points, samples, overhead):
            seen.append((points, samples, overhead))
            return fit(points, samples, overhead)

        monkeypatch.setattr(ScalingModel, "fit_speedups", spy)
        projection.fitted_to_paper.cache_clear()
        for cost in (0.5, None):
            projection.fitted_to_paper(task, left_out, cost)
            projection.fitted_to_paper(task, left_out, cost)
        nodes = {CIFAR: [[1, 2, 4, 8, 16, 32, 64, 128], [128], [256]],
                 DIV2K: [[16], [256], [256]], PHANTOM: [[16], [128], [128]]}[task]  # fmt: skip
        values = {CIFAR: (3.49, 20.01, 64.64), DIV2K: (9.54, 71.40, 81.71),
                  PHANTOM: (5.64, 30.79, 42.96)}[task]  # fmt: skip
        wanted = [
            (projection.paper_schedule(task, s), n, value)
            for s, n, value in zip(projection.SCALED, nodes, values, strict=True)
            if s != left_out
        ]
        # Each is fitted once; a given cost is held, none is fitted up to section VI-B's.
        assert seen == [(wanted, PAPER[task]["samples"], (0.5, 0.5)),
                        (wanted, PAPER[task]["samples"], (0.0, projection.overhead()))]  # fmt: skip

    @pytest.mark.parametrize("task", TASKS)
    def test_a_changed_value_changes_nothing_that_leaves_it_out(self, task, monkeypatch, uncached):
        before = projection.fitted_to_paper(task, "theta", 0)
        whole = projection.fitted_to_paper(task, None, 0)
        own = PAPER[task]["speedups"] | {"theta": [PAPER[task]["speedups"]["theta"][0], 9.0]}
        monkeypatch.setitem(PAPER[task], "speedups", own)
        projection.fitted_to_paper.cache_clear()
        assert projection.fitted_to_paper(task, "theta", 0) == before
        assert projection.fitted_to_paper(task, None, 0) != whole

    @pytest.mark.parametrize("cost", [0.0, None, 7 / 6])
    @pytest.mark.parametrize("task", TASKS)
    def test_speedups_are_within_bounds(self, task, cost):
        model = projection.fitted_to_paper(task, None, cost)
        assert 0 <= model.overhead_s <= 7 / 6 + 1e-9
        if cost is not None:
            assert model.overhead_s == cost
        for strategy in projection.SCALED:
            nodes = PAPER[task]["speedups"][strategy][0]
            found = projection.best_speedup(model, task, strategy)
            most = nodes or projection.nodes_of(task, strategy)[-1]
            assert 1 <= found <= most
            free = ScalingModel(1.0)
            assert projection.best_speedup(free, task, strategy) <= most

    @staticmethod
    def error(model, task):
        """The sum of squared logarithms of modelled over reported speed-ups, written out."""
        total = 0.0
        for strategy, (nodes, value) in PAPER[task]["speedups"].items():
            schedule, samples = projection.paper_schedule(task, strategy), PAPER[task]["samples"]
            largest = max(b for b, _ in schedule)
            tried = [nodes] if nodes else [2**n for n in range(9) if 2**n <= largest]
            found = max(model.speedup(schedule, samples, n) for n in tried)
            total += math.log(found / value) ** 2
        return total

    @pytest.mark.parametrize("task", TASKS)
    def test_no_other_latency_and_bandwidth_come_closer(self, task):
        """Of a grid of them; the cost of small batches as given, or anywhere up to VI-B's."""
        logs = range(-14, 5, 2)
        for cost, shares in ((0.0, (0,)), (projection.overhead(), (1,)), (None, (0, 0.3, 0.6, 1))):
            error = self.error(projection.fitted_to_paper(task, None, cost), task)
            for share, latency, transfer in itertools.product(shares, logs, logs):
                other = ScalingModel(1.0, share * 7 / 6, math.exp(latency), math.exp(transfer))
                assert error <= self.error(other, task) + 1e-6

    @pytest.mark.parametrize("cost", [None, 0.0, 7 / 6])
    def test_the_best_fixed_batch_on_cifar_is_at_its_largest(self, cost):
        """The paper gives 3.49 without nodes: it is the maximum over them, to the fit's error."""
        model = projection.fitted_to_paper(CIFAR, None, cost)
        schedule = [(128, 140)]
        curve = {2**n: model.speedup(schedule, 50_000, 2**n) for n in range(8)}
        found = projection.best_speedup(model, CIFAR, "best")
        assert found == max(curve.values())
        assert projection.largest_speedup(model, CIFAR, "best") == (
            found, max(curve, key=curve.get)
        )  # fmt: skip
        rest = [projection.best_speedup(model, CIFAR, s) / v for s, v in
                (("scheduled", 20.01), ("theta", 64.64))]  # fmt: skip
        # At the least squares no part may exceed the whole error, nor that of fitting 3.49 alone.
        whole = self.error(model, CIFAR)
        assert math.log(found / 3.49) ** 2 + sum(math.log(r) ** 2 for r in rest) == (
            pytest.approx(whole)
        )  # fmt: skip
        alone = min(
            (ScalingModel(1.0, model.overhead_s, model.latency_s, math.exp(n / 20))
             for n in range(-40, 80)),
            key=lambda m: abs(math.log(projection.best_speedup(m, CIFAR, "best") / 3.49)),
        )  # fmt: skip
        assert abs(math.log(projection.best_speedup(alone, CIFAR, "best") / 3.49)) < 0.05
        assert math.log(found / 3.49) ** 2 <= whole <= self.error(alone, CIFAR)
        assert abs(math.log(found / 3.49)) < 0.35

    @pytest.mark.parametrize("strategy", projection.SCALED)
    @pytest.mark.parametrize("task", TASKS)
    def test_predictions_without_and_with_section_6bs_cost(self, task, strategy, monkeypatch):
        """Of the other two strategies' speed-ups; in this order."""
        cost = projection.overhead()
        assert cost == pytest.approx(7 / 6)
        wanted = []
        for held in (0.0, cost):
            model = projection.fitted_to_paper(task, strategy, held)
            assert model.overhead_s == held
            nodes, _ = PAPER[task]["speedups"][strategy]
            tried = [nodes] if nodes else [2**n for n in range(8)]
            schedule = projection.paper_schedule(task, strategy)
            wanted.append(max(model.speedup(schedule, PAPER[task]["samples"], n) for n in tried))
        assert projection.predicted(task, strategy) == tuple(wanted)

        asked = []
        monkeypatch.setattr(projection, "fitted_to_paper",
                            lambda *given: asked.append(given) or ScalingModel(1.0))  # fmt: skip
        projection.predicted(task, strategy)
        assert asked == [(task, strategy, 0.0), (task, strategy, cost)]

    def test_the_largest_speedup_and_where(self):
        """On 4 of 16 nodes: what more nodes compute less, they communicate more."""
        model = ScalingModel(1.0, 0.0, 0.8, 12.0)
        found, nodes = projection.largest_speedup(model, DIV2K, "best")
        by_hand = {1: 1.0}
        for n in (2, 4, 8, 16):
            sent = 2 * (n - 1) * (0.8 + 12 / n)
            by_hand[n] = 16 / (16 / n + max(0.0, sent - 16 / n))
        assert found == pytest.approx(max(by_hand.values()))
        assert nodes == max(by_hand, key=by_hand.get)
        assert projection.largest_speedup(ScalingModel(1.0), DIV2K, "best") == (16.0, 16)

    @pytest.mark.parametrize("nodes", [1, 16, 64, 128, 256])
    def test_breakdown_by_hand(self, nodes):
        model = ScalingModel(2.0, 0.5, 0.03, 1.5)
        shares = projection.breakdown(model, nodes)
        parts, alone = {}, 0.0
        for size, epochs in ((64, 10), (128, 10), (256, 1080)):
            steps, busy = epochs * math.ceil(800 / size), min(size, nodes)
            computed = 2.0 * math.ceil(size / busy) + 0.5
            sent = 2 * (busy - 1) * (0.03 + 1.5 / busy)
            parts[size] = [steps * n for n in (computed, sent, max(0.0, sent - computed))]
            alone += steps * (2.0 * size + 0.5)
        computed, sent, blocked = map(sum, zip(*parts.values(), strict=True))
        early = sum(parts[n][0] + parts[n][2] for n in (64, 128))
        assert shares == pytest.approx({
            "computation": computed / alone, "computation at B_m": parts[256][0] / alone,
            "communication": sent / alone, "blocked": blocked / alone,
            "before B_m": early / (computed + blocked),
        })  # fmt: skip


# Blocked at every size and way; another with sums, which the averaging's thread makes.
EXACT = ScalingModel(2e-3, 5e-3, 0.06, 0.4, 0.0, 0.4)
SIZES = {task: job["sizes"] for task, job in grids.parallel("quick").config["jobs"].items()}


class TestMeasured:
    @pytest.mark.parametrize("task", TASKS)
    def test_an_exact_model_is_found_again(self, task):
        found = projection.fitted_here(measured_task(SIZES[task], grids.AVERAGING, EXACT))
        for name in ("sample_s", "overhead_s", "latency_s", "transfer_s", "summation_s", "overlap"):
            assert getattr(found, name) == pytest.approx(getattr(EXACT, name), rel=1e-6), name

    @pytest.mark.parametrize("task", TASKS)
    def test_steps_are_predicted_without_having_been_seen(self, task):
        found = measured_task(SIZES[task], grids.AVERAGING, EXACT)
        rows = projection.checked(found)
        assert [row["batch"] for row in rows] == SIZES[task]
        for row in rows:
            cost = EXACT.step(row["batch"], 2)
            assert row["measured_s"] == pytest.approx(cost.computation_s + cost.blocked_s)
            assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=1e-6)
            assert row["alone_s"] == pytest.approx(EXACT.step(row["batch"], 1).total_s)
        # What is measured of a size does not enter its own prediction.
        for step in found["steps"]:
            if step["batch"] == SIZES[task][1] and step["averaging"] == "all_to_all":
                step["blocked_s"] *= 3
        again = projection.checked(found)[1]
        assert again["predicted_s"] == pytest.approx(rows[1]["predicted_s"])
        assert again["measured_s"] > 1.2 * rows[1]["measured_s"]

    @pytest.mark.parametrize("strategy", projection.SCALED)
    @pytest.mark.parametrize("task", TASKS)
    def test_two_processes_as_the_model_has_them(self, task, strategy):
        """The speed-up at scale, written out: ⌈N/B⌉ steps in proportion to 1 / B."""
        found = measured_task(SIZES[task], grids.AVERAGING, EXACT)
        said, measured = projection.two_processes(found, task, strategy)
        assert said == pytest.approx(measured, rel=1e-6)
        share = SIZES[task][0] / PAPER[task]["best"]["batch"]
        alone = together = 0.0
        for size, epochs in projection.paper_schedule(task, strategy):
            steps = epochs / size
            alone += steps * EXACT.step(round(size * share), 1).total_s
            together += steps * EXACT.step(round(size * share), 2).total_s
        assert measured == pytest.approx(alone / together)

    def test_local_sums_are_communication(self):
        """The averaging's thread makes them, and they hide like it; nothing counts twice."""
        model = ScalingModel(2e-3, 5e-3, 0.06, 0.4, 0.02, 0.4)
        found = measured_task(SIZES[CIFAR], grids.AVERAGING, model)
        for step, own in zip(
            (s for s in found["steps"] if s["averaging"] == "all_to_all"),
            projection.steps_of(found, "all_to_all"), strict=True,
        ):  # fmt: skip
            step["summation_s"] = model.summation_s
            assert (own.batch_size, own.processes, own.summation_s) == (step["batch"], 2, 0.0)
        for step, own in zip(
            (s for s in found["steps"] if s["averaging"] == "all_to_all"),
            projection.steps_of(found, "all_to_all"), strict=True,
        ):  # fmt: skip
            assert own.communication_s == pytest.approx(step["communication_s"] + 0.02)
            assert own.computation_s == step["computation_s"]
            assert own.blocked_s == step["blocked_s"]
        fitted = projection.fitted_here(found)
        assert fitted.summation_s == 0.0
        (one, *_) = projection.steps_of(found, "all_to_all")
        sent = fitted.step(one.batch_size, 2).communication_s
        assert sent == pytest.approx(one.communication_s)

    @pytest.mark.parametrize("task", TASKS)
    def test_steps_whose_sums_hide_are_predicted(self, task):
        """The thread is under way for messages and sums; of both, 0.4 of the computation hide."""
        found = measured_task(SIZES[task], grids.AVERAGING, EXACT)
        for step in found["steps"]:
            if step["processes"] == 2:  # a part of what was under way was summing
                step["summation_s"] = 0.3 * step["communication_s"]
                step["communication_s"] *= 0.7
        for row in projection.checked(found):
            assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=1e-6)

    def test_updates_of_the_papers_trainings(self):
        """Section III-B: a batch twice as large, half as many averagings."""
        best = updates(projection.paper_schedule(CIFAR, "best"), 50_000)
        theta = updates(projection.paper_schedule(CIFAR, "theta"), 50_000)
        assert best == 140 * math.ceil(50_000 / 128)
        assert theta == 5 * (196 + 98 + 49) + 125 * 25
        assert 10 < best / theta < 16


def test_times_that_do_not_grow_with_the_samples_give_no_model():
    """A toy model's: tables, figures and verdicts go without a projection."""
    steps = [
        {"batch": n, "processes": p, "averaging": way, "total_s": s, "computation_s": s,
         "communication_s": 0.001, "summation_s": 0.0, "blocked_s": 0.001 * (p - 1)}
        for p, way, s in ((1, "none", 0.001), (2, "all_to_all", 0.003))
        for n in (4, 8, 16)
    ]  # fmt: skip
    found = {"steps": steps, "messages": {"all_to_all": [(2**10, 2, 0.001), (2**20, 2, 0.002)]},
             "gradient_bytes": 2**16, "buckets": 4}  # fmt: skip
    assert projection.fitted_here(found) is None
    assert all(math.isnan(row["predicted_s"]) for row in projection.checked(found))
    said, measured = projection.two_processes(found, PHANTOM, "best")
    assert math.isnan(said) and measured == pytest.approx(1 / 4)
