"""Figures 7, 8, 9 and 11, section IV-B: speed-ups, parts of a step, and the model's numbers."""

import math
import statistics

import made
import pytest
from invented import make_record
from made_adaptive import MODEL, World, checked, judge, measured_task, nothing, results_of

from repro.adaptive import ScalingModel
from repro.experiments import load_paper
from repro.experiments.adaptive import overlap, projection, runs, scaling
from repro.experiments.adaptive.runs import (
    AVERAGING,
    CIFAR,
    DIV2K,
    PAPER,
    PHANTOM,
    TASKS,
    paper_schedule,
)
from repro.experiments.query import Results
from repro.experiments.view import signature

DESIGN = load_paper("adaptive")
STRONG = {"figure7": DIV2K, "figure8": PHANTOM, "figure11": CIFAR}
MEASURED = [f"figure9/{key}" for key in ("few_samples", "all_to_all_faster", "steps_predicted")]
FREE_CORES = {"type": "cpu", "name": "a CPU", "slug": "cpu-4-cores", "memory_bytes": 2**33}


def slower(factor, tasks=TASKS, **options):
    """Return a world in which all-to-all takes so many times as long in some tasks."""

    def edit(metrics, config):
        for task in tasks:
            for step in metrics["tasks"][task]["steps"]:
                if step["averaging"] == "all_to_all":
                    step["samples_s"] = [factor * seconds for seconds in step["samples_s"]]

    return World(edit={"parallel": edit}, device=FREE_CORES, **options)


def launches(factors, change=lambda seed, step: 1.0):
    """Return launches that take as many times the modelled steps, whose first turns say nothing."""
    (run,) = runs.parallel("long", {})
    records = []
    for seed, factor in enumerate(factors):
        metrics = World()(run, seed)["metrics"]
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

    def test_each_counts_once_by_the_median_of_its_turns(self):
        found = scaling.measured(launches(self.FACTORS))[DIV2K]["steps"]
        once = scaling.measured(launches([1.0]))[DIV2K]["steps"]
        for step, one in zip(found, once, strict=True):
            middle = statistics.median(one["samples_s"])
            assert step["samples_s"] == pytest.approx([f * middle for f in self.FACTORS])
        assert signature(launches(self.FACTORS), "").endswith(" · n = 5")

    def test_a_launch_compares_with_itself(self):
        """One that is slow in all its steps says nothing of their ratios, a slow averaging does."""
        measurement = scaling.measured(launches(self.FACTORS))[DIV2K]
        assert scaling.pace(measurement, DIV2K, "theta").error == pytest.approx(0, abs=1e-12)
        draws = (1.0, 1.3, 0.8, 1.1, 0.9)

        def change(seed, step):
            return draws[seed] if step["averaging"] == "all_to_all" else 1.0

        results = launches([1.0] * 5, change)
        gap = scaling.pace(scaling.measured(results)[DIV2K], DIV2K, "theta")
        error = statistics.stdev(-math.log(draw) for draw in draws) / math.sqrt(5)
        assert (gap.error, gap.dof, gap.trials) == (pytest.approx(error), 4, "launches")
        found = made.verdict("adaptive/figure9/steps_predicted", results)
        assert found.word == "undecided" and " launches a cell decide" in found.evidence

    def test_weights_that_differ_in_one_launch(self):
        row = made.check_row("adaptive/figure9", 0, launches([1.0] * 5))
        assert row["holds"] == "NO" and "0.001" in row["evidence"]
        assert checked("figure9")["holds"] == "yes"
        assert checked("figure9", World(status=nothing))["holds"] == "not run"


