"""What the paper says about Micro-Batch Streaming, as checks on the records."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from repro.experiments.design import Claim, Part, Results, Verdict, combine, reported
from repro.experiments.mbs.artefacts import (
    best,
    curve_gap,
    epoch_times,
    hidden_share,
    same_size_difference,
    table1_cell,
    trainings,
)
from repro.experiments.mbs.grids import CLASSIFIERS, ROLES
from repro.report import difference

# The largest that section 4.3.3 gives.
OVERHEAD_PERCENT = max(
    percent for pair in reported("mbs")["overhead_percent"].values() for percent in pair
)
LOSS_PERCENT = 5.0  # curves of the loss count as the same within this share of their level


def paper_rows(role: str) -> list[dict[str, Any]]:
    """Return a model's rows of Table 4 or 5, the initial mini-batch first."""
    tables = (reported("mbs")["table4"], reported("mbs")["table5"])
    return [row for table in tables for row in table if row["model"] == role]


def tolerance(role: str) -> float:
    """Return how far apart two results may be and still count as the same, in points.

    It is the paper's own: the difference that it reports between training with and without MBS
    at the initial mini-batch, or twice the spread of its seeds there, whichever is larger.
    """
    first = paper_rows(role)[0]
    (without, spread), (streamed, spread_streamed) = first["without"], first["with"]
    return max(abs(streamed - without), 2 * float(np.hypot(spread, spread_streamed) / 2**0.5))


def larger(name: str, higher: Sequence[float], lower: Sequence[float], paper: float) -> Part:
    """Judge ``higher > lower``: reproduced where the 95 % interval excludes 0, partly if not."""
    if not higher or not lower:
        return "not run", f"{name}: no records"
    gap = difference(higher, lower)
    word = "not reproduced"
    if gap.mean > 0:
        word = "partly" if gap.includes_zero else "reproduced"
    return word, f"{name} {gap} points, paper {paper:+.2f}"


def _table1_gain(results: Results, larger_cell: str, smaller_cell: str) -> Verdict:
    parts = []
    for role in ("ResNet-50", "U-Net"):
        paper = reported("mbs")["table1"][role]
        gain = paper[larger_cell] - paper[smaller_cell]
        cells = [
            best(table1_cell(results, role, *cell.split("_")))
            for cell in (larger_cell, smaller_cell)
        ]
        parts.append(larger(role, cells[0], cells[1], gain))
    return combine(parts)


def check_prediction(results: Results) -> Verdict:
    """Judge whether the linear model names a size from the last that fits to the next tried."""
    parts = []
    for role in ROLES:
        record = next(iter(results.select("size", role=role)), None)
        metrics = record.metrics if record and record.status == "ok" else {}
        fits, predicted = metrics.get("largest_that_fits"), metrics.get("predicted_largest")
        if fits is None or predicted is None:
            parts.append(("not run", f"{role}: no records"))
            continue
        agrees = fits <= predicted < 2 * fits
        parts.append(
            ("reproduced" if agrees else "not reproduced",
             f"{role}: M(B) admits {predicted}, of powers of two {fits} ran and {2 * fits} did not")
        )  # fmt: skip
    return combine(parts)


def check_same(results: Results, roles: Sequence[str]) -> Verdict:
    """Judge results with and without MBS at the initial mini-batch against the tolerance."""
    parts = []
    for role in roles:
        gap = same_size_difference(results, role)
        if gap is None:
            parts.append(("not run", f"{role}: no records"))
            continue
        allowed = tolerance(role)
        inside = -allowed <= gap.low and gap.high <= allowed  # False for one seed's NaN
        close = abs(gap.mean) <= allowed
        # An interval that reaches beyond the tolerance and holds 0 decides nothing.
        word = "reproduced" if inside else "partly" if close or gap.includes_zero else (
            "not reproduced")  # fmt: skip
        parts.append((word, f"{role} {gap} points, tolerance ±{allowed:.2f}"))
    return combine(parts)


def check_memory(results: Results, roles: Sequence[str]) -> Verdict:
    """Judge whether mini-batches above the initial one train with MBS only."""
    parts = []
    for role in roles:
        initial = reported("mbs")["table2"][role]["mini_batch"]
        above = [r for r in results.select("train", role=role) if r.config["mini_batch"] > initial]
        streamed = [r for r in above if r.config["micro_batch"] is not None]
        without = [r for r in above if r.config["micro_batch"] is None]
        if not streamed or not without:
            parts.append(("not run", f"{role}: no records"))
            continue
        trained = [r.config["mini_batch"] for r in streamed if r.status == "ok"]
        refused = sum(r.status == "out_of_memory" for r in without)
        holds = len(trained) == len(streamed) and refused == len(without)
        word = "reproduced" if holds else "partly" if trained else "not reproduced"
        if word == "reproduced" and results.missing:
            word = "partly"
        reach = max(trained, default=initial) // initial
        published = paper_rows(role)[-1]["mini_batch"] // initial
        parts.append(
            (word,
             f"{role} up to ×{reach} the initial mini-batch, paper ×{published}: {len(trained)} of "
             f"{len(streamed)} runs trained with MBS, {refused} of {len(without)} ran out of "
             f"memory without")
        )  # fmt: skip
    return combine(parts)


