"""Whether the paper's claims hold in the records."""

import itertools
from collections.abc import Sequence

import numpy as np

from repro.adaptive import updates
from repro.experiments.adaptive import projection, reading, tables
from repro.experiments.adaptive.grids import AVERAGING, CIFAR, DIV2K, PAPER, TASKS
from repro.experiments.adaptive.reading import NAMES, diverged, final, metric, trained
from repro.experiments.design import Part, Results, Verdict, combine
from repro.report import Summary, difference

WITHIN = {"accuracy": 1.0, "psnr": 0.1}  # points (abstract); dB, the paper's own largest gap
SAME_COST = 0.10  # of the lowest training cost: "almost the same" (section III-D)
FLAT = 1.10  # θ at the end over θ at the decay: "does not significantly increase"
CLOSE = 0.20  # of a speed-up or a time: what counts as predicted
SAME_EPOCHS = 0.20  # of the epochs to converge; the paper's are 8 and 22 % apart
STEEP = 0.9  # of a linear fall: below it a time "does not linearly decrease"


def _unit(task: str) -> str:
    return "points" if task == CIFAR else "dB"


def _lost(count: int) -> str:
    return f"{count} training{'s' * (count > 1)} diverged"


def _lower(ours: Sequence[float], others: Sequence[float]) -> tuple[str, str]:
    """Judge ``ours < others``: partly where the 95 % interval does not exclude 0."""
    gap = difference(ours, others)
    word = "not reproduced"
    if gap.mean < 0:
        word = "partly" if gap.includes_zero else "reproduced"
    return word, str(gap)


def check_within(results: Results, task: str, strategy: str = "theta") -> Verdict:
    """Judge whether a strategy ends within a small margin of the best fixed batch."""
    name = metric(task)
    ours, best = trained(results, task, strategy), trained(results, task, "best")
    if lost := diverged(results, task, "best"):
        return Verdict("not run", f"best fixed batch: {_lost(lost)}")
    if lost := diverged(results, task, strategy):
        return Verdict("not reproduced", _lost(lost))
    if not ours or not best:
        return Verdict("not run", "no records")
    gap = difference(final(ours, name), final(best, name))
    margin = WITHIN[name] + 1e-6
    # Better than the best fixed batch is within the margin too.
    if gap.mean < -margin:
        word = "not reproduced" if gap.high < -margin else "partly"
    else:
        word = "partly" if np.isnan(gap.low) or gap.low < -margin else "reproduced"
    paper, own = (reading.paper_value(task, s) for s in (strategy, "best"))
    told = f", paper {paper - own:+.2f}" if paper is not None and own is not None else ""
    fewer = np.mean(reading.updates(best)) / np.mean(reading.updates(ours))
    return Verdict(
        word,
        f"{gap} {_unit(task)}, margin {WITHIN[name]:g}{told}; {fewer:.1f} times fewer updates",
    )


def check_loses(results: Results, task: str, strategy: str) -> Verdict:
    """Judge whether a strategy ends below the best fixed batch and below θ-adaptive."""
    name = metric(task)
    lost = diverged(results, task, strategy)
    parts: list[Part] = []
    for other in ("best", "theta"):
        if astray := diverged(results, task, other):
            parts.append(("not run", f"{NAMES[other]}: {_lost(astray)}"))
            continue
        if lost and trained(results, task, other):
            parts.append(("reproduced", f"over {NAMES[other]}: {_lost(lost)}"))
            continue
        ours, theirs = trained(results, task, strategy), trained(results, task, other)
        if not ours or not theirs:
            parts.append(("not run", f"over {NAMES[other]}: no records"))
            continue
        word, gap = _lower(final(ours, name), final(theirs, name))
        parts.append((word, f"over {NAMES[other]} {gap} {_unit(task)}"))
    return combine(parts)


def check_large_is_worse(results: Results) -> Verdict:
    """Judge whether batch sizes beyond 64 end below 16, and those up to 64 do not (Figure 1)."""
    found = {r[0].config["stands_for"]: r for r in reading.by_batch(results, DIV2K).values()}
    parts: list[Part] = []
    for size in (32, 64, 128, 256):
        if size not in found or 16 not in found:
            parts.append(("not run", f"B = {size}: no records"))
            continue
        word, gap = _lower(final(found[size], "psnr"), final(found[16], "psnr"))
        if size <= 64:
            word = "not reproduced" if word == "reproduced" else "reproduced"
        parts.append((word, f"B = {size} of the paper's over 16: {gap} dB"))
    return combine(parts)


