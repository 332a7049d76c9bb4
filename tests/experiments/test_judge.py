"""How claims are judged: scipy's tests, planted cases, simulated power, truth tables."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from invented import make_record
from scipy import stats

from repro.experiments import judge, query
from repro.experiments.design import LONG, claims_of
from repro.experiments.judge import BySeed, Estimate, NotRun, deterministic, difference, direction
from repro.experiments.query import Results

equivalence, ratio = judge.equivalence, judge.ratio
LEVELS = (0.90, 0.95)
CERTAIN, OPEN = ("reproduced", "partly", "not reproduced"), ("undecided", "not run")


@pytest.fixture
def random():
    return np.random.default_rng(0)


def by_seed(values, look=()):
    return BySeed(values, range(len(values)), look)


class TestEstimates:
    def test_paired_is_scipys_ttest_rel(self, random):
        for count in (2, 3, 8, 40):
            first, second = random.normal(3, 1, (2, count)) + random.normal(0, 5, count)
            found = difference(by_seed(first), by_seed(second), "points")
            for level in LEVELS:
                low, high = stats.ttest_rel(first, second).confidence_interval(level)
                assert found.interval(level) == pytest.approx((low, high))
            assert found.mean == pytest.approx(np.mean(first - second)) and found.n == count

    def test_unpaired_is_welchs_ttest_ind(self, random):
        for few, many in [(2, 2), (3, 9), (30, 4)]:
            first, second = random.normal(3, 1, few), random.normal(1, 4, many)
            test = stats.ttest_ind(first, second, equal_var=False)
            for level, one in itertools.product(LEVELS, (first, by_seed(first))):
                expected = tuple(test.confidence_interval(level))
                assert difference(one, second).interval(level) == pytest.approx(expected)

    def test_ratios_are_differences_of_logarithms(self, random):
        first, second = np.exp(random.normal(0, 1, (2, 6)))
        paired = stats.ttest_rel(np.log(first), np.log(second)).confidence_interval(0.95)
        assert judge.paired_ratio(first, second).interval() == pytest.approx(tuple(paired))
        found = ratio(by_seed(first), by_seed(second))
        assert found.interval() == pytest.approx(tuple(paired))
        test = stats.ttest_ind(np.log(first), np.log(second), equal_var=False)
        expected = tuple(test.confidence_interval(0.95))
        assert ratio(first, second).interval() == pytest.approx(expected)
        one = stats.ttest_1samp(np.log(first), 0).confidence_interval(0.95)
        assert judge.mean_of(first, log=True).interval() == pytest.approx(tuple(one))
        cells, weights = random.normal(0, 1, (3, 7)), [1, -0.5, -0.5]
        one = stats.ttest_1samp(weights @ cells, 0).confidence_interval(0.95)
        found = judge.contrast([by_seed(cell) for cell in cells], weights)
        assert found.interval() == pytest.approx(tuple(one))

    def test_only_common_seeds_count(self):
        first, second = BySeed([1, 2, 9], [4, 5, 6]), BySeed([7, 0, 1], [3, 5, 4])
        assert difference(first, second).mean == pytest.approx((1 - 1 + 2 - 0) / 2)
        with pytest.raises(NotRun, match="no seed was trained in all"):
            difference(first, BySeed([1], [0]))
        with pytest.raises(NotRun, match="several trainings of one seed"):
            BySeed([1, 2], [3, 3])

    def test_the_best_of_several_has_a_wider_interval_everywhere(self):
        found = Estimate(2.0, 1.0, 20, candidates=4)
        half = stats.t.ppf(1 - 0.05 / 8, 20)
        assert found.interval() == pytest.approx((2 - half, 2 + half))
        assert f"{2 + half:+.2f} for the best of 4" in str(found)
        assert direction("", replace(found, candidates=1, mean=2.2))[0] == "reproduced"
        assert direction("", replace(found, mean=2.2))[0] == "undecided"

    def test_equal_values_are_known_to_what_they_are_counted_in(self):
        first, second = by_seed([1.0] * 4), by_seed([0.0] * 4)
        assert difference(first, second).error == 0
        each = 0.1 / math.sqrt(12 * 4)  # of values spread evenly over one step
        for cells in ((first, second), ([1.0] * 4, [0.0] * 4)):
            assert difference(*cells, step=0.1).error == pytest.approx(math.sqrt(2) * each)

    def test_a_ratio_known_to_nothing_is_drawn_without_end(self):
        value, interval = judge.Estimate(0.0, 3.0, 1.0, 2, log=True, candidates=20).drawn()
        assert value == 1 and interval[0] == 0 and interval[1] > 1e300

    def test_without_a_spread_nothing_is_decided(self):
        diverged = by_seed([1.0, math.inf])
        for found in (
            *(judge.unsure(9.0), difference([9.0], [0.0]), judge.mean_of(by_seed([9.0]))),
            *(difference(by_seed([1.0, 2.0]), diverged), difference(diverged, diverged)),
            *(ratio([1.0, 2.0], diverged), difference([1.0, 2.0], list(diverged))),
        ):
            assert math.isnan(found.interval()[0]) and "no spread known" in str(found)
            assert direction("", found)[0] == equivalence("", found, 1e3)[0] == "undecided"

    def test_what_is_no_number_of_a_cell_is_refused(self):
        with pytest.raises(NotRun, match="no records"):
            difference([], [1.0])
        with pytest.raises(ValueError, match="above 0, got -1"):
            ratio([1.0], [-1.0])
        with pytest.raises(ValueError, match="2 values cannot pair with 1"):
            judge.paired_ratio([1.0, 2.0], [1.0])

    def test_a_case_without_records_says_so(self):
        found = judge.cases("ab", lambda name: difference([1.0], [0.0] if name == "a" else []))
        assert isinstance(found["a"], Estimate) and isinstance(found["b"], NotRun)


def test_a_verdict_says_how_many_repeats_judge_and_that_rounds_are_of_one_process():
    rounds = judge.paired_ratio([2.0, 2.1, 2.2], [1.0, 1.0, 1.1])
    cases = {"a": rounds, "b": deterministic(1.0), "c": judge.mean_of([1.0, 2.0])}
    said = "3 rounds of one process, 2 processes"
    assert judge.Verdict("partly", "", cases).repeats == said
    looked = BySeed([1.0, 2.0, 4.0, 5.0], range(4), look={0})
    cells = {"a": difference(looked, BySeed([0.0] * 4, range(4))), "b": difference([1, 2], [0, 0])}
    assert judge.Verdict("partly", "", cells).repeats == "2 to 3 seeds"


class TestTheFirstLook:
    def test_seeds_after_it_judge_alone(self, random):
        """Planted: the first six seeds are lucky by 9 points, and nobody sees it."""
        second = random.normal(0, 1, 12)
        first = second + random.normal(0, 0.1, 12) + 9.0 * (np.arange(12) < 6)
        look = range(6)
        found = difference(by_seed(first, look=look), by_seed(second))
        low, high = stats.ttest_rel(first[6:], second[6:]).confidence_interval(0.95)
        assert found.interval() == pytest.approx((low, high)) and found.n == 6 and high < 1
        alone = difference(by_seed(first[:6], look=look), by_seed(second[:6], look=look))
        assert alone.n == 6 and alone.mean > 8  # there are no others yet
        both = difference(by_seed(first, look=[0, 1]), by_seed(second, look=[2]))
        assert both.n == 9 and by_seed([1.0], look=[0]).logs().look == {0}

    @pytest.mark.parametrize("kind", ["task", "role", "setting"])
    def test_it_is_written_in_the_papers_toml_and_holds_under_long(self, monkeypatch, kind):
        toml = {"first_look": {"train": {"A": [0, 1]}, "twins": [2]}}
        monkeypatch.setattr(query, "paper_toml", lambda paper: toml)
        for profile, experiment, named, look in [
            (LONG, "train", "A", {0, 1}), (LONG, "train", "B", set()), (LONG, "twins", "A", {2}),
            (LONG, "times", "A", set()), ("quick", "train", "A", set()),
        ]:  # fmt: skip
            records = [make_record(experiment, seed=seed, config={kind: named}) for seed in (0, 3)]
            assert Results([], (), [], profile).cell(records, lambda r: r.seed).look == look


class TestDirection:
    @pytest.mark.parametrize(
        ("mean", "error", "word"),
        [
            (1.2, 0.3, "reproduced"), (0.9, 0.5, "undecided"), (0.0, 0.0, "not reproduced"),
            # Half of the paper's, certainly less, certainly below a quarter.
            (0.5, 0.2, "reproduced"), (0.49, 0.2, "partly"), (0.1, 0.01, "partly"),
            (10.0, 1.0, "reproduced"), (10.1, 1.0, "partly"),  # above ten times
            # Below 0, certainly or not; around 0, and wholly below a quarter.
            (-0.5, 0.5, "undecided"), (-0.5, 0.2, "not reproduced"), (-0.1, 0.15, "not reproduced"),
        ],
    )  # fmt: skip
    def test_words_at_each_bound(self, mean, error, word):
        """The paper's effect is 1; the interval is the mean ± 1.96 errors."""
        assert direction("it", Estimate(mean, error), 1.0)[0] == word
        assert direction("it", Estimate(-mean, error), -1.0, sign=-1)[0] == word
        assert direction("it", Estimate(mean, error, log=True), math.e)[0] == word

    def test_without_a_size_the_side_decides(self):
        for paper in (None, -3.0):  # the paper's own numbers may go the other way
            assert direction("it", Estimate(0.1, 0.01), paper)[0] == "reproduced"
        assert direction("it", Estimate(0.1, 0.01), sign=-1)[0] == "not reproduced"
        assert direction("it", Estimate(0.0, 0.0))[0] == "not reproduced"


