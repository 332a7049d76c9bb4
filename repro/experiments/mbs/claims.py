"""What the paper says about Micro-Batch Streaming, as checks on the records."""

from collections.abc import Callable, Sequence

import numpy as np

from repro.experiments.design import Claim, Results, Verdict, reported
from repro.experiments.mbs.artefacts import (
    best,
    curve_gap,
    epoch_times,
    hidden_share,
    same_size_difference,
    trainings,
)
from repro.experiments.mbs.grids import CLASSIFIERS, ROLES
from repro.report import difference

Part = tuple[str, str]  # a word of Verdict.WORDS, and its evidence

# The paper's own largest difference at equal mini-batches: ResNet-101 in Table 4.
SAME_WITHIN = 2.28
OVERHEAD_PERCENT = 5.1  # the largest that section 4.3.3 gives


def combine(parts: Sequence[Part]) -> Verdict:
    """Join the verdicts on several models: all, some or none reproduced."""
    words = [word for word, _ in parts if word != "not run"]
    evidence = "; ".join(text for _, text in parts)
    if not words:
        return Verdict("not run", evidence or "no records")
    if all(word == "reproduced" for word in words):
        whole = len(words) == len(parts)
        return Verdict("reproduced" if whole else "partly", evidence)
    if all(word == "not reproduced" for word in words):
        return Verdict("not reproduced", evidence)
    return Verdict("partly", evidence)


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
        cells = [_table1_cell(results, role, cell) for cell in (larger_cell, smaller_cell)]
        parts.append(larger(role, cells[0], cells[1], gain))
    return combine(parts)


def _table1_cell(results: Results, role: str, cell: str) -> list[float]:
    resolution, label = cell.split("_")
    runs = results.select("train", role=role, resolution=resolution, micro_batch=None)
    sizes = sorted({run.config["mini_batch"] for run in runs})
    if len(sizes) < 2:
        return []
    size = sizes[label == "large"]
    return best([run for run in runs if run.config["mini_batch"] == size])


def check_prediction(results: Results) -> Verdict:
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
    parts = []
    for role in roles:
        gap = same_size_difference(results, role)
        if gap is None:
            parts.append(("not run", f"{role}: no records"))
            continue
        word = "reproduced" if abs(gap.mean) <= SAME_WITHIN else "not reproduced"
        if word == "not reproduced" and gap.includes_zero:
            word = "partly"
        parts.append((word, f"{role} {gap} points"))
    return combine(parts)


def check_memory(results: Results, roles: Sequence[str]) -> Verdict:
    parts = []
    for role in roles:
        initial = reported("mbs")["table2"][role]["mini_batch"]
        above = [r for r in results.select("train", role=role) if r.config["mini_batch"] > initial]
        streamed = [r.status for r in above if r.config["micro_batch"] is not None]
        without = [r.status for r in above if r.config["micro_batch"] is None]
        if not streamed or not without:
            parts.append(("not run", f"{role}: no records"))
            continue
        trained, refused = streamed.count("ok"), without.count("out_of_memory")
        holds = trained == len(streamed) and refused == len(without)
        largest = max(r.config["mini_batch"] for r in above)
        parts.append(
            ("reproduced" if holds else "partly" if trained else "not reproduced",
             f"{role} up to {largest}: {trained} of {len(streamed)} runs trained with MBS, "
             f"{refused} of {len(without)} ran out of memory without")
        )  # fmt: skip
    return combine(parts)


def check_optimum(results: Results, roles: Sequence[str]) -> Verdict:
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
        rows = [r for r in (*reported("mbs")["table4"], *reported("mbs")["table5"])
                if r["model"] == role]  # fmt: skip
        paper = max(r["with"][0] for r in rows if r["mini_batch"] > initial) - rows[0]["without"][0]
        optimum = max(streamed, key=lambda n: float(np.mean(streamed[n])))
        name = f"{role}: best at {optimum}"
        parts.append(larger(name, streamed[optimum], without, paper))
    return combine(parts)