def check_slower(results: Results) -> Verdict:
    """Judge whether larger batches take more epochs to the PSNR that all reach (Figure 1)."""
    found = reading.by_batch(results, DIV2K)
    if len(found) < 2:
        return Verdict("not run", "no records")
    curves = {n: np.mean(reading.curves(records, "psnr"), 0) for n, records in found.items()}
    common = min(float(curve.max()) for curve in curves.values())
    epochs = {n: 1 + int((curve >= common).argmax()) for n, curve in curves.items()}
    values = list(epochs.values())
    steps = [b >= a for a, b in itertools.pairwise(values)]
    slower = values[-1] > values[0]
    word = "reproduced" if all(steps) and slower else "partly" if slower else "not reproduced"
    listed = ", ".join(f"B = {n}: {epoch}" for n, epoch in epochs.items())
    return Verdict(word, f"epochs to {common:.1f} dB, means of seeds: {listed}")


def check_same_cost(results: Results) -> Verdict:
    """Judge whether all batch sizes end with almost the same training cost (Figure 2)."""
    found = reading.by_batch(results, CIFAR)
    if len(found) < 2:
        return Verdict("not run", "no records")
    costs = {size: float(np.mean(final(r, "train_cost"))) for size, r in found.items()}
    spread = max(costs.values()) / min(costs.values()) - 1
    word = "reproduced" if spread <= SAME_COST else "not reproduced"
    listed = ", ".join(f"B = {size}: {cost:.3f}" for size, cost in costs.items())
    return Verdict(word, f"{listed}; the highest is {100 * spread:.0f} % above the lowest")


def check_sharpness(results: Results) -> Verdict:
    """Judge whether a higher θ at the end goes with a lower accuracy (Figure 2)."""
    found = reading.by_batch(results, CIFAR)
    if len(found) < 2:
        return Verdict("not run", "no records")
    parts: list[Part] = []
    for (small, a), (large, b) in itertools.combinations(found.items(), 2):
        theta = difference(final(a, "theta"), final(b, "theta"))
        accuracy = difference(final(a, "accuracy"), final(b, "accuracy"))
        open_ = theta.includes_zero or accuracy.includes_zero
        holds = theta.mean * accuracy.mean < 0
        word = "partly" if open_ else "reproduced" if holds else "not reproduced"
        told = f"θ {theta.mean:+.4f}, accuracy {accuracy}"
        parts.append((word, f"B = {small} over {large}: {told}"))
    return combine(parts)


def check_later_peak(results: Results, task: str) -> Verdict:
    """Judge whether θ of a larger batch peaks later (Figures 2 and 6)."""
    found = reading.by_batch(results, task)
    if len(found) < 2:
        return Verdict("not run", "no records")
    peaks, each, hidden = {}, [], ""
    for size, records in found.items():
        warmup = records[0].config["controller"].get("warmup", 0)
        epochs = [reading.first_peak(record) for record in records]
        if warmup and warmup + 1 in epochs:  # it may have peaked before
            hidden += f"; B = {size}: by the end of its warm-up, not counted"
            continue
        peaks[size] = float(np.mean(epochs))
        each.append(epochs)
    if len(peaks) < 2:
        return Verdict("not run", f"too few sizes{hidden}")
    values = list(peaks.values())
    steps = [b >= a for a, b in itertools.pairwise(values)]
    rises = values[-1] > values[0]
    word = "partly" if rises else "not reproduced"
    if rises and all(steps) and not difference(each[-1], each[0]).includes_zero:
        word = "reproduced"
    listed = ", ".join(f"B = {n}: epoch {epoch:.1f}" for n, epoch in peaks.items())
    return Verdict(word, f"{listed}{hidden}")


