"""Figures 7, 8, 9 and 11: speed-ups, the parts of a step, and what the model says of them."""

import math
import statistics

import made
import pytest
from invented import make_record
from made_adaptive import MODEL, World, checked, judge, nothing, results_of

from repro.adaptive import ScalingModel
from repro.experiments import load_paper, summary
from repro.experiments.adaptive import breakdown, projection, scaling
from repro.experiments.adaptive.settings import CIFAR, DIV2K, PAPER, PHANTOM, TASKS
from repro.experiments.captions import signature
from repro.experiments.design import Results, claims_of
from repro.experiments.sources import Source
from repro.records import RecordError, RecordStore
from repro.report import DASH

DESIGN = load_paper("adaptive")
STRONG = {"figure7": DIV2K, "figure8": PHANTOM, "figure11": CIFAR}
MEASURED = [f"figure9/{key}" for key in ("few_samples", "all_to_all_faster", "steps_predicted")]
FREE_CORES = {"type": "cpu", "name": "a CPU", "slug": "cpu-4-cores", "memory_bytes": 2**33}
# Checks of the model of the paper's cluster: the artefact, and the place there.
FURTHER, PREDICTED = 0, 1
BLOCKED, GROWS, COMMUNICATION, NOT_LINEAR = range(4)
CHECKS = [
    (name, place)
    for name in (*STRONG, "breakdown")
    for place in range(len(DESIGN.artefacts[name].checks))
]


def edited(change, tasks=TASKS):
    """Return a world in which the measured steps of some tasks are changed."""

    def edit(metrics, config):
        for task in tasks:
            for step in metrics["tasks"][task]["steps"]:
                change(step)

    return World(edit={"parallel": edit}, device=FREE_CORES)


def slower(factor, way="all_to_all"):
    def change(step):
        if step["averaging"] == way:
            step["samples_s"] = [factor * seconds for seconds in step["samples_s"]]

    return change


def launches(factors, change=lambda seed, step: 1.0):
    """Return launches that take as many times the modelled steps, whose first turns say nothing."""
    (run,) = scaling.runs("long", {})
    records = []
    for seed, factor in enumerate(factors):
        metrics = World()(run, seed)["metrics"]
        for task in metrics["tasks"].values():
            task["difference"] = 1e-3 * (seed == 3)
            for step in task["steps"]:
                first, *others = [factor * change(seed, step) * n for n in step["samples_s"]]
                step["samples_s"] = [9 * first, *others]
        values = {"paper": "adaptive", "config": run.config, "metrics": metrics}
        values["device"] = FREE_CORES
        records.append(make_record(run.experiment, seed=seed, **values))
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
        assert "launched 5 times." in " ".join(scaling.steps_in_full(launches(self.FACTORS)))
        assert signature(launches(self.FACTORS), "").endswith(" · 5 launches")

    def test_a_launch_compares_with_itself(self):
        """One that is slow in all its steps says nothing of their ratios."""
        measurement = scaling.measured(launches(self.FACTORS))[DIV2K]
        assert scaling.pace(measurement, DIV2K, "theta").error == pytest.approx(0, abs=1e-12)
        for key in ("few_samples", "all_to_all_faster"):
            found = made.verdict(f"adaptive/figure9/{key}", launches(self.FACTORS))
            assert found.word == "reproduced", found

    def test_what_a_launch_draws_is_common_to_all_its_sizes(self):
        """By a way's own factor in each launch there are five values, whatever the cases."""
        draws = (1.0, 1.3, 0.8, 1.1, 0.9)

        def change(seed, step):
            return draws[seed] if step["averaging"] == "all_to_all" else 1.0

        results = launches([1.0] * 5, change)
        gap = scaling.pace(scaling.measured(results)[DIV2K], DIV2K, "theta")
        logs = [-math.log(draw) for draw in draws]
        error = statistics.stdev(logs) / math.sqrt(5)
        assert (gap.error, gap.dof, gap.trials) == (pytest.approx(error), 4, "launches")
        found = made.verdict("adaptive/figure9/steps_predicted", results)
        assert found.word == "undecided" and " launches a cell decide" in found.evidence

    def test_weights_that_differ_in_one_launch(self):
        row = made.check_row("adaptive/figure9", 0, launches([1.0] * 5))
        assert row["holds"] == "NO" and "0.001" in row["evidence"]


