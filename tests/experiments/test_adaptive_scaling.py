"""Figures 7, 8, 9 and 11, section IV-B: speed-ups, parts of a step, and the model's numbers."""

import math
import statistics

import made
import pytest
from invented import make_record
from planted import reference

from repro.adaptive import ScalingModel
from repro.experiments import load_paper
from repro.experiments.adaptive import overlap, projection, runs, scaling
from repro.experiments.query import Results

MEASURED = [f"figure9/{key}" for key in ("few_samples", "all_to_all_faster", "steps_predicted")]
FREE_CORES = {"type": "cpu", "name": "a CPU", "slug": "cpu-4-cores", "memory_bytes": 2**33}


# Steps that follow the model exactly: blocked by communication everywhere, in all of its parts.
MODEL = ScalingModel(1e-3, 4e-3, 0.03, 0.2, overlap=0.5)
BYTES, BUCKETS = 40_000, 3


def measured_task(sizes, ways, model=MODEL, processes=2):
    """Return what processes measure whose steps follow a model, but for turns' 1 %.

    Turns of the smallest batch and of all-to-all go the other way, so that ratios differ too.
    """
    steps = []
    for n in sizes:
        for way in ("none", *ways):
            cost = model.step(n, 1 if way == "none" else processes)
            # An allreduce hides nothing.
            blocked = cost.communication_s if way == "allreduce" else cost.blocked_s
            total = cost.computation_s + blocked
            own = 0.01 * (-1) ** ((n == min(sizes)) + (way == "all_to_all"))
            step = {"batch": n, "processes": 1 if way == "none" else processes, "averaging": way}
            step |= {"computation_s": cost.computation_s, "communication_s": cost.communication_s}
            step |= {"summation_s": 0.0, "blocked_s": blocked, "total_s": total}
            step["samples_s"] = [total * math.exp(own * k) for k in (-2, -1, 0, 1, 2)]
            steps.append(step)
    alpha, beta = model.latency_s / BUCKETS, model.transfer_s / BYTES
    seconds = lambda size: 2 * (processes - 1) * (alpha + beta * size / processes)  # noqa: E731
    messages = [(size, processes, seconds(size)) for size in (2**10, 2**14, 2**18)]
    return {
        "processes": processes, "steps": steps, "messages": dict.fromkeys(ways, messages),
        "difference": 0.0, "gradient_bytes": BYTES, "buckets": BUCKETS,
    }  # fmt: skip


def launches(factors, change=lambda seed, step: 1.0):
    """Return launches that take as many times the modelled steps, whose first turns say nothing."""
    (run,) = runs.parallel("long", {})
    records = []
    for seed, factor in enumerate(factors):
        jobs = run.config["jobs"].items()
        tasks = {task: measured_task(job["sizes"], runs.AVERAGING) for task, job in jobs}
        metrics = {"tasks": tasks, "device": "a CPU"}
        for task in metrics["tasks"].values():
            task["difference"] = 1e-3 * (seed == 3)
            for step in task["steps"]:
                first, *others = [factor * change(seed, step) * n for n in step["samples_s"]]
                step["samples_s"] = [9 * first, *others]
        values = {"paper": "adaptive", "config": run.config, "metrics": metrics}
        records.append(make_record(run.experiment, seed=seed, device=FREE_CORES, **values))
    return Results([run], (), records, profile="long")


class TestLaunches:
    """Under `long` the processes are launched anew; turns of one launch tell of that alone."""

    FACTORS = (1.0, 1.1, 1.0, 1.3, 0.9)

    def test_a_launch_compares_with_itself(self):
        """One that is slow in all its steps says nothing of their ratios, a slow averaging does."""
        measurement = scaling.measured(launches(self.FACTORS))[runs.DIV2K]
        assert scaling.pace(measurement, runs.DIV2K, "theta").error == pytest.approx(0, abs=1e-12)
        draws = (1.0, 1.3, 0.8, 1.1, 0.9)
        change = lambda seed, step: draws[seed] if step["averaging"] == "all_to_all" else 1.0  # noqa: E731
        results = launches([1.0] * 5, change)
        gap = scaling.pace(scaling.measured(results)[runs.DIV2K], runs.DIV2K, "theta")
        error = statistics.stdev(-math.log(draw) for draw in draws) / math.sqrt(5)
        assert (gap.error, gap.dof, gap.trials) == (pytest.approx(error), 4, "launches")
        found = made.verdict("adaptive/figure9/steps_predicted", results)
        assert found.word == "undecided" and " launches a cell decide" in found.evidence

    def test_weights_that_differ_in_one_launch(self):
        row = made.check_row("adaptive/figure9", launches([1.0] * 5))
        assert row["holds"] == "NO" and "0.001" in row["evidence"]
        row = made.check_row("adaptive/figure9", reference("adaptive/figure9"))
        assert row["holds"] == "yes"


