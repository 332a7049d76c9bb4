"""Claims and checks of dual-batch learning on reference records with planted numbers."""

import dataclasses
import math

import pytest
from made import verdict
from planted import judged, reference

from repro.experiments import load_paper
from repro.experiments.dualbatch import cells, plans, real_workers, runs, times
from repro.experiments.dualbatch.runs import CIFAR, KEPT, OWN, SCHEMES, SECTION_5_2, SECTION_5_2_3
from repro.experiments.dualbatch.runs import PAPER as REPORTED
from repro.experiments.judge import mean_of


def near(record, value):
    """Return the value as this seed or process has it: within 0.1 %."""
    return value * (1 + 1e-3 * (record.seed % 3 - 1))


def reported(config):
    """Return the paper's loss and accuracy of a training."""
    n, k = config["n_small"], config["k"]
    if config["setting"] == SECTION_5_2:
        return REPORTED["table8"][SCHEMES[config["scheme"]]][n]
    if n == 0:
        return REPORTED["table5"]["baseline"]
    if config["factor"] != "linear":
        return REPORTED["table3"][n - 1][config["factor"]]
    (row,) = [r for r in REPORTED["table5"]["rows"] if (r["k"], r["n_small"]) == (k, n)]
    return row


def ends(accuracy=None, test_loss=None):
    """Return the edit that gives trainings a final value by their configuration."""

    def edit(record):
        if record.experiment in ("train", "own_plan"):
            values = {"accuracy": accuracy, "test_loss": test_loss}
            for metric, value in values.items():
                if value is not None:
                    record.metrics[metric] = [near(record, value(record.config))]

    return edit


PAPERS = ends(lambda config: reported(config)["accuracy"], lambda config: reported(config)["loss"])
MIRRORED = ends(lambda config: 140 - reported(config)["accuracy"])


def imagenet(accuracy):
    """Return the edit that makes trainings of Table 8 those of ImageNet."""
    change = ends(accuracy)

    def edit(record):
        if record.experiment == "train":
            record.config["setting"] = SECTION_5_2_3
            change(record)

    return edit


def timed(step, epoch=lambda side, n: 1.0):
    """Return the edit of the times of steps, and of epochs over those of their steps."""

    def edit(record):
        if record.experiment == "times":
            total = record.config["samples"]
            for side in record.config["resolutions"]:
                for n in record.config["batch_sizes"]:
                    seconds = near(record, step(side, n))
                    record.timings[f"{side}px, step of {n}"] = {"samples_s": [5 * seconds]}
                    seconds *= math.ceil(total / n) * epoch(side, n)
                    record.timings[f"{side}px, {n}, {total}"] = {"samples_s": [seconds]}

    return edit


def line(side, n):
    return 1e-6 * side**2 * n + 1e-4 * side


def shares(change):
    """Return the edit of workers' shares over their predictions, by row and process."""

    def edit(record):
        for row in record.metrics.get("shares", ()):
            if "batch" in row:
                row["measured_s"] = row["predicted_s"] * change(row, record.seed)

    return edit


def workers(kind=lambda kind, highest: 1.0, asp=1.0):
    """Return the edit of real workers' times: of kinds of epoch, and of an ASP round over BSP's."""

    def edit(record):
        if record.experiment != "wall":
            return
        for asked, part in zip(record.config["parts"], record.metrics["parts"], strict=True):
            for number, each in enumerate(asked["epochs"]):
                sides = [k["resolution"] for k in asked["epochs"] if k["in"] == each["in"]]
                seconds = near(record, kind(each, max(sides)))
                part["shares_s"][str(number)] = [[seconds] * 3, [0.9 * seconds] * 3]
            own = [kind(each, 0) for each in asked["epochs"] if each["in"] == OWN]
            if part.get("round_s"):
                part["round_s"]["asp"] = [asp * sum(own)] * 3

    return edit


def promised(kind, highest):
    return kind["k"] * (kind["resolution"] / highest) ** 2 if highest else kind["k"]


def converge(**accuracy):
    """Return the edit of trainings' last accuracy by synchronisation."""

    def edit(record):
        if record.experiment == "synchronise":
            record.metrics["accuracy"] = [10.0, near(record, accuracy[record.config["sync"]])]

    return edit


def steep(**of):
    """Return the edit of how steep the minima of batch sizes are."""

    def edit(record):
        if record.experiment == "flatness":
            value = near(record, of[record.config["batches"]])
            rises = [[value] * len(row) for row in record.metrics["rises"]]
            record.metrics.update(rises=rises, worst_rise=value, test_loss=1 + value)

    return edit


def fits(predicted, most=1000, device="cuda"):
    """Return the edit of the largest batch that fits a device, and of its prediction."""

    def edit(record):
        if record.experiment == "memory":
            record.device["type"] = device
            record.metrics.update(predicted_max=predicted, measured_max=most)

    return edit


