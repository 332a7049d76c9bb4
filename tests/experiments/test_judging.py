"""How claims are judged: planted cases, independent formulas, simulated power, truth tables."""

import itertools
import math
import re

import numpy as np
import pytest
from scipy import stats

from repro.experiments import summary
from repro.experiments.adaptive.contrasts import trend
from repro.experiments.dualbatch.hybrid import over_one
from repro.experiments.intervals import (
    BySeed,
    Gap,
    NotRun,
    Spread,
    contrast,
    difference,
    exactly,
    in_turns,
    paired,
    ratio,
    unsure,
)
from repro.experiments.judging import (
    KINDS,
    MOST_SEEDS,
    WORDS,
    Verdict,
    certain,
    combine,
    direction,
    each,
    equivalence,
    in_all_cases,
    seeds_to_decide,
)

CERTAIN = ("reproduced", "partly", "not reproduced")


def samples(random, cells, least=2, most=6, low=-5.0, high=5.0):
    """Draw cells of different means and one spread."""
    return [
        list(random.normal(random.uniform(low, high), 1.0, random.integers(least, most + 1)))
        for _ in range(cells)
    ]


def interval(mean, error, dof, level):
    """Return Student's interval, by scipy's own functions."""
    return stats.t.interval(level, dof, loc=mean, scale=error)


class TestWords:
    def test_the_five_words_and_the_three_kinds_have_a_sentence_each(self):
        assert list(WORDS) == ["reproduced", "partly", "undecided", "not reproduced", "not run"]
        assert list(KINDS) == ["measured", "simulated", "arithmetic"]
        assert all(len(means.split()) > 3 for means in (WORDS | KINDS).values())

    def test_no_other_word_is_a_verdict(self):
        with pytest.raises(ValueError, match="'mostly'; allowed are reproduced, partly"):
            Verdict("mostly", "")


class TestSpread:
    def test_against_the_residuals_of_an_analysis_of_variance(self):
        random = np.random.default_rng(0)
        for _ in range(100):
            cells = samples(random, random.integers(1, 8), least=1)
            residuals = np.concatenate([np.subtract(cell, np.mean(cell)) for cell in cells])
            dof = len(residuals) - len(cells)
            spread = Spread.pooled(cells)
            assert spread.dof == dof
            if dof:
                assert spread.sd == pytest.approx(math.sqrt((residuals**2).sum() / dof))
            else:
                assert math.isnan(spread.sd)

    def test_settings_are_not_seeds(self):
        """However far apart the cells lie, only what seeds do within them counts."""
        random = np.random.default_rng(1)
        cells = samples(random, 5, low=0.0, high=0.0)
        apart = [[value + 1000 * k for value in cell] for k, cell in enumerate(cells)]
        assert Spread.pooled(apart).sd == pytest.approx(Spread.pooled(cells).sd)

    def test_a_single_value_adds_nothing(self):
        cells = [[1.0, 2.0, 4.0], [5.0, 5.5]]
        assert Spread.pooled([*cells, [99.0], []]) == Spread.pooled(cells)

    def test_logarithms(self):
        cells = [[1.0, 2.0, 4.0], [5.0, 5.5, 7.0]]
        logs = [list(np.log(cell)) for cell in cells]
        assert Spread.pooled_logs(cells).sd == pytest.approx(Spread.pooled(logs).sd)

    def test_alike_is_bartletts_test(self):
        random = np.random.default_rng(2)
        words = set()
        for _ in range(300):
            scales = np.exp(random.normal(0, 0.8, random.integers(2, 7)))
            cells = [list(random.normal(0, scale, random.integers(2, 7))) for scale in scales]
            alike = stats.bartlett(*cells).pvalue >= 0.05
            assert Spread.pooled(cells).alike == alike
            words.add(alike)
        assert words == {True, False}

    def test_equal_values_by_chance_are_no_error(self):
        assert Spread.pooled([[1.0, 1.0, 1.0], [2.0, 2.0]]).alike
        assert not Spread.pooled([[1.0, 1.0, 1.0], [2.0, 3.0, 9.0], [4.0, 5.0, 1.0]]).alike


