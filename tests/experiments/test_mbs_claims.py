"""Every claim, judged on records made up to be reproduced, partly, not reproduced, not run."""

import numpy as np
import pytest
from made import (
    FAILED,
    INITIAL,
    OUT_OF_MEMORY,
    PAPER,
    made_results,
    overhead,
    trained,
    verdict,
)

from repro.experiments import sources
from repro.experiments.mbs.artefacts import curve_gap, hidden_share, same_size_difference
from repro.experiments.mbs.claims import combine, larger

NOISE = (-0.1, 0.0, 0.1)  # by seed

# How far apart results with and without MBS are in the paper at the initial mini-batch, or twice
# the spread of its seeds there: 2 sqrt((s1² + s2²) / 2) of its standard deviations.
TOLERANCE = {"ResNet-50": 1.543, "ResNet-101": 4.401, "AmoebaNet-D": 2.440, "U-Net": 0.411}


def streamed(run) -> bool:
    return run.config["micro_batch"] is not None


def beyond(run) -> bool:
    return run.config["mini_batch"] > INITIAL[run.config["role"]]


class TestEveryClaim:
    def test_without_records_it_is_not_run(self):
        for artefact in PAPER.artefacts.values():
            assert artefact.claims
            results = made_results(artefact.name, lambda run, seed: None)
            for claim in artefact.claims:
                assert claim.check(results).word == "not run", claim.text
                assert claim.text and claim.source

    @pytest.mark.parametrize("outcome", [FAILED, OUT_OF_MEMORY])
    def test_where_nothing_worked_it_is_not_reproduced(self, outcome):
        for artefact in PAPER.artefacts.values():
            results = made_results(artefact.name, lambda run, seed: outcome)
            for claim in artefact.claims:
                found = claim.check(results)
                assert found.word in ("not run", "not reproduced"), claim.text
                assert found.evidence

    def test_on_the_smoke_records_each_gives_numbers(self, smoke):

        source = sources.Source("local", "smoke", smoke.store)
        for artefact in PAPER.artefacts.values():
            results = sources.results_of(PAPER, artefact, source)
            assert results.missing == 0 and not results.stale and not results.failed
            for claim in artefact.claims:
                found = claim.check(results)
                assert found.word == "not run" or any(c.isdigit() for c in found.evidence)
                assert "nan" not in found.evidence


class TestCombine:
    @pytest.mark.parametrize(
        ("words", "whole"),
        [
            (["reproduced"] * 2, "reproduced"),
            (["reproduced", "not run"], "partly"),
            (["reproduced", "not reproduced"], "partly"),
            (["partly"] * 2, "partly"),
            (["not reproduced"] * 2, "not reproduced"),
            (["not reproduced", "not run"], "not reproduced"),
            (["partly", "not reproduced"], "partly"),
            (["not run"] * 2, "not run"),
            ([], "not run"),
        ],
    )
    def test_words(self, words, whole):
        found = combine([(word, f"evidence {k}") for k, word in enumerate(words)])
        assert found.word == whole
        assert all(f"evidence {k}" in found.evidence for k in range(len(words)))

    @pytest.mark.parametrize(
        ("higher", "lower", "word"),
        [
            ([5.0, 5.1, 4.9], [1.0, 1.1, 0.9], "reproduced"),
            ([5.0, 9.0, 1.0], [4.0, 8.0, 0.0], "partly"),  # the interval includes 0
            ([5.0], [1.0], "partly"),  # one value a side gives no interval
            ([1.0, 1.1], [5.0, 5.1], "not reproduced"),
            ([1.0], [1.0], "not reproduced"),
            ([], [1.0], "not run"),
            ([1.0], [], "not run"),
        ],
    )
    def test_larger(self, higher, lower, word):
        found, evidence = larger("ResNet-50", higher, lower, 3.21)
        assert found == word
        assert "ResNet-50" in evidence
        assert word == "not run" or "paper +3.21" in evidence


