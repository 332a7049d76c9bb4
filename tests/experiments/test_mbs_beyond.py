"""Tables 4 and 5: mini-batches beyond memory, by planted worlds."""

import numpy as np
import pytest
from made import FAILED, OUT_OF_MEMORY, check_row, made_results, verdict
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
)

from repro.experiments.design import claims_of, reported
from repro.experiments.mbs.beyond import TABLE4, TABLE5, paper_gain
from repro.experiments.mbs.settings import paper_rows
from repro.experiments.mbs.times import paper_overhead

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
    """Make trainings whose metric follows the doublings beyond the initial size.

    Those with MBS have noise: seeds are compared in pairs.
    """

    def make(run, seed):
        doublings = np.log2(run.config["mini_batch"] / INITIAL[run.config["role"]])
        own = noise * NOISE[seed] if streamed(run) else 0.0
        return trained(80.0 + (curve(doublings) if doublings else 0.0) + own)

    return of_trainings(make)


class TestMemory:
    """Checks: that the limit refuses larger mini-batches undivided, and that MBS trains them."""

    def as_claimed(self, run, seed):
        return of_trainings(lambda run, seed: trained(50.0))(run, seed)

    @both
    @pytest.mark.parametrize("outcome", [OUT_OF_MEMORY, FAILED])
    def test_streamed_mini_batches_train(self, artefact, outcome):
        def one_fails(run, seed):
            wrong = run.config["mini_batch"] == 64 and streamed(run) and seed == 1
            return outcome if wrong else self.as_claimed(run, seed)

        for make, holds in [
            (self.as_claimed, "yes"),
            (one_fails, "NO"),
            (lambda run, seed: None, "not run"),
        ]:
            row = check_row(f"mbs/{artefact}", 1, results(artefact, make))
            assert row["holds"] == holds
        assert (
            "runs, up to 1,024"
            in check_row(f"mbs/{artefact}", 1, results(artefact, self.as_claimed))["evidence"]
        )

    @both
    def test_the_limit_refuses(self, artefact):
        def one_fits(run, seed):
            wrong = run.config["mini_batch"] == 64 and not streamed(run)
            return trained(50.0) if wrong else self.as_claimed(run, seed)

        for make, holds in [
            (self.as_claimed, "yes"),
            (one_fits, "NO"),
            (lambda run, seed: None, "not run"),
        ]:
            row = check_row(f"mbs/{artefact}", 0, results(artefact, make))
            assert row["holds"] == holds

    @both
    @pytest.mark.parametrize(
        ("curve", "holds"),
        [(lambda d: -4 * d, "yes"), (lambda d: 10 - (d - 2) ** 2, "yes"), (lambda d: 4 * d, "NO")],
    )
    def test_the_best_is_not_the_largest(self, artefact, curve, holds):
        row = check_row(f"mbs/{artefact}", 2, results(artefact, by_size(curve)))
        assert row["holds"] == holds and "% at 1024" in row["evidence"]

    @both
    def test_one_size_has_no_best(self, artefact):
        alone = of_trainings(lambda run, seed: None if beyond(run) else trained(50.0))
        assert check_row(f"mbs/{artefact}", 2, results(artefact, alone))["holds"] == "not run"


@both
class TestOnGpu:
    """Accuracy is of smaller images: which sizes fit is told by steps at the paper's sides."""

    def made(self, run, seed):
        if run.experiment == "step":
            fits = streamed(run) or not beyond(run)
            return {"metrics": {"limit_bytes": 24 * 2**30}} if fits else OUT_OF_MEMORY
        return trained(50.0) if run.experiment == "train" else None

    def test_steps_say_what_trains_and_what_runs_out_of_memory(self, artefact):
        rows = EXHIBITS[artefact].table(results(artefact, self.made, "gpu"))
        failed = [r for r in rows if r["MBS"] == "without" and r["mini-batch"] > 32]
        assert {row["ours (%)"] for row in failed} == {"out of memory"}
        trained_ = {row["model"] for row in rows if row["ours (%)"].startswith("50.00")}
        assert trained_ == ({"ResNet-50"} if artefact == "table4" else {"U-Net"})

    def test_a_step_that_fails_counts(self, artefact):
        def none_fits(run, seed):
            return OUT_OF_MEMORY if run.experiment == "step" else self.made(run, seed)

        for make, holds in ((self.made, "yes"), (none_fits, "NO")):
            row = check_row(f"mbs/{artefact}", 1, results(artefact, make, "gpu"))
            assert row["holds"] == holds

    def test_rounds_of_one_process_count(self, artefact):
        def timed(run, seed):
            if run.experiment != "epochs":
                return None
            samples = [1.0, 1.01, 0.99]
            timing = {"samples_s": samples, "warmup": 1}
            return {"metrics": {}, "timings": dict.fromkeys(run.config["ways"], timing)}

        found = judge(f"{artefact}/{OF_EPOCHS[artefact]}", timed, "gpu")
        assert found.word in ("reproduced", "undecided")  # of the sizes that a card times
        assert "×1.000" in found.evidence