class TestDifference:
    def test_alone_it_is_welchs(self):
        random = np.random.default_rng(3)
        for _ in range(100):
            first, second = samples(random, 2)
            gap = difference(first, second)
            for level in (0.90, 0.95, 0.99):
                found = stats.ttest_ind(first, second, equal_var=False).confidence_interval(level)
                assert gap.interval(level) == pytest.approx((found.low, found.high))
            assert gap.mean == pytest.approx(np.mean(first) - np.mean(second))

    def test_with_the_spread_of_the_two_it_is_students(self):
        random = np.random.default_rng(4)
        seen = set()
        for _ in range(200):
            first, second = samples(random, 2)
            second = [value * random.choice([1.0, 9.0]) for value in second]
            spread = Spread.pooled([first, second])
            seen.add(spread.alike)
            # What does not share a spread is left to Welch.
            found = stats.ttest_ind(first, second, equal_var=spread.alike).confidence_interval(0.95)
            gap = difference(first, second, spread)
            assert gap.interval() == pytest.approx((found.low, found.high))
        assert seen == {True, False}

    def test_all_cells_of_the_design_narrow_it(self):
        """At n = 3 the half-width is 1.7 standard deviations by twelve cells, 2.3 by two."""
        cells = [[10.0 * k - 1, 10.0 * k, 10.0 * k + 1] for k in range(12)]
        for count, half in [(2, 2.27), (12, 1.69)]:
            low, high = difference(cells[0], cells[1], Spread.pooled(cells[:count])).interval()
            assert (high - low) / 2 == pytest.approx(half, abs=0.005)

    def test_a_ratio_is_a_difference_of_logarithms(self):
        random = np.random.default_rng(5)
        for _ in range(50):
            first, second = (np.exp(sample) for sample in samples(random, 2, low=-1, high=1))
            found = stats.ttest_ind(np.log(first), np.log(second), equal_var=False)
            expected = found.confidence_interval(0.95)
            gap = ratio(list(first), list(second))
            assert gap.interval() == pytest.approx((expected.low, expected.high))
            spread = Spread(0.7, 9)
            error = 0.7 * math.sqrt(1 / len(first) + 1 / len(second))
            pooled = ratio(list(first), list(second), spread)
            assert pooled.interval() == pytest.approx(interval(gap.mean, error, 9, 0.95))
            geometric = stats.gmean(first) / stats.gmean(second)
            assert gap.log and math.exp(gap.mean) == pytest.approx(geometric)

    def test_what_it_says_of_one_value_gives_its_error_and_its_freedom(self):
        """So that the seeds that would decide are counted at what was seen."""
        random = np.random.default_rng(20)
        for _ in range(100):
            first, second = samples(random, 2)
            for spread in (None, Spread.pooled([first, second]), Spread(2.0, 30)):
                gap = difference(first, second, spread)
                share = 1 / len(first) + 1 / len(second)
                assert gap.sd * math.sqrt(share) == pytest.approx(gap.error)
                assert gap.seed_dof * (2 / share - 1) == pytest.approx(gap.dof)

    @pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan])
    def test_a_ratio_of_what_is_not_above_0(self, wrong):
        with pytest.raises(ValueError, match=f"above 0, got {wrong}"):
            ratio([1.0, wrong], [1.0, 2.0])

    @pytest.mark.parametrize(("first", "second"), [([], [1.0]), ([1.0], []), ([], [])])
    @pytest.mark.parametrize("make", [difference, ratio])
    def test_without_records_it_is_not_run(self, make, first, second):
        with pytest.raises(NotRun, match="no records"):
            make(first, second)

    def test_one_value_a_side_has_no_interval(self):
        for gap in (difference([5.0], [1.0]), difference([5.0, 6.0], [1.0]), unsure(4.0)):
            assert all(map(math.isnan, gap.interval()))
            assert "no spread known" in str(gap)
        # With the spread of other cells it has one.
        spread = Spread.pooled([[1.0, 2.0, 3.0], [7.0, 8.0, 9.0]])
        gap = difference([5.0], [1.0], spread)
        assert gap.interval() == pytest.approx(interval(4.0, math.sqrt(2), 4, 0.95))

    def test_what_is_exact_is_a_point(self):
        assert exactly(3.0).interval() == (3.0, 3.0)
        assert exactly(2.0, log=True).interval(0.9) == (math.log(2), math.log(2))

    @pytest.mark.parametrize(
        ("gap", "text"),
        [
            (Gap(1.234, 0.5, unit="points"), "+1.23 [+0.25, +2.21] points"),
            (Gap(math.log(1.5), math.log(1.1), log=True), "×1.50 [×1.24, ×1.81]"),
            (exactly(-3, unit="MiB", digits=0), "-3 MiB"),
            (unsure(1.5, log=True), "×1.50 (no spread known)"),
        ],
    )
    def test_in_words(self, gap, text):
        assert str(gap) == text


def by_seed(random, cells, seeds, shared):
    """Draw cells of the same seeds, each value of variance 1, so much of it shared by a seed."""
    of_seed = random.normal(0, math.sqrt(shared), seeds)
    own = random.normal(0, math.sqrt(1 - shared), (cells, seeds))
    return [BySeed(row, range(seeds)) for row in own + of_seed + 10 * np.arange(cells)[:, None]]


