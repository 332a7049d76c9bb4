"""The questions of Micro-Batch Streaming: which records each claim, check and table takes."""

from functools import partial

import made_mbs
import numpy as np
import pytest
from made import FAILED, OUT_OF_MEMORY, table_of, verdict
from made_mbs import INITIAL, NOISE, PAPER, claimed, holds, of_trainings, results, streamed, trained

from repro.experiments.design import LONG
from repro.experiments.judge import Exact
from repro.experiments.mbs import runs
from repro.experiments.mbs.mini_batches import reach
from repro.experiments.mbs.runs import CLASSIFIERS, ROLES, paper_rows
from repro.experiments.mbs.streaming import growth, hidden_shares

OF_EPOCHS = {"table4": "epoch_time", "table5": "overhead_sizes"}
both = pytest.mark.parametrize("artefact", OF_EPOCHS)
CARD = {"type": "cuda", "name": "a card", "slug": "card", "memory_bytes": 1}
MACHINES = {way: CARD | {"type": "cpu", "name": f"machine {way}"} for way in (False, True)}


def rows_of(artefact, found):
    return list(PAPER.artefacts[artefact].rows(found))


def means_of(cases):
    """Return each case's estimate, of a ratio as such."""
    return {name: round(float(np.exp(c.mean) if c.log else c.mean), 9) for name, c in cases.items()}


def by_size(curve, noise=1.0):
    """Make trainings whose metric follows the doublings beyond the initial size."""

    def make(run, seed):
        doublings = np.log2(run.config["mini_batch"] / INITIAL[run.config["role"]])
        own = noise * NOISE[seed] if streamed(run) else 0.0  # seeds are compared in pairs
        return trained(80.0 + (curve(doublings) if doublings else 0.0) + own)

    return of_trainings(make)


class TestReported:
    """Cells copied from the paper by hand, and the effects and margins that follow from them."""

    def test_cells(self):
        rows = {(role, row["mini_batch"]): row for role in ROLES for row in paper_rows(role)}
        assert INITIAL == {"ResNet-50": 16, "ResNet-101": 8, "AmoebaNet-D": 32, "U-Net": 16}
        for (role, size), (metric, seconds) in {
            ("ResNet-50", 128): ([89.61, 0.14], [227.5, 0.02]),
            ("ResNet-101", 1024): ([75.14, 0.67], [392.8, 0.02]),
            ("AmoebaNet-D", 256): ([75.80, 0.17], [98.9, 0.17]),
            ("U-Net", 128): ([97.51, 0.06], [187.0, 0.24]),
        }.items():
            assert (rows[role, size]["with"], rows[role, size]["time_with"]) == (metric, seconds)
        assert rows["ResNet-50", 16]["without"] == [87.16, 0.33]
        assert runs.PAPER["table1"]["ResNet-50"]["high_large"] == 83.74
        # The micro-batch never grows beyond what fits.
        assert all(runs.micro_batch_of(*key) == row["micro_batch"] for key, row in rows.items())


