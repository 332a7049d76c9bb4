"""What the experiments of dual-batch learning run, on toys."""

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from repro import datasets
from repro.datasets import EpochTimes
from repro.dualbatch import Commit, cluster, train_dual_batch
from repro.experiments import load_paper
from repro.experiments.design import Outcome, reported
from repro.experiments.dualbatch import building, measuring, minima, runs, training, workers
from repro.experiments.dualbatch.runs import CIFAR, PLACES, RULES, SYNCS
from repro.measure import TimeModel, Timing
from repro.records import RecordStore

PAPER = load_paper("dualbatch")
REPORTED = reported("dualbatch")
DIGITS = {CIFAR: "digits"}
MODEL = {"name": "resnet_cifar", "depth": 8, "width": 4}


def shorter(run: Any, samples: int = 40, **changes: Any) -> dict[str, Any]:
    """Return a training's configuration with fewer samples and epochs."""
    subs = [
        entry | {"plan": entry["plan"] | {"samples": samples}} for entry in run.config["sub_stages"]
    ]
    stages = [[len(subs), rate] for _, rate in run.config["stages"][:2]]
    small = {"model": MODEL, "sub_stages": subs, "stages": stages, "test_samples": 20}
    return run.config | small | changes


_DUAL = shorter(runs.section51("smoke", DIGITS, 1.1, 2))
_BASE = shorter(runs.section51("smoke", DIGITS, 1.0, 0))
_HYBRID = shorter(runs.section52("smoke", DIGITS, 2, "hybrid"))
_TIMES = runs.step_times("smoke").config | {
    "model": MODEL,
    "repeats": 1,
    "batch_sizes": [4, 16, 64],
    "samples": 80,
}
_ABOVE = {
    "passes": False,
    "model": MODEL,
    "repeats": 1,
    "batch_sizes": [4, 64],
    "resolutions": [8, 16],
    "large_batches": [40, 20],
    "samples": 40,
}
_MEMORY = runs.memory("smoke", CIFAR).config | {"model": MODEL}
_SYNC = shorter(runs.synchronised("smoke", DIGITS, "bsp", "average"))
_FLAT = shorter(runs.flatness("smoke", DIGITS)[2], loss_samples=20, draws=3)
_OWN = shorter(runs.own_plan("smoke", DIGITS)[2])
_OWN["measured"] = {"resolution": 8, "batch_sizes": [4, 64], "repeats": 1}
_WALL = runs.wall("smoke").config
_BOTH = {"syncs": runs.wall("quick").config["parts"][0]["syncs"]}
_WALL = _WALL | {
    "rounds": 2,
    "repeats": 1,
    "parts": [_WALL["parts"][0] | _BOTH | {"model": MODEL, "samples": 40}],
}
TOYS = {
    "three schemes": ("schemes", {"n_small": 1, "stages": 2}),
    "bsp": ("synchronise", _SYNC),
    "flat": ("flatness", _FLAT),
    "own plan": ("own_plan", _OWN),
    "wall": ("wall", _WALL),
    "table2": ("solve", {"table": "table2"}),
    "table6": ("solve", {"table": "table6"}),
    "table7": ("solve", {"table": "table7"}),
    "table9": ("solve", {"table": "table9"}),
    "baseline": ("train", _BASE),
    "dual-batch": ("train", _DUAL),
    "hybrid": ("train", _HYBRID),
    "two workers": ("train", shorter(runs.engines("smoke", DIGITS)[0])),
    "times": ("times", _TIMES),
    "no passes": ("times", {k: v for k, v in _TIMES.items() if k != "plan_k"} | _ABOVE),
    "published": ("published", {"dataset": {"name": datasets.TIMES}}),
    "memory": ("memory", _MEMORY),
}


def epoch_times(bend: float = 0.0, framework: str = "TensorFlow", size: int = 500) -> EpochTimes:
    """Return times by equation 2, exact but for every other batch size."""
    sizes = np.arange(1, size + 1)
    exact = (5e-4 * sizes + 0.01) * np.ceil(50_000 / sizes)
    bent = exact * (1 + bend * (sizes % 2))
    return EpochTimes({framework: bent, "other": exact}, 50_000, "f" * 16)