class TestMeasured:
    @pytest.mark.parametrize("target", MEASURED)
    def test_steps_as_the_model_has_them(self, target):
        found = judge(target, World(jitter=0.001, device=FREE_CORES))
        assert found.word == "reproduced", found.evidence

    @pytest.mark.parametrize("target", MEASURED)
    def test_without_measurements(self, target):
        assert judge(target, World(status=nothing)).word == "not run"

    @pytest.mark.parametrize(
        ("factor", "jitter", "word"),
        [
            (1.15, 0.01, "reproduced"),
            (1.3, 0.01, "not reproduced"),
            (0.7, 0.01, "not reproduced"),
            (1.0, 0.3, "undecided"),
        ],
    )
    def test_steps_predicted(self, factor, jitter, word):
        """The prediction is of the medians of other sizes; what is judged are these turns."""
        world = World(edit=edited(slower(factor)).edit, jitter=jitter)
        found = judge("figure9/steps_predicted", world)
        assert found.word == word, found.evidence
        assert f"DIV2K, EDSR 2×16 (for EDSR), B = 4 ×{1 / factor:.2f} [" in found.evidence
        assert found.evidence.count("B = ") == 14
        assert (word != "undecided" or " rounds " in found.evidence) and "seeds" not in (
            found.evidence
        )

    def test_times_that_do_not_grow_have_no_model(self):
        def flat(step):
            step["computation_s"] = step["total_s"] = 0.001

        found = judge("figure9/steps_predicted", edited(flat))
        assert found.word == "not run" and "do not grow" in found.evidence

    def test_few_samples(self):
        free = World(
            model=ScalingModel(1e-3), jitter=0.001
        )  # no cost of a step: a sample takes its time
        assert judge("figure9/few_samples", free).word == "not reproduced"
        noisy = judge("figure9/few_samples", World(jitter=0.5))
        assert noisy.word == "undecided" and "rounds a cell decide" in noisy.evidence
        found = judge("figure9/few_samples")
        assert "CIFAR, ResNet-8 (for ResNet-20): time of a sample at B = 8 over 128" in (
            found.evidence
        )
        # By section VI-B a step costs 7/6 of a sample.
        wanted = (1 + 7 / 6 / 8) / (1 + 7 / 6 / 128)
        assert f"paper ×{wanted:.2f}" in found.evidence

    @pytest.mark.parametrize("profile", ["smoke", "quick"])
    def test_the_papers_cost_of_few_samples_at_every_profiles_sizes(self, profile):
        effects = claims_of("adaptive")["figure9"]["few_samples"].effect
        for name in breakdown.few_samples(results_of("figure9", profile=profile)):
            few, many = map(int, name.partition(", ")[2].split(" over "))
            cost = projection.overhead()
            assert effects[name] == pytest.approx((1 + cost / few) / (1 + cost / many), abs=1e-5)

    def test_all_to_all(self):
        target = "figure9/all_to_all_faster"
        found = judge(target, World(device=FREE_CORES))
        assert found.evidence.count("B = ") == 14
        assert judge(target, edited(slower(9.0))).word == "not reproduced"
        some = World(edit=edited(slower(9.0), [CIFAR]).edit, jitter=0.001, device=FREE_CORES)
        assert judge(target, some).word == "partly"
        noisy = judge(target, World(jitter=0.8, device=FREE_CORES))
        assert noisy.word == "undecided" and " rounds " in noisy.evidence

    def test_without_a_core_to_communicate_nothing_can_be_hidden(self):
        found = judge("figure9/all_to_all_faster")
        assert found.word == "not run" and "2 processes on 2 cores leave no core" in found.evidence

    def test_the_same_weights(self):
        def edit(metrics, config):
            metrics["tasks"][PHANTOM]["difference"] = 1e-3

        assert checked("figure9")["holds"] == "yes"
        row = checked("figure9", World(edit={"parallel": edit}))
        assert row["holds"] == "NO" and "Phantom: largest difference 0.001" in row["evidence"]
        assert checked("figure9", World(status=nothing))["holds"] == "not run"


def rows_of(change):
    """Breakdowns by nodes, from what a function says of their parts."""
    return {n: change(n) for n in projection.NODES}


def shared(at_32, at_128):
    """Breakdowns of which these shares are blocked."""
    of = {32: at_32, 128: at_128, 256: 0.5}

    def row(nodes):
        share = of.get(nodes, 0.05)
        return {"computation": 3 - 3 * share, "blocked": 3 * share, "communication": 99.0}

    return rows_of(row)