def check_interval(results: Results, task: str) -> Verdict:
    """Judge whether K comes when θ has peaked: that of the training that stays at B_s."""
    parts: list[Part] = []
    fixed = {
        record.seed: record
        for records in reading.by_batch(results, task).values()
        for record in records
        if record.config["stands_for"] == PAPER[task]["theta"]["batch"]
    }
    for record in trained(results, task, "theta"):
        interval = record.metrics["interval"][-1]
        if interval is None:
            parts.append(("not reproduced", f"seed {record.seed}: K not found"))
            continue
        if record.seed not in fixed:
            continue
        top = reading.first_peak(fixed[record.seed])
        # Still rising at K; or never seen to rise.
        word = "partly" if top > interval or top == 1 else "reproduced"
        parts.append((word, f"seed {record.seed}: peak {top}, K = {interval}"))
    verdict = combine(parts)
    peak = " to ".join(map(str, dict.fromkeys(PAPER[task]["peak"])))
    return Verdict(
        verdict.word, f"{verdict.evidence}; paper: peak {peak}, K = {PAPER[task]['interval']}"
    )


def check_flat_after_decay(results: Results) -> Verdict:
    """Judge whether θ of θ-adaptive stays where others' rise after the first decay (Figure 3)."""
    rises = {}
    for strategy in ("best", "linear", "scheduled", "theta"):
        values = [v for r in trained(results, CIFAR, strategy) if (v := tables.rise(r)) is not None]
        if values:
            rises[strategy] = values
    if "theta" not in rises or len(rises) < 2:
        return Verdict("not run", "no records")
    others = [max(values) > FLAT for s, values in rises.items() if s != "theta"]
    flat = [value <= FLAT for value in rises["theta"]]
    whole = all(flat) and all(others)
    word = "reproduced" if whole else "partly" if any(flat) else "not reproduced"
    listed = ", ".join(f"{NAMES[s]} {Summary.of(values).text()}" for s, values in rises.items())
    return Verdict(word, f"θ at the end over θ at the decay: {listed}; flat is up to {FLAT:g}")


def check_fewer_updates(results: Results, task: str) -> Verdict:
    """Judge whether the steps that were made are fewer by the factor that the schedule implies."""
    parts: list[Part] = []
    for best, ours in tables.communications(results, task):
        made = [sum(record.metrics["updates"]) for record in (best, ours)]
        implied = [
            updates(reading.schedule(record), record.config["train_samples"])
            for record in (best, ours)
        ]
        word = "reproduced" if made == implied and made[0] > made[1] else "not reproduced"
        parts.append(
            (word, f"seed {ours.seed}: {made[0]:,} and {made[1]:,}, {made[0] / made[1]:.1f} times "
                   f"fewer (implied {implied[0] / implied[1]:.1f})")
        )  # fmt: skip
    return combine(parts)


def check_epochs(results: Results, task: str) -> Verdict:
    """Judge whether θ-adaptive converges in about as many epochs as the best fixed batch."""
    pairs = tables.communications(results, task)
    ended = [r.metrics["stopped"] for pair in pairs for r in pair]
    if not ended or not all(ended):
        return Verdict("not run", "the stop rule was not met within the epochs")
    ratios = [ours.metrics["completed"] / best.metrics["completed"] for best, ours in pairs]
    near = [abs(ratio - 1) <= SAME_EPOCHS for ratio in ratios]
    word = "reproduced" if all(near) else "partly" if any(near) else "not reproduced"
    own = PAPER[task]["theta"]["epochs"] / PAPER[task]["best"]["epochs"]
    return Verdict(word, f"{', '.join(f'{r:.2f}' for r in ratios)} times, paper {own:.2f}")


def check_stable(results: Results) -> Verdict:
    """Judge whether gradient norms give the paper's maximum stable batch sizes, at scale."""
    frame = tables.stable(results)
    if frame.empty:
        return Verdict("not run", "no records")
    parts: list[Part] = []
    for task, rows in frame.groupby("task", sort=False):
        found = {row["B_s"] for _, row in rows.iterrows()}
        wanted = str(rows.iloc[0]["B_s, paper, at scale"])
        word = "partly" if wanted in found else "not reproduced"
        word = "reproduced" if found == {wanted} else word
        parts.append((word, f"{task}: {' / '.join(rows['B_s'])} for {wanted}"))
    return combine(parts)


def check_scaling(results: Results, task: str) -> Verdict:
    """Judge whether θ-adaptive's speed-up follows from the other two strategies'."""
    if task not in reading.measured(results):
        return Verdict("not run", "no records")
    paper = PAPER[task]["speedups"]
    parts: list[Part] = []
    for label, value in zip(("without", "with"), projection.predicted(task, "theta"), strict=True):
        furthest = value > max(paper["best"][1], paper["scheduled"][1])
        near = abs(value / paper["theta"][1] - 1) <= CLOSE
        word = "reproduced" if furthest and near else "partly" if furthest else "not reproduced"
        parts.append((word, f"{value:.1f} {label} VI-B's cost of small batches"))
    verdict = combine(parts)
    return Verdict(verdict.word, f"SIMULATED: {verdict.evidence}; paper {paper['theta'][1]:g}")