def digits(config: Any) -> Any:
    options = dict(config["dataset"])
    return datasets.load(options.pop("name"), **options)


def growing(functions: Any, *, warmup: int, repeats: int, device: str) -> dict[str, Timing]:
    """Call each once; it takes longer the larger its batch, or side, is, on a busy machine too."""
    for function in functions.values():
        function()
    sizes = {name: int(re.search(r"\d+", name)[0]) for name in functions}
    return {name: Timing((0.01 + 1e-4 * n,) * repeats, warmup) for name, n in sizes.items()}


def without_processes(patch: pytest.MonkeyPatch) -> None:
    """Let workers take turns on the virtual clock, as if each had a core."""

    def local(*arguments: Any, engine: str, address: str | None, **options: Any) -> Any:
        assert engine == "ray"
        return train_dual_batch(*arguments, **options)

    patch.setattr(cluster, "connected", lambda *arguments: nullcontext())
    patch.setattr(workers, "train_dual_batch", local)
    patch.setattr(workers, "devices_here", lambda device: 2)
    # Of a machine on which steps cost something beside their samples.
    fitted = TimeModel(1e-3, 1e-2)
    patch.setattr(workers, "fitted", lambda *arguments: (fitted, {}))


@pytest.fixture(scope="module")
def toys() -> dict[str, Outcome]:
    made = {}
    for name, (experiment, config) in TOYS.items():
        data: Any = None
        if config.get("dataset") and experiment != "published":
            data = digits(config)
        elif experiment == "published":
            data = epoch_times()
        function = PAPER.experiments[experiment].function
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "time_interleaved", growing)
            if experiment == "wall":
                without_processes(patch)
            made[name] = function(config, 0, data, "cpu")
    return made


class TestEveryRun:
    def test_every_experiment_is_here(self):
        assert {experiment for experiment, _ in TOYS.values()} == set(PAPER.experiments)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", TOYS)
    def test_metrics_and_timings_can_be_written(self, toys, name, tmp_path, make_record):
        outcome = toys[name]
        timings = {
            k: {"samples_s": list(t.samples_s), "warmup": t.warmup}
            for k, t in outcome.timings.items()
        }
        store = RecordStore(tmp_path)
        record = make_record(
            "x",
            paper="dualbatch",
            config=TOYS[name][1],
            key="k",
            metrics=outcome.metrics,
            timings=timings,
        )
        store.write(record)
        (read,) = store.load("dualbatch")
        assert read.metrics == json.loads(json.dumps(outcome.metrics)) == outcome.metrics
        assert read.timings == timings