class TestMeasured:
    @pytest.mark.parametrize("target", MEASURED)
    def test_steps_as_the_model_has_them(self, target):
        found = judge(target, World(jitter=0.001, device=FREE_CORES))
        assert found.word == "reproduced", found.evidence
        assert judge(target, World(status=nothing)).word == "not run"

    @pytest.mark.parametrize(
        ("factor", "jitter", "word"),
        [(1.15, 0.01, "reproduced"), (1.3, 0.01, "not reproduced")],
    )
    def test_steps_predicted(self, factor, jitter, word):
        """The prediction is of the medians of other sizes; these turns are judged."""
        found = judge("figure9/steps_predicted", slower(factor, jitter=jitter))
        assert found.word == word, found.evidence
        assert f"DIV2K, B = 4 ×{1 / factor:.2f} [" in found.evidence
        assert found.evidence.count("B = ") == 14

    def test_few_samples(self):
        """Without a cost of a step a sample takes its time."""
        free = World(model=ScalingModel(1e-3), jitter=0.001)
        assert judge("figure9/few_samples", free).word == "not reproduced"
        found = judge("figure9/few_samples")
        wanted = (1 + 7 / 6 / 8) / (1 + 7 / 6 / 128)  # section VI-B: a step costs 7/6 of a sample
        said = "CIFAR: time of a sample at B = 8 over 128"
        assert said in found.evidence and f"paper ×{wanted:.2f}" in found.evidence

    def test_all_to_all(self):
        target = "figure9/all_to_all_faster"
        assert judge(target, slower(9.0)).word == "not reproduced"
        assert judge(target, slower(9.0, [CIFAR], jitter=0.001)).word == "partly"
        found = judge(target)
        assert found.word == "not run" and "2 processes on 2 cores leave no core" in found.evidence

    @pytest.mark.parametrize("artefact", STRONG)
    def test_the_speedups_need_a_cluster(self, artefact):
        found = judge(f"{artefact}/speedup")
        assert found.word == "not run"
        for nodes, value in PAPER[STRONG[artefact]]["speedups"].values():
            assert f" of {nodes or math.ceil(value)} " in found.evidence


@pytest.mark.parametrize("artefact", [*STRONG, "breakdown"])
def test_models_of_the_papers_cluster_say_so(artefact):
    assert "SIMULATED" in DESIGN.artefacts[artefact].caption(results_of(artefact))


@pytest.fixture
def uncached():
    """Forget the fits to numbers that a test has changed, afterwards too."""
    projection.fitted_to_paper.cache_clear()
    yield
    projection.fitted_to_paper.cache_clear()


class TestProjection:
    def test_schedules_by_hand(self):
        theta = [(256, 5), (512, 5), (1024, 5), (2048, 125)]
        assert paper_schedule(CIFAR, "theta") == theta
        scheduled = [(256, 30), (512, 30), (1024, 30), (2048, 50)]
        assert paper_schedule(CIFAR, "scheduled") == scheduled
        assert paper_schedule(DIV2K, "theta") == [(64, 10), (128, 10), (256, 1080)]
        assert paper_schedule(PHANTOM, "best") == [(16, 930)]
        assert projection.nodes_of(DIV2K, "best") == [1, 2, 4, 8, 16]
        assert projection.overhead() == pytest.approx(7 / 6)  # 0.0014 s a step, 0.0012 s a sample

    def test_a_value_that_is_left_out_changes_nothing(self, monkeypatch, uncached):
        """A flattering value cannot move the band that it is compared with."""
        task = DIV2K
        predicted, whole = projection.held_out(task, "theta"), projection.fitted_to_paper(task)
        own = PAPER[task]["speedups"]
        monkeypatch.setitem(PAPER[task], "speedups", own | {"theta": [own["theta"][0], 9.0]})
        projection.fitted_to_paper.cache_clear()
        assert projection.held_out(task, "theta") == predicted
        assert projection.fitted_to_paper(task) != whole
        assert predicted[0] != predicted[1]  # without and with section VI-B's cost

    @pytest.mark.parametrize("task", TASKS)
    def test_steps_are_predicted_without_having_been_seen(self, task):
        """Blocked at every size and way; a step that is changed does not change its prediction."""
        exact = ScalingModel(2e-3, 5e-3, 0.06, 0.4, 0.4)
        (run,) = runs.parallel("quick", {})
        sizes = run.config["jobs"][task]["sizes"]
        found = measured_task(sizes, AVERAGING, exact)
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


def pace_by_hand(task, strategy):
    """Every step of the paper's training at scale, by the model that our steps follow."""
    share = {CIFAR: 1 / 16, DIV2K: 1 / 4, PHANTOM: 1 / 4}[task]
    alone = together = 0.0
    for size, epochs in paper_schedule(task, strategy):
        count = epochs * math.ceil(PAPER[task]["samples"] / size)
        alone += count * MODEL.step(round(size * share), 1).total_s
        together += count * MODEL.step(round(size * share), 2).total_s
    return alone / together