@both
class TestOptimum:
    @pytest.mark.parametrize(
        ("curve", "noise", "word"),
        [
            (lambda d: 5 - d, 1, "reproduced"),
            (lambda d: -5 - d, 1, "not reproduced"),
            (lambda d: 0.2 - d, 6, "undecided"),
            (lambda d: -d, 6, "undecided"),  # the mean is lower, the interval holds 0
        ],
    )
    def test_beyond_the_initial_size(self, artefact, curve, noise, word):
        found = judge(f"{artefact}/optimum_beyond", by_size(curve, noise))
        assert found.word == word
        assert found.evidence.count("for the best of") == (3 if artefact == "table4" else 1)
        assert ", 32 over undivided 16" in found.evidence  # the first size beyond
        # 89.61 - 87.16 of ResNet-50, 97.51 - 95.48 of U-Net
        paper = "+2.45" if artefact == "table4" else "+2.03"
        assert f"paper {paper} (" in found.evidence

    def test_the_best_of_many_sizes_needs_more_than_the_only_one(self, artefact):
        """The interval is widened for the choice (Bonferroni), in the table as in the verdict."""
        widths = {}
        for profile in ("smoke", "paper"):
            make = by_size(lambda d: 3 - d)
            found = judge(f"{artefact}/optimum_beyond", make, profile, (0, 1, 2)).evidence
            shown = found.split("[")[1].split("]")[0]
            low, high = shown.split(" for the best")[0].split(", ")
            widths[profile] = float(high) - float(low)
            told = EXHIBITS[artefact].table(results(artefact, make, profile))
            assert any(shown in row["ours, gain (points)"] for row in told)
        assert widths["paper"] > widths["smoke"] * 1.05

    def test_certain_but_small_is_partly(self, artefact):
        make = by_size(lambda d: 0.75 - d / 100, 0.1)  # of 2.5, 2.3, 1.3 and 2.0 points
        assert judge(f"{artefact}/optimum_beyond", make).word == "partly"

    def test_a_size_alone_is_not_the_best_of_any(self, artefact):
        def make(run, seed):
            alone = run.experiment == "train" and not beyond(run)
            return trained(80.0 + NOISE[seed]) if alone else None

        assert judge(f"{artefact}/optimum_beyond", make).word == "not run"

    def test_seeds_after_the_first_look_judge_alone(self, artefact):
        """Under `long`, where they are two or more; of quick and paper nobody looked before."""
        better = {0: 40.0, 1: 40.5, 2: -3.0, 3: -3.1, 4: -3.2}

        def make(run, seed):
            return trained(50.0 + (better[seed] if beyond(run) and streamed(run) else 0.0))

        world = of_trainings(make)
        first = judge(f"{artefact}/optimum_beyond", world, "long", (0, 1))
        assert "+40.25" in first.evidence
        found = judge(f"{artefact}/optimum_beyond", world, "long", (0, 1, 2, 3, 4))
        assert found.word == "not reproduced" and "-3.10" in found.evidence
        rows = EXHIBITS[artefact].table(results(artefact, world, "long", (0, 1, 2, 3, 4)))
        gains = {row["ours, gain (points)"][:5] for row in rows if row["MBS"] == "with"}
        assert "-3.10" in gains and "+40.2" not in gains