def check_model(results: Results, task: str) -> Verdict:
    """Judge whether the model predicts steps of two real processes that it has not seen."""
    found = reading.measured(results).get(task)
    if not found:
        return Verdict("not run", "no records")
    errors = {
        row["batch"]: row["predicted_s"] / row["measured_s"] - 1
        for row in projection.checked(found)
        if not np.isnan(row["predicted_s"])
    }
    if not errors:
        return Verdict("not run", "measured times do not grow with the samples")
    worst = max(abs(error) for error in errors.values())
    holds = [abs(error) <= CLOSE for error in errors.values()]
    word = "reproduced" if all(holds) else "partly" if any(holds) else "not reproduced"
    listed = ", ".join(f"B = {size:g}: {100 * error:+.1f} %" for size, error in errors.items())
    return Verdict(word, f"{listed}; at most {100 * worst:.1f} %, allowed {100 * CLOSE:.0f} %")


def check_averaging(results: Results) -> Verdict:
    """Judge whether all-to-all and allgather block computation less than an allreduce."""
    parts: list[Part] = []
    for task, found in reading.measured(results).items():
        steps = {(s["averaging"], s["batch"]): s for s in found["steps"]}
        for size in sorted({s["batch"] for s in found["steps"]}):
            ours, plain = (1e3 * steps[way, size]["blocked_s"] for way in AVERAGING[1::-1])
            word = "reproduced" if ours < plain else "not reproduced"
            parts.append((word, f"{task}, B = {size}: {ours:.1f} and {plain:.1f} ms"))
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


def _projected(results: Results) -> dict[str, dict[int, dict[str, float]]]:
    """Return the projected breakdown by the cost of small batches and the nodes."""
    if not reading.measured(results):
        return {}
    return {label: rows for label, (_, rows) in projection.breakdowns().items()}


def check_blocked(results: Results) -> Verdict:
    """Judge whether blocked time becomes significant from 128 nodes on (Figure 9)."""
    parts: list[Part] = []
    for label, rows in _projected(results).items():
        shares = {n: row["blocked"] / (row["computation"] + row["blocked"])
                  for n, row in rows.items()}  # fmt: skip
        rises = shares[256] > shares[128]
        word = "partly" if rises else "not reproduced"
        word = "reproduced" if rises and shares[128] > 0.1 > shares[32] else word
        listed = ", ".join(f"{100 * shares[n]:.0f} %" for n in (32, 64, 128, 256))
        parts.append((word, f"cost of small batches {label}: {listed}"))
    verdict = combine(parts)
    return Verdict(
        verdict.word, f"SIMULATED, of the time at 32, 64, 128, 256 nodes: {verdict.evidence}"
    )


def check_communication(results: Results) -> Verdict:
    """Judge whether communication takes as long as computation at 128 nodes (Figure 9)."""
    parts: list[Part] = []
    for label, rows in _projected(results).items():
        ratio = rows[128]["communication"] / rows[128]["computation"]
        word = "reproduced" if 0.8 <= ratio <= 1.25 else "not reproduced"
        parts.append((word, f"cost of small batches {label}: {ratio:.2f}"))
    verdict = combine(parts)
    return Verdict(verdict.word, f"SIMULATED, communication over computation: {verdict.evidence}")


def check_not_linear(results: Results) -> Verdict:
    """Judge whether computation at B_m falls less than linearly from 64 nodes on (Figure 9)."""
    parts: list[Part] = []
    for label, rows in _projected(results).items():
        at = {n: row["computation at B_m"] for n, row in rows.items()}
        halves = [at[n] / at[2 * n] / 2 for n in (64, 128)]
        word = "reproduced" if max(halves) < STEEP else "not reproduced"
        listed = ", ".join(f"{2 * half:.2f}" for half in halves)
        parts.append((word, f"cost of small batches {label}: {listed}"))
    verdict = combine(parts)
    return Verdict(
        verdict.word, f"SIMULATED, from 64 to 128 and to 256 nodes, linear is 2: {verdict.evidence}"
    )


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
