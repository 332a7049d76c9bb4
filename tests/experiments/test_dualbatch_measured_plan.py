"""Plans solved from times measured here, and Table 1: what is read and judged."""

import made
from made_dualbatch import World, judge, results, rows

from repro.experiments.dualbatch import measured_plan


def no_plan(metrics, config):
    metrics |= {"error": "there is no B_S", "plan": None}
    del metrics["accuracy"]


def no_plans(metrics, config):
    for number, kind in enumerate(config["parts"][0]["epochs"]):
        if kind["a"] is None and kind["k"] > 1:
            metrics["parts"][0]["solved"][number] |= {"error": "there is no B_S", "plan": None}
            del metrics["parts"][0]["shares_s"][str(number)]


def longer(factor):
    def edit(metrics, config):
        for number, kind in enumerate(config["parts"][0]["epochs"]):
            if kind["in"] == measured_plan.OWN and kind["k"] == 1.1:
                shares = metrics["parts"][0]["shares_s"][str(number)]
                # Of the small-batch worker alone: an epoch ends with the slower one.
                shares[0] = [factor * seconds for seconds in shares[0]]

    return {"wall": edit}


def test_extra_time():
    assert judge("own_plan/extra_time", edit=longer(1.03))[0] == "reproduced"
    word, evidence = judge("own_plan/extra_time", edit=longer(1.2))
    assert word == "partly" and "k = 1.1, measured over promised: ×1.1" in evidence
    assert judge("own_plan/extra_time", noise=0.05)[0] == "undecided"
    word, evidence = judge("own_plan/extra_time", edit={"wall": no_plans})
    assert word == "not run" and "there is no B_S" in evidence


def test_gain():
    assert judge("own_plan/gain", accuracy=lambda config: 67.8)[0] == "not reproduced"
    word, evidence = judge("own_plan/gain", edit={"own_plan": no_plan})
    assert word == "not run" and "there is no B_S" in evidence
    # Of one seed no spread is known.
    assert judge("own_plan/gain", "quick")[0] == "undecided"


def test_table():
    found = rows("own_plan", World(noise=0.0))
    assert [row["plan"] for row in found[:2]] == [
        "trained, the paper's b / a",
        "trained, times measured here",
    ]
    assert found[1]["b / a (samples)"] == "30.0" and found[1]["k at most"] == "1.300"
    own = [row for row in found if "times measured here, 32 px" in row["plan"]]
    assert [row.get("time over large batches") for row in own] == [
        None,
        "1.050, wall",
        "1.100, wall",
    ]
    none = rows("own_plan", World(edit={"wall": no_plans, "own_plan": no_plan}))
    assert sum("no plan" in row["plan"] for row in none) == 5  # three seeds, two kinds


def test_the_schemes_have_the_papers_symbols():
    found = rows("table1")
    assert [row["batch sizes, paper"] for row in found[:2]] == ["(B_S2, B_L2)"] * 2
    assert [row["batch sizes"] for row in found[:2]] == ["102, 560"] * 2
    hybrid = found[-4:]
    assert [row["resolution, paper"] for row in hybrid] == ["r1", "r2"] * 2
    assert [row["resolution"] for row in hybrid] == ["24", "32"] * 2
    assert [row["rate, paper"] for row in hybrid] == ["η1", "η1", "η2", "η2"]


def test_a_schedule_that_mixes_the_symbols_up_is_found():
    def mixed(metrics, config):
        metrics["rows"][-1]["resolution"] = 24

    assert made.check_row("dualbatch/table1", 0, results("table1"))["holds"] == "yes"
    row = made.check_row("dualbatch/table1", 0, results("table1", World(edit={"schemes": mixed})))
    assert row["holds"] == "NO" and "11 of 12: not hybrid scheme, resolution" in row["evidence"]