def check_decline(results: Results, roles: Sequence[str]) -> Verdict:
    parts = []
    for role in roles:
        sizes = sorted({r.config["mini_batch"] for r in results.select("train", role=role)})
        curve = {n: best(trainings(results, role, n, True)) for n in sizes}
        curve = {n: values for n, values in curve.items() if values}
        if len(curve) < 2:
            parts.append(("not run", f"{role}: no records"))
            continue
        rows = [r for r in (*reported("mbs")["table4"], *reported("mbs")["table5"])
                if r["model"] == role]  # fmt: skip
        paper = max(r["with"][0] for r in rows) - rows[-1]["with"][0]
        optimum = max(curve, key=lambda n: float(np.mean(curve[n])))
        name = f"{role}: {optimum} above {max(curve)} by"
        parts.append(larger(name, curve[optimum], curve[max(curve)], paper))
    return combine(parts)


def check_overhead(results: Results, roles: Sequence[str]) -> Verdict:
    parts = []
    for role in roles:
        record = next(iter(results.select("overhead", role=role)), None)
        if record is None or record.status != "ok":
            parts.append(("not run", f"{role}: no records"))
            continue
        percent = record.metrics["overhead_percent"]
        count = len(record.timings["streamed"]["samples_s"])
        word = "reproduced" if percent <= OVERHEAD_PERCENT else "not reproduced"
        micro = record.config["micro_batch"]
        sizes = f"{record.config['mini_batch']} in micro-batches of {micro}"
        parts.append((word, f"{role} {percent:+.1f} % ({sizes}, median of {count} in turns)"))
    return combine(parts)


def check_flat_time(results: Results, roles: Sequence[str]) -> Verdict:
    parts = []
    for role in roles:
        rows = [r for r in (*reported("mbs")["table4"], *reported("mbs")["table5"])
                if r["model"] == role and r["mini_batch"] > r["micro_batch"] * 2 - 1]  # fmt: skip
        initial = reported("mbs")["table2"][role]["mini_batch"]
        sizes = sorted({r.config["mini_batch"] for r in results.select("train", role=role)})
        times = {n: epoch_times(trainings(results, role, n, True)) for n in sizes if n > initial}
        times = {n: values for n, values in times.items() if values}
        if len(times) < 2:
            parts.append(("not run", f"{role}: no records"))
            continue
        first, last = min(times), max(times)
        ratio = float(np.median(times[last]) / np.median(times[first]))
        paper = {r["mini_batch"]: r["time_with"][0] for r in rows}
        published = paper[last] / paper[first]
        word = "reproduced" if ratio <= max(1.05, published) else "not reproduced"
        parts.append((word, f"{role} ×{ratio:.2f} from {first} to {last}, paper ×{published:.2f}"))
    return combine(parts)


def check_curves(results: Results) -> Verdict:
    parts = []
    for role in CLASSIFIERS:
        measured = curve_gap(results, role)
        if measured is None:
            parts.append(("not run", f"{role}: no records"))
            continue
        gap, spread = measured
        word = "reproduced" if gap <= max(SAME_WITHIN, 0 if np.isnan(spread) else spread) else (
            "not reproduced")  # fmt: skip
        seeds = "one seed" if np.isnan(spread) else f"seeds spread {spread:.2f}"
        parts.append((word, f"{role} {gap:.2f} points apart on average, {seeds}"))
    return combine(parts)


def check_overlap(results: Results) -> Verdict:
    record = next(iter(results.select("timeline")), None)
    if record is None or record.status != "ok":
        return Verdict("not run", "no records")
    if record.device["type"] != "cuda":
        return Verdict("not run", "a CPU has no copy engine; needs a GPU")
    share = hidden_share(record.metrics["spans"])
    word = "reproduced" if share >= 0.5 else "partly" if share > 0 else "not reproduced"
    return Verdict(word, f"{100 * share:.0f} % of the copy time lies behind a computation")


def check_order(results: Results) -> Verdict:
    record = next(iter(results.select("timeline")), None)
    if record is None or record.status != "ok":
        return Verdict("not run", "no records")
    computed = [end for kind, _, _, end in record.metrics["spans"] if kind == "compute"]
    update = record.metrics["update"][0]
    holds = len(computed) == record.metrics["micro_batches"] and update >= max(computed) - 1e-3
    word = "reproduced" if holds else "not reproduced"
    return Verdict(
        word,
        f"{len(computed)} micro-batches computed until {1e3 * max(computed):.1f} ms, one update "
        f"from {1e3 * update:.1f} ms",
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
        "A mini-batch can only grow into the memory that the model leaves: M(B) = p + B a "
        "foretells the largest that fits",
        "Sections 1 and 3.1",
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
            "At one micro-batch size an epoch takes hardly longer with larger mini-batches",
            "Section 4.3.3",
            _of(check_flat_time, roles),
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