class TestEquivalence:
    def test_two_one_sided_tests(self, random):
        """On each side that is asked: within where both reject at 5 %, outside where one does."""
        words = []
        for side, _ in itertools.product((0, 1, -1), range(300)):
            values = random.normal(random.normal(0, 1.2), 0.8, 5)

            def p(bound, way, values=values):
                return stats.ttest_1samp(values, bound, alternative=way).pvalue

            lower = [(p(-1.0, "greater"), p(-1.0, "less"))] * (side <= 0)
            upper = [(p(1.0, "less"), p(1.0, "greater"))] * (side >= 0)
            inside, outside = zip(*lower, *upper, strict=True)
            fails = "not reproduced" if min(outside) < 0.05 else "undecided"
            expected = "reproduced" if max(inside) <= 0.05 else fails
            words.append(equivalence("it", judge.mean_of(list(values)), 1.0, side=side)[0])
            assert words[-1] == expected, (values, inside, outside)
        assert min(words.count(word) for word in set(words)) > 50 and len(set(words)) == 3

    def test_a_margin_of_a_ratio_is_a_share_and_the_margin_itself_is_inside(self):
        assert equivalence("", deterministic(1.049, log=True), 0.05)[0] == "reproduced"
        assert equivalence("", deterministic(1.051, log=True), 0.05)[0] == "not reproduced"
        assert equivalence("", deterministic(0.5, log=True), 0.05, side=1)[0] == "reproduced"
        assert equivalence("", deterministic(-2.0), 2.0, side=-1)[0] == "reproduced"
        with pytest.raises(ValueError, match="margin is 0"):
            equivalence("", deterministic(0.0), 0.0)


