"""Which mini-batch fits, and does the linear model of memory predict it? (Table 2)"""

from typing import Any

from repro.experiments.design import check
from repro.experiments.judge import NotRun
from repro.experiments.mbs.cells import MIB, artefact, ran_as
from repro.experiments.mbs.runs import INITIAL, PAPER, ROLES, sizes
from repro.experiments.query import Results
from repro.report import DASH


def table(results: Results) -> list[dict[str, Any]]:
    """The largest mini-batch that fits: tried, modelled and chosen by the streamer."""
    rows = []
    for role in ROLES:
        record = results.first("size", role=role)
        metrics = record.metrics if record else {}
        error, limit = metrics.get("auto_prediction_error"), metrics.get("limit_bytes")
        fits = metrics.get("largest_that_fits")
        rows.append(
            {
                "model": ran_as(role, results.records),
                "limit (MiB)": f"{limit / MIB:,.1f}" if limit else DASH,
                "mini-batch, paper": INITIAL[role],
                "predicted, paper's network and card": _predicted(results, role) or DASH,
                "largest 2ᵏ that fits": fits if fits is not None else DASH,
                "M(B): largest that fits": metrics.get("predicted_largest") or DASH,
                '"auto" chose': metrics.get("auto_micro_batch") or DASH,
                "prediction error": f"{100 * error:+.2f} %" if error is not None else DASH,
                "μ-batch, paper": PAPER["table2"][role]["micro_batch"],
                "μ-batch, ours": fits // 2 if fits else DASH,
                "n": int(bool(metrics)),
            }
        )
    return rows


def _predicted(results: Results, role: str) -> int | None:
    record = results.first("foretell", role=role)
    return record.metrics["largest"] if record else None


@check(
    "The largest mini-batches (powers of two) that the paper's 24 GB hold are Table 2's, by the "
    "live tensors of the published networks (SIMULATED)"
)
def initial_sizes(results: Results) -> tuple[bool, str]:
    """Whether the paper's size fits its card by prediction, and its double does not."""
    found = {role: n for role in ROLES if (n := _predicted(results, role)) is not None}
    if not found:
        raise NotRun("no records")
    return all(INITIAL[role] <= n < 2 * INITIAL[role] for role, n in found.items()), "; ".join(
        f"{role}: {n}, paper {INITIAL[role]}" for role, n in found.items()
    )


@check(
    "M(B) = p + B a predicts the largest mini-batch that fits. A sound model cannot miss it: the "
    "limit lies half way between the needs of two sizes"
)
def prediction(results: Results) -> tuple[bool, str]:
    """Whether the model's size lies between the last that fits and the next tried."""
    holds, said = [], []
    for record in (results.first("size", role=role) for role in ROLES):
        metrics = record.metrics if record else {}
        fits, predicted = metrics.get("largest_that_fits"), metrics.get("predicted_largest")
        if record is None or fits is None or predicted is None:
            continue
        holds.append(fits <= predicted < 2 * fits)
        said.append(
            f"{ran_as(record.config['role'], results.records)}: M(B) admits {predicted}, of powers "
            f"of two {fits} ran and {2 * fits} did not"
        )
    if not said:
        raise NotRun("no records under a limit")
    return all(holds), "; ".join(said)


TABLE2 = artefact(
    "table2",
    plan=sizes,
    rows=table,
    checks=(prediction, initial_sizes),
)
