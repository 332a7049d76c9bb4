"""Table 3 and Figure 3: whether training with MBS goes as without, by planted worlds."""

import numpy as np
import pytest
from made import OUT_OF_MEMORY
from made_mbs import CHOSEN, NOISE, PAPER, judge, plausible, results, streamed, trained, twins

from repro.datasets import load
from repro.experiments.design import claims_of
from repro.experiments.mbs import settings
from repro.experiments.mbs import twins as executed
from repro.experiments.mbs.sameness import BATCHNORM, FIGURE3, NORMS, TABLE3

# How far apart results with and without MBS are in the paper at the initial mini-batch, or twice
# the spread of its seeds there: 2 sqrt((s1² + s2²) / 2) of its standard deviations.
MARGIN = {"ResNet-50": 1.543, "ResNet-101": 4.401, "AmoebaNet-D": 2.440, "U-Net": 0.411}


def test_the_margins_are_the_papers():
    own = {}
    for role in MARGIN:
        (without, spread), (streamed_, other) = (
            settings.paper_rows(role)[0][way] for way in ("without", "with")
        )
        twice = 2 * np.hypot(spread, other) / 2**0.5
        own[role] = pytest.approx(max(abs(streamed_ - without), twice), abs=1e-3)
    assert own == MARGIN
    rows = claims_of("mbs")
    given = rows["table3"]["same_result"].margin | rows["table4"]["same_result"].margin
    assert given == pytest.approx(MARGIN, abs=1e-3)
    curves = rows["figure3"]["same_curves"].margin
    accuracies = {case.removesuffix(", accuracy"): m for case, m in curves.items()}
    assert own.items() >= {r: accuracies[r] for r in MARGIN if r in accuracies}.items()
    assert rows["batchnorm"]["same_without_batchnorm"].margin["ResNet-50"] == own["ResNet-50"]


@pytest.mark.parametrize("artefact", ["table3", "table4"])
class TestSameResult:
    def judge(self, artefact, gap, noise):
        """Judge a gap between the ways and a noise of seeds, both in margins."""

        def make(run, seed):
            margin = MARGIN[run.config["role"]]
            return trained(80.0 + margin * (2 * noise * NOISE[seed] + gap) * streamed(run))

        return judge(f"{artefact}/same_result", make)

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize(
        ("gap", "noise", "word"),
        [
            (0.2, 0.1, "reproduced"),
            (1.5, 0.1, "not reproduced"),
            (0.9, 0.5, "undecided"),  # inside, but the interval reaches beyond
            (0.0, 5.0, "undecided"),  # no significant difference is no sameness
            (5.0, 9.0, "undecided"),  # far apart, but so are the seeds
        ],
    )
    def test_words(self, artefact, gap, noise, word, sign):
        found = self.judge(artefact, sign * gap, noise)
        assert found.word == word
        assert "margin ±" in found.evidence
        assert word != "undecided" or "a cell" in found.evidence

    def test_not_run(self, artefact):
        key = f"{artefact}/same_result"
        assert judge(key, lambda run, seed: None).word == "not run"
        assert judge(key, lambda run, seed: OUT_OF_MEMORY).word == "not run"
        only_streamed = judge(
            key, lambda run, seed: trained(1.0) if run.config.get("micro_batch") else None
        )
        assert only_streamed.word == "not run"

    def test_one_seed_decides_nothing(self, artefact):
        found = judge(f"{artefact}/same_result", plausible, seeds=(0,))
        assert found.word == "undecided" and "no spread known" in found.evidence


class TestCurves:
    def world(self, gap=0.0, noise=0.2, factor=1.0, loss_noise=0.01):
        def make(run, seed):
            offset = 2 * noise * NOISE[seed] + gap * streamed(run)
            scale = (factor if streamed(run) else 1.0) * (1 + 2 * loss_noise * NOISE[seed])
            return trained(50.0 + offset, 60.0 + offset, loss=[2.0 * scale, 1.9 * scale])

        return make

    @pytest.mark.parametrize(
        ("gap", "factor", "word"),
        [
            (0.5, 1.01, "reproduced"),
            (-6.0, 1.2, "not reproduced"),  # beyond every network's margin
            (-6.0, 0.8, "not reproduced"),
            (-6.0, 1.0, "partly"),
            (0.0, 1.2, "partly"),
        ],
    )
    def test_words(self, gap, factor, word):
        found = judge("figure3/same_curves", self.world(gap, factor=factor))
        assert found.word == word
        assert found.evidence.count("margin ±") == 6
        assert found.evidence.count(f"{gap:+.2f}") >= 3
        assert f"×{factor:.3f}" in found.evidence and "margin ±5 %" in found.evidence

    def test_seeds_that_part_decide_nothing(self):
        def make(run, seed):
            apart = 12 * NOISE[seed] * streamed(run)
            scale = 1 + NOISE[seed] * streamed(run) / 2
            return trained(50.0 + apart, 60.0 + apart, loss=[2 * scale, 1.9 * scale])

        assert judge("figure3/same_curves", make).word == "undecided"

    def test_noise_within_a_curve_is_not_taken_for_distance(self):
        """Curves that zigzag around the same mean go the same way, however wild."""

        def make(run, seed):
            turn = 20.0 * (-1) ** (seed + streamed(run))
            return trained(50 + turn + 0.1 * NOISE[seed], 50 - turn)

        assert judge("figure3/same_curves", make).word == "reproduced"

    def test_not_run(self):
        assert judge("figure3/same_curves", lambda run, seed: None).word == "not run"