class TestTable1:
    def judge(self, beginning, cells):
        """Judge by the mean of (resolution, large) for both models."""

        def make(run, seed):
            mean = cells[run.config["resolution"], run.config["mini_batch"] == 16]
            return mean and trained(mean + NOISE[seed])

        return verdict("table1", beginning, made_results("table1", make)).word

    CELLS = (("low", False), ("low", True), ("high", False), ("high", True))

    @pytest.mark.parametrize(
        ("beginning", "means", "word"),
        [
            ("At the higher", (40, 50, 60, 80), "reproduced"),
            ("At the higher", (40, 50, 80, 60), "not reproduced"),
            ("At the higher", (40, 50, 60, 60.05), "partly"),
            ("At the higher", (40, 50, None, 60), "not run"),
            ("With a large", (40, 50, 60, 80), "reproduced"),
            ("With a large", (40, 80, 60, 50), "not reproduced"),
            ("With a large", (40, 60, 60, 60.05), "partly"),
            ("With a large", (40, None, 60, 60), "not run"),
        ],
    )
    def test_gains(self, beginning, means, word):
        assert self.judge(beginning, dict(zip(self.CELLS, means, strict=True))) == word

    def test_one_model_of_two_is_partly(self):
        def make(run, seed):
            gain = 10 if run.config["role"] == "U-Net" else -10
            return trained(50 + gain * (run.config["mini_batch"] == 16) + NOISE[seed])

        found = verdict("table1", "At the higher", made_results("table1", make))
        assert found.word == "partly"
        assert "ResNet-50 -10.00" in found.evidence and "U-Net +10.00" in found.evidence
        assert "paper +21.88" in found.evidence and "paper +2.01" in found.evidence


class TestTable2:
    @pytest.mark.parametrize(
        ("fits", "predicted", "word"),
        [(16, 16, "reproduced"), (16, 31, "reproduced"), (16, 32, "not reproduced"),
         (16, 15, "not reproduced"), (None, 16, "not run"), (16, None, "not run")],
    )  # fmt: skip
    def test_prediction(self, fits, predicted, word):
        metrics = {"largest_that_fits": fits, "predicted_largest": predicted}
        results = made_results("table2", lambda run, seed: {"metrics": metrics})
        assert verdict("table2", "A mini-batch", results).word == word


class TestSame:
    def judge(self, artefact, gaps, seeds=(0, 1, 2)):
        """Judge by with - without for each seed, in tolerances."""

        def make(run, seed):
            gap = gaps[seed] * TOLERANCE[run.config["role"]] if streamed(run) else 0.0
            return trained(80.0 + NOISE[seed] / 100 + gap)

        beginning = "U-Net reaches" if artefact == "table3" else "The result at the initial"
        return verdict(artefact, beginning, made_results(artefact, make, seeds=seeds))

    @pytest.mark.parametrize("artefact", ["table3", "table4", "table5"])
    @pytest.mark.parametrize(
        ("gaps", "word"),
        [
            ((0.1, 0.2, 0.3), "reproduced"),
            ((-0.3, -0.2, -0.1), "reproduced"),
            ((0.9, 0.98, 0.9), "partly"),  # close, but the interval reaches beyond
            ((-1.4, -1.5, -1.6), "not reproduced"),
            ((1.4, 1.5, 1.6), "not reproduced"),
            ((-20.0, 10.0, 20.0), "partly"),  # far apart, but so are the seeds
        ],
    )
    def test_same(self, artefact, gaps, word):
        assert self.judge(artefact, gaps).word == word

    def test_without_one_side_it_is_not_run(self):
        results = made_results("table3", lambda run, seed: trained(1.0) if streamed(run) else None)
        assert verdict("table3", "U-Net reaches", results).word == "not run"

    def test_the_difference(self):
        results = made_results(
            "table3", lambda run, seed: trained(80.0 + seed + (3.0 if streamed(run) else 0.0))
        )
        assert same_size_difference(results, "U-Net").mean == pytest.approx(3.0)


