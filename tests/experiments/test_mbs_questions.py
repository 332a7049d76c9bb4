"""The questions of Micro-Batch Streaming: which records each claim, check and table takes."""

import numpy as np
import pytest
from made import FAILED, OUT_OF_MEMORY, check_row
from made_mbs import (
    CHOSEN,
    INITIAL,
    NOISE,
    PAPER,
    beyond,
    judge,
    overhead,
    plausible,
    results,
    streamed,
    trained,
    twins,
)

from repro.experiments.design import LONG, claims_of
from repro.experiments.judge import NotRun
from repro.experiments.mbs import runs
from repro.experiments.mbs.runs import ROLES, paper_rows
from repro.experiments.mbs.streaming import growth, hidden_shares
from repro.experiments.mbs.tables_4_5 import TABLE4, TABLE5, paper_gain

EXHIBITS = {"table4": TABLE4, "table5": TABLE5}
OF_EPOCHS = {"table4": "epoch_time", "table5": "overhead_sizes"}
both = pytest.mark.parametrize("artefact", EXHIBITS)


def of_trainings(make):
    """Ask `make` of the trainings that fit or are streamed; the others run out of memory."""

    def whole(run, seed):
        if run.experiment != "train":
            return None
        return make(run, seed) if streamed(run) or not beyond(run) else OUT_OF_MEMORY

    return whole


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
        assert {role: INITIAL[role] for role in ROLES} == {
            "ResNet-50": 16, "ResNet-101": 8, "AmoebaNet-D": 32, "U-Net": 16}  # fmt: skip
        for (role, size), (metric, seconds) in {
            ("ResNet-50", 128): ([89.61, 0.14], [227.5, 0.02]),
            ("ResNet-101", 1024): ([75.14, 0.67], [392.8, 0.02]),
            ("AmoebaNet-D", 256): ([75.80, 0.17], [98.9, 0.17]),
            ("U-Net", 128): ([97.51, 0.06], [187.0, 0.24]),
        }.items():
            assert (rows[role, size]["with"], rows[role, size]["time_with"]) == (metric, seconds)
        assert rows["ResNet-50", 16]["without"] == [87.16, 0.33]
        assert runs.PAPER["table1"]["ResNet-50"]["high_large"] == 83.74
        for role in ROLES:  # Tables 4 and 5: the micro-batch never grows beyond what fits
            sizes = {row["mini_batch"]: row["micro_batch"] for row in paper_rows(role)}
            assert {n: runs.micro_batch_of(role, n) for n in sizes} == sizes

    def test_effects_and_margins(self):
        over = {
            (role, row["mini_batch"]): row["time_with"][0] / paper_rows(role)[0]["time_without"][0]
            for role in ROLES
            for row in paper_rows(role)
        }
        claims = claims_of("mbs")
        named = runs.PAPER["overhead_percent"]
        for artefact, roles in (("table4", runs.CLASSIFIERS), ("table5", ("U-Net",))):
            best = {
                role: max(paper_gain(role, row["mini_batch"]) for row in paper_rows(role)[1:])
                for role in roles
            }
            assert claims[artefact]["optimum_beyond"].effect == pytest.approx(best)
            halved = {role: max(0.01, over[role, INITIAL[role]] - 1) for role in roles}
            assert claims[artefact]["overhead_halved"].margin == pytest.approx(halved, rel=1e-5)
            sizes = {
                f"{r}, {n}": max(0.01, over[r, int(n)] - 1) for r in roles for n in named.get(r, {})
            }
            assert claims[artefact]["overhead_sizes"].margin == pytest.approx(sizes, abs=1e-5)
        apart = {}
        for role in ROLES:
            (without, spread), (with_, other) = (
                paper_rows(role)[0][w] for w in ("without", "with")
            )
            apart[role] = max(abs(with_ - without), 2 * np.hypot(spread, other) / 2**0.5)
        given = claims["table3"]["same_result"].margin | claims["table4"]["same_result"].margin
        assert given == pytest.approx(apart, abs=1e-3)
        accepted = {r: max([1.0, *named.get(r, {}).values()]) / 100 for r in ROLES}
        allowed = {
            f"{role}, {size}": max(ratio * (1 + accepted[role]) - 1, 0.01)
            for (role, size), ratio in over.items()
            if size > INITIAL[role] and role != "U-Net"
        }
        assert claims["table4"]["epoch_time"].margin == pytest.approx(allowed, abs=1e-4)