@pytest.mark.parametrize("target", MEASURED)
def test_steps_as_the_model_has_them(target):
    noise = (1.0, 1.00001, 0.99999, 1.00002, 0.99998)
    change = lambda seed, step: noise[(seed + step["batch"] + len(step["averaging"])) % 5]  # noqa: E731
    found = made.verdict(f"adaptive/{target}", launches([1.0] * 5, change))
    assert found.word == "reproduced", found.evidence


@pytest.fixture
def uncached():
    """Forget the fits to numbers that a test has changed, afterwards too."""
    projection.fitted_to_paper.cache_clear()
    yield
    projection.fitted_to_paper.cache_clear()


class TestProjection:
    def test_schedules_by_hand(self):
        theta = [(256, 5), (512, 5), (1024, 5), (2048, 125)]
        assert runs.paper_schedule(runs.CIFAR, "theta") == theta
        scheduled = [(256, 30), (512, 30), (1024, 30), (2048, 50)]
        assert runs.paper_schedule(runs.CIFAR, "scheduled") == scheduled
        assert runs.paper_schedule(runs.DIV2K, "theta") == [(64, 10), (128, 10), (256, 1080)]
        assert runs.paper_schedule(runs.PHANTOM, "best") == [(16, 930)]
        assert projection.nodes_of(runs.DIV2K, "best") == [1, 2, 4, 8, 16]
        assert projection.overhead() == pytest.approx(7 / 6)  # 0.0014 s a step, 0.0012 s a sample

    def test_a_value_that_is_left_out_changes_nothing(self, monkeypatch, uncached):
        """A flattering value cannot move the band that it is compared with."""
        task = runs.DIV2K
        predicted, whole = projection.held_out(task, "theta"), projection.fitted_to_paper(task)
        own = runs.PAPER[task]["speedups"]
        monkeypatch.setitem(runs.PAPER[task], "speedups", own | {"theta": [own["theta"][0], 9.0]})
        projection.fitted_to_paper.cache_clear()
        assert projection.held_out(task, "theta") == predicted
        assert projection.fitted_to_paper(task) != whole
        assert predicted[0] != predicted[1]  # without and with section VI-B's cost

    @pytest.mark.parametrize("task", runs.TASKS)
    def test_steps_are_predicted_without_having_been_seen(self, task):
        """Blocked at every size and way; a step that is changed does not change its prediction."""
        exact = ScalingModel(2e-3, 5e-3, 0.06, 0.4, 0.4)
        (run,) = runs.parallel("quick", {})
        sizes = run.config["jobs"][task]["sizes"]
        found = measured_task(sizes, runs.AVERAGING, exact)
        assert projection.fitted_here(found).sample_s == pytest.approx(exact.sample_s, rel=1e-6)

        def said(size):
            return projection.fitted_here(found, without=size).step(size, 2).total_s

        for size in sizes:
            assert said(size) == pytest.approx(exact.step(size, 2).total_s)
        for step in found["steps"]:
            if step["batch"] == sizes[1] and step["averaging"] == "all_to_all":
                step["blocked_s"] *= 3
        assert said(sizes[1]) == pytest.approx(exact.step(sizes[1], 2).total_s)
        for step in found["steps"]:
            step["computation_s"] = 0.001
        with pytest.raises(ValueError, match="does not grow"):
            projection.fitted_here(found)


def test_the_table_of_overlap():
    """1 s of the 2 s of communication hides; the model has it all hidden, but on 256 nodes."""
    row = {"computation_s": 4.0, "after_s": [6.0] * 3, "within_s": [5.0, 5.5, 4.5]}
    longer = {**row, "after_s": [12.0] * 3, "within_s": [8.0, 9.0, 7.0]}
    assert overlap.hidden(row).mean == pytest.approx(50.0)
    assert overlap.hidden(longer).mean == pytest.approx(100.0)  # 4 s, all of the computation
    changed = {"metrics": {"ratios": {str(nodes): row for nodes in (256, 64, 128)}}}
    results = made.made_results("adaptive/overlap", lambda run, seed: changed, {}, "quick")
    rows = list(overlap.table(results))
    assert [row["nodes modelled"] for row in rows] == [64, 128, 256]
    assert {row["blocked, measured (%)"] for row in rows} == {"20"}
    assert [row["blocked, model (%)"] for row in rows] == ["0", "0", "43"]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("figure7", ["ResNet"]),
        ("figure8", ["ResNet"]),
        ("figure11", ["EDSR"]),
        ("breakdown", ["STAND-IN", "SYNTHETIC"]),
    ],
)
def test_a_caption_names_the_stand_ins_of_its_own_task(name, others):
    artefact = load_paper("adaptive").artefacts[name]
    assert "SIMULATED" in artefact.caption(Results([], (), [], profile="gpu"))
    caption = artefact.caption(reference(f"adaptive/{name}"))
    assert "SIMULATED" in caption and not any(other in caption for other in others)
    assert ("for ResNet-20" in caption) == (name == "figure11")