def check_optimum(results: Results, roles: Sequence[str]) -> Verdict:
    """Judge whether the best streamed size above the initial one beats the undivided one."""
    parts = []
    for role in roles:
        initial = reported("mbs")["table2"][role]["mini_batch"]
        without = best(trainings(results, role, initial, False))
        sizes = {r.config["mini_batch"] for r in results.select("train", role=role)}
        streamed = {n: best(trainings(results, role, n, True)) for n in sizes if n > initial}
        streamed = {n: values for n, values in streamed.items() if values}
        if not streamed or not without:
            parts.append(("not run", f"{role}: no records"))
            continue
        rows = paper_rows(role)
        paper = max(r["with"][0] for r in rows if r["mini_batch"] > initial) - rows[0]["without"][0]
        optimum = max(streamed, key=lambda n: float(np.mean(streamed[n])))
        name = f"{role}: best of {len(streamed)} sizes at {optimum},"
        parts.append(larger(name, streamed[optimum], without, paper))
    return combine(parts)


def check_decline(results: Results, roles: Sequence[str]) -> Verdict:
    """Judge whether the best streamed size beats the largest."""
    parts = []
    for role in roles:
        sizes = sorted({r.config["mini_batch"] for r in results.select("train", role=role)})
        curve = {n: best(trainings(results, role, n, True)) for n in sizes}
        curve = {n: values for n, values in curve.items() if values}
        if len(curve) < 2:
            parts.append(("not run", f"{role}: no records"))
            continue
        rows = paper_rows(role)
        paper = max(r["with"][0] for r in rows) - rows[-1]["with"][0]
        optimum = max(curve, key=lambda n: float(np.mean(curve[n])))
        name = f"{role}: {optimum} above {max(curve)} by"
        parts.append(larger(name, curve[optimum], curve[max(curve)], paper))
    return combine(parts)


def check_overhead(results: Results, roles: Sequence[str]) -> Verdict:
    """Judge the cost of a step with MBS against an undivided one, measured in turns."""
    parts = []
    for role in roles:
        record = next(iter(results.select("overhead", role=role)), None)
        if record is None or record.status != "ok":
            parts.append(("not run", f"{role}: no records"))
            continue
        initial, micro = record.config["mini_batch"], record.config["micro_batch"]
        halved, doubled = (record.metrics[f"{way}_percent"] for way in ("halved", "doubled"))
        within = [percent <= OVERHEAD_PERCENT for percent in (halved, doubled)]
        word = "reproduced" if all(within) else "partly" if any(within) else "not reproduced"
        count = len(record.timings["undivided"]["samples_s"])
        parts.append(
            (word, f"{role} {halved:+.1f} % ({initial} as 2 × {micro}), {doubled:+.1f} % "
                   f"({2 * initial} as 2 × {initial}), medians of {count} in turns")
        )  # fmt: skip
    return combine(parts)


def check_epoch_time(results: Results, roles: Sequence[str]) -> Verdict:
    """Judge the time of epochs with MBS against the undivided initial one."""
    parts = []
    for role in roles:
        rows = paper_rows(role)
        initial = rows[0]["mini_batch"]
        sizes = sorted({r.config["mini_batch"] for r in results.select("train", role=role)})
        times = {n: epoch_times(trainings(results, role, n, True)) for n in sizes if n > initial}
        times = {n: values for n, values in times.items() if values}
        undivided = epoch_times(trainings(results, role, initial, False))
        if not times or not undivided:
            parts.append(("not run", f"{role}: no records"))
            continue
        published = {r["mini_batch"]: r["time_with"][0] / rows[0]["time_without"][0] for r in rows}
        measured = {n: float(np.median(times[n]) / np.median(undivided)) for n in times}
        held = [measured[n] <= max(published[n], 1 + OVERHEAD_PERCENT / 100) for n in measured]
        word = "reproduced" if all(held) else "partly" if any(held) else "not reproduced"
        text = ", ".join(f"{n}: ×{measured[n]:.2f} (paper ×{published[n]:.2f})" for n in measured)
        parts.append((word, f"{role} {text}"))
    return combine(parts)