class TestTables4And5:
    @both
    def test_checks(self, artefact):
        as_claimed = of_trainings(lambda run, seed: trained(50.0))

        def but(outcome, way, seed=None):
            def make(run, own):
                wrong = run.config.get("mini_batch") == 64 and streamed(run) == way
                return outcome if wrong and seed in (None, own) else as_claimed(run, own)

            return make

        nothing = lambda run, seed: None  # noqa: E731 (a world)
        falls, peaks, grows = (by_size(c) for c in (lambda d: -4 * d, lambda d: 10 - (d - 2) ** 2,
                                                    lambda d: 4 * d))  # fmt: skip
        for position, worlds in enumerate(
            (
                {as_claimed: "yes", but(trained(50.0), False): "NO", nothing: "not run"},
                {
                    as_claimed: "yes",
                    but(OUT_OF_MEMORY, True, 1): "NO",
                    but(FAILED, True, 1): "NO",
                    nothing: "not run",
                },
                {falls: "yes", peaks: "yes", grows: "NO", nothing: "not run"},
            )
        ):
            for make, holds in worlds.items():
                row = check_row(f"mbs/{artefact}", position, results(artefact, make))
                assert row["holds"] == holds, (position, row)

    @both
    def test_on_a_gpu_steps_at_the_papers_sides_say_what_fits(self, artefact):
        def made(run, seed):
            if run.experiment == "step":
                fits = streamed(run) or not beyond(run)
                return {"metrics": {"limit_bytes": 24 * 2**30}} if fits else OUT_OF_MEMORY
            if run.experiment == "epochs":
                timing = {"samples_s": [1.0, 1.01, 0.99], "warmup": 1}
                return {"metrics": {}, "timings": dict.fromkeys(run.config["ways"], timing)}
            return trained(50.0) if run.experiment == "train" else None

        found = results(artefact, made, "gpu")
        rows = EXHIBITS[artefact].table(found)
        failed = [r for r in rows if r["MBS"] == "without" and r["mini-batch"] > 32]
        assert {row["ours (%)"] for row in failed} == {"out of memory"}
        assert check_row(f"mbs/{artefact}", 1, found)["holds"] == "yes"
        # A card's rounds count, not its one process.
        verdict = judge(f"{artefact}/{OF_EPOCHS[artefact]}", made, "gpu")
        assert verdict.word in ("reproduced", "undecided") and "×1.000" in verdict.evidence

    @both
    @pytest.mark.parametrize(
        ("curve", "noise", "word"),
        [
            (lambda d: 5 - d, 1, "reproduced"),
            (lambda d: -5 - d, 1, "not reproduced"),
            (lambda d: 0.2 - d, 6, "undecided"),
            (lambda d: 0.75 - d / 100, 0.1, "partly"),  # of 2.5, 2.3, 1.3 and 2.0 points
        ],
    )
    def test_the_best_size_beyond_the_initial_one(self, artefact, curve, noise, word):
        found = judge(f"{artefact}/optimum_beyond", by_size(curve, noise))
        assert found.word == word
        assert found.evidence.count("for the best of") == (3 if artefact == "table4" else 1)
        assert ", 32 over undivided 16" in found.evidence  # the first size beyond
        assert f"paper {'+2.45' if artefact == 'table4' else '+2.03'} (" in found.evidence

    @both
    def test_seeds_after_the_first_look_judge_alone(self, artefact):
        better = {0: 40.0, 1: 40.5, 2: -3.0, 3: -3.1, 4: -3.2}

        def make(run, seed):
            return trained(50.0 + (better[seed] if beyond(run) and streamed(run) else 0.0))

        world = of_trainings(make)
        assert "+40.25" in judge(f"{artefact}/optimum_beyond", world, LONG, (0, 1)).evidence
        found = judge(f"{artefact}/optimum_beyond", world, LONG, (0, 1, 2, 3, 4))
        assert found.word == "not reproduced" and "-3.10" in found.evidence
        rows = EXHIBITS[artefact].table(results(artefact, world, LONG, (0, 1, 2, 3, 4)))
        gains = {row["ours, gain (points)"][:5] for row in rows if row["MBS"] == "with"}
        assert "-3.10" in gains and "+40.2" not in gains

    @both
    @pytest.mark.parametrize(
        ("percent", "jitter", "word"),
        [
            (0.5, 0.01, "reproduced"),
            (-20.0, 0.01, "reproduced"),
            (9.0, 0.01, "not reproduced"),
            (1.0, 0.3, "undecided"),
        ],
    )
    def test_steps_in_halves(self, artefact, percent, jitter, word):
        def make(run, seed):
            return overhead(percent, 50.0, jitter) if run.experiment == "overhead" else None

        found = judge(f"{artefact}/overhead_halved", make)
        assert found.word == word and "15 in turns" in found.evidence
        assert f"×{1 + percent / 100:.3f}" in found.evidence
        by_process = judge(f"{artefact}/overhead_halved", make, LONG)
        assert "by each of 5 processes" in by_process.evidence

    @both
    @pytest.mark.parametrize(
        ("factor", "word"), [(0.9, "reproduced"), (1.0, "reproduced"), (1.25, "not reproduced")]
    )
    def test_epochs_of_trainings_that_ran_alone_and_in_turns(self, artefact, factor, word):
        def alone(run, seed):
            longer = factor if beyond(run) else 1.0
            return trained(50.0, epoch_s=10 * longer * (1 + 0.001 * NOISE[seed]))

        assert judge(f"{artefact}/{OF_EPOCHS[artefact]}", of_trainings(alone)).word == word

        def in_turns(run, seed):
            if run.experiment != "epochs":
                return of_trainings(alone)(run, seed)  # side by side: their times do not count
            times = {
                way: {"samples_s": [(factor if micro else 1.0) * (1 + seed)] * 3, "warmup": 1}
                for way, (_, micro) in run.config["ways"].items()
            }
            return {"metrics": {}, "timings": times}

        found = judge(f"{artefact}/{OF_EPOCHS[artefact]}", in_turns, LONG)
        assert found.word == word, found.evidence
        only_trained = judge(f"{artefact}/{OF_EPOCHS[artefact]}", of_trainings(alone), LONG)
        assert only_trained.word == "not run"

    @pytest.mark.parametrize(
        ("resnet101", "others", "word"),
        [(0.98, 1.02, "reproduced"), (0.98, 0.98, "partly"), (1.10, 0.98, "not reproduced")],
    )
    def test_resnet101_alone_is_faster(self, resnet101, others, word):
        def make(run, seed):
            own = resnet101 if run.config["role"] == "ResNet-101" else others
            factor = own if beyond(run) else 1.0
            return trained(50.0, epoch_s=factor * (1 + NOISE[seed] / 10_000))

        found = judge("table4/resnet101_faster", of_trainings(make))
        assert found.word == word and f"ResNet-101, 128 ×{resnet101:.3f}" in found.evidence
        assert f"AmoebaNet-D, 256, undivided over it: ×{1 / others:.3f}" in found.evidence

    def test_times_of_two_machines_do_not_compare(self):
        def make(run, seed):
            told = plausible(run, seed)
            return told and told | {"device": DEVICES[streamed(run)]}

        found = judge("table4/epoch_time", make)
        assert found.word == "not run" and "do not compare" in found.evidence

    @both
    def test_the_table_has_every_row_of_the_paper_twice(self, artefact):
        rows = EXHIBITS[artefact].table(results(artefact, plausible))
        assert len(rows) == 2 * (21 if artefact == "table4" else 7)
        failed = [row for row in rows if row["paper (%)"] == "Failed"]
        assert len(failed) == len(rows) // 2 - len({row["model"] for row in rows})
        for row in failed:
            assert (row["MBS"], row["n"], row["ours, gain (points)"]) == ("without", 3, "–")
            assert row["ours (%)"] == row["ours (s/epoch)"] == "out of memory"
        assert rows[0]["ours (%)"] == "70.00 ± 0.50" and rows[0]["ours (s/epoch)"] == "10.00 ± 0.50"
        own = {"classification": "flowers102", "segmentation": "carvana"}
        whole = results(artefact, plausible, "paper", chosen=own)
        extra = EXHIBITS[artefact].table(whole)[len(rows) :]
        size = 6551 if artefact == "table4" else 4080
        assert {(row["mini-batch"], row["MBS"], row["paper (%)"]) for row in extra} == {
            (size, "with", "–")
        }
        assert max(axes.get_xlim()[1] for axes in EXHIBITS[artefact].figure(whole).axes) > size

    def test_the_figure_shades_what_ran_out_of_memory_and_compares_ours_with_ours(self):
        def flattering(run, seed):
            return trained(99.0 + NOISE[seed] / 100)

        found = results("table4", of_trainings(flattering), "quick")
        axes = {a.get_title().replace("\n", " "): a for a in TABLE4.figure(found).axes[:3]}
        axis = axes["ours: ResNet-8 for ResNet-50, digits"]
        sizes = [16, 32, 64, 128, 256, 512]
        assert sizes[1:] == [
            size
            for size in sizes
            if any(p.get_x() < size < p.get_x() + p.get_width() for p in axis.patches)
        ]
        lines = {line.get_label(): line.get_ydata() for line in axis.get_lines()}
        assert max(abs(lines["ours, with MBS, 95 % interval"])) < 1e-9
        assert max(lines["paper, with MBS"]) == pytest.approx(89.61 - 87.16)