class TestTables4And5:
    @both
    def test_a_planted_fault_breaks_each_check(self, artefact):
        as_claimed = by_size(lambda doublings: -4 * doublings)

        def but(outcome, way, seed=None):
            def make(run, own):
                wrong = run.config.get("mini_batch") == 64 and streamed(run) == way
                return outcome if wrong and seed in (None, own) else as_claimed(run, own)

            return make

        sound = dict.fromkeys(("undivided_fails", "streamed_trains", "largest_declines"), "yes")
        for make, broken in (
            (as_claimed, {}),
            (by_size(lambda doublings: 10 - (doublings - 2) ** 2), {}),
            (but(trained(50.0), False), {"undivided_fails": "NO"}),
            (but(OUT_OF_MEMORY, True, 1), {"streamed_trains": "NO"}),
            (but(FAILED, True, 1), {"streamed_trains": "NO"}),
            (by_size(lambda doublings: 4 * doublings), {"largest_declines": "NO"}),
            (lambda run, seed: None, dict.fromkeys(sound, "not run")),
        ):
            assert holds(artefact, results(artefact, make)) == sound | broken

    @both
    def test_a_row_names_the_network_that_ran(self, artefact):
        for profile, own in (("quick", ["ResNet-8 (for ResNet-50)", "U-Net of width 4"]),
                             ("paper", ["ResNet-50", "U-Net"])):  # fmt: skip
            found = results(artefact, by_size(lambda doublings: 0.0), profile)
            model = table_of(PAPER.artefacts[artefact], found)["model"][0]
            assert model.startswith(own[artefact == "table5"]), profile
            assert (" (for " in model) == (profile == "quick")

    @both
    def test_the_best_size_beyond_the_initial_one(self, artefact):
        found = results(artefact, by_size(lambda doublings: 5 - doublings))
        cases = claimed(f"{artefact}/optimum_beyond", found)
        assert set(means_of(cases).values()) == {4.0}  # the first size beyond
        tried = {6, 7, 5} if artefact == "table4" else {6}
        assert {case.candidates for case in cases.values()} == tried
        role = "ResNet-50" if artefact == "table4" else "U-Net"
        assert cases[role].label == f"{role}, 32 over undivided 16"
        if artefact == "table4":
            assert means_of({"": reach(found)})[""] == pytest.approx(1024 / 16)

    @both
    def test_times_of_steps_and_of_epochs(self, artefact):
        steps, epochs = f"{artefact}/overhead_halved", f"{artefact}/{OF_EPOCHS[artefact]}"

        def make(run, seed, alone=True):
            if run.experiment == "overhead":
                slow, swing = 1 + seed, np.linspace(0.99, 1.01, 15)  # what rounds share drops out
                way = {"undivided": 1.0, "halved": 1.25, "doubled": 2.5}
                return {"timings": {w: {"samples_s": list(s * slow * swing), "warmup": 3}
                                    for w, s in way.items()}}  # fmt: skip
            if run.experiment == "epochs" and not alone:
                return {"timings": {way: {"samples_s": [(1.5 if micro else 1.0) * (1 + seed)] * 3,
                                          "warmup": 1}
                                    for way, (_, micro) in run.config["ways"].items()}}  # fmt: skip
            own = 1.2 if run.experiment == "train" and made_mbs.beyond(run) else 1.0
            return of_trainings(lambda *_: trained(50.0, epoch_s=10 * own))(run, seed)

        found = results(artefact, make)
        assert set(means_of(claimed(steps, found)).values()) == {1.25}
        assert {(c.trials, c.n) for c in claimed(steps, found).values()} == {("rounds", 15)}
        assert set(means_of(claimed(epochs, found)).values()) <= {1.2, 1.0}
        found = results(artefact, lambda run, seed: make(run, seed, alone=False), LONG)
        assert {(c.trials, c.n) for c in claimed(steps, found).values()} == {("processes", 5)}
        # Trainings are side by side: their times do not count.
        assert set(means_of(claimed(epochs, found)).values()) == {1.5}
        (shown,) = {row["ours, time (ratio)"] for row in rows_of(artefact, found)} - {None}
        assert shown.startswith("×1.500")
        only_trained = results(artefact, lambda run, seed: make(run, seed), LONG)
        assert verdict(f"mbs/{epochs}", only_trained).word == "not run"

    def test_times_of_two_machines_do_not_compare(self):
        def make(run, seed):
            return trained(50.0) | {"device": MACHINES[streamed(run)]}

        found = results("table4", of_trainings(make))
        told = verdict("mbs/table4/epoch_time", found)
        assert told.word == "not run" and "do not compare" in told.evidence
        assert {row["ours, time (ratio)"] for row in rows_of("table4", found)} == {None}


class TestSameness:
    @pytest.mark.parametrize("artefact", ["table3", "table4"])
    def test_the_results_at_the_initial_size(self, artefact):
        def make(run, seed):
            return trained(80.0 + NOISE[seed] + 1.5 * (streamed(run) and not made_mbs.beyond(run)))

        found = results(artefact, of_trainings(make))
        gaps = claimed(f"{artefact}/same_result", found)
        assert set(means_of(gaps).values()) == {1.5}
        # Equal accuracies are known to a test image; paper takes whole test sets.
        assert all(gap.error > 0 for name, gap in gaps.items() if name != "U-Net")
        half = results(artefact, lambda run, seed: make(run, seed) if run.config.get("micro_batch")
                       else None)  # fmt: skip
        assert verdict(f"mbs/{artefact}/same_result", half).word == "not run"

    def test_the_curves(self):
        def make(run, seed):
            better, factor = (2.0, 1.2) if streamed(run) else (0.0, 1.0)
            noise = NOISE[seed] * better  # pairs differ
            loss = [2.0 * factor, 1.9 * factor]
            return trained(50 + better + noise, 60 + better + noise, loss=loss)

        found = results("figure3", make)
        cases = claimed("figure3/same_curves", found)
        wanted = {"accuracy": 2.0, "loss": 1.2}
        assert means_of(cases) == {f"{r}, {q}": v for r in CLASSIFIERS for q, v in wanted.items()}
        drawn = PAPER.artefacts["figure3"].figure(found).axes
        assert list(drawn[0].get_lines()[1].get_ydata()) == pytest.approx([2.4, 2.28])

    def test_pairs_are_compared_however_far_seeds_lie_apart(self):
        def make(run, seed):
            kind = run.config["norm"], run.config["dtype"]
            gap = {("group", "float32"): 2.0 + NOISE[seed % 3]}.get(kind, 50.0)
            best = {"without": 20.0 + 30 * seed, "with": 20.0 + 30 * seed + gap}
            curves = {way: [value / 2, value] for way, value in best.items()}
            told = {"best": best, "train_loss": curves, "accuracy": curves}
            return {"metrics": told | {"apart": [1e-15, gap]}}

        found = results("batchnorm", make)
        assert means_of(claimed("batchnorm/same_without_batchnorm", found)) == {"ResNet-50": 2.0}