class TestTables:
    @pytest.mark.parametrize("artefact", STRONG)
    def test_speedups(self, artefact):
        task = STRONG[artefact]
        for row, strategy in zip(
            scaling.table(results_of(artefact), task), projection.SCALED, strict=True
        ):
            nodes = PAPER[task]["speedups"][strategy][0]
            both = projection.held_out(task, strategy)
            low, high = sorted(own[nodes] if nodes else max(own.values()) for own in both)
            assert row["modelled from the other two"] == f"{low:.1f} to {high:.1f}"
            assert row["paper"] == f"{PAPER[task]['speedups'][strategy][1]:.2f}" and row["n"] == 5
            said = row["two processes, measured"]
            assert said.startswith(f"×{pace_by_hand(task, strategy):.2f} [")

    def test_where_the_time_goes(self):
        rows = scaling.steps_table(results_of("figure9"))
        row = next(r for r in rows if (r["task"], r["averaging"]) == (CIFAR, "all_to_all"))
        assert (row["batch size"], row["processes"], row["n"]) == (8, 2, 5)
        for name in ("computation", "blocked", "communication"):
            assert row[f"{name} (ms)"] == f"{1e3 * getattr(MODEL.step(8, 2), f'{name}_s'):.2f}"
        rows = scaling.nodes_table(results_of("breakdown", World(status=nothing)))
        assert [row["nodes"] for row in rows] == list(projection.NODES)
        cost, alone = (projection.breakdown()[n] for n in (128, 1))
        for name in ("computation", "blocked", "communication"):
            share = getattr(cost, f"{name}_s") / alone.computation_s
            assert rows[7][f"{name} (%)"] == f"{100 * share:.2f}"

    def test_overlap(self):
        """1 s of the 2 s of communication hides; the model has it all hidden, but on 256 nodes."""
        row = {"computation_s": 4.0, "after_s": [6.0] * 3, "within_s": [5.0, 5.5, 4.5]}
        longer = {**row, "after_s": [12.0] * 3, "within_s": [8.0, 9.0, 7.0]}
        assert overlap.hidden(row).mean == pytest.approx(50.0)
        assert overlap.hidden(longer).mean == pytest.approx(100.0)  # 4 s, all of the computation
        ratios = {str(nodes): row for nodes in (256, 64, 128)}
        changed = {"metrics": {"ratios": ratios}}
        results = made.made_results("adaptive/overlap", lambda run, seed: changed, {}, "quick")
        rows = overlap.table(results)
        assert [row["nodes modelled"] for row in rows] == [64, 128, 256]
        assert {row["blocked, measured (%)"] for row in rows} == {"20"}
        assert [row["blocked, model (%)"] for row in rows] == ["0", "0", "43"]


def marks(axis, hollow):
    """The points that are drawn as the paper's, or as measured here."""
    return [
        point
        for line in axis.get_lines()
        if line.get_ls() == "None" and (line.get_markerfacecolor() == "none") == hollow
        for point in zip(*line.get_data(), strict=True)
    ]


class TestFigures:
    @pytest.mark.parametrize("artefact", ["figure7", "figure8"])
    def test_speedups(self, artefact):
        task = STRONG[artefact]
        results = results_of(artefact)
        drawn = scaling.figure(results, task)
        (speed,) = drawn.axes
        assert "SIMULATED" in speed.get_title() and "random images" in speed.get_title()
        wanted = sorted(tuple(v) for v in PAPER[task]["speedups"].values() if v[0])
        assert sorted(marks(speed, hollow=True)) == wanted
        paces = [pace_by_hand(task, name) for name in projection.SCALED]
        assert [y for _, y in marks(speed, hollow=False)] == pytest.approx(paces, rel=0.02)
        (alone,) = scaling.figure(results_of(artefact, World(status=nothing)), task).axes
        assert marks(alone, hollow=True) and not marks(alone, hollow=False)

    def test_parts_of_a_step(self):
        first, *others = scaling.figure9(results_of("figure9")).axes
        assert len(others) == 2
        labels = [text.get_text() for text in first.get_yticklabels()]
        assert labels == ["1 process", "2, allreduce", "2, all-to-all", "2, reduce-scatter"]
        widths = [patch.get_width() for patch in first.patches]
        blocked = 1e3 * MODEL.step(128, 2).blocked_s
        assert any(width == pytest.approx(blocked) for width in widths)
        assert first.get_title().startswith("ours: ResNet-8 for ResNet-20, random images")


def test_measured_steps_are_of_stand_ins_on_synthetic_images():
    artefact = "figure9"
    said = DESIGN.artefacts[artefact].caption(results_of(artefact))
    assert "SYNTHETIC: random images." in said and "STAND-IN" in said
    assert "SYNTHETIC" not in DESIGN.artefacts[artefact].caption(
        results_of(artefact, World(status=nothing))
    )