DEVICES = {
    way: {"type": "cpu", "name": f"machine {way}", "slug": "a", "memory_bytes": 1}
    for way in (False, True)
}


class TestSameness:
    @pytest.mark.parametrize("artefact", ["table3", "table4"])
    @pytest.mark.parametrize(
        ("gap", "noise", "word"),
        [
            (0.2, 0.1, "reproduced"),
            (-1.5, 0.1, "not reproduced"),
            (0.9, 0.5, "undecided"),  # inside, but the interval reaches beyond
            (0.0, 5.0, "undecided"),  # no significant difference is no sameness
        ],
    )
    def test_the_results_at_the_initial_size(self, artefact, gap, noise, word):
        margins = claims_of("mbs")[artefact]["same_result"].margin

        def make(run, seed):
            margin = margins[run.config["role"]]
            return trained(80.0 + margin * (2 * noise * NOISE[seed] + gap) * streamed(run))

        assert judge(f"{artefact}/same_result", make).word == word
        only_streamed = judge(
            f"{artefact}/same_result",
            lambda run, seed: trained(1.0) if run.config.get("micro_batch") else None,
        )
        assert only_streamed.word == "not run"

    @pytest.mark.parametrize(
        ("gap", "factor", "word"),
        [(0.5, 1.01, "reproduced"), (-6.0, 1.2, "not reproduced"), (-6.0, 1.0, "partly")],
    )
    def test_the_curves(self, gap, factor, word):
        def make(run, seed):
            offset = 0.4 * NOISE[seed] + gap * streamed(run)
            scale = (factor if streamed(run) else 1.0) * (1 + 0.02 * NOISE[seed])
            return trained(50.0 + offset, 60.0 + offset, loss=[2.0 * scale, 1.9 * scale])

        found = judge("figure3/same_curves", make)
        assert found.word == word and found.evidence.count("margin ±") == 6
        assert found.evidence.count(f"{gap:+.2f}") >= 3 and f"×{factor:.3f}" in found.evidence

    def test_table3_has_both_and_their_difference(self):
        rows = PAPER.artefacts["table3"].table(results("table3", plausible))
        assert list(rows["paper"]) == ["95.48 ± 0.13", "95.45 ± 0.26", "-0.03"]
        assert list(rows["ours"]) == ["70.00 ± 0.50"] * 2 + ["+0.00 [-2.15, +2.15]"]

    @pytest.mark.parametrize(
        ("gaps", "word"),
        [((0.0, -0.1, 0.2), "reproduced"), ((9.0, 9.1, 9.2), "not reproduced")],
    )
    def test_pairs_are_judged_however_far_seeds_lie_apart(self, gaps, word):
        def make(run, seed):
            apart = gaps[seed] if run.config["norm"] == "group" else 50.0
            return twins(20.0 + 30 * seed, 20.0 + 30 * seed + apart)

        assert judge("batchnorm/same_without_batchnorm", make).word == word
        holds = {gap: check_row("mbs/batchnorm", 0, results(
            "batchnorm", lambda run, seed, gap=gap: twins(1.0, 1.0 + gap)))["holds"]
            for gap in (0.0, 1.0)}  # fmt: skip
        assert holds == {0.0: "yes", 1.0: "NO"}


