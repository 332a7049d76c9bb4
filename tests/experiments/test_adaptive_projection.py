"""The model of strong scaling: the paper's schedules, fits to speed-ups and to measured steps."""

import itertools
import math
import subprocess
import sys

import pytest
from made_adaptive import measured_task

from repro import adaptive
from repro.adaptive import ScalingModel, updates
from repro.experiments.adaptive import projection, settings
from repro.experiments.adaptive.settings import CIFAR, DIV2K, PAPER, PHANTOM, STRATEGIES, TASKS

# Tables I to III by hand: the batch sizes at the start and the largest.
SIZES_OF = {
    DIV2K: {"best": (16, 16), "linear": (256, 256), "scheduled": (64, 256), "theta": (64, 256)},
    PHANTOM: {"best": (16, 16), "linear": (128, 128), "scheduled": (32, 128), "theta": (32, 128)},
    CIFAR: {
        "best": (128, 128),
        "linear": (2048, 2048),
        "scheduled": (256, 2048),
        "theta": (256, 2048),
    },
}


@pytest.fixture
def uncached():
    """Forget the fits to numbers that a test has changed, afterwards too."""
    projection.fitted_to_paper.cache_clear()
    yield
    projection.fitted_to_paper.cache_clear()


@pytest.mark.slow
def test_every_name_is_there_and_updates_need_no_torch():
    """Tables of finished trainings count updates; importing torch takes a second."""
    code = (
        "import sys; from repro.adaptive import updates, ScalingModel; "
        "assert 'torch' not in sys.modules; import repro.adaptive as package; "
        "found = {name: getattr(package, name) for name in package.__all__}; "
        "assert found['updates'] is updates and 'torch' in sys.modules; "
        "assert found.items() <= vars(package).items(); "
        "import repro.measure; assert found['CheckpointError'] is repro.measure.CheckpointError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    homes = [name for names in adaptive._HOMES.values() for name in names]
    assert sorted(homes) == sorted(adaptive.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = adaptive.nothing


class TestProjection:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("task", TASKS)
    def test_the_papers_schedules(self, task, strategy):
        own = PAPER[task][strategy]
        schedule = projection.paper_schedule(task, strategy)
        assert sum(epochs for _, epochs in schedule) == own.get("epochs", PAPER[task]["epochs"])
        sizes = [size for size, _ in schedule]
        assert (sizes[0], sizes[-1]) == SIZES_OF[task][strategy]
        assert all(b == 2 * a for a, b in itertools.pairwise(sizes))
        assert all(epochs > 0 for _, epochs in schedule)
        every = {"theta": PAPER[task]["interval"]}.get(strategy, own.get("every"))
        assert all(epochs == every for _, epochs in schedule[:-1])

    def test_schedules_by_hand(self):
        assert projection.paper_schedule(CIFAR, "theta") == [
            (256, 5),
            (512, 5),
            (1024, 5),
            (2048, 125),
        ]
        assert projection.paper_schedule(CIFAR, "scheduled") == [
            (256, 30),
            (512, 30),
            (1024, 30),
            (2048, 50),
        ]
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

        def spy(points, samples, overhead):
            seen.append((points, samples, overhead))
            return ScalingModel(1.0)

        monkeypatch.setattr(ScalingModel, "fit_speedups", spy)
        projection.fitted_to_paper.cache_clear()
        for cost in (0.5, None):
            projection.fitted_to_paper(task, left_out, cost)
            projection.fitted_to_paper(task, left_out, cost)
        nodes = {
            CIFAR: [[1, 2, 4, 8, 16, 32, 64, 128], [128], [256]],
            DIV2K: [[16], [256], [256]],
            PHANTOM: [[16], [128], [128]],
        }[task]
        values = {
            CIFAR: (3.49, 20.01, 64.64),
            DIV2K: (9.54, 71.40, 81.71),
            PHANTOM: (5.64, 30.79, 42.96),
        }[task]
        wanted = [
            (projection.paper_schedule(task, s), n, value)
            for s, n, value in zip(projection.SCALED, nodes, values, strict=True)
            if s != left_out
        ]
        # Each is fitted once; a given cost is held, none is fitted up to section VI-B's.
        assert seen == [
            (wanted, PAPER[task]["samples"], (0.5, 0.5)),
            (wanted, PAPER[task]["samples"], (0.0, projection.overhead())),
        ]

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
            found,
            max(curve, key=curve.get),
        )
        rest = [
            projection.best_speedup(model, CIFAR, s) / v
            for s, v in (("scheduled", 20.01), ("theta", 64.64))
        ]
        # At the least squares no part may exceed the whole error, nor that of fitting 3.49 alone.
        whole = self.error(model, CIFAR)
        assert math.log(found / 3.49) ** 2 + sum(math.log(r) ** 2 for r in rest) == (
            pytest.approx(whole)
        )
        alone = min(
            (
                ScalingModel(1.0, model.overhead_s, model.latency_s, math.exp(n / 20))
                for n in range(-40, 80)
            ),
            key=lambda m: abs(math.log(projection.best_speedup(m, CIFAR, "best") / 3.49)),
        )
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
        monkeypatch.setattr(
            projection, "fitted_to_paper", lambda *given: asked.append(given) or ScalingModel(1.0)
        )
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
        assert shares == pytest.approx(
            {
                "computation": computed / alone,
                "computation at B_m": parts[256][0] / alone,
                "communication": sent / alone,
                "blocked": blocked / alone,
                "before B_m": early / (computed + blocked),
            }
        )


# Blocked at every size and way; another with sums, which the averaging's thread makes.
EXACT = ScalingModel(2e-3, 5e-3, 0.06, 0.4, 0.0, 0.4)
SIZES = {task: job["sizes"] for task, job in settings.parallel("quick").config["jobs"].items()}


class TestMeasured:
    @pytest.mark.parametrize("task", TASKS)
    def test_an_exact_model_is_found_again(self, task):
        found = projection.fitted_here(measured_task(SIZES[task], settings.AVERAGING, EXACT))
        for name in ("sample_s", "overhead_s", "latency_s", "transfer_s", "summation_s", "overlap"):
            assert getattr(found, name) == pytest.approx(getattr(EXACT, name), rel=1e-6), name

    @pytest.mark.parametrize("task", TASKS)
    def test_steps_are_predicted_without_having_been_seen(self, task):
        found = measured_task(SIZES[task], settings.AVERAGING, EXACT)
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
        """The speed-up at scale, written out: ⌈N/B⌉ steps an epoch."""
        found = measured_task(SIZES[task], settings.AVERAGING, EXACT)
        said = projection.two_processes(found, task, strategy)
        share = SIZES[task][0] / PAPER[task]["best"]["batch"]
        alone = together = 0.0
        for size, epochs in projection.paper_schedule(task, strategy):
            steps = epochs * math.ceil(PAPER[task]["samples"] / size)
            alone += steps * EXACT.step(round(size * share), 1).total_s
            together += steps * EXACT.step(round(size * share), 2).total_s
        assert said == pytest.approx(alone / together, rel=1e-6)

    def test_local_sums_are_communication(self):
        """The averaging's thread makes them, and they hide like it; nothing counts twice."""
        model = ScalingModel(2e-3, 5e-3, 0.06, 0.4, 0.02, 0.4)
        found = measured_task(SIZES[CIFAR], settings.AVERAGING, model)
        for step, own in zip(
            (s for s in found["steps"] if s["averaging"] == "all_to_all"),
            projection.steps_of(found, "all_to_all"),
            strict=True,
        ):
            step["summation_s"] = model.summation_s
            assert (own.batch_size, own.processes, own.summation_s) == (step["batch"], 2, 0.0)
        for step, own in zip(
            (s for s in found["steps"] if s["averaging"] == "all_to_all"),
            projection.steps_of(found, "all_to_all"),
            strict=True,
        ):
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
        found = measured_task(SIZES[task], settings.AVERAGING, EXACT)
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
        {
            "batch": n,
            "processes": p,
            "averaging": way,
            "total_s": s,
            "computation_s": s,
            "communication_s": 0.001,
            "summation_s": 0.0,
            "blocked_s": 0.001 * (p - 1),
        }
        for p, way, s in ((1, "none", 0.001), (2, "all_to_all", 0.003))
        for n in (4, 8, 16)
    ]
    found = {
        "steps": steps,
        "messages": {"all_to_all": [(2**10, 2, 0.001), (2**20, 2, 0.002)]},
        "gradient_bytes": 2**16,
        "buckets": 4,
    }
    assert projection.fitted_here(found) is None
    assert all(math.isnan(row["predicted_s"]) for row in projection.checked(found))
    assert math.isnan(projection.two_processes(found, PHANTOM, "best"))
