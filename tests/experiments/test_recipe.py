"""Every paper's recipe: the paper's value beside each profile's, with what differs explained."""

import importlib
import json

import pytest

from repro import paths
from repro.experiments import PAPERS, load_paper
from repro.experiments.recipes import compared

COLUMNS = ["item", "paper", "paper profile", "gpu", "long", "quick", "why they differ"]


@pytest.mark.parametrize("key", PAPERS)
def test_it_is_whole_and_shown(key):
    rows = importlib.import_module(f"repro.experiments.{key}.recipe").recipe()
    assert len(rows) > 5 and len({row["item"] for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == COLUMNS and all(isinstance(value, str) for value in row.values())
        assert row["paper"] and row["gpu"] and row["long"] and row["quick"], row
        if row["paper profile"] != row["quick"] or row["paper"] == "not stated":
            assert row["why they differ"], row
    notebook = json.loads(
        (paths.ROOT / "notebooks" / f"{load_paper(key).notebook}.ipynb").read_text(encoding="utf-8")
    )
    assert any("session.recipe()" in "".join(cell["source"]) for cell in notebook["cells"])


def test_what_does_not_differ_has_no_reason():
    same, other = (
        compared("seeds", "3", lambda profile, n=few: n if profile == "quick" else "3", "short")
        for few in ("3", "2")
    )
    assert (same["why they differ"], other["why they differ"]) == ("", "short")