def test_normalisation_is_judged_by_the_distance_of_losses():
    def world(none, paper, diverged=False):
        def make(run, seed):
            if run.experiment != "normalised":
                return None
            way = run.config["normalization"]
            away = {None: 0.0, "none": none, "paper": paper, "exact": 0.0}[way]
            losses = [2.0 + away + NOISE[seed] / 100, None if diverged and way == "none" else 1.5]
            told = {"train_loss": losses, "accuracy": [40.0, 60.0], "best": 60.0}
            return {"metrics": told | {"diverged": None in losses}}

        return make

    for make, word in (
        (world(0.5, 0.05), "reproduced"),
        (world(0.05, 0.5), "not reproduced"),
        (world(0.5, 0.05, diverged=True), "reproduced"),
        (lambda run, seed: None, "not run"),
    ):
        assert judge("normalisation/closer", make).word == word


def test_gradients_are_the_same_where_they_have_to_be():
    def world(ragged=1e-16, exact=1e-16, length=1.0):
        def make(run, seed):
            if run.experiment != "gradients":
                return None
            rows = [
                {
                    "mini_batch": mini,
                    "micro_batch": micro,
                    "frozen": frozen,
                    "way": way,
                    "error": {
                        "none": 3.0,
                        "paper": ragged if mini % micro else 1e-16,
                        "exact": exact,
                    }[way],
                    "length": length * (mini // micro) if way == "none" else 1.0,
                }
                for mini, micro in run.config["divisions"]
                for frozen in (True, False)
                for way in ("none", "paper", "exact")
            ]
            return {"metrics": {"rows": rows}}

        return results("normalisation", make)

    def holds(found):
        return [check_row("mbs/normalisation", n, found)["holds"] for n in range(3)]

    assert holds(world()) == ["yes"] * 3
    assert holds(world(ragged=0.2)) == ["yes", "yes", "NO"]
    assert holds(world(exact=1e-3)) == ["NO", "yes", "yes"]
    assert holds(world(length=1.1)) == ["yes", "NO", "yes"]


@pytest.mark.parametrize(
    ("fits", "predicted", "largest", "holds"),
    [(1, 1.5, 1, ["yes", "yes"]), (1, 2, 1, ["NO", "yes"]), (1, 1, 2, ["yes", "NO"])],
)
def test_sizes_that_fit_are_checked_between_two_powers_of_two(fits, predicted, largest, holds):
    def make(run, seed):
        initial = INITIAL[run.config["role"]]
        if run.experiment == "foretell":
            return {"metrics": {"largest": largest * initial}}
        told = {"largest_that_fits": fits * initial, "predicted_largest": int(predicted * initial)}
        return {"metrics": told | {"limit_bytes": 3 * 2**20}}

    found = results("table2", make)
    assert [check_row("mbs/table2", n, found)["holds"] for n in (0, 1)] == holds
    rows = PAPER.artefacts["table2"].table(found)
    assert list(rows["limit (MiB)"]) == ["3.0"] * 4 and list(rows["mini-batch, paper"]) == [
        16, 8, 32, 16]  # fmt: skip


@pytest.mark.parametrize(
    ("larger", "word"), [(15.0, "reproduced"), (3.0, "partly"), (-1.0, "not reproduced")]
)
def test_table1_compares_cells(larger, word):
    def make(run, seed):
        large = run.config["mini_batch"] == 16
        return trained(50.0 + larger * large * (run.config["resolution"] == "high") + NOISE[seed])

    assert judge("table1/large_mini_batch", make).word == word
    assert judge("table1/high_resolution", make).word == word
    rows = PAPER.artefacts["table1"].table(results("table1", make))
    assert list(rows["paper (%)"][:4]) == ["48.66", "62.10", "61.86", "83.74"]
    assert list(rows["n"]) == [3] * 8


def test_the_share_of_copies_behind_computations():
    spans = [["copy", 0, 0.0, 1.0], ["compute", 0, 1.0, 3.0], ["copy", 1, 1.0, 2.0]]
    assert hidden_shares(spans) == [1.0]
    assert hidden_shares([*spans, ["copy", 2, 2.5, 3.5]]) == [1.0, 0.5]
    told = {"spans": spans, "update": [3.0, 3.5], "copied": "host to device", "micro_batches": 2}

    def make(device, between):
        metrics = told | {"updates_between_micro_batches": between, "updates_after": 1}
        return lambda run, seed: {"metrics": metrics, "device": device}

    card = {"type": "cuda", "name": "a card", "slug": "card", "memory_bytes": 1}
    assert judge("figure2/overlap", make(DEVICES[True], 0)).word == "not run"
    assert "100" in judge("figure2/overlap", make(card, 0)).evidence
    for between, holds in ((0, "yes"), (1, "NO")):
        found = results("figure2", make(card, between))
        assert check_row("mbs/figure2", 0, found)["holds"] == holds
    rows = PAPER.artefacts["figure2"].table(found)
    assert list(rows["in all (ms)"]) == ["2000.00", "2000.00", "500.00", "–"]


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
    grown = growth(found)
    assert {way: gap.shown(gap.mean) for way, gap in grown.items()} == {
        "memory": "×1.000", "ahead": "×1.500", "asked": "×1.100"}  # fmt: skip
    assert {gap.trials for gap in grown.values()} == {trials}
    assert all(gap.error < 1e-9 for gap in grown.values())
    said = PAPER.artefacts["files"].caption(found)
    assert "512 files of our own: JPEG, 224 px, 8 kB, 100 % not in the page cache" in said
    with pytest.raises(NotRun):
        growth(results("files", lambda run, seed: None, profile))


def test_a_caption_names_what_stands_for_the_papers():
    said = PAPER.artefacts["table4"].caption(results("table4", plausible, "quick"))
    assert "STAND-IN: digits for Flowers-102, smaller networks." in said
    assert "SIMULATED memory limit." in said
    own = PAPER.artefacts["table4"].caption(results("table4", plausible, "paper"))
    assert "smaller networks" not in own


def test_the_profile_gpu_measures_at_the_papers_sides_in_float32():
    chosen = {"classification": "flowers102", "segmentation": "carvana"}
    for artefact in PAPER.artefacts.values():
        for run in artefact.runs("gpu", chosen):
            config = run.config
            if run.experiment in ("size", "step", "overhead", "epochs", "timeline"):
                assert config["channels_last"] and "autocast" not in config
                # Where memory is measured, trials of algorithms would take more than a training.
                timed = run.experiment in ("overhead", "epochs")
                assert config.get("benchmark", False) == timed
            if run.experiment == "train":
                assert config["timed"] is False and config["autocast"] == "bfloat16"
    assert CHOSEN["classification"] == "digits"