SLOW = workers(lambda kind, highest: 2.0 - kind["resolution"] / highest if highest else 1.0)
BY_SMALL = ends(lambda c: 60.0 + c["n_small"], lambda c: 2.0 - c["n_small"] / 10)
# What would reproduce a claim, None where the reference records do; and what would not.
CLAIMS = {
    "figure3/line": (timed(line), timed(lambda side, n: line(side, n) * (1 + (n / 60) ** 2))),
    "figure4/falls": (None, timed(lambda side, n: n**1.2)),
    "figure4/equation2": (timed(line), timed(line, lambda side, n: 1.1)),
    "table3/factor_gains": (PAPERS, MIRRORED),
    "table4/shares_predicted": (shares(lambda row, seed: 1.03), shares(lambda row, seed: 0.96)),
    "figure13/largest_predicted": (fits(1034), fits(1036)),
    "table5/gain": (PAPERS, ends(lambda c: 68.0 - c["n_small"])),
    "table5/one_too_few": (None, ends(lambda c: 80.0 - c["n_small"])),
    "table5/three_best": (PAPERS, BY_SMALL),
    "table5/lowest_loss": (PAPERS, BY_SMALL),
    "table8/accuracy": (PAPERS, MIRRORED),
    "table8/gain": (PAPERS, ends(lambda c: 70.0)),
    "table8/over_cyclic": (PAPERS, ends(lambda c: 68.0)),
    "table8/saving": (None, SLOW),
    "table10/saving": (None, SLOW),
    "synchronisation/asp_faster": (None, workers(promised, asp=1.1)),
    "synchronisation/asp_converges_worse": (None, converge(bsp=69.0, ssp=69.0, asp=71.0)),
    "flatness/sharper": (None, steep(small=1.0, dual=1.0, large=1.0)),
    "flatness/dual_flatter": (None, steep(small=1.0, dual=3.0, large=3.0)),
    "flatness/test_loss": (None, steep(small=1.0, dual=1.0, large=1.0)),
    "own_plan/extra_time": (workers(promised), workers(lambda kind, _: 2 * kind["k"] - 1)),
    "own_plan/gain": (ends(lambda c: 68.0 + 3 * (c["n_small"] > 0)), ends(lambda c: 67.8)),
}


def test_every_claim_is_here():
    artefacts = load_paper("dualbatch").artefacts
    named = {f"{name}/{key}" for name in artefacts for key in artefacts[name].claims}
    assert named == {*CLAIMS, "table10/imagenet_accuracy", "table10/imagenet_loss"}


@pytest.mark.parametrize("target", CLAIMS)
def test_planted_numbers_decide(target):
    for edit, word in zip(CLAIMS[target], ("reproduced", "not reproduced"), strict=True):
        if edit is not None:
            found = judged(f"dualbatch/{target}", edit)
            assert found.word == word, found.evidence


def test_memory_that_is_a_line_by_construction_judges_no_prediction():
    found = judged("dualbatch/figure13/largest_predicted", fits(1000, device="cpu"))
    assert found.word == "not run"


def test_imagenet_is_judged_where_it_was_trained():
    """By the trainings of Table 8, named ImageNet's: its own need the profile `paper`."""
    rows = REPORTED["table10"]

    for edit, word in (
        (imagenet(lambda c: rows[SCHEMES[c["scheme"]]][c["n_small"]]["accuracy"]), "reproduced"),
        (imagenet(lambda c: 65.0 - 3 * (c["n_small"] > 2)), "not reproduced"),
    ):
        found = reference("dualbatch/table8", edit)
        for key in ("imagenet_accuracy", "imagenet_loss"):
            judgement = verdict(f"dualbatch/table10/{key}", found)
            assert judgement.word == word, judgement.evidence


def test_the_best_of_some_is_not_the_best_of_all():
    for key, lost in (("three_best", 4), ("lowest_loss", 3), ("gain", 0)):
        found = reference("dualbatch/table5")
        found.records = [r for r in found.records if r.config["n_small"] != lost]
        assert verdict(f"dualbatch/table5/{key}", found).word == "not run"


def test_equal_gains_are_known_to_a_test_image_and_a_plan_needs_its_own_record():
    def edit(record):
        record.metrics["accuracy"] = [50.4 if record.config["n_small"] else 50.0]

    found = reference("dualbatch/table5", edit)
    trainings = (cells.section51(found, *of) for of in ((runs.K[1], 2), (1.0, 0)))
    change = cells.change(found, *trainings)
    assert change.mean == pytest.approx(0.4) and change.error > 0
    alone = reference("dualbatch/table2")
    alone.records = [record for record in alone.records if record.experiment == "published"]
    assert alone.records and plans.sizes_table(alone, "table2") == []


def test_all_seeds_with_momentum_kept_judge():
    """They were planned at once; of others, which were looked at, the first look counts."""
    several = reference("dualbatch/updates")
    kept, base = (several.ok("train", setting=KEPT, n_small=n) for n in (4, 0))
    assert cells.change(several, kept, base).n == len(kept) == 4
    assert cells.change(several, kept, cells.section51(several, runs.K[1], 4)).n == 1


