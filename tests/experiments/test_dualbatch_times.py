"""Times, memory and their lines: what is read, drawn and judged."""

import made
import pytest
from made_dualbatch import World, results, rows

from repro.experiments.dualbatch import times
from repro.experiments.judge import NotRun, mean_of


def checked(artefact, position=0, **world):
    return made.check_row(f"dualbatch/{artefact}", position, results(artefact, World(**world)))


def test_a_line_has_no_bend_and_a_parabola_its_own():
    sizes = [8, 16, 24, 40, 72]
    assert times.bend({n: 2 * n + 5.0 for n in sizes}) == pytest.approx(0, abs=1e-9)
    # Half way, at 40, the chord from 8 to 72 lies 1024 above n².
    square = times.bend({n: float(n * n) for n in sizes})
    assert square == pytest.approx(-100 * 1024 / ((8**2 + 72**2) / 2))
    with pytest.raises(NotRun, match="3 batch sizes"):
        times.bend({1: 1.0, 2: 2.0, 3: 3.0})
    assert times.doubling({n: n**-0.5 for n in (8, 16, 32, 64)}) == pytest.approx(0.5**0.5)


def farthest(**errors):
    found = times._farthest(["all"], lambda name: errors).values()
    return [(case.label, case) for case in found]


def test_the_farthest_is_widened_for_the_choice():
    near = mean_of([1.01, 1.011, 1.012], log=True)
    wide = mean_of([0.95, 1.0, 1.06], log=True)
    (label, found), _ = farthest(near=near, wide=wide)
    assert label == "farthest of 2: wide:" and found.candidates == 2
    (low, high), (before, after) = found.interval(), wide.interval()
    assert low < before and after < high
    # Of one value no spread is known: it decides nothing.
    labels = [label for label, _ in farthest(near=near, one=mean_of([1.0], log=True))]
    assert labels == ["farthest of 2: one:", "surest of 2: near:"]
    # A wide interval hides none that lies beyond.
    off = mean_of([1.2, 1.201, 1.202], log=True)
    labels = [label for label, _ in farthest(off=off, wide=mean_of([0.6, 1.0, 1.7], log=True))]
    assert labels == ["farthest of 2: wide:", "surest of 2: off:"]


# Figure 3.


# Several processes.


def verdict(target, found):
    judged = made.verdict(f"dualbatch/{target}", found)
    return judged.word, judged.evidence


# Figure 4.


# Table 4.


def shares(change, profile="long"):
    """Return the verdict on the shares after a change of each one's row by its process."""
    found = results("table4", World(noise=0.0), profile)
    for record in found.records:
        for row in record.metrics["shares"]:
            if "batch" in row:
                row["measured_s"] = row["predicted_s"] * change(row, record.seed)
    return verdict("table4/shares_predicted", found)


def test_shares():
    assert shares(lambda row, seed: 1.03)[0] == shares(lambda row, seed: 0.97)[0] == "reproduced"
    assert (
        shares(lambda row, seed: 1.04)[0] == shares(lambda row, seed: 0.96)[0] == "not reproduced"
    )
    word, evidence = shares(lambda row, seed: 1.0 + 0.09 * (row["n_small"] == 2))
    assert word == "not reproduced" and "small batches, n_S = 2" in evidence
    assert shares(lambda row, seed: 1 + 0.1 * (seed % 2))[0] == "undecided"
    assert shares(lambda row, seed: 1.0, "gpu")[0] == "undecided"  # of one process
    assert shares(lambda row, seed: 1.0)[1].count("farthest of 4: ") == 2


# Figure 13.


@pytest.mark.parametrize(("error", "word"), [(3.4, "yes"), (-3.4, "yes"), (3.6, "NO"), (-9, "NO")])
def test_the_largest_batch(error, word):
    def edit(metrics, config):
        metrics |= {"measured_max": 100_000, "predicted_max": round(1000 * (100 + error))}

    row = checked("figure13", edit={"memory": edit})
    assert row["holds"] == word and row["evidence"].count(f"{error:+.1f} %") == 2
    found = rows("figure13", World(edit={"memory": edit}))
    assert [row["largest, paper's prediction"] for row in found] == ["11,147", "1,345"]
    assert [row["error, paper"] for row in found] == ["3.5 %", "3.7 %"]
    assert [row["error"] for row in found] == [f"{error:+.1f} %"] * 2
    assert [row["limit (MiB)"] for row in found] == ["24,576"] * 2
