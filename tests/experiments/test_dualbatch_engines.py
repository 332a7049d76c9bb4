"""Real processes against the simulation: what is read and judged."""

import made
from made_dualbatch import World, judge, rows

from repro.report import DASH

COLUMN = "same weights in the same order"


def differ(metrics, config):
    metrics["same_weights"] = False


def test_verdicts():
    assert judge("engines/same_weights", "quick", edit={"train": differ})[0] == "not reproduced"
    word, evidence = judge("engines/same_weights", "gpu")
    assert word == "not run" and "too large" in evidence


def test_the_local_engine_alone_proves_nothing():
    def status(run):
        return None if run.config["engine"] == "ray" else {}

    assert judge("engines/same_weights", "quick", status=status)[0] == "not run"


def test_table():
    found = rows("engines", profile="quick")
    assert [row["engine"] for row in found] == ["local", "ray"]
    assert {row[COLUMN] for row in found} == {"yes"}
    assert [row["staleness, mean"] for row in found] == ["2.00", "2.00"]
    assert [row["staleness, most"] for row in found] == [3, 3]
    wrong = rows("engines", World(edit={"train": differ}), "quick")
    assert {row[COLUMN] for row in wrong} == {"NO"}
    assert {row[COLUMN] for row in rows("engines")} == {DASH}


def test_an_engine_that_failed_says_so():
    def status(run):
        return made.FAILED if run.config["engine"] == "ray" else {}

    assert rows("engines", World(status=status), "quick")[1]["accuracy (%)"] == "failed"