class TestSeedsAsBlocks:
    def test_they_are_compared_one_by_one(self):
        cells = by_seed(np.random.default_rng(1), 4, 8, shared=0.95)
        turned = BySeed(cells[0][::-1], cells[0].seeds[::-1])
        test = stats.ttest_rel(cells[0], cells[1]).confidence_interval()
        for ours in (cells[0], turned):
            gap = difference(ours, cells[1], Spread.pooled(cells))
            assert gap.interval() == pytest.approx((test.low, test.high))

    @pytest.mark.parametrize("lacking", [0, 2])
    def test_by_the_f_test_of_two_nested_models(self, lacking):
        for shared in np.linspace(0, 0.8, 9):
            cells = by_seed(np.random.default_rng(2), 4, 7, shared)
            cells[0] = BySeed(cells[0][lacking:], cells[0].seeds[lacking:])
            rows = [(v, n, s) for n, c in enumerate(cells) for v, s in zip(c, c.seeds, strict=True)]
            y, cell, seed = (np.array(column) for column in zip(*rows, strict=True))
            small = np.eye(4)[cell]
            squares, free = [], []
            for model in (small, np.hstack([small, np.eye(7)[seed][:, 1:]])):
                left = y - model @ np.linalg.pinv(model) @ y
                squares.append(left @ left)
                free.append(len(y) - model.shape[1])
            f = (squares[0] - squares[1]) / (free[0] - free[1]) / (squares[1] / free[1])
            p = stats.f.sf(f, free[0] - free[1], free[1])
            assert Spread.pooled(cells).blocks == (p < 0.01)

    def test_only_cells_of_the_same_seeds_and_of_enough(self):
        cells = by_seed(np.random.default_rng(3), 4, 8, shared=0.9)
        short = BySeed(cells[0][:6], range(6))
        pooled = Spread.pooled([short, *cells[1:]])
        assert pooled.blocks
        assert difference(short, cells[1], pooled).dof == pooled.dof == 5 + 3 * 7
        few = [BySeed(cell[:4], range(4)) for cell in cells]
        assert Spread.pooled(few).blocks
        assert difference(few[0], few[1], Spread.pooled(few)).dof == 4 * 3
        assert not Spread.pooled([list(cell) for cell in cells]).blocks

    @pytest.mark.parametrize("alone", [False, True])
    @pytest.mark.parametrize("shared", [0.0, 0.3, 0.8])
    @pytest.mark.parametrize(("cells", "seeds"), [(2, 6), (4, 6), (3, 12)])
    def test_intervals_hold_as_often_as_they_say(self, cells, seeds, shared, alone):
        """With a cell alone, which does not follow its seeds, too: no two need be as alike."""
        random, missed, draws = np.random.default_rng(6), 0, 400
        for _ in range(draws):
            drawn = by_seed(random, cells, seeds, shared)
            other = BySeed(random.normal(10, 1, seeds), range(seeds)) if alone else drawn[1]
            pooled = Spread.pooled([*drawn, other])
            low, high = difference(other, drawn[0], pooled).interval()
            missed += not low <= 10 <= high
        assert missed / draws < 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)

    def test_coverage_of_a_mean_over_cells_less_one(self):
        random, missed, draws = np.random.default_rng(9), 0, 400
        for _ in range(draws):
            drawn = by_seed(random, 5, 4, 0.3)
            low, high = over_one(drawn[1:], drawn[0], Spread.pooled(drawn)).interval()
            missed += not low <= 25 <= high
        assert missed / draws < 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)

    def test_what_a_seed_gives_stays_in_the_mean_of_one_cell(self):
        cells = by_seed(np.random.default_rng(10), 9, 6, shared=0.9)
        alone = contrast(cells[:1], [1.0], Spread.pooled(cells))
        test = stats.ttest_1samp(cells[0], 0).confidence_interval()
        assert alone.interval() == pytest.approx((test.low, test.high))

    def test_a_copy_is_no_witness(self):
        for shared in (0.0, 0.9):
            cells = by_seed(np.random.default_rng(11), 3, 6, shared)
            copies = [BySeed(cells[0], cells[0].seeds) for _ in range(5)]
            assert Spread.pooled([*cells, *copies]).blocks == Spread.pooled(cells).blocks
        assert not Spread.pooled(copies).blocks

    def test_equal_steps_by_chance_are_no_spread_of_0(self):
        steps = [71.0, 74, 69, 72, 68, 75]
        ours, theirs = BySeed(steps, range(6)), BySeed([v - 1 for v in steps], range(6))
        pooled = Spread.pooled([ours, theirs])
        assert difference(ours, theirs, pooled).sd == pytest.approx(pooled.sd / 10)

    def test_one_that_diverged_leaves_the_others_a_spread_of_none(self):
        diverged = BySeed([math.nan, 2.0], range(2))
        pooled = Spread.pooled([diverged, BySeed([2.3, 2.3], range(2))])
        assert not pooled.alike and not pooled.blocks

    def test_a_seed_counts_once(self):
        with pytest.raises(NotRun, match=r"several trainings of one seed \(0, 0\)"):
            BySeed([1.0, 2.0], [0, 0])

    def test_ratios_and_trends_follow_them_too(self):
        cells = [BySeed(np.exp(c), c.seeds) for c in by_seed(np.random.default_rng(7), 3, 6, 0.9)]
        ours = ratio(cells[1], cells[0], Spread.pooled_logs(cells))
        assert ours.interval() == pytest.approx(in_turns(cells[1], cells[0]).interval())
        slope = trend(dict(zip((1, 2, 4), cells, strict=True)))
        slopes = (np.log(cells[2]) - np.log(cells[0])) / 2
        assert slope.mean == pytest.approx(slopes.mean())
        assert slope.error == pytest.approx(slopes.std(ddof=1) / math.sqrt(6))


class TestPaired:
    @pytest.mark.parametrize("count", [2, 3, 10])
    def test_interval_is_that_of_the_paired_t_test(self, count):
        random = np.random.default_rng(count)
        seeds = 100 * random.normal(size=count)  # which both ways share
        one, other = (seeds + random.normal(size=count) for _ in range(2))
        found = paired(list(one), list(other))
        theirs = stats.ttest_rel(one, other).confidence_interval(0.95)
        assert found.interval() == pytest.approx((theirs.low, theirs.high))
        assert difference(list(one), list(other)).error > 10 * found.error

    def test_equal_values_are_known_to_what_they_are_counted_in(self):
        assert paired([1.0, 2.0], [1.0, 2.0], resolution=0.5).error == pytest.approx(
            0.5 / math.sqrt(12) / math.sqrt(2)
        )
        assert paired([1.0, 2.0], [1.0, 2.0]).interval() == (0.0, 0.0)

    def test_a_ratio_in_turns_is_free_of_what_a_round_shares(self):
        random = np.random.default_rng(0)
        slow = np.exp(random.normal(size=8))  # spells of the machine
        one, other = (slow * np.exp(0.01 * random.normal(size=8)) for _ in range(2))
        found = in_turns(list(3 * one), list(other), trials="processes")
        theirs = stats.ttest_rel(np.log(3 * one), np.log(other)).confidence_interval(0.95)
        assert found.log and found.trials == "processes"
        assert found.interval() == pytest.approx((theirs.low, theirs.high))
        assert ratio(list(3 * one), list(other)).error > 10 * found.error
        with pytest.raises(ValueError, match="above 0, got 0"):
            in_turns([1.0, 2.0], [0, 1.0])

    def test_what_has_no_pairs(self):
        assert math.isnan(paired([1.0], [2.0], resolution=0.5).error)
        with pytest.raises(NotRun):
            paired([], [])
        with pytest.raises(ValueError, match="zip"):
            paired([1.0, 2.0], [1.0])