class TestBeyondMemory:
    def judge(self, beginning, make, artefact="table4"):
        return verdict(artefact, beginning, made_results(artefact, make))

    @pytest.mark.parametrize("artefact", ["table4", "table5"])
    def test_memory(self, artefact):
        def as_claimed(run, seed):
            if run.experiment != "train":
                return overhead(1.0)
            return trained(50.0) if streamed(run) or not beyond(run) else OUT_OF_MEMORY

        def one_fits(run, seed):
            if run.experiment == "train" and not streamed(run) and run.config["mini_batch"] == 64:
                return trained(50.0)
            return as_claimed(run, seed)

        def none_trains(run, seed):
            return OUT_OF_MEMORY if run.experiment == "train" and beyond(run) else None

        def only_streamed(run, seed):
            return as_claimed(run, seed) if run.experiment == "train" and streamed(run) else None

        def one_missing(run, seed):
            return None if run.config["mini_batch"] == 64 else as_claimed(run, seed)

        for make, word in [
            (as_claimed, "reproduced"),
            (one_missing, "partly"),
            (one_fits, "partly"),
            (none_trains, "not reproduced"),
            (only_streamed, "not run"),
        ]:
            found = self.judge("Mini-batches far beyond", make, artefact)
            assert found.word == word
        found = self.judge("Mini-batches far beyond", as_claimed, artefact)
        reach = 64  # of 16, for ResNet-50 and U-Net
        assert f"up to ×{reach} the initial mini-batch, paper ×{reach}" in found.evidence

    def by_size(self, curve, initial=80.0):
        """Make trainings whose metric is a function of the doublings beyond the initial size."""

        def make(run, seed):
            if run.experiment != "train" or (beyond(run) and not streamed(run)):
                return None
            doublings = np.log2(run.config["mini_batch"] / INITIAL[run.config["role"]])
            return trained(initial + (curve(doublings) if doublings else 0.0) + NOISE[seed])

        return make

    @pytest.mark.parametrize(
        ("curve", "word"),
        [
            (lambda d: 5 - d, "reproduced"),
            (lambda d: -d, "not reproduced"),
            (lambda d: 0.05 if d == 1 else -d, "partly"),
        ],
    )
    def test_optimum_beyond_the_initial_size(self, curve, word):
        found = self.judge("A mini-batch above", self.by_size(curve))
        assert found.word == word
        assert found.evidence.count("best of") == 3
        assert "sizes at 32" in found.evidence  # ResNet-50, one doubling beyond 16

    @pytest.mark.parametrize(
        ("curve", "word"),
        [
            (lambda d: 2 * d, "not reproduced"),
            (lambda d: -d, "reproduced"),
            (lambda d: 5 - (d - 2) ** 2, "reproduced"),
        ],
    )
    def test_the_largest_is_not_the_best(self, curve, word):
        assert self.judge("The best mini-batch", self.by_size(curve)).word == word

    def test_the_papers_own_numbers_bear_its_claims_out(self):
        """What the paper reports, as records: ResNets and U-Net as claimed, AmoebaNet partly."""
        from repro.experiments.design import reported

        rows = {
            (row["model"], row["mini_batch"]): row
            for table in ("table4", "table5")
            for row in reported("mbs")[table]
        }

        def make(run, seed):
            if run.experiment != "train":
                return None
            row = rows[run.config["role"], run.config["mini_batch"]]
            way = "with" if streamed(run) else "without"
            if way not in row:
                return OUT_OF_MEMORY
            mean, std = row[way]
            return trained(mean + std * (seed - 1), epoch_s=row[f"time_{way}"][0])

        for artefact, word in (("table4", "partly"), ("table5", "reproduced")):
            results = made_results(artefact, make, "paper")
            assert verdict(artefact, "The result at", results).word in ("reproduced", "partly")
            assert verdict(artefact, "A mini-batch above", results).word == word
            assert verdict(artefact, "An epoch with larger", results).word == "reproduced"
            found = verdict(artefact, "A mini-batch above", results).evidence
            assert "sizes at 128" in found

    @pytest.mark.parametrize(
        ("halved", "doubled", "word"),
        [
            (-3.0, 5.1, "reproduced"),
            (5.1, 5.2, "partly"),
            (5.2, 0.0, "partly"),
            (5.2, 9.0, "not reproduced"),
        ],
    )
    def test_overhead(self, halved, doubled, word):
        def make(run, seed):
            return overhead(halved, doubled) if run.experiment == "overhead" else None

        found = self.judge("MBS costs at most", make)
        assert found.word == word
        for percent, size, micro in ((halved, 16, 8), (doubled, 32, 16)):
            assert f"{percent:+.1f} % ({size} as 2 × {micro})" in found.evidence
        assert "medians of 15" in found.evidence

    @pytest.mark.parametrize(
        ("ratio", "word"),
        [(0.9, "reproduced"), (1.05, "reproduced"), (1.06, "partly"), (1.5, "not reproduced")],
    )
    def test_epoch_time(self, ratio, word):
        """Against the undivided initial mini-batch; streaming that one is left out."""

        def make(run, seed):
            if run.experiment != "train" or (beyond(run) and not streamed(run)):
                return None
            return trained(50.0, epoch_s=ratio if beyond(run) else 100.0 if streamed(run) else 1.0)

        found = self.judge("An epoch with larger", make)
        assert found.word == word
        # 227.5 s of 226.8 s in Table 4
        assert f"128: ×{ratio:.2f} (paper ×1.00)" in found.evidence

    @pytest.mark.parametrize("profile", ["smoke", "quick"])
    def test_every_claim_is_judged_on_smaller_grids(self, profile):
        def make(run, seed):
            if run.experiment == "overhead":
                return overhead(1.0)
            return trained(50.0) if streamed(run) or not beyond(run) else OUT_OF_MEMORY

        for artefact in ("table4", "table5"):
            results = made_results(artefact, make, profile)
            for claim in PAPER.artefacts[artefact].claims:
                found = claim.check(results)
                if profile == "quick":
                    assert found.word != "not run", claim.text


