"""Figure 2: what one mini-batch does when, by planted timelines."""

import numpy as np
import pytest
from made import check_row
from made_mbs import judge, plausible, results

from repro.experiments.mbs.streaming import FIGURE2, hidden_shares


def world(spans=(), between=0, after=1, kind="cuda"):
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

    return make


@pytest.mark.parametrize(
    ("between", "after", "holds"), [(0, 1, "yes"), (1, 1, "NO"), (0, 0, "NO"), (1, 0, "NO")]
)
def test_one_update(between, after, holds):
    row = check_row("mbs/figure2", 0, results("figure2", world(between=between, after=after)))
    assert row["holds"] == holds
    assert f"{between} times between micro-batches and {after} times after" in row["evidence"]


class TestOverlap:
    def spans(self, *shares):
        """Make one computation a micro-batch, each but the last beside a copy hidden so far."""
        spans = [["copy", 0, -1.0, 0.0]]
        for k, share in enumerate(shares):
            spans.append(["compute", k, float(2 * k), 2 * k + 1.0])
            spans.append(["copy", k + 1, 2 * k + 1 - 0.5 * share, 2 * k + 1.5 - 0.5 * share])
        return spans

    @pytest.mark.parametrize(
        ("shares", "word"),
        [
            ((1.0, 0.9, 1.0), "reproduced"),
            ((0.3, 0.31, 0.3), "partly"),  # certain, and below half of all that the paper draws
            ((0.05, 0.06, 0.05), "partly"),
            ((0.0, 0.0, 0.0), "not reproduced"),
            ((0.0, 1.0), "undecided"),
            ((0.9,), "undecided"),  # one copy has no spread
        ],
    )
    def test_words(self, shares, word):
        found = judge("figure2/overlap", world(self.spans(*shares)))
        assert found.word == word
        assert f"{100 * np.mean(shares):+.2f}" in found.evidence and "paper +100" in found.evidence

    def test_a_cpu_cannot_overlap(self):
        found = judge("figure2/overlap", world(self.spans(1.0, 1.0), kind="cpu"))
        assert found.word == "not run" and "needs a GPU" in found.evidence

    def test_the_first_copy_has_nothing_to_hide_behind(self):
        assert hidden_shares(self.spans()) == []
        assert hidden_shares(self.spans(0.25, 1.0)) == pytest.approx([0.25, 1.0])

    def test_shares_by_brute_force(self):
        random = np.random.default_rng(0)
        for _ in range(20):
            cuts = np.sort(random.choice(1000, 12, replace=False))
            computing = [["compute", k, *map(float, cuts[2 * k : 2 * k + 2])] for k in range(6)]
            starts = np.sort(random.choice(900, 5, replace=False))
            ends = starts + random.integers(1, 99, 5)
            copies = [
                ["copy", k, float(start), float(end)]
                for k, (start, end) in enumerate(zip(starts, ends, strict=True))
            ]
            busy = np.zeros(1000, bool)
            for _, _, start, end in computing:
                busy[int(start) : int(end)] = True
            expected = [busy[a:b].mean() for a, b in zip(starts[1:], ends[1:], strict=True)]
            random.shuffle(copies)
            assert hidden_shares(copies + computing) == pytest.approx(expected)


def test_not_run():
    assert judge("figure2/overlap", lambda run, seed: None).word == "not run"


class TestTable:
    def test_the_stages(self):
        rows = FIGURE2.table(results("figure2", plausible))
        stages = ["host to device", "forward + backward", "optimizer step"]
        assert [row["stage"] for row in rows] == stages
        assert [row["in all (ms)"] for row in rows] == ["10.00", "20.00", "5.00"]
        assert [row["n"] for row in rows] == ["1", "1", "1"]

    def test_a_gpu_hides_copies(self):
        spans = TestOverlap().spans(1.0, 0.5)
        *_, row = FIGURE2.table(results("figure2", world(spans)))
        assert row["stage"] == "a copy behind a computation, but the first"
        assert (row["n"], row["each (ms)"]) == ("2", "75 ± 35 %")
