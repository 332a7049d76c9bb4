"""Does training with MBS go as training without? (Table 3, Figure 3)

At the initial mini-batch, the largest that fits, both ways can be run.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Claim, Exhibit, Expectation, Results, Run, claim
from repro.experiments.judging import (
    Part,
    Spread,
    Verdict,
    combine,
    difference,
    each,
    equivalence,
    ratio,
)
from repro.experiments.mbs.settings import (
    CLASSIFIERS,
    PAPER,
    UNITS,
    best,
    facts,
    initial_pair,
    paper_rows,
    same_margin,
    status_or,
    trainings,
)
from repro.records import Record
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = (("without", False), ("with", True))


def pair(results: Results, role: str) -> list[list[Record]]:
    """Return the trainings without and with MBS at the initial mini-batch."""
    initial = PAPER["table2"][role]["mini_batch"]
    return [trainings(results, role, initial, streamed) for _, streamed in WAYS]


def same_result(roles: Sequence[str], text: str) -> Claim:
    """Return the claim that the best metric is the same with and without MBS."""

    @claim("same_result", text, "Section 4.3.1")
    def judge_same(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            # All cells of the model share a spread: other sizes tell of it too.
            cells: dict[tuple[int, bool], list[float]] = {}
            for record in results.ok("train", role=role):
                way = record.config["mini_batch"], record.config["micro_batch"] is not None
                cells.setdefault(way, []).append(record.metrics["best"])
            without, streamed = (best(records) for records in pair(results, role))
            gap = difference(streamed, without, Spread.pooled(cells.values()), "points")
            return equivalence(role, gap, same_margin(role))

        return combine(each(roles, judge))

    return judge_same


def table3(results: Results) -> list[dict[str, Any]]:
    """Return U-Net's IoU without and with MBS."""
    rows = []
    for (label, _), records in zip(WAYS, pair(results, "U-Net"), strict=True):
        values, paper = best(records), PAPER["table3"][label]
        rows.append(
            {
                "U-Net, IoU (%)": f"{label} MBS",
                "paper": mean_std(paper),
                "ours": status_or(records, Summary.of(values).text()),
                "n": len(values),
                "difference": f"{np.mean(values) - paper[0]:+.2f}" if values else DASH,
            }
        )
    return rows


TABLE3 = Exhibit(
    runs=lambda profile, chosen: initial_pair(profile, "U-Net", chosen),
    table=table3,
    caption=caption("Best test IoU at the initial mini-batch.", facts),
    claims=(same_result(["U-Net"], "U-Net reaches the same IoU with and without MBS"),),
)


def _curves(results: Results, role: str, name: str) -> dict[str, list[list[float]]]:
    """Return the curves of all seeds, per epoch, by way of training."""
    return {
        label: [record.metrics[name] for record in records if record.status == "ok"]
        for (label, _), records in zip(WAYS, pair(results, role), strict=True)
    }


def figure3_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return both ways of every classifier."""
    return [run for role in CLASSIFIERS for run in initial_pair(profile, role, chosen)]


def figure3(results: Results) -> "Figure":
    """Draw training loss and accuracy per epoch, without and with MBS."""
    from repro import plots

    quantities = {"training loss": "train_loss", UNITS["accuracy"]: "accuracy"}
    return plots.learning_curves(
        {
            role: {
                quantity: {
                    f"{way} MBS": curves for way, curves in _curves(results, role, name).items()
                }
                for quantity, name in quantities.items()
            }
            for role in CLASSIFIERS
        }
    )


def figure3_table(results: Results) -> list[dict[str, Any]]:
    """Return every curve's highest and last point; the paper gives the highest as numbers."""
    rows = []
    for role in CLASSIFIERS:
        paper = paper_rows(role)[0]
        for label, _ in WAYS:
            curves = _curves(results, role, "accuracy")[label]
            highest, accuracy = [max(curve) for curve in curves], [curve[-1] for curve in curves]
            loss = [curve[-1] for curve in _curves(results, role, "train_loss")[label]]
            rows.append(
                {
                    "model": role,
                    "MBS": label,
                    "paper, max. accuracy (%)": mean_std(paper[label]),
                    "ours, max. accuracy (%)": Summary.of(highest).text(),
                    "ours, last accuracy (%)": Summary.of(accuracy).text(),
                    "ours, last training loss": Summary.of(loss).text(3),
                    "n": len(loss),
                    "difference": f"{np.mean(highest) - paper[label][0]:+.2f}" if highest else DASH,
                }
            )
    return rows


def _over_epochs(results: Results, role: str, name: str) -> list[list[float]]:
    """Return the mean over epochs of each seed's curve, without and with MBS."""
    curves = _curves(results, role, name)
    return [[float(np.mean(curve)) for curve in curves[label]] for label, _ in WAYS]


@claim(
    "same_accuracy_curve",
    "Accuracy follows the same curve with and without MBS (as we put it: its mean over the epochs "
    "is the same)",
    "Section 4.3.1",
)
def same_accuracy_curve(results: Results, expected: Expectation) -> Verdict:
    """Judge the curves' mean over epochs, seed by seed, so that noise is not taken for distance."""

    def judge(role: str) -> Part:
        without, streamed = _over_epochs(results, role, "accuracy")
        gap = difference(streamed, without, Spread.pooled([without, streamed]), "points")
        return equivalence(role, gap, same_margin(role))

    return combine(each(CLASSIFIERS, judge))


@claim(
    "same_loss_curve",
    "The training loss follows the same curve with and without MBS (as we put it: its mean over "
    "the epochs is the same)",
    "Section 4.3.1",
)
def same_loss_curve(results: Results, expected: Expectation) -> Verdict:
    """Judge the curves' mean over epochs as a ratio."""

    def judge(role: str) -> Part:
        without, streamed = _over_epochs(results, role, "train_loss")
        gap = ratio(streamed, without, Spread.pooled_logs([without, streamed]), digits=3)
        return equivalence(role, gap, expected.allowed())

    return combine(each(CLASSIFIERS, judge))


FIGURE3 = Exhibit(
    runs=figure3_runs,
    table=figure3_table,
    figure=figure3,
    caption=caption(
        "At the initial mini-batch, mean over seeds with a band of one standard deviation. "
        "The paper's curves are not given as numbers; its maximum accuracies stand beside.",
        facts,
    ),
    claims=(same_accuracy_curve, same_loss_curve),
)
