"""Whether the paper's claims hold in the records."""

import itertools
from collections.abc import Sequence

import numpy as np

from repro.experiments.adaptive import projection, reading, tables
from repro.experiments.adaptive.grids import CIFAR, DIV2K, PAPER, TASKS
from repro.experiments.adaptive.reading import NAMES, final, metric, trained
from repro.experiments.design import Part, Results, Verdict, combine
from repro.records import Record
from repro.report import difference

WITHIN = {"accuracy": 1.0, "psnr": 0.1}  # points (abstract); dB, the paper's own largest gap
SAME_COST = 0.10  # of the training cost: "almost the same" (section III-D)
FLAT = 1.10  # θ at the end over θ at the decay: "does not significantly increase"
CLOSE = 0.20  # of a speed-up or a time: what counts as predicted


def _gap(records: Sequence[Record], others: Sequence[Record], name: str) -> str:
    return str(difference(final(records, name), final(others, name)))


def check_within(results: Results, task: str, strategy: str = "theta") -> Verdict:
    """Judge whether a strategy ends within a small margin of the best fixed batch."""
    name = metric(task)
    ours, best = trained(results, task, strategy), trained(results, task, "best")
    if not ours or not best:
        return Verdict("not run", "no records")
    gap = difference(final(ours, name), final(best, name))
    margin = WITHIN[name]
    # Better than the best fixed batch is within the margin too.
    if gap.mean < -margin:
        word = "not reproduced" if gap.high < -margin else "partly"
    else:
        word = "partly" if np.isnan(gap.low) or gap.low < -margin else "reproduced"
    paper = reading.paper_value(task, strategy)
    own = reading.paper_value(task, "best")
    told = f", paper {paper - own:+.2f}" if paper is not None and own is not None else ""
    return Verdict(word, f"{gap} {_unit(task)}, margin {margin:g}{told}")


def _unit(task: str) -> str:
    return "points" if task == CIFAR else "dB"


def check_loses(results: Results, task: str, strategy: str) -> Verdict:
    """Judge whether a strategy ends below the best fixed batch and below θ-adaptive."""
    name = metric(task)
    parts: list[Part] = []
    for other in ("best", "theta"):
        ours, theirs = trained(results, task, strategy), trained(results, task, other)
        if not ours or not theirs:
            parts.append(("not run", f"over {NAMES[other]}: no records"))
            continue
        gap = difference(final(ours, name), final(theirs, name))
        word = "not reproduced"
        if gap.mean < 0:
            word = "partly" if gap.includes_zero else "reproduced"
        parts.append((word, f"over {NAMES[other]} {gap} {_unit(task)}"))
    return combine(parts)


def check_large_is_worse(results: Results) -> Verdict:
    """Judge whether batch sizes beyond 64 end below 16 (Figure 1)."""
    found = {r[0].config["stands_for"]: r for r in reading.by_batch(results, DIV2K).values()}
    parts: list[Part] = []
    for size in (128, 256):
        if size not in found or 16 not in found:
            parts.append(("not run", f"B = {size}: no records"))
            continue
        gap = difference(final(found[size], "psnr"), final(found[16], "psnr"))
        word = "not reproduced"
        if gap.mean < 0:
            word = "partly" if gap.includes_zero else "reproduced"
        parts.append((word, f"B = {size} of the paper's over 16: {gap} dB"))
    return combine(parts)


def check_same_cost(results: Results) -> Verdict:
    """Judge whether all batch sizes end with almost the same training cost (Figure 2)."""
    found = reading.by_batch(results, CIFAR)
    if len(found) < 2:
        return Verdict("not run", "no records")
    costs = {size: float(np.mean(final(r, "train_cost"))) for size, r in found.items()}
    initial = float(np.mean([r.metrics["initial_cost"][0] for rs in found.values() for r in rs]))
    spread = (max(costs.values()) - min(costs.values())) / initial
    word = "reproduced" if spread <= SAME_COST else "not reproduced"
    listed = ", ".join(f"B = {size}: {cost:.3f}" for size, cost in costs.items())
    return Verdict(word, f"{listed}; they differ by {100 * spread:.0f} % of the cost at the start")