@both
class TestTime:
    @pytest.mark.parametrize(
        ("percent", "jitter", "word"),
        [
            (0.5, 0.01, "reproduced"),
            (-20.0, 0.01, "reproduced"),  # faster is no cost
            (9.0, 0.01, "not reproduced"),
            (1.0, 0.30, "undecided"),
            (4.0, 0.30, "undecided"),
        ],
    )
    def test_overhead(self, artefact, percent, jitter, word):
        def make(run, seed):
            return overhead(percent, 50.0, jitter) if run.experiment == "overhead" else None

        found = judge(f"{artefact}/overhead_halved", make)
        assert found.word == word
        assert "15 in turns" in found.evidence
        # Of each network's own row: 233.0 s of 226.8 s; 183.2 of 180.7.
        assert f"margin +{'2.73' if artefact == 'table4' else '1.38'} %" in found.evidence
        assert f"×{1 + percent / 100:.3f}" in found.evidence

    @pytest.mark.parametrize(
        ("factor", "noise", "word"),
        [
            (0.90, 0.001, "reproduced"),
            (1.00, 0.001, "reproduced"),
            (1.25, 0.001, "not reproduced"),  # 1.226 of AmoebaNet-D at 1024 is allowed
            (1.01, 0.20, "undecided"),
            (1.12, 0.20, "undecided"),
        ],
    )
    def test_epoch(self, artefact, factor, noise, word):
        """Against the undivided initial mini-batch; streaming that one is left out."""

        def make(run, seed):
            own = factor if beyond(run) else 100.0 if streamed(run) else 1.0
            return trained(50.0, epoch_s=own * (1 + noise * NOISE[seed]))

        found = judge(f"{artefact}/{OF_EPOCHS[artefact]}", of_trainings(make))
        assert found.word == word
        assert f"×{factor:.3f} [" in found.evidence
        assert found.evidence.count("margin +") == (6 + 7 + 5 if artefact == "table4" else 1)

    def test_epochs_of_the_sizes_that_the_paper_names(self, artefact):
        """0.3 % of ResNet-50 at 128 counts as 1 %; 3.5 % of U-Net."""

        def make(slower):
            def outcome(run, seed):
                own = slower if run.config["mini_batch"] == 128 else 1.0
                return trained(50.0, epoch_s=own * (1 + NOISE[seed] / 1000))

            return of_trainings(outcome)

        words = {"table4": ("reproduced", "partly"), "table5": ("reproduced", "not reproduced")}
        for slower, word in zip((1.0, 1.2), words[artefact], strict=True):
            found = judge(f"{artefact}/overhead_sizes", make(slower))
            assert found.word == word
            assert ("margin +1 %" if artefact == "table4" else "margin +3.49 %") in found.evidence

    def test_times_of_two_machines_do_not_compare(self, artefact):
        def make(run, seed):
            device = {"type": "cpu", "name": f"machine {seed}"}
            return trained(50.0) | {"device": device}

        found = judge(f"{artefact}/{OF_EPOCHS[artefact]}", of_trainings(make))
        assert found.word == "not run" and "do not compare" in found.evidence


@both
class TestTimesOfSeveralProcesses:
    def make(self, factor, jitter=0.0):
        """Return outcomes of processes of several speeds.

        Sizes above the initial take `factor` times as long, streaming that one a hundred times.
        """

        def outcome(run, seed):
            if run.experiment != "epochs":
                return None
            odd = 1 + jitter * (-1) ** seed
            initial = INITIAL[run.config["role"]]
            times = {
                name: (1.0 if micro is None else 100.0 if mini == initial else factor * odd)
                for name, (mini, micro) in run.config["ways"].items()
            }
            return {
                "metrics": {},
                "timings": {
                    name: {"samples_s": [2.0**seed * s, 2.0**seed * s, 99.0], "warmup": 1}
                    for name, s in times.items()
                },
            }

        return outcome

    @pytest.mark.parametrize(
        ("factor", "jitter", "word"),
        [
            (0.99, 0.0, "reproduced"),
            (1.50, 0.0, "not reproduced"),
            (1.02, 0.2, "undecided"),
        ],
    )
    def test_a_slow_process_is_no_slow_way(self, artefact, factor, jitter, word):
        made_ = self.make(factor, jitter)
        found = judge(f"{artefact}/{OF_EPOCHS[artefact]}", made_, "long")
        assert found.word == word, found.evidence
        if jitter:
            assert "processes a cell would not decide" in found.evidence

    def test_table_and_figure_have_what_was_timed_and_no_more(self, artefact):
        found = results(artefact, self.make(2.0), "long")
        timed = [row for row in EXHIBITS[artefact].table(found) if " ± " in row["ours (s/epoch)"]]
        ways = sum(len(r.config["ways"]) for r in found.ok("epochs") if r.seed == 0)
        assert len(timed) == ways
        panels = EXHIBITS[artefact].figure(found).axes
        assert any(axis.containers or axis.lines for axis in panels)

    def test_trainings_side_by_side_say_nothing_of_time(self, artefact):
        found = judge(
            f"{artefact}/{OF_EPOCHS[artefact]}", of_trainings(lambda *_: trained(50.0)), "long"
        )
        assert found.word == "not run"

    def test_one_process_is_one_of_several(self, artefact):
        def make(run, seed):
            return self.make(1.5)(run, seed) if seed == 0 else None

        found = judge(f"{artefact}/{OF_EPOCHS[artefact]}", make, "long")
        assert found.word == "undecided" and "no spread known" in found.evidence

    def test_steps_in_turns_are_of_processes_too(self, artefact):
        def make(run, seed):
            return overhead(0.5, jitter=0.3 * (seed == 0)) if run.experiment == "overhead" else None

        found = judge(f"{artefact}/overhead_halved", make, "long")
        assert found.word == "reproduced" and "by each of 5 processes" in found.evidence


