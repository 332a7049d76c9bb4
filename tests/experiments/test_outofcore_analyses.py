"""Where the paper's figures come from, and the size of a chunk."""

import pytest
from made import FAILED
from test_outofcore_settings import (
    PAPER,
    V100,
    World,
    curves,
    is_hollow,
    judged,
    nothing,
    panels,
    results,
    table,
)

from repro.experiments.outofcore import rates, settings

# What makes each claim fail.
WRONG = {
    "link/out_of_reach": {"relative": {("link", 1.0): 1.3}},
    "link/within_reach": {"relative": {("link",): 0.8}},
    "chunks/smaller_fragments_less": {"internal": {("chunk", 2): 1000}},
    "chunks/smaller_costs_more": {"relative": {("chunk", 40): 2.0}},
    "chunks/balanced": {"relative": {("chunk", 40): 1.2}},
}


def word(key: str, world: World) -> str:
    return judged(key, world).word


class TestClaims:
    def test_every_claim_is_tried(self):
        own = [f"{a}/{c.key}" for a in ("link", "chunks") for c in PAPER.artefacts[a].claims]
        assert own == list(WRONG)

    @pytest.mark.parametrize("key", WRONG)
    def test_as_the_records_usually_are(self, key):
        assert word(key, World()) == "reproduced"

    @pytest.mark.parametrize("key", WRONG)
    def test_otherwise(self, key):
        assert word(key, World(**WRONG[key])) == "not reproduced"

    @pytest.mark.parametrize("key", WRONG)
    @pytest.mark.parametrize("rules", [{"places": ()}, {"status": {(): FAILED}}])
    def test_without_records(self, key, rules):
        assert word(key, World(**rules)) == "not run"

    def test_one_batch_size_within_the_bound_is_partly(self):
        assert word("link/out_of_reach", World(relative={("link", 1440, 1.0): 1.3})) == "partly"

    def test_where_no_budget_is_served_with_the_papers_chunk(self):
        found = results("chunks", World())
        for record in found.records:
            del record.metrics["rows"]["40"]
        rows = PAPER.artefacts["chunks"].exhibit.table(found)
        assert all("the paper's" not in row["chunk"] for row in rows)


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