def judged(words, over):
    return judge.combine([(word, "") for word in words], over).word


@pytest.mark.parametrize("over", ["all", "any"])
class TestCombine:
    EVERY = tuple(w for n in (1, 2, 3, 4) for w in itertools.product(CERTAIN + OPEN, repeat=n))

    def test_a_word_is_undecided_exactly_where_the_open_parts_may_change_it(self, over):
        """So deciding an open part makes no worse word better, and no word without reason."""
        for words in self.EVERY:
            choices = [CERTAIN if word in OPEN else (word,) for word in words]
            ends = {judged(decided, over) for decided in itertools.product(*choices)}
            expected = ends.pop() if len(ends) == 1 else "undecided"
            expected = "not run" if set(words) == {"not run"} else expected
            assert judged(words, over) == expected, words


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("distance", [30.0, 1.5, 0.7, 0.25])
def test_the_power_of_so_many_seeds_by_simulation(random, distance, level):
    """Paired: differences of standard deviation 1 exclude a bound in four of five samples."""
    seen = Estimate(0.0, 1 / math.sqrt(3), 2.0, 3)
    count = judge.seeds_to_decide(seen, [distance], level)

    def power(count):
        values = random.normal(distance, 1, (20_000, count))
        error = values.std(axis=1, ddof=1) / math.sqrt(count)
        return np.mean(values.mean(axis=1) > stats.t.ppf((1 + level) / 2, count - 1) * error)

    assert power(count) > 0.79 and (count == 3 or power(count - 1) < 0.81)
    word, told = direction("", replace(seen, mean=distance))
    assert word == "reproduced" or level == 0.9 or f"about {count} seeds" in told