class TestFigure2:
    @staticmethod
    def judge(beginning, spans=(), between=0, after=1, kind="cuda"):
        def make(run, seed):
            metrics = {
                "spans": spans,
                "update": [4.0, 5.0],
                "micro_batches": 2,
                "updates_between_micro_batches": between,
                "updates_after": after,
            }
            device = {"type": kind, "name": "a device"}
            return {"metrics": metrics | {"copied": "host to device"}, "device": device}

        return verdict("figure2", beginning, made_results("figure2", make))

    def test_order(self):
        for between, after, word in [
            (0, 1, "reproduced"),
            (1, 1, "not reproduced"),
            (0, 0, "not reproduced"),
            (1, 0, "not reproduced"),
        ]:
            assert self.judge("One update", (), between, after).word == word

    @pytest.mark.parametrize(
        ("copy", "word"),
        [([0.0, 1.0], "reproduced"), ([0.5, 1.5], "reproduced"), ([0.9, 1.5], "partly"),
         ([1.0, 2.0], "not reproduced")],
    )  # fmt: skip
    def test_overlap(self, copy, word):
        spans = [["compute", 0, 0.0, 1.0], ["copy", 1, *copy], ["compute", 1, 3.0, 4.0]]
        assert self.judge("Micro-batches are streamed", spans).word == word

    def test_a_cpu_cannot_overlap(self):
        spans = [["compute", 0, 0.0, 1.0], ["copy", 1, 0.0, 1.0]]
        found = self.judge("Micro-batches are streamed", spans, kind="cpu")
        assert found.word == "not run" and "needs a GPU" in found.evidence

    def test_hidden_share_by_brute_force(self):
        random = np.random.default_rng(0)
        for _ in range(20):
            cuts = np.sort(random.choice(1000, 12, replace=False))
            computing = [["compute", k, *map(float, cuts[2 * k : 2 * k + 2])] for k in range(6)]
            starts = random.integers(0, 900, 4)
            lengths = random.integers(1, 99, 4)
            copies = [
                ["copy", k, float(start), float(start + length)]
                for k, (start, length) in enumerate(zip(starts, lengths, strict=True))
            ]
            busy = np.zeros(1000, bool)
            for _, _, start, end in computing:
                busy[int(start) : int(end)] = True
            hidden = sum(busy[int(start) : int(end)].sum() for _, _, start, end in copies)
            expected = hidden / lengths.sum()
            assert hidden_share(copies + computing) == pytest.approx(expected, abs=1e-12)
        assert np.isnan(hidden_share(computing))


class TestFigure3:
    def judge(self, gap, spread=0.1, seeds=(0, 1, 2)):
        def make(run, seed):
            offset = spread * (seed - 1) + (gap if streamed(run) else 0.0)
            return trained(50.0 + offset, 60.0 + offset)

        return made_results("figure3", make, seeds=seeds)

    @pytest.mark.parametrize(
        ("gap", "spread", "seeds", "word"),
        [
            (1.0, 0.1, (0, 1, 2), "reproduced"),
            (-5.0, 0.1, (0, 1, 2), "not reproduced"),
            (-5.0, 6.0, (0, 1, 2), "partly"),  # no farther apart than seeds are
            (1.0, 0.1, (0,), "reproduced"),
            (5.0, 0.1, (0,), "not reproduced"),
        ],
    )
    def test_curves(self, gap, spread, seeds, word):
        found = verdict("figure3", "Loss and accuracy", self.judge(gap, spread, seeds))
        assert found.word == word
        assert "nan" not in found.evidence

    def test_the_gap_is_the_mean_distance_of_the_mean_curves(self):
        found = curve_gap(self.judge(2.5, 0.7), "ResNet-50", "accuracy")
        assert found.distance == pytest.approx(2.5)
        assert found.spread == pytest.approx(0.7)
        assert found.level == pytest.approx(55.0 + 2.5 / 2)

    @pytest.mark.parametrize(("factor", "word"), [(1.04, "reproduced"), (1.2, "not reproduced")])
    def test_the_loss_counts_too(self, factor, word):
        def make(run, seed):
            changes = trained(50.0, 60.0)
            losses = [loss * (factor if streamed(run) else 1.0) for loss in (2.0, 1.9)]
            changes["metrics"]["train_loss"] = losses
            return changes

        results = made_results("figure3", make)
        assert verdict("figure3", "Loss and accuracy", results).word == word