def direction_by_the_issue(mean, error, dof, effect):
    """Judge "A is higher", sentence by sentence; `effect` None or above 0."""
    low, high = interval(mean, error, dof, 0.95)
    if effect is None:
        return "reproduced" if low > 0 else "not reproduced" if high < 0 else "undecided"
    if high < 0 or high < effect / 4:
        return "not reproduced"
    if low > 0:
        return "reproduced" if mean >= effect / 2 else "partly"
    return "undecided"


class TestDirection:
    @pytest.mark.parametrize(
        ("mean", "error", "word"),
        [
            (1.2, 0.3, "reproduced"),
            (0.5, 0.2, "reproduced"),  # half of the paper's
            (0.49, 0.2, "partly"),  # certain, and less than half
            (0.9, 0.5, "undecided"),  # the interval holds 0
            (-0.5, 0.5, "undecided"),  # the mean is below 0, which is no refutation
            (-0.5, 0.2, "not reproduced"),
            (0.1, 0.05, "not reproduced"),  # certainly above 0, certainly below a quarter
            (0.1, 0.2, "undecided"),
            (-0.1, 0.15, "not reproduced"),  # holds 0, and is wholly below a quarter
        ],
    )
    def test_planted(self, mean, error, word):
        """The paper's effect is 1; the interval is the mean ± 1.96 errors."""
        for unit in (1.0, 1000.0):
            gap = Gap(unit * mean, unit * error, sd=unit)
            assert direction("ResNet", gap, unit)[0] == word
            mirrored = Gap(-unit * mean, unit * error, sd=unit)
            assert direction("ResNet", mirrored, -unit, sign=-1)[0] == word
            logs = Gap(mean, error, sd=1.0, log=True)
            assert direction("ResNet", logs, math.e)[0] == word

    def test_against_the_issues_sentences(self):
        random = np.random.default_rng(6)
        words = dict.fromkeys((*CERTAIN, "undecided"), 0)
        for _ in range(2000):
            mean, error = random.normal(0, 1.5), random.exponential(0.4)
            dof = random.integers(1, 30)
            effect = None if random.random() < 0.2 else float(random.exponential(1.0))
            word, told = direction("it", Gap(mean, error, dof, sd=error), effect)
            assert word == direction_by_the_issue(mean, error, dof, effect)
            words[word] += 1
            low, high = interval(mean, error, dof, 0.95)
            if low <= 0 <= high:
                assert word != "reproduced" and word != "partly"
                if effect is None or high >= effect / 2:
                    assert word == "undecided"
            # What is judged is shown, and what would decide is said where nothing is decided.
            assert told.startswith(f"it {mean:+.2f} [{low:+.2f}, {high:+.2f}]")
            assert ("would decide" in told) == (word == "undecided")
        assert min(words.values()) > 30

    def test_swapping_the_sides_and_the_sign_changes_nothing(self):
        random = np.random.default_rng(7)
        for _ in range(500):
            first, second = samples(random, 2, low=0, high=2)
            paper = float(random.normal(0, 1))
            for one, other in [(difference(first, second), difference(second, first))]:
                word, told = direction("it", one, paper)
                again, told_again = direction("it", other, -paper, sign=-1)
                assert word == again
                share = re.compile(r"\(.* of the paper's\)|about \d+ seeds")
                assert share.findall(told) == share.findall(told_again)

    def test_the_other_sign_asks_the_other_question(self):
        gap = Gap(2.0, 0.1)
        assert direction("it", gap)[0] == "reproduced"
        assert direction("it", gap, sign=-1)[0] == "not reproduced"

    def test_a_paper_that_goes_the_other_way_sets_no_size(self):
        for paper in (-3.0, 0.0):
            word, told = direction("it", Gap(0.1, 0.01), paper)
            assert word == "reproduced"
            assert f"paper {paper:+.2f}" in told and "of the paper's" not in told

    @pytest.mark.parametrize(
        ("ours", "word", "share"),
        [
            (1.60, "reproduced", "1"),
            (1.27, "reproduced", "0.51"),  # half of ×1.60 is ×1.265 on a log scale
            (1.26, "partly", "0.49"),
            (1.13, "partly", "0.26"),
            (1.05, "not reproduced", "0.1"),
            (1.00, "not reproduced", "0"),
            (0.90, "not reproduced", "-0.22"),
        ],
    )
    def test_exact_ratios(self, ours, word, share):
        found, told = direction("speed", exactly(ours, log=True), 1.60)
        assert found == word
        assert told == f"speed ×{ours:.2f}, paper ×1.60 ({share} of the paper's)"

    def test_an_exact_effect_of_0_is_none(self):
        assert direction("it", exactly(0.0))[0] == "not reproduced"
        assert direction("it", exactly(0.0), sign=-1)[0] == "not reproduced"

    def test_a_value_without_a_spread_decides_nothing(self):
        for gap in (unsure(100.0), difference([100.0], [0.0])):
            for paper in (None, 1.0, -1.0):
                word, told = direction("it", gap, paper)
                assert word == "undecided" and "nan" not in told

    def test_the_best_of_several_is_corrected_for_the_choice(self):
        gap = Gap(2.2, 1.0, 20, sd=1.0)
        assert direction("it", gap)[0] == "reproduced"
        word, told = direction("it", gap, candidates=3)
        assert word == "undecided"
        low, high = interval(2.2, 1.0, 20, 1 - 0.05 / 3)
        assert f"[{low:+.2f}, {high:+.2f} at 98.33 %]" in told

    def test_noise_alone_is_seldom_an_effect(self):
        """Of the best of four cells over a fifth, all alike, one in forty is called better."""
        random = np.random.default_rng(8)
        rounds, wrong = 1000, 0
        for _ in range(rounds):
            cells = [list(cell) for cell in random.normal(0, 1, (5, 3))]
            best = max(cells[:4], key=np.mean)
            spread = Spread.pooled(cells)
            word, _ = direction("it", difference(best, cells[4], spread), candidates=4)
            wrong += word == "reproduced"
        assert wrong / rounds < 0.035