class TestClaims:
    ROW = replace(claims_of("together")["accuracy"]["linear_loses"], effect={"a": -2.0})

    def test_rule_effect_and_margin_are_those_of_the_row(self):
        seen = Estimate(-3.0, 0.1, label="ResNet-8", note="short")
        assert self.ROW.judge({"a": seen}).word == "reproduced"
        assert replace(self.ROW, rule="higher").judge({"a": seen}).word == "not reproduced"
        told = self.ROW.judge({"a": seen}).evidence
        assert told.startswith("ResNet-8 -3.00") and told.endswith("; short")
        same = replace(self.ROW, rule="same", effect=None, margin=1.0, margin_source="ours")
        assert same.judge({"a": Estimate(0.5, 0.1)}).evidence.endswith("margin: ours")
        assert self.ROW.judge({"a": NotRun("no data")}) == judge.Verdict("not run", "a: no data")
        with pytest.raises(AssertionError, match="no number for 'b'"):
            self.ROW.judge({"b": seen})
        with pytest.raises(ValueError, match="exact, and a an estimate"):
            replace(self.ROW, rule="exact").judge({"a": seen})

    @pytest.mark.parametrize(
        ("cases", "told"),
        [
            ({"a": -3.0, "b": -2.0}, "-3.00 (paper -2.00): a"),
            ({"a": -3.0, "b": -0.1}, "-0.10 (paper -2.00): b"),  # undecided
            ({"a": -3.0, "b": 9.0}, "+9.00 (paper -2.00): b"),  # partly: b certainly fails
            ({"a": -3.0, "b": NotRun("no data")}, "b: no data"),
            ({"a": NotRun("no data")}, "a: no data"),
            ({}, "no records"),
        ],
    )
    def test_the_number_is_of_the_case_that_sets_the_word(self, cases, told):
        row = replace(self.ROW, effect=-2.0, own=False)
        ours = {k: c if isinstance(c, NotRun) else Estimate(c, 0.3) for k, c in cases.items()}
        assert row.number(row.judge(ours)) == told


def test_a_cell_without_seeds_beside_one_with_seeds_leaves_the_first_look_out():
    looked = BySeed([9.0, 9.0, 1.0, 2.0], (0, 1, 2, 3), look=(0, 1))
    assert judge.difference(looked, [0.0, 0.5]).mean == pytest.approx(1.25)
    diverged = BySeed([math.inf, 9.0, 1.0, 2.0], (0, 1, 2, 3), look=(0, 1))
    assert judge.difference(diverged, [0.0, 0.5]) == judge.difference(looked, [0.0, 0.5])