def check_sharpness(results: Results) -> Verdict:
    """Judge whether a higher θ at the end goes with a lower accuracy (Figure 2)."""
    found = reading.by_batch(results, CIFAR)
    if len(found) < 2:
        return Verdict("not run", "no records")
    rows = [
        (float(np.mean(final(r, "theta"))), float(np.mean(final(r, "accuracy"))), size)
        for size, r in found.items()
    ]
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
    holds = [(a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in pairs]
    word = "reproduced" if all(holds) else "partly" if any(holds) else "not reproduced"
    listed = ", ".join(f"B = {size}: θ {theta:.4f}, {acc:.1f} %" for theta, acc, size in rows)
    return Verdict(word, f"{sum(holds)} of {len(pairs)} pairs; {listed}")


def check_later_peak(results: Results, task: str) -> Verdict:
    """Judge whether θ of a larger batch peaks later (Figures 2 and 6)."""
    found = reading.by_batch(results, task)
    if len(found) < 2:
        return Verdict("not run", "no records")
    peaks = {n: float(np.mean([reading.first_peak(r) for r in rs])) for n, rs in found.items()}
    values = list(peaks.values())
    steps = [b >= a for a, b in itertools.pairwise(values)]
    rises = values[-1] > values[0]
    word = "reproduced" if all(steps) and rises else "partly" if rises else "not reproduced"
    return Verdict(word, ", ".join(f"B = {n}: epoch {epoch:.1f}" for n, epoch in peaks.items()))


def check_interval(results: Results, task: str) -> Verdict:
    """Judge whether θ peaks before the 10 % rule finds K."""
    parts: list[Part] = []
    for record in trained(results, task, "theta"):
        interval = record.metrics["interval"][-1]
        if interval is None:
            parts.append(("not reproduced", f"seed {record.seed}: K not found"))
            continue
        start = reading.schedule(record)[0][1]  # epochs at B_s, up to K
        top = 1 + int(np.nanargmax(reading.curves([record], "theta")[0][:start]))
        word = "reproduced" if top <= interval and _peaked(record, start) else "partly"
        parts.append((word, f"seed {record.seed}: peak {top}, K = {interval}"))
    verdict = combine(parts)
    return Verdict(verdict.word, f"{verdict.evidence}; paper K = {PAPER[task]['interval']}")


def _peaked(record: Record, epochs: int) -> bool:
    """Return whether θ at K is no longer rising by more than the tolerance."""
    theta = reading.curves([record], "theta")[0][:epochs]
    return len(theta) < 2 or theta[-1] <= (1 + PAPER["tolerance"]) * theta[-2]


def check_flat_after_decay(results: Results) -> Verdict:
    """Judge whether θ of θ-adaptive stays where others' rise after the first decay (Figure 3)."""
    rises = {}
    for strategy in ("best", "linear", "scheduled", "theta"):
        values = [v for r in trained(results, CIFAR, strategy) if (v := tables.rise(r)) is not None]
        if values:
            rises[strategy] = float(np.mean(values))
    if "theta" not in rises or len(rises) < 2:
        return Verdict("not run", "no records")
    others = [value for strategy, value in rises.items() if strategy != "theta"]
    listed = ", ".join(f"{NAMES[strategy]} {value:.2f}" for strategy, value in rises.items())
    flat, least = rises["theta"] <= FLAT, rises["theta"] < min(others)
    word = "reproduced" if flat and least else "partly" if flat or least else "not reproduced"
    return Verdict(word, f"θ at the end over θ at the decay: {listed}")


def check_fewer_updates(results: Results, task: str) -> Verdict:
    """Judge whether communications fall by the factor that the schedule implies."""
    rows = tables.communications(results, task)
    if not rows:
        return Verdict("not run", "no records")
    parts: list[Part] = []
    for record, (best, ours, ratio) in zip(trained(results, task, "theta"), rows, strict=False):
        samples = record.config["train_samples"]
        implied = sum(-(-samples // n) * epochs for n, epochs in reading.schedule(record))
        word = "reproduced" if implied == ours and ratio > 1 else "not reproduced"
        parts.append((word, f"seed {record.seed}: {best:,} and {ours:,}, {ratio:.1f} times fewer"))
    return combine(parts)


def check_stable(results: Results) -> Verdict:
    """Judge whether gradient norms give the paper's maximum stable batch sizes, at scale."""
    frame = tables.stable(results)
    if frame.empty:
        return Verdict("not run", "no records")
    parts: list[Part] = []
    for task, rows in frame.groupby("task", sort=False):
        found = {row["B_s"] for _, row in rows.iterrows()}
        wanted = str(rows.iloc[0]["B_s, paper, at scale"])
        word = (
            "reproduced" if found == {wanted} else "partly" if wanted in found else "not reproduced"
        )
        parts.append((word, f"{task}: {' / '.join(rows['B_s'])} for {wanted}"))
    return combine(parts)


def check_scaling(results: Results, task: str) -> Verdict:
    """Judge whether θ-adaptive scales furthest, on the modelled cluster of the paper."""
    model = projection.fitted_to_paper(task, "theta", 0)
    values = {s: projection.best_speedup(model, task, s) for s in projection.SCALED}
    ordered = values["best"] < values["scheduled"] < values["theta"]
    paper = PAPER[task]["speedups"]["theta"][1]
    near = abs(values["theta"] / paper - 1) <= CLOSE
    word = "reproduced" if ordered and near else "partly" if ordered else "not reproduced"
    listed = ", ".join(f"{NAMES[s]} {value:.1f}" for s, value in values.items())
    return Verdict(
        word, f"SIMULATED, from the other two strategies' speed-ups: {listed}; paper {paper:g}"
    )


def check_model(results: Results, task: str) -> Verdict:
    """Judge whether the model predicts steps of two real processes that it has not seen."""
    found = reading.measured(results).get(task)
    if not found:
        return Verdict("not run", "no records")
    errors = {
        row["batch"]: row["predicted_s"] / row["measured_s"] - 1
        for row in projection.checked(found)
    }
    worst = max(abs(error) for error in errors.values())
    holds = [abs(error) <= CLOSE for error in errors.values()]
    word = "reproduced" if all(holds) else "partly" if any(holds) else "not reproduced"
    listed = ", ".join(f"B = {size:g}: {100 * error:+.0f} %" for size, error in errors.items())
    return Verdict(word, f"{listed}; at most {100 * worst:.0f} %, allowed {100 * CLOSE:.0f} %")


def check_averaging(results: Results) -> Verdict:
    """Judge whether all-to-all and allgather block computation less than an allreduce."""
    parts: list[Part] = []
    for task, found in reading.measured(results).items():
        steps = {(s["averaging"], s["batch"]): s for s in found["steps"]}
        for size in sorted({s["batch"] for s in found["steps"]}):
            ours, plain = (steps[way, size]["blocked_s"] for way in ("all_to_all", "allreduce"))
            word = "reproduced" if ours < plain else "not reproduced"
            parts.append((word, f"{task}, B = {size}: {ours / plain:.2f}"))
    return combine(parts)


def check_same_weights(results: Results) -> Verdict:
    """Judge whether the three ways of averaging give the same weights."""
    found = reading.measured(results)
    if not found:
        return Verdict("not run", "no records")
    largest = max(own["difference"] for own in found.values())
    return Verdict(
        "reproduced" if largest <= 1e-6 else "not reproduced",
        f"largest difference {largest:.1g}, after batches that grow",
    )


def check_blocked(results: Results) -> Verdict:
    """Judge whether blocked time becomes significant from 128 nodes on (Figure 9)."""
    model = projection.fitted_to_paper(DIV2K, None, 0)
    shares = {}
    for nodes in projection.NODES[1:]:
        cost = projection.breakdown(model, DIV2K, nodes)
        shares[nodes] = cost.blocked_s / cost.total_s
    rises = shares[256] > shares[128] > shares[32]
    word = "partly" if rises else "not reproduced"
    word = "reproduced" if rises and shares[128] > 0.1 > shares[32] else word
    listed = ", ".join(f"{n} nodes: {100 * share:.0f} %" for n, share in shares.items() if n >= 16)
    return Verdict(word, f"SIMULATED, fitted to Figure 7's speed-ups: blocked {listed}")


def check_inefficiency(results: Results) -> Verdict:
    """Judge whether a step of few samples takes more time per sample (section VI-B)."""
    parts: list[Part] = []
    for task in TASKS:
        found = reading.measured(results).get(task)
        if not found:
            continue
        steps = sorted(projection.steps_of(found, "none"), key=lambda step: step.batch_size)
        each = [step.computation_s / step.batch_size for step in steps]
        word = "reproduced" if each[0] > 1.1 * each[-1] else "not reproduced"
        parts.append((word, f"{task}: {each[0] / each[-1]:.2f} times as long a sample at "
                            f"B = {steps[0].batch_size} as at {steps[-1].batch_size}"))  # fmt: skip
    return combine(parts)