class TestEquivalence:
    def test_against_two_one_sided_tests(self):
        random = np.random.default_rng(9)
        words = dict.fromkeys(("reproduced", "not reproduced", "undecided"), 0)
        for _ in range(2000):
            mean, error = random.normal(0, 1.0), random.exponential(0.3)
            dof, margin = random.integers(1, 30), float(random.exponential(1.0)) + 1e-3
            above = stats.t.sf((mean + margin) / error, dof)  # p of "lies below -margin"
            below = stats.t.cdf((mean - margin) / error, dof)  # p of "lies above +margin"
            gap = Gap(mean, error, dof, sd=error)
            expected = "undecided"
            if max(above, below) <= 0.05:
                expected = "reproduced"
            elif min(1 - above, 1 - below) <= 0.05:
                expected = "not reproduced"
            word, told = equivalence("it", gap, margin)
            assert word == expected
            words[word] += 1
            assert ("would decide" in told) == (word == "undecided")
            # At most so far above: only the upper test counts. Below: only the lower one.
            at_most = {p <= 0.05: w for p, w in ((1 - below, "not reproduced"),
                                                 (below, "reproduced"))}  # fmt: skip
            assert equivalence("it", gap, margin, side=1)[0] == at_most.get(True, "undecided")
            at_least = {p <= 0.05: w for p, w in ((1 - above, "not reproduced"),
                                                  (above, "reproduced"))}  # fmt: skip
            assert equivalence("it", gap, margin, side=-1)[0] == at_least.get(True, "undecided")
        assert min(words.values()) > 100

    def test_swapping_the_sides_changes_nothing(self):
        random = np.random.default_rng(10)
        for _ in range(300):
            first, second = samples(random, 2, low=0, high=1)
            one, other = difference(first, second), difference(second, first)
            for side in (-1, 0, 1):
                word, told = equivalence("it", one, 0.8, side=side)
                again, told_again = equivalence("it", other, 0.8, side=-side)
                assert word == again
                if word == "undecided":  # and takes as many seeds
                    assert told.rpartition(";")[2] == told_again.rpartition(";")[2]

    def test_no_significant_difference_is_no_sameness(self):
        random = np.random.default_rng(11)
        for _ in range(200):
            first, second = random.normal(0, 3, (2, 3))
            if stats.ttest_ind(first, second).pvalue > 0.05:
                word, _ = equivalence("it", difference(list(first), list(second)), 0.1)
                assert word != "reproduced"

    @pytest.mark.parametrize(
        ("ours", "side", "word"),
        [
            (1.04, 0, "reproduced"),
            (0.96, 0, "reproduced"),
            (1.0505, 0, "not reproduced"),
            (0.952, 0, "not reproduced"),  # 1 / 1.05 is 0.9524
            (0.50, 1, "reproduced"),
            (1.06, 1, "not reproduced"),
            (2.00, -1, "reproduced"),
            (0.94, -1, "not reproduced"),
        ],
    )
    def test_exact_ratios(self, ours, side, word):
        found, told = equivalence("time", exactly(ours, log=True), 0.05, side=side)
        assert found == word
        assert told == f"time ×{ours:.2f}, margin {'±+-'[side]}5 %"

    def test_the_margin_itself_is_inside(self):
        for side in (-1, 0, 1):
            assert equivalence("it", exactly(0.5), 0.5, side=side)[0] == "reproduced"
            assert equivalence("it", exactly(-0.5), 0.5, side=side)[0] == "reproduced"

    def test_a_value_without_a_spread_decides_nothing(self):
        for side in (-1, 0, 1):
            word, told = equivalence("it", unsure(0.0, unit="dB"), 0.5, side=side)
            assert word == "undecided" and "nan" not in told and "0.5 dB" in told

    @pytest.mark.parametrize("margin", [0.0, -1.0, math.nan])
    def test_a_margin_is_above_0(self, margin):
        with pytest.raises(ValueError, match="above 0"):
            equivalence("it", exactly(0.0), margin)


class TestCertain:
    def test_words(self):
        assert certain("equal bits", True) == ("reproduced", "equal bits")
        assert certain("equal bits", False) == ("not reproduced", "equal bits")


def draw(random, rounds, count, mean, sd):
    """Return differences of two cells of `count` seeds and their errors, many at once."""
    first = random.normal(mean, sd, (rounds, count))
    second = random.normal(0.0, sd, (rounds, count))
    variance = (first.var(axis=1, ddof=1) + second.var(axis=1, ddof=1)) / 2
    return first.mean(axis=1) - second.mean(axis=1), np.sqrt(2 * variance / count)


def told_seeds(told):
    """Return the number of seeds that an evidence names, None where it names none."""
    found = re.search(r"about (\d+) seeds a cell would decide", told)
    return int(found[1]) if found else None