class TestTrain:
    @pytest.mark.parametrize("name", ["baseline", "dual-batch", "hybrid", "two workers"])
    def test_what_tables_read(self, toys, name):
        config = TOYS[name][1]
        outcome = toys[name]
        metrics = outcome.metrics
        epochs = sum(count for count, _ in config["stages"])
        workers = config.get("workers", 4)
        for key in (
            "accuracy",
            "test_loss",
            "train_loss",
            "resolution",
            "virtual_time_s",
            "wall_time_s",
        ):
            assert len(metrics[key]) == epochs, key
        assert all(0 <= value <= 100 for value in metrics["accuracy"])
        for key in ("virtual_time_s", "wall_time_s"):
            assert metrics[key] == sorted(metrics[key]) and metrics[key][0] > 0
        assert metrics["commits"] == len(metrics["staleness"]) == epochs * workers
        assert len(metrics["plans"]) == len(config["sub_stages"])
        samples = outcome.timings["epoch"].samples_s
        assert sum(samples) == pytest.approx(metrics["wall_time_s"][-1])
        assert metrics["same_weights"] is (True if config.get("verify") else None)

    def test_the_hybrid_scheme_cycles_the_resolution(self, toys):
        low, high = (entry["resolution"] for entry in _HYBRID["sub_stages"])
        assert low < high
        assert toys["hybrid"].metrics["resolution"] == [low, high] * 2
        assert set(toys["dual-batch"].metrics["resolution"]) == {None}
        plans = toys["hybrid"].metrics["plans"]
        assert [plan["resolution"] for plan in plans] == [low, high]
        assert plans[0]["small_batch"] > plans[1]["small_batch"]

    def test_the_virtual_clock_is_the_time_models(self, toys):
        plan = building.plan_of(_BASE["sub_stages"][0]["plan"])
        epoch = plan.time_of("large")
        virtual = toys["baseline"].metrics["virtual_time_s"]
        assert virtual == pytest.approx([epoch, 2 * epoch])

    def test_the_same_seed_repeats_exactly_and_another_does_not(self, toys):
        data = digits(_HYBRID)
        torch.rand(3)  # whatever ran before in the process
        again = training.train(_HYBRID, 0, data, "cpu").metrics
        first = toys["hybrid"].metrics
        assert again | {"wall_time_s": None} == first | {"wall_time_s": None}
        other = training.train(_HYBRID, 1, data, "cpu").metrics
        assert other["train_loss"] != first["train_loss"]

    def test_captured_steps_are_ordinary_ones_where_nothing_captures(self, toys):
        under_gpu = runs.section51("gpu", DIGITS, 1.1, 2).config
        assert under_gpu["captured"] and under_gpu["autocast"] == "bfloat16"
        again = training.train(_DUAL | {"captured": True}, 0, digits(_DUAL), "cpu").metrics
        assert again["train_loss"] == toys["dual-batch"].metrics["train_loss"]

    def test_the_factor_and_the_sub_stages_matter(self, toys):
        data = digits(_DUAL)
        first = toys["dual-batch"].metrics
        plain = training.train(_DUAL | {"factor": "none"}, 0, data, "cpu").metrics
        assert plain["test_loss"] != first["test_loss"]
        assert plain["virtual_time_s"] == first["virtual_time_s"]

    def test_a_training_that_diverges_is_no_result(self):
        config = _DUAL | {"stages": [[1, 1e30]]}
        with pytest.raises(FloatingPointError, match="diverged"):
            training.train(config, 0, digits(config), "cpu")

    @pytest.mark.parametrize("side", [9, 16])
    def test_no_image_is_enlarged_unasked(self, side):
        subs = [entry | {"resolution": side} for entry in _HYBRID["sub_stages"]]
        with pytest.raises(ValueError, match=rf"resolution {side}, and the images have 8x8 pixels"):
            training.train(_HYBRID | {"sub_stages": subs}, 0, digits(_HYBRID), "cpu")

    def test_more_samples_than_there_are(self):
        config = shorter(runs.section51("smoke", DIGITS, 1.1, 2), samples=10**6)
        with pytest.raises(ValueError, match="1000000 samples of"):
            training.train(config, 0, digits(config), "cpu")

    def test_the_seed_is_in_every_worker_and_epoch(self):
        data = building.TrainingData(_DUAL, digits(_DUAL), "cpu")
        assert len(data.images) == 40 and data.images.shape[1] == 3
        assert len(data.test[0]) == 20
        assert len(data.labels.unique()) == 10  # of every class


class TestSchemes:
    def test_rows_are_of_stages_and_sub_stages(self, toys):
        rows = toys["three schemes"].metrics["rows"]
        assert [row["scheme"] for row in rows] == [
            *["dual-batch learning"] * 2,
            *["cyclic progressive learning"] * 4,
            *["hybrid scheme"] * 4,
        ]
        assert [row["resolution"] for row in rows] == [32, 32, *[24, 32] * 4]
        assert [row["batches"] for row in rows[:4]] == [[102, 560], [102, 560], [600], [560]]
        assert [(row["first"], row["last"]) for row in rows[-4:]] == [
            (1, 40), (41, 80), (81, 100), (101, 120),
        ]  # fmt: skip