class TestTables:
    def test_table3(self):
        rows = TABLE3.table(results("table3", plausible))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        assert columns["paper"] == ["95.48 ± 0.13", "95.45 ± 0.26", "-0.03"]
        assert columns["ours"] == ["70.00 ± 0.50"] * 2 + ["+0.00 [-2.15, +2.15]"]
        assert columns["n"] == [3, 3, 3]

    def test_figure3_shows_the_last_point(self):
        def make(run, seed):
            return trained(80.0 + NOISE[seed], 70.0 + NOISE[seed])

        rows = FIGURE3.table(results("figure3", make))
        assert len(rows) == 6
        assert {row["ours, last accuracy (%)"] for row in rows} == {"70.00 ± 0.50"}
        assert {row["ours, last training loss"] for row in rows} == {"1.900 ± 0.000"}
        published = [row["paper, max. accuracy (%)"] for row in rows]
        assert published[:2] == ["87.16 ± 0.33", "87.04 ± 1.04"]

    def test_figure3_has_a_legend_whichever_model_was_run(self):
        def make(run, seed):
            return plausible(run, seed) if run.config["role"] == "AmoebaNet-D" else None

        figure = PAPER.artefacts["figure3"].exhibit.figure(results("figure3", make))
        labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert labels == ["without MBS", "with MBS"]

    def test_noise_has_the_spread_that_the_cells_show(self):
        assert np.std(NOISE, ddof=1) == 0.5


class TestTwins:
    def test_only_batchnorm_sets_them_apart(self):
        found = {}
        for norm, dtype in NORMS:
            run = settings.twins("smoke", CHOSEN, norm, dtype)
            dataset = dict(run.config["dataset"])
            data = load(dataset.pop("name"), **dataset)
            found[norm, dtype] = executed.twins(run.config, 0, data, "cpu").metrics
        exact, grouped, normed = (found[way]["apart"] for way in reversed(NORMS))
        assert max(exact) < 1e-12 < 1e-8 < max(grouped) < 1e-4 < 1e-2 < min(normed)
        best = found["group", "float64"]["best"]
        assert best["with"] == best["without"]

    @pytest.mark.parametrize(
        ("gaps", "word"),
        [
            ((0.0, 0.0, 0.0), "reproduced"),
            ((0.1, -0.1, 0.2), "reproduced"),
            ((9.0, 9.1, 9.2), "not reproduced"),
            ((-3.0, 0.0, 3.0), "undecided"),
        ],
    )
    def test_pairs_are_judged(self, gaps, word):
        """However far seeds lie apart."""

        def make(run, seed):
            apart = gaps[seed] if run.config["norm"] == "group" else 50.0
            return twins(20.0 + 30 * seed, 20.0 + 30 * seed + apart)

        assert judge("batchnorm/same_without_batchnorm", make).word == word

    def test_not_run(self):
        key = "batchnorm/same_without_batchnorm"
        assert judge(key, lambda run, seed: None).word == "not run"
        only = judge(key, lambda run, seed: twins(1, 1) if run.config["norm"] == "batch" else None)
        assert only.word == "not run"
        assert judge(key, plausible, seeds=(0,)).word == "undecided"

    def test_what_is_shown(self):
        rows = BATCHNORM.table(results("batchnorm", plausible))
        assert [row["weights apart, after one epoch"] for row in rows] == ["1.0e-15"] * 3
        assert [row["ours, with less without (points)"][:5] for row in rows] == ["+0.00"] * 3
        empty = BATCHNORM.table(results("batchnorm", lambda run, seed: None))
        assert [row["n"] for row in empty] == [0, 0, 0]
        (check,) = BATCHNORM.checks
        assert check.row(results("batchnorm", plausible))["holds"] == "yes"
        parted = results("batchnorm", lambda run, seed: twins(1.0, 2.0))
        assert check.row(parted)["holds"] == "NO"