class TestSeeds:
    def test_where_no_number_would_decide_it_says_how_near_the_bound_is(self):
        _, told = equivalence("it", Gap(-1.16, 0.5, 9, sd=1.0, unit="points"), 1.0, side=-1)
        assert told.endswith(
            "within reason (up to 200 a cell) would decide, 0.16 points from a bound"
        )
        ratio = Gap(math.log(1.05), 0.1, 9, sd=0.3, log=True)
        assert equivalence("it", ratio, 0.08)[1].endswith("would decide, 2.9 % from a bound")
        _, told = equivalence("it", Gap(0.2, 0.9, 9, sd=1.0, unit="points"), 1.0)
        assert "about" in told and "bound" not in told

    @pytest.mark.parametrize("level", [0.90, 0.95, 0.99])
    @pytest.mark.parametrize(
        ("distance", "sd"), [(30.0, 1.0), (3.0, 1.0), (1.5, 1.0), (1.0, 1.4), (0.02, 0.05)]
    )
    def test_the_power_by_simulation(self, distance, sd, level):
        random = np.random.default_rng(12)
        count = seeds_to_decide([distance], sd, level)

        def power(count):
            mean, error = draw(random, 20_000, count, distance, sd)
            return np.mean(mean - stats.t.ppf((1 + level) / 2, 2 * count - 2) * error > 0)

        assert power(count) > 0.79
        assert count == 2 or power(count - 1) < 0.81

    def test_more_than_is_reasonable(self):
        assert seeds_to_decide([0.1], 1.0) is None
        reach = 2.802 * math.sqrt(2 / MOST_SEEDS)  # 1.960 + 0.842 standard errors
        assert seeds_to_decide([1.01 * reach], 1.0) in range(MOST_SEEDS - 8, MOST_SEEDS + 1)
        assert seeds_to_decide([0.99 * reach], 1.0) is None
        assert seeds_to_decide([0.0, 2.0], 1.0) is None
        assert seeds_to_decide([1.0], math.nan) is None

    def test_claims_that_lack_runs_are_told_from_those_that_no_number_decides(self):
        """A value far from its bound lacks runs; one at its bound does not."""

        def row(mean):
            gap = Gap(mean, 0.5, 4, 0.8)
            found = combine([equivalence("a", gap, 1.0)])
            return {"verdict": found.word, "evidence": found.evidence}

        lacks, at_its_bound, decided = row(0.2), row(0.99), row(9.0)
        assert [r["verdict"] for r in (lacks, at_its_bound)] == ["undecided"] * 2
        both = {"verdict": "undecided", "evidence": "; ".join((lacks["evidence"],
                at_its_bound["evidence"]))}  # fmt: skip
        assert summary.lacking_runs([lacks]) == 1
        assert summary.lacking_runs([at_its_bound, decided, both]) == 0

    def test_certainly_different_takes_two(self):
        assert seeds_to_decide([1.0], 0.0) == 2
        assert seeds_to_decide([1e6], 1.0) == 2

    def test_a_spread_that_more_cells_tell_of_takes_fewer(self):
        few, many = (seeds_to_decide([2.0], 1.0, seed_dof=cells) for cells in (1, 12))
        assert many < seeds_to_decide([2.0], 1.0) < few

    @pytest.mark.thorough
    @pytest.mark.parametrize("effect", [None, 1.0])
    @pytest.mark.parametrize("mean", [0.35, 0.2, -0.2, 0.9])
    def test_as_many_as_a_direction_tells_of_decide_it(self, mean, effect):
        """Where what was seen is true, four in five such experiments are decided."""
        random = np.random.default_rng(13)
        word, told = direction("it", Gap(mean, 1.0, 4, sd=0.5), effect)
        count = told_seeds(told)
        assert word == "undecided" and count is not None

        def decided(count):
            means, errors = draw(random, 800, count, mean, 0.5)
            words = [
                direction("it", Gap(m, e, 2 * count - 2, sd=0.5), effect)[0]
                for m, e in zip(means, errors, strict=True)
            ]
            return 1 - words.count("undecided") / len(words)

        assert decided(count) > 0.76
        assert decided(max(2, count // 2)) < 0.76

    @pytest.mark.thorough
    @pytest.mark.parametrize("side", [0, 1, -1])
    @pytest.mark.parametrize("mean", [0.0, 0.3, -0.6, 1.8, -1.5])
    def test_as_many_as_an_equivalence_tells_of_decide_it(self, mean, side):
        random = np.random.default_rng(14)
        _, told = equivalence("it", Gap(mean, 9.0, 4, sd=1.0), 1.0, side=side)
        count = told_seeds(told)
        assert count is not None

        def decided(count):
            means, errors = draw(random, 800, count, mean, 1.0)
            words = [
                equivalence("it", Gap(m, e, 2 * count - 2, sd=1.0), 1.0, side=side)[0]
                for m, e in zip(means, errors, strict=True)
            ]
            return 1 - words.count("undecided") / len(words)

        assert decided(count) > 0.76
        assert decided(max(2, count // 2)) < 0.76

    def test_outside_a_margin_its_nearer_end_counts_alone(self):
        for mean in (1.0, -1.0):
            _, told = equivalence("it", Gap(mean, 9.0, 4, sd=1.0), 0.01)
            assert told_seeds(told) == seeds_to_decide([0.99], 1.0, 0.90)

    def test_never_as_few_as_were_not_enough(self):
        """What was undecided with n seeds takes more than n, whatever the error was made of."""
        random = np.random.default_rng(15)
        found = 0
        for _ in range(600):
            count = int(random.integers(2, 7))
            scales = np.exp(random.normal(0, random.choice([0.0, 1.5]), 4))
            cells = [list(random.normal(0, scale, count)) for scale in scales]
            cells[0] = [value + 4 * scales[0] * random.random() for value in cells[0]]
            for spread in (None, Spread.pooled(cells)):
                gap = difference(cells[0], cells[1], spread)
                for word, told in (direction("it", gap), equivalence("it", gap, 1.0)):
                    if word == "undecided":
                        needed = told_seeds(told)
                        assert needed is None or needed > count, (told, gap)
                        found += 1
        assert found > 500


def holm(p):
    """Return which hypotheses Holm's step-down procedure rejects at 0.05."""
    rejected = np.zeros(len(p), bool)
    for step, index in enumerate(np.argsort(p)):
        if p[index] > 0.05 / (len(p) - step):
            break
        rejected[index] = True
    return rejected


def failures(verdict):
    """Return the cases that a verdict names as certain failures."""
    found = re.search(r"certainly not for (.*)$", verdict.evidence)
    return set(found[1].split(", ")) if found else set()


class TestInAllCases:
    def test_the_issues_example(self):
        """Gains of -0.67, -1.33 and +0.13 points where the paper has 0.3 to 0.9."""
        means = {"k = 1.05": -0.67, "k = 1.1": -1.33, "k = 1.2": 0.13}
        papers = {"k = 1.05": 0.3, "k = 1.1": 0.6, "k = 1.2": 0.9}
        for error in np.geomspace(0.01, 10, 40):
            for sized in (True, False):
                cases = {
                    name: (Gap(mean, error, 12, sd=error), papers[name] if sized else None)
                    for name, mean in means.items()
                }
                found = in_all_cases(cases)
                # +0.13 is no gain before it is certain, as the others' losses are then.
                certain_gain = stats.t.ppf(0.975, 12) * error < 0.13
                assert found.word != "reproduced"
                assert found.word != "partly" or certain_gain
                if error > 1.0:  # as in the records, whose errors are 1.3 to 2.8
                    assert found.word == "undecided" and not failures(found)
                if error < 0.2:
                    assert {"k = 1.05", "k = 1.1"} <= failures(found)

    @pytest.mark.parametrize(
        ("means", "error", "word"),
        [
            ((1.0, 1.2, 0.8), 0.1, "reproduced"),
            ((1.0, 0.7, 0.8), 0.5, "reproduced"),  # no single case is certain, their mean is
            ((0.4, 0.3, 0.45), 0.05, "partly"),  # certain, below half
            ((0.1, 0.1, 0.12), 0.03, "not reproduced"),  # certain, below a quarter
            ((1.0, 1.0, -0.1), 0.3, "undecided"),  # on average, but not yet for the third
            ((1.0, 1.0, -1.0), 0.1, "partly"),  # the others are certain
            ((1.0, 0.2, -1.0), 0.2, "not reproduced"),  # the second is not
            ((-1.0, -1.2, -0.8), 0.1, "not reproduced"),
            ((1.0, 1.0, 1.0), 3.0, "undecided"),
            ((-0.1, 0.1, 0.0), 1.0, "undecided"),
        ],
    )
    @pytest.mark.parametrize("sign", [1, -1])
    def test_planted(self, means, error, word, sign):
        """The paper's effect is 1 in every case."""
        cases = {
            f"case {k}": (Gap(sign * mean, error, 24, sd=error), float(sign))
            for k, mean in enumerate(means)
        }
        found = in_all_cases(cases, sign=sign)
        assert found.word == word
        assert all(name in found.evidence for name in cases)

    @pytest.mark.slow
    def test_holms_correction(self):
        """Without sizes, a case certainly fails where Holm rejects 0 and it lies below."""
        random = np.random.default_rng(16)
        seen = {}
        for _ in range(500):
            count, dof = int(random.integers(1, 6)), int(random.integers(3, 40))
            means, errors = random.normal(0.5, 1.5, count), random.uniform(0.2, 0.8, count)
            p = 2 * stats.t.sf(abs(means) / errors, dof)
            rejected = holm(p)
            names = [f"case {k}" for k in range(count)]
            found = in_all_cases(
                {
                    name: (Gap(mean, error, dof, sd=error), None)
                    for name, mean, error in zip(names, means, errors, strict=True)
                }
            )
            lost = {names[k] for k in range(count) if rejected[k] and means[k] < 0}
            assert failures(found) == lost
            # The one contrast of all.
            low, high = interval(means.mean(), math.sqrt((errors**2).sum()) / count, dof, 0.95)
            if lost:
                rest = [rejected[k] for k in range(count) if names[k] not in lost]
                word = "partly" if rest and all(rest) else "not reproduced"
            elif low > 0:
                word = "reproduced" if min(means) > 0 else "undecided"
            else:
                word = "not reproduced" if high < 0 else "undecided"
            assert found.word == word
            seen[word] = seen.get(word, 0) + 1
        assert min(seen.values()) > 20 and len(seen) == 4

    @pytest.mark.slow
    def test_noise_alone_seldom_refutes(self):
        """Five cases of a true effect: one certain failure in forty at most, for all at once."""
        random = np.random.default_rng(17)
        wrong = 0
        for _ in range(600):
            cells = random.normal(0, 1, (10, 3))
            spread = Spread.pooled([list(cell) for cell in cells])
            cases = {
                f"case {k}": (difference(list(cells[2 * k]), list(cells[2 * k + 1]), spread), None)
                for k in range(5)
            }
            wrong += bool(failures(in_all_cases(cases)))
        assert wrong / 600 < 0.04

    def test_the_contrast_knows_as_little_as_the_case_that_knows_least(self):
        cases = {f"case {k}": (Gap(0.6, 0.5, dof, sd=0.9), None) for k, dof in enumerate((9, 3))}
        found = in_all_cases(cases)
        low, high = interval(0.6, 0.5 / math.sqrt(2), 3, 0.95)
        assert found.evidence.startswith(f"mean of all +0.60 [{low:+.2f}, {high:+.2f}]")
        # A seed more is one in every case.
        assert told_seeds(found.evidence) == seeds_to_decide([0.6], 0.9 / math.sqrt(2))

    def test_a_case_of_which_the_paper_gives_no_size_leaves_the_contrast_without_one(self):
        found = in_all_cases({"a": (Gap(0.6, 0.01), 1.0), "b": (Gap(0.1, 0.01), None)})
        assert found.word == "reproduced"
        assert "paper" not in found.evidence.partition(";")[0]

    def test_ratios(self):
        def cases(*ratios, error=0.01):
            return {
                f"case {k}": (Gap(math.log(r), error, 20, sd=error, log=True), 1.6)
                for k, r in enumerate(ratios)
            }

        assert in_all_cases(cases(1.5, 1.7)).word == "reproduced"
        assert in_all_cases(cases(1.2, 1.2)).word == "partly"
        assert in_all_cases(cases(1.05, 1.05)).word == "not reproduced"
        assert "paper ×1.60 (" in in_all_cases(cases(1.5, 1.7)).evidence

    def test_a_case_without_a_spread_leaves_it_open(self):
        good = Gap(1.0, 0.1, 20, sd=0.1)
        found = in_all_cases({"a": (good, 1.0), "b": (unsure(1.0), 1.0)})
        assert found.word == "undecided" and "nan" not in found.evidence
        bad = Gap(-1.0, 0.1, 20, sd=0.1)
        found = in_all_cases({"a": (bad, 1.0), "b": (unsure(1.0), 1.0)})
        assert found.word == "not reproduced"

    def test_one_case_is_its_direction(self):
        random = np.random.default_rng(18)
        for _ in range(200):
            gap = Gap(random.normal(0, 1), random.exponential(0.5), 6, sd=1.0)
            assert in_all_cases({"it": (gap, 1.0)}).word == direction("it", gap, 1.0)[0]

    def test_without_cases_it_is_not_run(self):
        with pytest.raises(NotRun):
            in_all_cases({})


def judged(words, quantifier):
    return combine([(word, f"part {k}") for k, word in enumerate(words)], quantifier).word


EVERY = [words for count in (1, 2, 3) for words in itertools.product(WORDS, repeat=count)]
OPEN = ("undecided", "not run")


class TestCombine:
    def test_all(self):
        for words in EVERY:
            found = judged(words, "all")
            if set(words) == {"not run"}:
                assert found == "not run"
            elif "not reproduced" in words:
                # One certain failure refutes it, but for others that are certain.
                others = set(words) - {"not reproduced"}
                sure = others and not others & set(OPEN)
                assert found == ("partly" if sure else "not reproduced"), words
            elif set(words) & set(OPEN):
                assert found == "undecided", words
            else:
                assert found == ("partly" if "partly" in words else "reproduced"), words

    def test_any(self):
        for words in EVERY:
            found = judged(words, "any")
            if set(words) == {"not run"}:
                assert found == "not run"
            elif "reproduced" in words:
                assert found == "reproduced", words
            elif set(words) & set(OPEN):
                assert found == "undecided", words
            else:
                assert found == ("partly" if "partly" in words else "not reproduced"), words

    def test_most(self):
        for words in EVERY:
            found = judged(words, "most")
            if set(words) == {"not run"}:
                assert found == "not run"
            elif words.count("reproduced") > len(words) / 2:
                assert found == "reproduced", words
            elif words.count("not reproduced") >= len(words) / 2:
                assert found == "not reproduced", words
            else:
                assert found == ("undecided" if set(words) & set(OPEN) else "partly"), words

    @pytest.mark.parametrize("quantifier", ["all", "most", "any"])
    def test_order_and_what_leaves_it_open_do_not_matter(self, quantifier):
        for words in EVERY:
            found = judged(words, quantifier)
            assert {judged(w, quantifier) for w in itertools.permutations(words)} == {found}
            if set(words) != {"not run"}:
                again = ["undecided" if word == "not run" else word for word in words]
                assert judged(again, quantifier) == found

    @pytest.mark.parametrize("quantifier", ["all", "most", "any"])
    def test_a_part_that_comes_out_better_makes_no_verdict_worse(self, quantifier):
        rank = {"not reproduced": 0, "undecided": 1, "partly": 1, "reproduced": 2}
        for words in EVERY:
            for k, word in enumerate(words):
                if word == "not reproduced":
                    better = [*words[:k], "reproduced", *words[k + 1 :]]
                    before, after = judged(words, quantifier), judged(better, quantifier)
                    assert rank[before] <= rank[after], (words, better)

    @pytest.mark.parametrize("quantifier", ["most", "any"])
    def test_what_is_decided_stays_so_however_the_open_parts_come_out(self, quantifier):
        for words in EVERY:
            found = judged(words, quantifier)
            if found in ("reproduced", "not reproduced"):
                choices = [CERTAIN if word in OPEN else (word,) for word in words]
                assert {judged(w, quantifier) for w in itertools.product(*choices)} == {found}

    def test_the_evidence_of_all_parts_is_kept(self):
        found = combine([("reproduced", "ResNet +2"), ("not run", "U-Net: no records")])
        assert found.evidence == "ResNet +2; U-Net: no records"

    def test_without_parts_it_is_not_run(self):
        assert combine([]) == Verdict("not run", "no records")

    def test_an_unknown_quantifier(self):
        with pytest.raises(ValueError, match="'some'; allowed are all, most, any"):
            combine([], "some")


def test_each_names_the_case_whose_records_are_missing():
    def judge(name):
        if name == "U-Net":
            raise NotRun("no records")
        return certain(name, True)

    assert each(["ResNet", "U-Net"], judge) == [
        ("reproduced", "ResNet"),
        ("not run", "U-Net: no records"),
    ]