def compared(ratio):
    return rows_of(lambda n: {"computation": 0.25, "communication": 0.25 * ratio})


def fallen(after_64, after_128):
    """Computation at B_m that falls by these factors from 64 to 128 and to 256 nodes."""
    at = {64: 1.0, 128: 1 / after_64, 256: 1 / after_64 / after_128}
    return rows_of(lambda n: {"computation at B_m": at.get(n, 1.0)})


def clusters(monkeypatch, fitted, whole=None):
    found = {"fitted": (None, fitted), "section VI-B's": (None, whole or fitted)}
    monkeypatch.setattr(projection, "breakdowns", lambda: found)


class TestSimulated:
    def test_what_no_record_can_change_is_no_claim(self):
        kinds = {c.kind for own in claims_of("adaptive").values() for c in own.values()}
        assert kinds == {"training", "time"}
        assert not DESIGN.artefacts["breakdown"].exhibit.claims and len(CHECKS) == 16

    @pytest.mark.parametrize(("artefact", "place"), CHECKS)
    def test_no_record_of_ours_enters(self, artefact, place):
        rows = [
            checked(artefact, world, place=place)
            for world in (World(), World(model=ScalingModel(1.0)), World(status=nothing))
        ]
        assert rows[0] == rows[1] == rows[2]
        assert rows[0]["holds"] in ("yes", "NO") and "SIMULATED" in rows[0]["check"] + (
            DESIGN.artefacts[artefact].caption(results_of(artefact))
        )

    @pytest.mark.parametrize(
        ("without", "whole", "holds"),
        [
            (64.64, 64.64, "yes"),
            (77.0, 54.0, "yes"),
            (78.0, 64.0, "NO"),
            (64.0, 53.0, "NO"),
            (20.0, 100.0, "NO"),
        ],
    )
    def test_predicted(self, monkeypatch, without, whole, holds):
        """Paper: 64.64, of which 20 % are ×1.2 and ×1/1.2."""
        monkeypatch.setattr(projection, "predicted", lambda task, strategy: (without, whole))
        row = checked("figure11", place=PREDICTED)
        assert row["holds"] == holds and "within 20 %" in row["check"]
        said = " and ".join(f"{n:.1f} (×{n / 64.64:.2f})" for n in (without, whole))
        assert row["evidence"] == f"{said}, without and with VI-B's cost; paper 64.64"

    @pytest.mark.parametrize("artefact", STRONG)
    def test_scaling_further(self, artefact, monkeypatch):
        assert checked(artefact, place=FURTHER)["holds"] == "yes"
        task = STRONG[artefact]
        others = max(PAPER[task]["speedups"][name][1] for name in ("best", "scheduled"))
        monkeypatch.setattr(projection, "predicted", lambda *given: (others + 1, others - 1))
        assert checked(artefact, place=FURTHER)["holds"] == "NO"

    @pytest.mark.parametrize(
        ("shares", "holds"),
        [((0.05, 0.2), "yes"), ((0.12, 0.2), "NO"), ((0.0, 0.05), "NO")],
    )
    def test_blocked(self, monkeypatch, shares, holds):
        clusters(monkeypatch, shared(*shares))
        row = checked("breakdown", place=BLOCKED)
        assert row["holds"] == holds
        told = f"{100 * shares[0]:.0f} % on 32, {100 * shares[1]:.0f} % on 128"
        assert row["evidence"] == f"cost fitted: {told}; cost section VI-B's: {told}"
        # With either cost of small batches.
        clusters(monkeypatch, shared(*shares), shared(0.05, 0.2))
        assert checked("breakdown", place=BLOCKED)["holds"] == holds

    def test_that_blocked_time_grows(self, monkeypatch):
        assert checked("breakdown", place=GROWS)["holds"] == "yes"
        clusters(monkeypatch, shared(0.05, 0.6))  # and 0.5 on 256
        assert checked("breakdown", place=GROWS)["holds"] == "NO"

    @pytest.mark.parametrize(
        ("ratio", "holds"), [(0.79, "NO"), (0.81, "yes"), (1.24, "yes"), (1.26, "NO")]
    )
    def test_communication(self, monkeypatch, ratio, holds):
        clusters(monkeypatch, compared(ratio))
        row = checked("breakdown", place=COMMUNICATION)
        assert row["holds"] == holds and f"cost fitted: ×{ratio:.2f}" in row["evidence"]
        clusters(monkeypatch, compared(1.0), compared(ratio))
        assert checked("breakdown", place=COMMUNICATION)["holds"] == holds

    @pytest.mark.parametrize(
        ("factors", "holds"),
        [
            ((1.63, 1.46), "yes"),
            ((1.79, 1.59), "yes"),
            ((1.96, 1.93), "NO"),
            ((1.85, 1.65), "NO"),
            ((2.0, 2.0), "NO"),
        ],
    )
    def test_not_linear(self, monkeypatch, factors, holds):
        """By the cost that is fitted; section VI-B's makes it so by itself."""
        clusters(monkeypatch, fallen(*factors), fallen(1.5, 1.5))
        row = checked("breakdown", place=NOT_LINEAR)
        assert row["holds"] == holds, row
        for nodes, factor, paper in ((64, factors[0], 0.82), (128, factors[1], 0.73)):
            told = f"{nodes} to {2 * nodes} nodes ×{factor / 2:.2f} (by the paper's ×{paper})"
            assert told in row["evidence"]

    def test_of_the_papers_cluster_by_hand(self):
        """Every step of the paper's training on DIV2K, with the model's latency and bandwidth."""
        blocked_told, sent_told = (
            checked("breakdown", place=place)["evidence"] for place in (BLOCKED, COMMUNICATION)
        )
        for cost, place in ((None, 0), (projection.overhead(), 1)):
            model = projection.fitted_to_paper(DIV2K, None, cost)
            kinds = {}
            for nodes in (32, 128):
                computed = blocked = sent = 0.0
                for size, epochs in ((64, 10), (128, 10), (256, 1080)):
                    steps, busy = epochs * math.ceil(800 / size), min(size, nodes)
                    own = math.ceil(size / busy) + model.overhead_s
                    both = 2 * (busy - 1) * (model.latency_s + model.transfer_s / busy)
                    computed += steps * own
                    sent += steps * both
                    blocked += steps * max(0.0, both - own)
                kinds[nodes] = computed, blocked, sent
            shares = [f"{100 * b / (c + b):.0f} % on {n}" for n, (c, b, _) in kinds.items()]
            assert blocked_told.split("; ")[place].endswith(", ".join(shares))
            ratio = kinds[128][2] / kinds[128][0]
            assert sent_told.split("; ")[place].endswith(f"×{ratio:.2f}")