class TestNormalisation:
    def world(self, diverged=False, ragged=0.2):
        def make(run, seed):
            if run.experiment != "normalised":
                rows = [
                    {"mini_batch": mini, "micro_batch": micro, "frozen": True, "way": "paper",
                     "error": ragged if mini % micro else 1e-16, "length": 1.0}
                    for mini, micro in run.config["divisions"]
                ]  # fmt: skip
                return {"metrics": {"rows": rows}}
            way = run.config["normalization"]
            away = {"none": 0.5, "paper": 0.05}.get(way, 0.0)
            losses = [2.0 + 2 * away + NOISE[seed] / 100]
            losses.append(None if diverged and way == "none" else 1.5)
            told = {"train_loss": losses, "accuracy": [40.0, 60.0], "best": 60.0}
            return {"metrics": told | {"diverged": None in losses}}

        return results("normalisation", make)

    def test_trainings_are_compared_by_the_distance_of_their_losses(self):
        (case,) = claimed("normalisation/closer", self.world()).values()
        assert case.mean == pytest.approx(0.45)
        (case,) = claimed("normalisation/closer", self.world(diverged=True)).values()
        assert isinstance(case, Exact) and case.holds

    def test_ragged_micro_batches_break_the_check(self):
        for ragged, said in ((1e-16, "yes"), (0.2, "NO")):
            assert holds("normalisation", self.world(ragged=ragged)) == {"same_gradient": said}


def test_sizes_that_fit_lie_between_two_powers_of_two():
    def world(fits, predicted, largest):
        def make(run, seed):
            initial = INITIAL[run.config["role"]]
            if run.experiment == "foretell":
                return {"metrics": {"largest": largest * initial}}
            told = {"largest_that_fits": fits * initial, "limit_bytes": 3 * 2**20}
            return {"metrics": told | {"predicted_largest": int(predicted * initial)}}

        return results("table2", make)

    for numbers, said in (((1, 1.5, 1), ["yes", "yes"]), ((1, 2, 1), ["NO", "yes"]),
                          ((1, 1, 2), ["yes", "NO"])):  # fmt: skip
        assert list(holds("table2", world(*numbers)).values()) == said


def test_the_share_of_copies_behind_computations():
    spans = [["copy", 0, 0.0, 1.0], ["compute", 0, 1.0, 3.0], ["copy", 1, 1.0, 2.0]]
    assert hidden_shares(spans) == [1.0]
    assert hidden_shares([*spans, ["copy", 2, 2.5, 3.5]]) == [1.0, 0.5]
    told = {"spans": spans, "update": [3.0, 3.5], "copied": "host to device", "micro_batches": 2}

    def found(device, between=0):
        metrics = told | {"updates_between_micro_batches": between, "updates_after": 1}
        return results("figure2", lambda run, seed: {"metrics": metrics, "device": device})

    assert verdict("mbs/figure2/overlap", found(MACHINES[True])).word == "not run"
    assert means_of(claimed("figure2/overlap", found(CARD))) == {"ResNet-50": 100.0}
    assert holds("figure2", found(CARD)) == {"one_update": "yes"}
    assert holds("figure2", found(CARD, 1)) == {"one_update": "NO"}


def test_a_mini_batch_is_drawn_from_its_start_and_no_short_copy_hides_behind_an_edge():
    spans = [["copy", 0, 0.0, 1e-5], ["compute", 0, 1e-5, 1.0]]
    metrics = {"spans": spans, "update": [1.0, 1.1], "copied": "host to device"}
    found = results("figure2", lambda run, seed: {"metrics": metrics, "device": CARD})
    axis = PAPER.artefacts["figure2"].draw(found).axes[0]
    drawn = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axis.patches]
    ms = [(1e3 * start, 1e3 * end) for *_, start, end in (*spans, metrics["update"])]
    assert sum(drawn, ()) == pytest.approx(sum(ms, ())) and axis.get_xlim()[0] == 0
    copy, compute, _ = axis.patches
    assert copy.get_edgecolor() == copy.get_facecolor() != compute.get_facecolor()
    assert compute.get_edgecolor() == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("profile", "trials"), [("quick", "rounds"), (LONG, "processes")])
def test_epochs_from_files_grow_by_way_of_reading(profile, trials):
    longer = {"memory": 1.0, "ahead": 1.5, "asked": 1.1}

    def make(run, seed):
        times = {
            name: (longer[way] if mini > 32 else 1.0) * (1 + seed / 10)  # a process is slow
            for name, (mini, _, way) in run.config["ways"].items()
        }
        timings = {n: {"samples_s": [s, 1.01 * s, 0.99 * s], "warmup": 1} for n, s in times.items()}
        metrics = {"files": 512, "file_bytes": 512 * 8000, "uncached": 1.0}
        return {"metrics": metrics, "timings": timings}

    found = results("files", make, profile)
    grown = {way: growth(found, way) for way in longer}
    assert means_of(grown) == longer and {case.trials for case in grown.values()} == {trials}
    assert len(claimed("files/time_grows", found)) == 2
    table = partial(table_of, PAPER.artefacts["files"])
    assert len(table(found)) == 3
    none = table(results("files", lambda run, seed: None, profile))
    assert [*none["n"]] == [0] * 3
    for papers in ("images", "paper, larger / smaller"):
        assert [*none[papers]] == [*table(found)[papers]]