def test_no_process_is_dropped_and_those_after_the_first_look_judge():
    """Whatever processor they were measured on; the first five set how many are needed."""
    found = reference("dualbatch/table8", workers(lambda kind, highest: 1.0))
    for record in found.ok("wall"):
        if record.seed >= 5:  # faster at the lower resolution, and elsewhere
            (part,) = record.metrics["parts"]
            part["shares_s"]["0"] = [[0.8 * s for s in each] for each in part["shares_s"]["0"]]
            place = next(n for n, each in enumerate(found.records) if each is record)
            device = record.device | {"name": "another"}
            found.records[place] = dataclasses.replace(record, device=device)
    ratio = real_workers.cycled(found, CIFAR)
    assert ratio.n == 11 and ratio.trials == "processes"
    assert math.exp(ratio.mean) == pytest.approx(0.9, abs=0.01)


def test_workers_that_share_a_core_say_nothing():
    def alone(record):
        if record.experiment == "wall":
            record.metrics.update(devices=1, parts=[])

    found = judged("dualbatch/table8/saving", alone)
    assert found.word == "not run" and "1 core or accelerator for two workers" in found.evidence


def test_each_process_compares_its_own_rounds():
    found = reference("dualbatch/synchronisation", workers(promised, asp=0.95))
    for record in found.ok("wall"):  # machines that differ by far, ASP's 5 % ahead
        for part in record.metrics["parts"]:
            for each in (*part["shares_s"].values(), [part["round_s"].get("asp", [])]):
                for seconds in each:
                    seconds[:] = [2.0 ** (record.seed % 7) * s for s in seconds]
    judgement = verdict("dualbatch/synchronisation/asp_faster", found)
    assert judgement.word == "reproduced"
    assert "ASP over BSP: ×0.95 [×0.95, ×0.95]" in judgement.evidence


def test_a_rule_of_which_nothing_learned_is_left_out():
    def merged(*accuracy, rules=("delta",)):
        def edit(record):
            converge(bsp=70.0, ssp=69.0, asp=67.0)(record)
            if record.config.get("merge") in rules or not rules:
                record.metrics["accuracy"] = list(accuracy)

        return edit

    key = "dualbatch/synchronisation/asp_converges_worse"
    for edit in (merged(10.0, 10.0), merged(15.6, 10.0)):  # idle; or diverged after an epoch
        judgement = judged(key, edit)
        assert judgement.word == "reproduced"
        assert "left out, both evaluated at chance: delta" in judgement.evidence
    assert judged(key, merged(10.0, 10.0, rules=())).word == "not run"


def test_shares_are_judged_at_the_farthest_of_every_k():
    def word(change):
        return judged("dualbatch/table4/shares_predicted", shares(change)).word

    assert word(lambda row, seed: 1.0 + 0.09 * (row["n_small"] == 2)) == "not reproduced"
    assert word(lambda row, seed: 1 + 0.1 * (seed % 2)) == "undecided"


def test_a_line_has_no_bend_and_a_parabola_its_own():
    sizes = [8, 16, 24, 40, 72]
    assert times.bend({n: 2 * n + 5.0 for n in sizes}) == pytest.approx(0, abs=1e-9)
    # Half way, at 40, the chord from 8 to 72 lies 1024 above n².
    square = times.bend({n: float(n * n) for n in sizes})
    assert square == pytest.approx(-100 * 1024 / ((8**2 + 72**2) / 2))
    assert times.doubling({n: n**-0.5 for n in (8, 16, 32, 64)}) == pytest.approx(0.5**0.5)


def test_times_of_three_batch_sizes_show_no_trend():
    def edit(record):
        if record.experiment == "times":
            record.config["batch_sizes"] = record.config["batch_sizes"][:3]

    assert judged("dualbatch/figure3/line", edit).word == "not run"


def test_the_farthest_is_widened_for_the_choice():
    def farthest(**errors):
        return list(times._farthest(["all"], lambda name: errors).values())

    near = mean_of([1.01, 1.011, 1.012], log=True)
    wide = mean_of([0.95, 1.0, 1.06], log=True)
    found, _ = farthest(near=near, wide=wide)
    assert found.label == "farthest of 2: wide" and found.candidates == 2
    (low, high), (before, after) = found.interval(), wide.interval()
    assert low < before and after < high
    # Of one value no spread is known: it decides nothing.
    labels = [case.label for case in farthest(near=near, one=mean_of([1.0], log=True))]
    assert labels == ["farthest of 2: one", "surest of 2: near"]
    # A wide interval hides none that lies beyond.
    off = mean_of([1.2, 1.201, 1.202], log=True)
    labels = [case.label for case in farthest(off=off, wide=mean_of([0.6, 1.0, 1.7], log=True))]
    assert labels == ["farthest of 2: wide", "surest of 2: off"]


def test_every_worker_has_its_tick():
    drawn = load_paper("dualbatch").artefacts["figure2"].draw(reference("dualbatch/figure2"))
    for axis in drawn.axes:
        assert [*axis.get_yticks()] == [*range(REPORTED["workers"])]