class TestTables:
    @pytest.mark.parametrize("artefact", STRONG)
    def test_speedups(self, artefact):
        task = STRONG[artefact]
        rows = scaling.table(results_of(artefact), task)
        assert len(rows) == 3
        for row, strategy in zip(rows, projection.SCALED, strict=True):
            nodes, value = PAPER[task]["speedups"][strategy]
            assert row["paper"] == f"{value:.2f}"
            assert row["nodes"] == (nodes or "best of 1 to 128")
            low, high = map(float, row["modelled from the other two"].split(" to "))
            assert 1 <= low <= high
            assert row["two processes, projected"] == row["two processes, measured"]
            assert 0 < float(row["two processes, measured"]) < 2
            # As the notebook's first cell has it.
            gap = scaling.pace(scaling.measured(results_of(artefact))[task], task, strategy)
            assert row["two processes, measured"] == f"{math.exp(gap.mean):.2f}"
        without = scaling.table(results_of(artefact, World(status=nothing)), task)
        assert {row["two processes, measured"] for row in without} == {DASH}
        fitted = "fitted to all three"
        assert [row[fitted] for row in without] == [row[fitted] for row in rows]

    def test_where_the_time_goes(self):
        rows = breakdown.steps_table(results_of("figure9"))
        ways = {row["averaging"] for row in rows}
        assert ways == {"one process", "allreduce", "all_to_all", "reduce_scatter"}
        row = next(r for r in rows if (r["task"], r["averaging"]) == (CIFAR, "all_to_all"))
        cost = MODEL.step(8, 2)
        assert (row["batch size"], row["processes"]) == (8, 2)
        for name in ("computation", "blocked", "communication"):
            assert row[f"{name} (ms)"] == f"{1e3 * getattr(cost, f'{name}_s'):.2f}"
        assert breakdown.steps_table(results_of("figure9", World(status=nothing))) == []

    def test_where_the_time_goes_on_many_nodes(self):
        rows = breakdown.nodes_table(results_of("breakdown"))
        assert rows == breakdown.nodes_table(results_of("breakdown", World(status=nothing)))
        assert [row["nodes"] for row in rows] == list(projection.NODES) * 2
        costs = (None, projection.overhead())
        fitted, whole = (projection.fitted_to_paper(DIV2K, None, cost) for cost in costs)
        labels = list(dict.fromkeys(row["cost of small batches"] for row in rows))
        assert labels == [
            f"fitted: {fitted.overhead_s:.2f} samples",
            "section VI-B's: 1.17 samples",
        ]
        for place, model in ((7, fitted), (16, whole)):
            for name, value in projection.breakdown(model, 128).items():
                assert rows[place][f"{name} (%)"] == f"{100 * value:.2f}"
        assert (rows[0]["computation (%)"], rows[0]["blocked (%)"]) == ("100.00", "0.00")