class TestSynchronise:
    def test_the_log_is_of_a_barrier(self, toys):
        metrics = toys["bsp"].metrics
        assert metrics["pulled"] == [0] * 4 + [4] * 4
        assert set(metrics["staleness"]) == {0}
        assert sorted(metrics["worker"][:4]) == [0, 1, 2, 3]
        assert metrics["commit_s"] == sorted(metrics["commit_s"])
        assert len(metrics["accuracy"]) == len(metrics["virtual_time_s"]) == 2

    def test_each_way_is_trained(self, toys):
        data = digits(_SYNC)
        losses = {}
        for sync, merge in SYNCS:
            config = shorter(runs.synchronised("smoke", DIGITS, sync, merge))
            metrics = PAPER.experiments["synchronise"].function(config, 0, data, "cpu").metrics
            losses[sync, merge] = metrics["train_loss"][-1]
            if sync == "asp":
                assert max(metrics["staleness"]) > 0
        assert losses["bsp", "average"] == toys["bsp"].metrics["train_loss"][-1]
        assert len({losses["asp", rule] for rule in RULES}) == 3
        assert all(losses["asp", rule] != losses["bsp", rule] for rule in RULES)


class TestOwnPlan:
    def test_the_plan_follows_from_the_times_measured(self, monkeypatch):
        for b in (1e-2, 2e-2):
            model = TimeModel(1e-3, b, (), (1.0,))
            monkeypatch.setattr(workers, "fitted", lambda *arguments, m=model: (m, {}))
            metrics = workers.train_own_plan(_OWN, 0, digits(_OWN), "cpu").metrics
            due = building.plan_of(_OWN["sub_stages"][0]["plan"] | {"a": 1e-3, "b": b})
            assert metrics["plan"]["small_batch"] == due.small_batch
            assert metrics["plans"][0]["small_batch"] == due.small_batch
            assert (metrics["a"], metrics["b"], metrics["error"]) == (1e-3, b, None)
            assert len(metrics["accuracy"]) == 2

    def test_where_there_is_no_plan_it_is_said_and_nothing_is_trained(self, monkeypatch):
        for b, why in ((-1e-3, "without a fixed cost"), (1e-9, "feasible k")):
            model = TimeModel(1e-3, b)
            monkeypatch.setattr(workers, "fitted", lambda *arguments, m=model: (m, {}))
            metrics = workers.train_own_plan(_OWN, 0, digits(_OWN), "cpu").metrics
            assert why in metrics["error"] and metrics["plan"] is None
            assert "accuracy" not in metrics

    def test_times_that_do_not_grow_are_no_failure(self, monkeypatch):
        def flat(*arguments):
            raise ValueError("seconds per step do not increase with the batch size")

        monkeypatch.setattr(workers, "fitted", flat)
        metrics = workers.train_own_plan(_OWN, 0, digits(_OWN), "cpu").metrics
        assert "do not increase" in metrics["error"] and metrics["a"] is None
        without_processes(monkeypatch)
        monkeypatch.setattr(workers, "fitted", flat)
        (part,) = workers.wall_times(_WALL, 0, None, "cpu").metrics["parts"]
        told = [str(solved["error"]) for solved in part["solved"]]
        assert ["do not increase" in error for error in told] == [False] * 3 + [True] * 2 + [
            False
        ] * 3


class TestWall:
    def test_every_kind_has_its_shares(self, toys):
        (part,) = toys["wall"].metrics["parts"]
        kinds = _WALL["parts"][0]["epochs"]
        assert set(part["shares_s"]) == {str(n) for n in range(len(kinds))}
        for number, solved in enumerate(part["solved"]):
            for own in part["shares_s"][str(number)]:
                assert len(own) == _WALL["rounds"] and min(own) > 0
            assert (solved["plan"] is None) == (kinds[number]["k"] == 1.0)
        assert len(part["round_s"]["asp"]) == _WALL["rounds"]

    def test_kinds_are_told_apart(self, toys):
        """On the virtual clock, which has one time model for each resolution, times are known."""
        (part,) = toys["wall"].metrics["parts"]
        kinds = _WALL["parts"][0]["epochs"]
        models = {kind["resolution"]: kind for kind in reversed(kinds)}
        for number, (kind, solved) in enumerate(zip(kinds, part["solved"], strict=True)):
            entry = {key: kind[key] for key in ("k", "large_batch")}
            entry |= {"samples": 40, "n_small": 1, "n_large": 1}
            entry |= {key: solved[key] for key in ("a", "b")}
            plan = (
                building.plan_of(entry)
                if kind["k"] > 1
                else workers.alone(entry["large_batch"], 40)
            )
            first = models[kind["resolution"]]
            a, b = (0.001, 0.01) if first["a"] is None else (first["a"], first["b"])
            due = [plan.time_of(own, TimeModel(a, b)) for own in plan.kinds]
            for worker, seconds in enumerate(part["shares_s"][str(number)]):
                assert seconds == pytest.approx([due[worker]] * _WALL["rounds"])

    def test_workers_without_a_core_each_are_not_timed(self, monkeypatch):
        monkeypatch.setattr(workers, "devices_here", lambda device: 1)
        metrics = workers.wall_times(_WALL, 0, None, "cpu").metrics
        assert metrics == {"devices": 1, "parts": []}

    def test_a_kind_without_a_plan_is_left_out(self, monkeypatch):
        without_processes(monkeypatch)
        model = TimeModel(1e-3, -1e-4)
        monkeypatch.setattr(workers, "fitted", lambda *arguments: (model, {}))
        (part,) = workers.wall_times(_WALL, 0, None, "cpu").metrics["parts"]
        told = [bool(solved["error"]) for solved in part["solved"]]
        kinds = _WALL["parts"][0]["epochs"]
        assert told == [kind["a"] is None and kind["k"] > 1 for kind in kinds]
        assert {int(n) for n in part["shares_s"]} == {n for n, no in enumerate(told) if not no}