def check_curves(results: Results) -> Verdict:
    """Judge how far learning curves with and without MBS lie apart."""
    parts = []
    for role in CLASSIFIERS:
        accuracy = curve_gap(results, role, "accuracy")
        loss = curve_gap(results, role, "train_loss")
        if accuracy is None or loss is None:
            parts.append(("not run", f"{role}: no records"))
            continue
        limits = (tolerance(role), LOSS_PERCENT / 100 * loss.level)
        close = all(
            gap.distance <= limit for gap, limit in zip((accuracy, loss), limits, strict=True)
        )
        # No farther apart than two seeds of one way are.
        as_seeds = all(gap.distance <= gap.spread for gap in (accuracy, loss))
        word = "reproduced" if close else "partly" if as_seeds else "not reproduced"
        parts.append(
            (word, f"{role}: accuracy {accuracy.distance:.2f} points apart on average (tolerance "
                   f"{limits[0]:.2f}, {_spread(accuracy.spread)}), loss "
                   f"{100 * loss.distance / loss.level:.1f} % apart (tolerance {LOSS_PERCENT:g} %, "
                   f"{_spread(100 * loss.spread / loss.level)})")
        )  # fmt: skip
    return combine(parts)


def _spread(value: float) -> str:
    return "one seed" if np.isnan(value) else f"seeds spread {value:.2f}"


def check_overlap(results: Results) -> Verdict:
    """Judge how much of the copies' time lies behind a computation; needs a GPU."""
    record = next(iter(results.select("timeline")), None)
    if record is None or record.status != "ok":
        return Verdict("not run", "no records")
    if record.device["type"] != "cuda":
        return Verdict("not run", "a CPU has no copy engine; needs a GPU")
    share = hidden_share(record.metrics["spans"])
    word = "reproduced" if share >= 0.5 else "partly" if share > 0 else "not reproduced"
    return Verdict(word, f"{100 * share:.0f} % of the copy time lies behind a computation")


def check_order(results: Results) -> Verdict:
    """Judge whether parameters change once, after the last micro-batch."""
    record = next(iter(results.select("timeline")), None)
    if record is None or record.status != "ok":
        return Verdict("not run", "no records")
    between = record.metrics["updates_between_micro_batches"]
    after = record.metrics["updates_after"]
    word = "reproduced" if (between, after) == (0, 1) else "not reproduced"
    return Verdict(
        word,
        f"over {record.metrics['micro_batches']} micro-batches the parameters changed {between} "
        f"times between micro-batches and {after} times after the last",
    )


def _of(
    check: Callable[[Results, Sequence[str]], Verdict], roles: Sequence[str]
) -> Callable[[Results], Verdict]:
    return lambda results: check(results, roles)


TABLE1 = (
    Claim(
        "At the higher resolution, a large mini-batch beats a small one",
        "Section 1",
        lambda results: _table1_gain(results, "high_large", "high_small"),
    ),
    Claim(
        "With a large mini-batch, the higher resolution beats the lower",
        "Section 1",
        lambda results: _table1_gain(results, "high_large", "low_large"),
    ),
)
TABLE2 = (
    Claim(
        "A mini-batch can only grow into the memory that the model leaves (as we put it: "
        "M(B) = p + B a foretells the largest that fits)",
        "Section 1",
        check_prediction,
    ),
)
TABLE3 = (
    Claim(
        "U-Net reaches the same IoU with and without MBS",
        "Section 4.3.1",
        _of(check_same, ["U-Net"]),
    ),
)


def large_batch_claims(roles: Sequence[str]) -> tuple[Claim, ...]:
    """Return the claims on Table 4 or 5."""
    return (
        Claim(
            "Mini-batches far beyond memory train with MBS and fail without",
            "Section 4.3.2",
            _of(check_memory, roles),
        ),
        Claim(
            "The result at the initial mini-batch is the same with and without MBS",
            "Section 4.3.1",
            _of(check_same, roles),
        ),
        Claim(
            "A mini-batch above the largest that fits gives the best result",
            "Section 4.3.2",
            _of(check_optimum, roles),
        ),
        Claim(
            "The best mini-batch is not the largest one",
            "Section 4.3.2",
            _of(check_decline, roles),
        ),
        Claim(
            f"MBS costs at most {OVERHEAD_PERCENT} % of time",
            "Section 4.3.3",
            _of(check_overhead, roles),
        ),
        Claim(
            "An epoch with larger mini-batches takes no longer, relative to the undivided initial "
            "one, than in the paper",
            "Section 4.3.3",
            _of(check_epoch_time, roles),
        ),
    )


FIGURE2 = (
    Claim("One update follows all micro-batches of a mini-batch", "Section 3.3", check_order),
    Claim("Micro-batches are streamed while others compute", "Section 3.1", check_overlap),
)
FIGURE3 = (
    Claim(
        "Loss and accuracy follow the same curve with and without MBS",
        "Section 4.3.1",
        check_curves,
    ),
)