def hollow(axis):
    """What is drawn as the paper's."""
    return [
        point
        for line in axis.get_lines()
        if line.get_markerfacecolor() == "none"
        for point in zip(*line.get_data(), strict=True)
    ]


def solid(axis):
    """What is drawn as measured here: marks without a line between them."""
    return [
        point
        for line in axis.get_lines()
        if line.get_linestyle() == "None" and line.get_markerfacecolor() != "none"
        for point in zip(*line.get_data(), strict=True)
    ]


def bands(axis):
    """The lowest and the highest value of each band at each number of nodes."""
    found = []
    for band in axis.collections:
        paths = band.get_paths()
        if paths and len(paths[0].vertices):
            points = {}
            for n, value in paths[0].vertices:
                points.setdefault(float(n), []).append(float(value))
            found.append({n: (min(values), max(values)) for n, values in points.items()})
    return found


class TestFigures:
    @pytest.mark.parametrize("artefact", STRONG)
    def test_speedups(self, artefact):
        task = STRONG[artefact]
        drawn = scaling.figure(results_of(artefact), task)
        _, speed, here = drawn.axes
        assert [axis.get_title().partition(":")[0] for axis in drawn.axes] == [
            "paper", "paper", "ours",
        ]  # fmt: skip
        assert all("SIMULATED" in axis.get_title() for axis in drawn.axes)
        assert "random images" in here.get_title() and "DIV2K" not in here.get_title()
        wanted = sorted(tuple(v) for v in PAPER[task]["speedups"].values() if v[0])
        assert sorted(hollow(speed)) == wanted
        # What has no marks but lines is the fit, which has seen the paper's values, and says so.
        fits = [line for line in speed.get_lines() if line.get_linestyle() == "--"]
        for line, strategy in zip(fits, projection.SCALED, strict=True):
            nodes, values = line.get_data()
            assert list(nodes) == projection.nodes_of(task, strategy)
            assert values[0] == pytest.approx(1.0)
        (legend,) = drawn.legends
        texts = [text.get_text() for text in legend.get_texts()]
        assert "fit to all three of the paper's speed-ups" in texts
        assert "predicted from the other two strategies (held out)" in texts
        assert len(solid(here)) == 3 and not hollow(here)
        paces = [scaling.pace(scaling.measured(results_of(artefact))[task], task, name)
                 for name in projection.SCALED]  # fmt: skip
        assert [y for _, y in solid(here)] == pytest.approx([math.exp(p.mean) for p in paces])
        ticks = [text.get_text() for text in speed.get_xticklabels()]
        assert ticks == ["1", "2", "4", "8", "16", "32", "64", "128", "256"]
        assert not any("^" in text.get_text() for axis in drawn.axes for text in
                       axis.get_yticklabels())  # fmt: skip
        assert len(scaling.figure(results_of(artefact, World(status=nothing)), task).axes) == 2

    @pytest.mark.parametrize("artefact", STRONG)
    def test_held_out_predictions_are_drawn_as_bands(self, artefact):
        task = STRONG[artefact]
        found = bands(scaling.figure(results_of(artefact), task).axes[1])
        for band, strategy in zip(found, projection.SCALED, strict=True):
            nodes = PAPER[task]["speedups"][strategy][0]
            if nodes:
                low, high = sorted(projection.predicted(task, strategy))
                assert band[float(nodes)] == pytest.approx((low / 1.03, high * 1.03))

    def test_a_flattering_value_cannot_move_its_own_band(self, monkeypatch):
        """The paper's value of a strategy, were it another, moves the fit and not the band."""

        def drawn():
            axis = scaling.figure(results_of("figure11"), CIFAR).axes[1]
            fits = [line for line in axis.get_lines() if line.get_linestyle() == "--"]
            return bands(axis)[2], list(fits[2].get_ydata())

        before = drawn()
        monkeypatch.setitem(PAPER[CIFAR]["speedups"], "theta", [256, 200.0])
        projection.fitted_to_paper.cache_clear()
        try:
            band, fit = drawn()
        finally:
            monkeypatch.undo()
            projection.fitted_to_paper.cache_clear()
        assert band == before[0] and fit != before[1]

    def test_bars(self):
        drawn = breakdown.figure9(results_of("figure9"))
        assert len(drawn.axes) == 3
        first = drawn.axes[0]
        labels = [text.get_text() for text in first.get_yticklabels()]
        assert labels == ["1 process", "2, allreduce", "2, all-to-all", "2, reduce-scatter"]
        widths = [patch.get_width() for patch in first.patches]
        cost = MODEL.step(128, 2)
        assert any(width == pytest.approx(1e3 * cost.blocked_s) for width in widths)
        assert first.get_title().startswith("ours: ResNet-8 for ResNet-20, random images")

    def test_shares(self):
        drawn = breakdown.nodes_figure(results_of("breakdown"))
        *times, shares = drawn.axes
        costs = (None, projection.overhead())
        for axis, whole, cost in zip(times, shares.get_lines(), costs, strict=True):
            parts = projection.breakdown(projection.fitted_to_paper(DIV2K, None, cost), 256)
            # Of all time: another quantity than times over one node's.
            before = parts.pop("before B_m")
            assert dict(zip(*whole.get_data(), strict=True))[256] == pytest.approx(100 * before)
            lines = {
                line.get_label(): dict(zip(*line.get_data(), strict=True))
                for line in axis.get_lines()
            }
            assert set(lines) == {name.replace("B_m", "the largest batch") for name in parts}
            for name, value in parts.items():
                assert lines[name.replace("B_m", "the largest batch")][256] == value
            texts = [text.get_text() for text in axis.get_yticklabels()]
            assert texts == ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"]