def logged(*entries: tuple[int, int, int, float]) -> list[Commit]:
    """Return a log of (worker, share, pulled version, second)."""
    return [
        Commit(number, worker, share, pulled, 0, 1.0, time_s, 1.0)
        for number, (worker, share, pulled, time_s) in enumerate(entries)
    ]


def test_seconds_of_shares_begin_with_the_pull():
    log = logged((0, 0, 0, 5.0), (1, 0, 0, 6.0), (1, 1, 2, 7.5), (0, 1, 2, 8.0))
    assert workers.share_seconds(log, 1) == [[[2.0], [1.5]]]


def test_rounds_without_a_barrier_are_the_slower_workers():
    log = logged((0, 0, 0, 1.0), (0, 1, 1, 2.0), (1, 0, 0, 4.0), (0, 2, 2, 3.5), (1, 1, 3, 8.5))
    assert workers.round_seconds(log, 1) == [4.5]


class TestFlatness:
    def test_what_tables_read(self, toys):
        metrics = toys["flat"].metrics
        assert len(metrics["variances"]) == len(_FLAT["variance_batches"])
        assert all(value > 0 for value in metrics["variances"])
        assert [len(row) for row in metrics["rises"]] == [2] * len(_FLAT["sizes"])
        assert {name: len(line) for name, line in metrics["line"].items()} == {
            "train": len(PLACES),
            "test": len(PLACES),
        }
        # In the middle of the line is the model itself.
        assert metrics["line"]["train"][5] == pytest.approx(metrics["train_loss"])

    def test_variance_of_gradients_against_all_batches(self):
        """Of a model without batch normalisation: that of one sample over the batch size."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
        pool = torch.randn(30, 3, 2, 2), torch.randint(3, (30,))
        each = torch.stack([minima._gradient(model, pool[0][n : n + 1], pool[1][n : n + 1])
                            for n in range(30)]).double()  # fmt: skip
        sigma2 = float((each - each.mean(0)).square().sum(1).mean())
        for batch in (1, 4, 16):
            generator = torch.Generator().manual_seed(batch)
            found = minima.gradient_variance(model, pool, batch, 600, generator)
            assert found == pytest.approx(sigma2 / batch, rel=0.1)

    def test_directions_have_the_length_of_every_filter(self):
        model = building.build_model({"model": MODEL}, 10)
        direction = minima.filter_normalised(model, torch.Generator().manual_seed(0))
        for weight, part in zip(model.parameters(), direction, strict=True):
            if weight.dim() < 2:
                assert not part.any()
            else:
                assert torch.allclose(part.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))

    def test_rises_of_a_known_bowl(self):
        """Of a loss whose gradient is known, the step up has its length; the model stays."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2, bias=False))
        batch = torch.randn(8, 1, 2, 2), torch.randint(2, (8,))
        before = [p.clone() for p in model.parameters()]
        gradient = minima._gradient(model, *batch)
        size = 1e-3
        due = size * float(gradient.norm())
        assert minima.worst_rise(model, batch, size) == pytest.approx(due, rel=1e-2)
        assert all(map(torch.equal, before, model.parameters()))


