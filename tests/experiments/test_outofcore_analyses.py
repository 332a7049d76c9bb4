"""Where the paper's figures come from, and the size of a chunk."""

import pytest
from made import FAILED
from test_outofcore_settings import (
    PAPER,
    V100,
    World,
    checked,
    curves,
    is_hollow,
    nothing,
    panels,
    results,
    table,
)

from repro.experiments.outofcore import rates, settings

# What makes each check fail, by its artefact and words of it.
WRONG = {
    ("link", "no schedule"): {"relative": {("link", 1.0): 1.3}},
    ("link", "or more"): {"relative": {("link",): 0.8}},
    ("chunks", "lose less"): {"internal": {("chunk", 2): 1000}},
    ("chunks", "take longer"): {"relative": {("chunk", 40): 2.0}},
    ("chunks", "balance both"): {"relative": {("chunk", 40): 1.2}},
}


class TestChecks:
    def test_every_check_is_tried_and_there_is_no_claim(self):
        found = [PAPER.artefacts[name] for name in ("link", "chunks")]
        assert sum(len(artefact.checks) for artefact in found) == len(WRONG)
        assert not any(artefact.exhibit.claims for artefact in found)

    @pytest.mark.parametrize(("artefact", "words"), WRONG)
    def test_right_wrong_and_without_records(self, artefact, words):
        assert checked(artefact, World(), words)["holds"] == "yes"
        wrong = World(**WRONG[artefact, words])
        assert checked(artefact, wrong, words)["holds"] == "NO"
        for rules in ({"places": ()}, {"status": {(): FAILED}}):
            assert checked(artefact, World(**rules), words)["holds"] == "not run"

    def test_one_batch_size_within_the_bound_is_enough(self):
        row = checked("link", World(relative={("link", 1440, 1.0): 1.3}))
        assert row["holds"] == "NO" and "at best ×1.06 at 1440" in row["evidence"]

    def test_where_no_budget_is_served_with_the_papers_chunk(self):
        found = results("chunks", World())
        for record in found.records:
            del record.metrics["rows"]["40"]
        rows = PAPER.artefacts["chunks"].exhibit.table(found)
        assert all("the paper's" not in row["chunk"] for row in rows)
        assert PAPER.artefacts["chunks"].checks[2].row(found)["holds"] == "not run"


class TestTables:
    def test_the_papers_images_per_second(self):
        assert [rates.published(b) for b in settings.LINK_BATCHES] == [409, 398, 321]

    def test_link(self):
        rows = table("link", World())
        assert len(rows) == 3 * 4 * 2
        (row,) = [
            r for r in rows if (r["batch"], r["bytes"], r["GB/s each way"]) == (928, "100%", "50")
        ]
        assert row["our fastest"] == "327 (56%)" and row["paper"] == "409 (70%)"
        assert row["no schedule beats"] == "334 (57%)"
        assert not table("link", nothing)

    def test_chunks(self):
        rows = table("chunks", World())
        assert [row["chunk"] for row in rows][:4] == [
            "2 MiB",
            "10 MiB",
            "20 MiB",
            "40 MiB (the paper's)",
        ]
        assert rows[3]["chunks mapped and unmapped"] == "500"


def test_figures():
    shown = panels("link", World())
    titles = [f"{batch:,} images {V100}" for batch in settings.LINK_BATCHES]
    assert list(shown) == titles
    lines = curves(shown[titles[0]])
    assert set(lines) == {
        "paper",
        *(
            f"{name}, {share} of the bytes"
            for name in ("our fastest", "no schedule beats")
            for share in ("100%", "80%")
        ),
    }
    assert lines["paper"] == [(50, pytest.approx(409 / 581))]
    assert is_hollow(shown[titles[0]], "paper")
    assert all("SIMULATED V100" in title for title in panels("chunks", World()))