@both
def test_not_run(artefact):
    for key in EXHIBITS[artefact].claims:
        assert judge(f"{artefact}/{key}", lambda run, seed: None).word == "not run"


@pytest.mark.parametrize(
    ("resnet101", "others", "word"),
    [
        (0.98, 1.02, "reproduced"),
        (0.98, 0.98, "partly"),  # faster, and so are the others
        (1.10, 1.02, "partly"),
        (1.10, 0.98, "not reproduced"),
    ],
)
def test_resnet101_alone_is_faster(resnet101, others, word):
    def make(run, seed):
        own = resnet101 if run.config["role"] == "ResNet-101" else others
        factor = own if beyond(run) else 1.0
        return trained(50.0, epoch_s=factor * (1 + NOISE[seed] / 10_000))

    found = judge("table4/resnet101_faster", of_trainings(make))
    assert found.word == word
    assert f"ResNet-101, 128 ×{resnet101:.3f}" in found.evidence
    assert f"AmoebaNet-D, 256, undivided over it: ×{1 / others:.3f}" in found.evidence


@pytest.mark.parametrize("profile", ["smoke", "quick"])
@both
def test_smaller_grids_are_judged_too(artefact, profile):
    for key in EXHIBITS[artefact].claims:
        found = judge(f"{artefact}/{key}", plausible, profile, (0, 1, 2))
        # Of ResNet-101 and AmoebaNet `smoke` trains no size beyond the initial one.
        assert found.word != "not run" or profile == "smoke", key
        assert "nan" not in found.evidence


def test_the_papers_own_numbers_bear_its_claims_out():
    """What the paper reports, as records of three seeds."""
    rows = {
        (row["model"], row["mini_batch"]): row
        for table in EXHIBITS
        for row in reported("mbs")[table]
    }

    def make(run, seed):
        row = rows[run.config["role"], run.config["mini_batch"]]
        mean, std = row["with" if streamed(run) else "without"]
        seconds, error = row["time_with" if streamed(run) else "time_without"]
        own = 2 * NOISE[(seed + streamed(run)) % 3]  # seeds are compared in pairs, which differ
        return trained(mean + std * own, epoch_s=seconds + error * (seed - 1))

    words = {
        artefact: {
            key: judge(f"{artefact}/{key}", of_trainings(make), "paper").word
            for key in EXHIBITS[artefact].claims
            if key != "overhead_halved"
        }
        for artefact in EXHIBITS
    }
    # Its own overhead lies on the margin.
    assert words["table5"] == {"optimum_beyond": "reproduced", "overhead_sizes": "undecided"}
    # Three seeds of its ResNet-101 and AmoebaNet scatter too much for two of its claims.
    assert words["table4"] == {
        "same_result": "undecided",
        "optimum_beyond": "undecided",
        "overhead_sizes": "undecided",
        "epoch_time": "reproduced",
        "resnet101_faster": "reproduced",
    }