class TestBuilding:
    @pytest.mark.parametrize("profile", ["smoke", "gpu"])
    def test_models_have_one_dropout_before_the_last_layer(self, profile):
        for part in ("cifar", "imagenet"):
            model = building.build_model(runs.PROFILES[profile][part], 7)
            dropouts = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
            linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
            assert len(dropouts) == 1 and dropouts[0].p == 0.0
            assert linear[-1].out_features == 7

    def test_a_model_without_a_last_linear_layer(self):
        with pytest.raises(ValueError, match="unet has no last linear layer"):
            building.build_model({"model": {"name": "unet"}}, 2)

    def test_low_precision(self):
        assert building.low_precision({"autocast": None}) is None
        assert building.low_precision({"autocast": "bfloat16"}) is torch.bfloat16


class TestTimes:
    def test_what_tables_read(self, toys):
        metrics = toys["times"].metrics
        assert [fit["resolution"] for fit in metrics["fits"]] == _TIMES["resolutions"]
        for fit, passes in zip(metrics["fits"], metrics["passes"], strict=True):
            assert len(fit["seconds"]) == len(_TIMES["batch_sizes"])
            line = np.polyfit(_TIMES["batch_sizes"], fit["seconds"], 1)
            assert (fit["a"], fit["b"]) == pytest.approx(tuple(line), rel=1e-6)
            assert [row["batch"] for row in passes] == _TIMES["batch_sizes"]
            for row in passes:
                steps = math.ceil(80 / row["batch"])
                whole = (fit["a"] * row["batch"] + fit["b"]) * steps
                assert row["equation2_s"] == pytest.approx(whole)
                assert row["predicted_s"] == pytest.approx(fit["a"] * 80 + fit["b"] * steps)
                assert row["measured_s"] > 0
        assert set(metrics["epoch_s"]) == {"6", "8"}
        assert all(seconds > 0 for seconds in metrics["epoch_s"].values())

    def test_shares_are_of_every_plan(self, toys):
        shares = toys["times"].metrics["shares"]
        assert {(row["k"], row["n_small"]) for row in shares} == {
            (k, n) for k in (1.05, 1.1) for n in range(1, 5)
        }
        for row in shares:
            if "error" in row:
                assert "feasible k" in row["error"] or "b =" in row["error"]
            else:
                assert row["kind"] in ("small", "large")
                assert row["measured_s"] > 0 and row["predicted_s"] > 0

    def test_passes_and_shares_can_be_left_out(self, toys):
        metrics = toys["no passes"].metrics
        assert metrics["passes"] == [[], []] and metrics["shares"] == []
        assert set(metrics["epoch_s"]) == {"8", "16"}

    def test_where_smaller_batches_look_slower_all_is_measured_again(self, monkeypatch):
        asked = []

        def busy(functions, *, warmup, repeats, device):
            asked.append(repeats)
            times = growing(functions, warmup=warmup, repeats=repeats, device=device)
            return (
                times
                if len(asked) > quiet
                else dict(zip(times, reversed(times.values()), strict=True))
            )

        monkeypatch.setattr(measuring, "time_interleaved", busy)
        monkeypatch.setattr(measuring, "_pass", lambda *arguments: lambda: None)
        quiet = 1
        fit, _ = measuring.fitted(_TIMES, 8, {}, 5, "cpu")
        assert fit.a > 0 and asked == [5, 10]
        asked, quiet = [], 9
        with pytest.raises(ValueError, match="do not increase"):
            measuring.fitted(_TIMES, 8, {}, 5, "cpu")
        assert asked == [5, 10, 20]

    def test_a_pass_ends_with_a_short_batch(self, monkeypatch):
        made = []

        def step_of(config, model, resolution, batch, device):
            return lambda: made.append(batch)

        monkeypatch.setattr(measuring, "step_of", step_of)
        for batch, samples, steps in ((4, 10, [4, 4, 2]), (5, 10, [5, 5]), (16, 10, [10])):
            made.clear()
            measuring._pass(_TIMES, 8, batch, samples, "cpu")()
            assert made == steps

    def test_a_plan_without_a_solution_is_recorded(self, monkeypatch):
        """A device with next to no cost of a step has no small batch that takes longer."""
        monkeypatch.setattr(measuring, "step_of", lambda *arguments: lambda: None)
        monkeypatch.setattr(
            measuring,
            "fitted",
            lambda config, side, rows, *rest: (
                TimeModel(1.0, 1e-9),
                dict.fromkeys(rows, Timing((1.0,), 0)),
            ),
        )
        rows = measuring._shares(_TIMES, {"a": 1.0, "b": 1e-9, "resolution": 8}, "cpu")
        assert len(rows) == 8 and all("error" in row for row in rows)