class TestCaptions:
    @pytest.mark.parametrize("artefact", [*STRONG, "breakdown"])
    def test_what_is_simulated(self, artefact):
        for world in (World(), World(status=nothing)):
            assert "SIMULATED" in DESIGN.artefacts[artefact].caption(results_of(artefact, world))

    def test_what_is_assumed_stands_in_the_setup(self):
        said = " ".join(scaling.steps_in_full(results_of("figure7")))
        assert "ASSUMED" in said and "SIMULATED" in said
        assert "SYNTHETIC images (random numbers)" in said
        none = " ".join(scaling.steps_in_full(results_of("figure7", World(status=nothing))))
        assert "ASSUMED" in none and "SYNTHETIC" not in none

    @pytest.mark.parametrize("artefact", [*STRONG, "figure9"])
    def test_measured_steps_are_of_stand_ins_on_synthetic_images(self, artefact):
        said = DESIGN.artefacts[artefact].caption(results_of(artefact))
        assert "SYNTHETIC: random images." in said and "STAND-IN" in said
        none = results_of(artefact, World(status=nothing))
        assert "SYNTHETIC" not in DESIGN.artefacts[artefact].caption(none)


def test_a_record_that_cannot_be_shown_is_named(tmp_path):
    store, artefact = RecordStore(tmp_path), DESIGN.artefacts["figure7"]
    (record,) = results_of("figure7").records
    del record.metrics["tasks"][DIV2K]["steps"][0]["samples_s"]
    store.write(record)
    source = Source(DESIGN, {("local", "gpu"): store})
    results = results_of("figure7")
    results.records = list(source.records["local", "gpu"])
    with (
        pytest.raises(RecordError, match=f"cannot be shown for what is in .*parallel-{record.key}"),
        summary.blaming(source, artefact, results),
    ):
        artefact.table(results)


@pytest.mark.parametrize("artefact", STRONG)
def test_speedups_are_not_run_and_name_the_nodes_that_they_take(artefact):
    found = judge(f"{artefact}/speedup")
    assert found.word == "not run"
    for nodes, value in PAPER[STRONG[artefact]]["speedups"].values():
        assert f"needs a cluster of {nodes or math.ceil(value)} nodes" in found.evidence