def test_effects_and_margins_are_the_papers():
    first = {role: paper_rows(role)[0] for role in INITIAL}
    rows = claims_of("mbs")
    for artefact, roles in (("table4", list(INITIAL)[:3]), ("table5", ["U-Net"])):
        best = {
            r: max(paper_gain(r, row["mini_batch"]) for row in paper_rows(r)[1:]) for r in roles
        }
        assert rows[artefact]["optimum_beyond"].effect == pytest.approx(best)
        halved = {r: max(0.01, paper_overhead(r, 0) - 1) for r in roles}
        assert rows[artefact]["overhead_halved"].margin == pytest.approx(halved, rel=1e-5)
    named = reported("mbs")["overhead_percent"]
    over = {
        (role, row["mini_batch"]): row["time_with"][0] / first[role]["time_without"][0]
        for role in INITIAL
        for row in paper_rows(role)
    }
    sizes = {f"{r}, {n}": max(0.01, over[r, int(n)] - 1) for r in named for n in named[r]}
    own = [rows[artefact]["overhead_sizes"].margin for artefact in EXHIBITS]
    assert own[0] | own[1] == pytest.approx(sizes, abs=1e-5)
    accepted = {r: max([1.0, *named.get(r, {}).values()]) / 100 for r in INITIAL}
    allowed = {
        f"{role}, {size}": max(ratio * (1 + accepted[role]) - 1, 0.01)
        for (role, size), ratio in over.items()
        if size > INITIAL[role] and role != "U-Net"
    }
    assert rows["table4"]["epoch_time"].margin == pytest.approx(allowed, abs=1e-4)
    assert rows["table4"]["resnet101_faster"].effect == pytest.approx(
        {
            "ResNet-101, 128": over["ResNet-101", 128],
            "ResNet-50, 128": 1 / over["ResNet-50", 128],
            "AmoebaNet-D, 256": 1 / over["AmoebaNet-D", 256],
        },
        rel=1e-5,
    )
    grown = over["ResNet-50", 512] / over["ResNet-50", 32]
    assert rows["files"]["time_grows"].effect == pytest.approx(grown, abs=1e-3)


@both
def test_all_samples_of_the_papers_own_data(artefact):
    """A mini-batch that the paper has no row of."""
    own = {"classification": "flowers102", "segmentation": "carvana"}
    known, found = (
        made_results(f"mbs/{artefact}", plausible, chosen, "paper", (0, 1, 2))
        for chosen in (CHOSEN, own)
    )
    exhibit, size = EXHIBITS[artefact], 6551 if artefact == "table4" else 4080
    extra = [row for row in exhibit.table(found) if row["mini-batch"] == size]
    assert len(exhibit.table(known)) + len(extra) == len(exhibit.table(found))
    assert [row["model"] for row in extra] == sorted(
        {row["model"] for row in exhibit.table(known)}, key=[r["model"] for r in extra].index
    )
    for row in extra:
        assert (row["MBS"], row["n"], row["ours (%)"]) == ("with", 3, "70.00 ± 0.50")
        assert row["paper (%)"] == row["paper, gain (points)"] == "–"
        assert row["ours, gain (points)"].startswith("+0.00 [")
    assert max(axes.get_xlim()[1] for axes in exhibit.figure(found).axes) > size
    for key in exhibit.claims:
        words = [verdict(f"mbs/{artefact}/{key}", world).word for world in (known, found)]
        assert words[0] == words[1], key