class TestPublished:
    def test_an_exact_line_is_found(self, toys):
        found = toys["published"].metrics["frameworks"]
        assert set(found) == {"TensorFlow", "other"}
        for fit in found.values():
            assert (fit["a"], fit["b"]) == pytest.approx((5e-4, 0.01))
            assert fit["largest_error"] == pytest.approx(0, abs=1e-9)
            assert fit["share_beyond"] == 0 and fit["r_squared"] == pytest.approx(1)
            assert len(fit["table2"]) == 8 and all(size < 500 for size in fit["table2"])
            assert fit["batches"] == list(range(20, 501, 20))
            assert fit["epoch_s"] == pytest.approx(fit["predicted_s"])
            assert set(fit["plan_errors"]) == {
                "38",
                "83",
                "87",
                "127",
                "154",
                "160",
                "205",
                "242",
                "500",
            }

    def test_errors_are_of_the_epoch(self):
        found = measuring.published({}, 0, epoch_times(0.1), "cpu").metrics["frameworks"]
        bent = found["TensorFlow"]
        assert 0.04 < bent["median_error"] <= bent["largest_error"] < 0.1
        assert bent["largest_at"] % 2 in (0, 1) and 0.9 < bent["share_beyond"] <= 1
        assert bent["plan_errors"]["83"] > 0 > bent["plan_errors"]["38"]
        assert found["other"]["largest_error"] == pytest.approx(0, abs=1e-9)


class TestMemory:
    def test_a_line_and_the_largest_batch_under_a_limit(self, toys):
        outcome = toys["memory"]
        metrics = outcome.metrics
        assert metrics["batch_sizes"] == _MEMORY["batch_sizes"]
        assert metrics["limit_bytes"] == 4 * metrics["peaks"][-1]
        assert outcome.peak_bytes == metrics["peaks"][-1]
        assert metrics["peaks"] == sorted(metrics["peaks"])
        line = np.polyfit(metrics["batch_sizes"], metrics["peaks"], 1)
        assert metrics["bytes_per_sample"] == pytest.approx(line[0], rel=0.05)
        room = metrics["limit_bytes"] - metrics["fixed_bytes"]
        assert metrics["predicted_max"] == int(room / metrics["bytes_per_sample"])
        assert metrics["measured_max"] == pytest.approx(metrics["predicted_max"], rel=0.2)
        assert all(n > metrics["batch_sizes"][-1] for n, _ in metrics["beyond"])

    def test_an_error_that_is_no_lack_of_memory_is_seen(self, monkeypatch):
        def broken(*arguments):
            raise RuntimeError("broken")

        monkeypatch.setattr(measuring, "step_of", broken)
        with pytest.raises(RuntimeError, match="broken"):
            measuring._fits(_MEMORY, 2, 2**30, "cpu")

    def test_a_limit_below_the_parameters(self):
        assert measuring._fits(_MEMORY, 1, 1000, "cpu") is False


@pytest.mark.gpu
@pytest.mark.slow
def test_a_training_on_an_accelerator(device):
    config = _HYBRID | {"autocast": "bfloat16", "channels_last": True}
    outcome = training.train(config, 0, digits(config), str(device))
    assert len(outcome.metrics["accuracy"]) == 4


def test_data_facts_do_not_change_an_outcome(toys):
    renamed = replace(digits(_DUAL), provenance="elsewhere")
    again = training.train(_DUAL, 0, renamed, "cpu").metrics
    assert again["test_loss"] == toys["dual-batch"].metrics["test_loss"]