class TestTable:
    def row(self, rows, **wanted):
        (found,) = [row for row in rows if wanted.items() <= row.items()]
        return found

    def test_every_row_of_the_paper_twice(self):
        assert len(TABLE4.table(results("table4", plausible))) == 2 * (7 + 8 + 6)
        assert len(TABLE5.table(results("table5", plausible))) == 2 * 7

    def test_without_and_with(self):
        rows = TABLE4.table(results("table4", plausible))
        assert self.row(rows, model="ResNet-50", MBS="without", **{"mini-batch": 16}) == {
            "model": "ResNet-50",
            "mini-batch": 16,
            "μ-batch": "–",
            "MBS": "without",
            "paper (%)": "87.16 ± 0.33",
            "ours (%)": "70.00 ± 0.50",
            "n": 3,
            "paper, gain (points)": "–",
            "ours, gain (points)": "–",
            "paper (s/epoch)": "226.80 ± 0.01",
            "ours (s/epoch)": "10.00 ± 0.50",
        }
        row = self.row(rows, model="ResNet-50", MBS="with", **{"mini-batch": 128})
        assert (row["paper (%)"], row["μ-batch"]) == ("89.61 ± 0.14", 16)
        assert row["paper, gain (points)"] == "+2.45"  # over its own 87.16 without MBS

    @both
    def test_failed_in_the_paper_is_out_of_memory_here(self, artefact):
        rows = EXHIBITS[artefact].table(results(artefact, plausible))
        failed = [row for row in rows if row["paper (%)"] == "Failed"]
        assert len(failed) == len(rows) // 2 - len({row["model"] for row in rows})
        for row in failed:
            assert (row["MBS"], row["n"], row["ours, gain (points)"]) == ("without", 3, "–")
            assert row["paper (s/epoch)"] == "Failed"
            assert row["ours (%)"] == row["ours (s/epoch)"] == "out of memory"

    def test_what_failed_and_what_was_not_run(self):
        def make(run, seed):
            if run.config["mini_batch"] == 64:
                return FAILED
            return None if run.config["mini_batch"] == 128 else plausible(run, seed)

        rows = TABLE5.table(results("table5", make))
        for size, shown, count in [(64, "error", 3), (128, "not run", 0)]:
            own = [row for row in rows if row["mini-batch"] == size]
            assert {(row["ours (%)"], row["n"]) for row in own} == {(shown, count)}

    def test_one_seed_that_failed_does_not_hide_the_others(self):
        def make(run, seed):
            return FAILED if seed == 1 else plausible(run, seed)

        row = TABLE5.table(results("table5", make))[0]
        assert (row["n"], row["ours (%)"]) == (2, "70.00 ± 0.71")


def test_each_model_is_timed_and_trained():
    for artefact, roles in [("table4", set(INITIAL) - {"U-Net"}), ("table5", {"U-Net"})]:
        for profile, experiments in [
            ("gpu", ("step", "overhead", "epochs")),
            ("paper", ("train", "overhead")),
        ]:
            runs = PAPER.artefacts[artefact].runs(profile, CHOSEN)
            for name in experiments:
                assert {r.config["role"] for r in runs if r.experiment == name} == roles


class TestFigure:
    def panels(self, artefact, make, profile="paper"):
        """Return the upper panel of each model by its title."""
        figure = EXHIBITS[artefact].figure(results(artefact, make, profile))
        return {axis.get_title().replace("\n", " "): axis for axis in figure.axes[:3]}

    def shaded(self, axis):
        return [
            size
            for size in (8, 16, 32, 64, 128, 256, 512, 1024)
            if any(p.get_x() < size < p.get_x() + p.get_width() for p in axis.patches)
        ]

    def test_what_is_shaded_is_what_ran_out_of_memory(self):
        """Each model's own sizes: AmoebaNet-D still trains 32 undivided, where ResNet-50 fails."""
        by_model = {
            title: self.shaded(axis) for title, axis in self.panels("table4", plausible).items()
        }
        doubles = [32, 64, 128, 256, 512, 1024]
        assert by_model == {
            "ours: ResNet-50, digits": doubles,
            "ours: ResNet-101, digits": [16, *doubles],
            "ours: AmoebaNet-D, digits": doubles[1:],
        }

    def test_a_size_that_fits_is_not_shaded(self):
        def fits(run, seed):
            return trained(50.0) if run.config["mini_batch"] == 64 else plausible(run, seed)

        for axis in self.panels("table4", fits).values():
            assert 64 not in self.shaded(axis) and 128 in self.shaded(axis)

    def test_ours_is_compared_with_ours_and_the_papers_with_the_papers(self):
        """However much better than the paper's all of ours are, its gain is our own."""

        def flattering(run, seed):
            return trained(99.0 + NOISE[seed] / 100)

        axis = self.panels("table4", of_trainings(flattering))["ours: ResNet-50, digits"]
        lines = {line.get_label(): line.get_ydata() for line in axis.get_lines()}
        assert max(abs(lines["ours, with MBS, 95 % interval"])) < 1e-9
        assert max(lines["paper, with MBS"]) == pytest.approx(89.61 - 87.16)

    def test_a_stand_in_has_its_own_name(self):
        rows = TABLE4.table(results("table4", plausible, "quick"))
        assert rows[0]["model"] == "ResNet-8 (for ResNet-50)"
        titles = list(self.panels("table4", plausible, "quick"))
        assert titles[0] == "ours: ResNet-8 for ResNet-50, digits"
        assert titles[2] == "ours: AmoebaNet-D of 3 layers for AmoebaNet-D, digits"
