"""Whether the paper's claims hold in the records."""

import itertools
from collections.abc import Sequence

import numpy as np

from repro.experiments.design import Part, Results, Verdict, combine
from repro.experiments.dualbatch import costs, reading, tables
from repro.experiments.dualbatch.grids import CIFAR, IMAGENET, PAPER, WORKERS, K
from repro.experiments.dualbatch.reading import final, section51, section52
from repro.report import difference

CLAIMS = PAPER["claims"]
LINEAR = 0.98  # of the variance that a line explains
OUTPUTS = ("small_batch", "small_samples", "large_samples")
MOST = 0.2  # of batch sizes may lie beyond for a claim on all of them to hold in part
CLOSE = 0.1  # of a batch size: solved from other measurements
SAME_POINTS = 0.5  # of accuracy: "similar" (section 5.2.3)
SAME_TIME = 0.01  # of the time that k promises


def _larger(name: str, higher: Sequence[float], lower: Sequence[float], paper: float) -> Part:
    """Judge ``higher > lower``: reproduced where the 95 % interval excludes 0, partly if not."""
    if not higher or not lower:
        return "not run", f"{name.rstrip(':')}: no records"
    gap = difference(higher, lower)
    word = "not reproduced"
    if gap.mean > 0:
        word = "partly" if gap.includes_zero else "reproduced"
    return word, f"{name} {gap}, paper {paper:+.2f}"


def _solved(results: Results, table: str, wanted: Sequence[dict[str, int]]) -> Verdict:
    rows = reading.rows(results, table)
    if len(rows) != len(wanted):
        return Verdict("not run", "no records")
    pairs = [
        (name, own[name], value)
        for own, paper in zip(rows, wanted, strict=True)
        for name, value in paper.items()
    ]
    wrong = [f"{name} {own!r} for {value!r}" for name, own, value in pairs if own != value]
    count = len(pairs)
    said = f"{count - len(wrong)} of {count} batch sizes and shares"
    fitted = "with one b / a for each B_L, chosen to give them"
    if wrong:
        word = "partly" if len(wrong) < count else "not reproduced"
        return Verdict(word, f"{said}, {fitted}; not {', '.join(wrong[:3])}")
    return Verdict("reproduced", f"{said} to the last digit, {fitted}")


def check_table2(results: Results) -> Verdict:
    """Judge whether the equations give every value of Table 2."""
    wanted = []
    for row in PAPER["table2"]["rows"]:
        wanted.append({name: row[name] for name in OUTPUTS if name in row})
    rows = reading.rows(results, "table2")
    factors = [
        abs(own["factor"] - row["factor"]) < 6e-4
        for own, row in zip(rows, PAPER["table2"]["rows"], strict=False)
        if "factor" in row
    ]
    verdict = _solved(results, "table2", wanted)
    if verdict.word == "reproduced" and not all(factors):
        return Verdict("partly", f"{verdict.evidence}, but not every d_S/d_L")
    return verdict


def check_table6(results: Results) -> Verdict:
    """Judge whether the equations give every value of Table 6."""
    wanted = []
    for name in ("cifar", "imagenet"):
        part = PAPER["table6"][name]
        for place in range(len(part["resolutions"])):
            wanted.append({"large_samples": part["baseline_samples"]})
            for n_small in range(1, WORKERS + 1):
                row = {
                    "small_batch": part["small_batches"][n_small - 1][place],
                    "small_samples": part["small_samples"][n_small - 1],
                }
                large = {"large_samples": part["large_samples"]} if n_small < WORKERS else {}
                wanted.append(row | large)
    return _solved(results, "table6", wanted)


def check_schedule(results: Results, table: str) -> Verdict:
    """Judge whether the schedule is that of Table 7 or 9."""
    frame = tables.schedule_table(results, table)
    if frame.empty:
        return Verdict("not run", "no records")
    names = ["epochs", "B_S, B_L"]  # the rest is given to the schedule
    equal = sum(
        str(a) == str(b)
        for name in names
        for a, b in zip(frame[name], frame[f"{name}, paper"], strict=True)
    )
    count = len(names) * len(frame)
    word = "reproduced" if equal == count else "partly" if equal else "not reproduced"
    return Verdict(word, f"{equal} of {count} spans of epochs and pairs of batch sizes")


def check_raw_plan(results: Results) -> Verdict:
    """Judge whether the authors' raw measurements lead to the batch sizes of Table 2."""
    solved = reading.frameworks(results).get("TensorFlow", {}).get("table2")
    if not solved:
        return Verdict("not run", "the authors' raw data is not at hand")
    pairs = [(b, row["small_batch"]) for b, row in
             zip(solved, PAPER["table2"]["rows"], strict=True)]  # fmt: skip
    said = ", ".join(f"{own} for {paper}" for own, paper in pairs)
    if all(own == paper for own, paper in pairs):
        return Verdict("reproduced", said)
    near = all(abs(own / paper - 1) <= CLOSE for own, paper in pairs)
    return Verdict("partly" if near else "not reproduced", said)


def check_factor(results: Results, scheme: str, numbers: Sequence[int] = (1, 2, 3)) -> Verdict:
    """Judge whether a model-update factor gains accuracy for numbers of small-batch workers."""
    parts = []
    for paper in PAPER["table3"]:
        if (n_small := paper["n_small"]) not in numbers:
            continue
        ours = final(section51(results, K[1], n_small, scheme), "accuracy")
        plain = final(section51(results, K[1], n_small, "none"), "accuracy")
        gain = paper[scheme]["accuracy"] - paper["none"]["accuracy"]
        parts.append(_larger(f"n_S = {n_small}:", ours, plain, gain))
    return combine(parts)


def check_gain(results: Results) -> Verdict:
    """Judge whether two small-batch workers or more gain accuracy over the baseline."""
    base = final(section51(results, 1.0, 0), "accuracy")
    before = PAPER["table5"]["baseline"]["accuracy"]
    parts = [
        _larger(
            f"k = {row['k']:g}, n_S = {row['n_small']}:",
            final(section51(results, row["k"], row["n_small"]), "accuracy"),
            base,
            row["accuracy"] - before,
        )
        for row in PAPER["table5"]["rows"]
        if row["n_small"] > 1
    ]
    return combine(parts)


def check_one_is_too_few(results: Results) -> Verdict:
    """Judge whether one small-batch worker gains less accuracy than three."""
    parts = []
    for k in K:
        paper = {row["n_small"]: row for row in PAPER["table5"]["rows"] if row["k"] == k}
        three, one = (final(section51(results, k, n), "accuracy") for n in (3, 1))
        parts.append(
            _larger(f"k = {k:g}, three over one:", three, one,
                    paper[3]["accuracy"] - paper[1]["accuracy"])
        )  # fmt: skip
    return combine(parts)


def check_three_best(results: Results) -> Verdict:
    """Judge whether three small-batch workers end with the highest accuracy."""
    return combine([_best(results, k, "accuracy", 3, 1) for k in K])


def _best(results: Results, k: float, metric: str, wanted: int, sign: int) -> Part:
    """Judge which number of small-batch workers is best; an interval with 0 decides nothing."""
    found = {n: final(section51(results, k, n), metric) for n in range(WORKERS + 1)}
    if not all(found.values()):
        return "not run", f"k = {k:g}: no records"
    means = {n: float(np.mean(values)) for n, values in found.items()}
    ranked = sorted(means, key=lambda n: -sign * means[n])
    other = ranked[1] if ranked[0] == wanted else ranked[0]
    unclear = difference(found[wanted], found[other]).includes_zero
    word = "reproduced" if ranked[0] == wanted else "not reproduced"
    said = ", ".join(f"{n}: {mean:.3g}" for n, mean in means.items())
    return "partly" if unclear else word, f"k = {k:g}: {said}"


def check_root_is_worse(results: Results) -> Verdict:
    """Judge whether √(d_S/d_L) is less accurate than d_S/d_L with one and three workers."""
    parts = []
    for paper in PAPER["table3"]:
        if (n_small := paper["n_small"]) == 2:
            continue
        linear, root = (
            final(section51(results, K[1], n_small, scheme), "accuracy")
            for scheme in ("linear", "sqrt")
        )
        gap = paper["linear"]["accuracy"] - paper["sqrt"]["accuracy"]
        parts.append(_larger(f"n_S = {n_small}:", linear, root, gap))
    return combine(parts)


def check_lowest_loss(results: Results) -> Verdict:
    """Judge whether one small-batch worker ends with the lowest test loss."""
    return combine([_best(results, k, "test_loss", 1, -1) for k in K])


def check_extra_time(results: Results) -> Verdict:
    """Judge whether an epoch takes k times the baseline's, by the virtual clock."""
    base = section51(results, 1.0, 0)
    parts: list[Part] = []
    for k in K:
        ratios = [
            record.metrics["virtual_time_s"][-1] / base[0].metrics["virtual_time_s"][-1]
            for n in range(1, WORKERS + 1)
            for record in section51(results, k, n)[:1]
            if base and record.metrics["virtual_time_s"] and base[0].metrics["virtual_time_s"]
        ]
        if not ratios:
            parts.append(("not run", f"k = {k:g}: no records"))
            continue
        holds = [abs(ratio / k - 1) <= SAME_TIME for ratio in ratios]
        word = "reproduced" if all(holds) else "partly" if any(holds) else "not reproduced"
        parts.append((word, f"k = {k:g}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}"))
    return combine(parts)


def check_shares(results: Results) -> Verdict:
    """Judge whether the time of a worker's share is predicted to 3.5 %."""
    errors = [row["measured_s"] / row["predicted_s"] - 1 for row in costs.shares(results)]
    if not errors:
        return Verdict("not run", "no records")
    largest = 100 * max(map(abs, errors))
    word = "reproduced" if largest <= CLAIMS["time_error"] else "partly"
    if 100 * float(np.median(np.abs(errors))) > CLAIMS["time_error"]:
        word = "not reproduced"
    return Verdict(
        word,
        f"largest error {largest:.1f} %, median {100 * float(np.median(np.abs(errors))):.1f} % of "
        f"{len(errors)} shares, paper {CLAIMS['time_error']:g} %",
    )


def check_linear(results: Results) -> Verdict:
    """Judge whether the time of a batch is a line of its size, here and in the authors' data."""
    parts: list[Part] = []
    sizes = reading.config_of(results, "times", CIFAR).get("batch_sizes", [])
    for fit in reading.measured(results, "times", CIFAR).get("fits", []):
        explained = _explained(sizes, fit["seconds"])
        parts.append(_linear(f"here, {fit['resolution']} px", explained))
    for name, fit in reading.frameworks(results).items():
        parts.append(_linear(f"GTX 1080, {name}", fit["r_squared"]))
    return combine(parts)


def _explained(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    return float(np.corrcoef(sizes, seconds)[0, 1] ** 2)


def _linear(where: str, explained: float) -> Part:
    word = "reproduced" if explained >= LINEAR else "not reproduced"
    return word, f"{where}: R² {explained:.4f}"


def check_predictable(results: Results) -> Verdict:
    """Judge whether TensorFlow's times are more predictable than PyTorch's, in the raw data."""
    found = reading.frameworks(results)
    if not found:
        return Verdict("not run", "the authors' raw data is not at hand")
    errors = {name: fit["median_error"] for name, fit in found.items()}
    said = ", ".join(
        f"{name} median {100 * fit['median_error']:.1f} %, largest {100 * fit['largest_error']:.1f}"
        " % of 500 batch sizes"
        for name, fit in found.items()
    )
    better = errors["TensorFlow"] < errors["PyTorch"]
    return Verdict("reproduced" if better else "not reproduced", said)


def check_raw_predictions(results: Results) -> Verdict:
    """Judge whether equation 2 predicts the raw data's epochs to 3.5 % at all batch sizes."""
    found = reading.frameworks(results).get("TensorFlow")
    if found is None:
        return Verdict("not run", "the authors' raw data is not at hand")
    beyond = found["share_beyond"]
    word = "reproduced" if beyond == 0 else "partly" if beyond <= MOST else "not reproduced"
    own = 100 * max(abs(value) for value in found["plan_errors"].values())
    return Verdict(
        word,
        f"largest error {100 * found['largest_error']:.1f} %, at batch size {found['largest_at']}; "
        f"{100 * beyond:.1f} % of 500 batch sizes beyond {CLAIMS['time_error']:g} %; at Table 4's "
        f"at most {own:.1f} %",
    )


def check_falls(results: Results) -> Verdict:
    """Judge whether an epoch takes less time with larger batches."""
    parts: list[Part] = []
    for passes in reading.measured(results, "times", CIFAR).get("passes", []):
        times = [p["measured_s"] for p in passes]
        falling = sum(b <= 1.03 * a for a, b in itertools.pairwise(times))
        whole = falling == len(times) - 1
        word = "reproduced" if whole else "partly" if times[-1] < times[0] else "not reproduced"
        parts.append((word, f"here {times[0]:.3f} s at {passes[0]['batch']} to {times[-1]:.3f} s "
                            f"at {passes[-1]['batch']}"))  # fmt: skip
    for name, fit in reading.frameworks(results).items():
        times = fit["epoch_s"]
        word = "reproduced" if times[-1] < times[0] else "not reproduced"
        parts.append((word, f"GTX 1080, {name} {times[0]:.1f} s at {fit['batches'][0]} to "
                            f"{times[-1]:.1f} s at {fit['batches'][-1]}"))  # fmt: skip
    return combine(parts)


def check_hybrid_accuracy(results: Results) -> Verdict:
    """Judge whether the hybrid scheme is more accurate than dual-batch learning in all cases."""
    parts = []
    for n in range(1, WORKERS + 1):
        ours, plain = (
            final(section52(results, n, scheme), "accuracy") for scheme in ("hybrid", "dual-batch")
        )
        paper = (
            PAPER["table8"]["hybrid"][n]["accuracy"] - PAPER["table8"]["dual_batch"][n]["accuracy"]
        )
        parts.append(_larger(f"n_S = {n}:", ours, plain, paper))
    return combine(parts)


def check_hybrid_gain(results: Results) -> Verdict:
    """Judge 3.3 points over the baseline with three small-batch workers and the hybrid scheme."""
    ours = final(section52(results, 3, "hybrid"), "accuracy")
    base = final(section52(results, 0, "dual-batch"), "accuracy")
    return combine([_larger("n_S = 3:", ours, base, CLAIMS["cifar_gain"])])


def check_saving(results: Results, role: str) -> Verdict:
    """Judge the share of time that cycling the resolutions saves, from epochs timed in turns."""
    paper = CLAIMS["cifar_saving" if role == CIFAR else "imagenet_saving"]
    saved = reading.saved_share(reading.measured(results, "times", role))
    if saved is None:
        return Verdict("not run", "no records")
    fits = reading.measured(results, "times", role)["fits"]
    sides = [fit["resolution"] for fit in fits]
    table = PAPER["table6"]["cifar" if role == CIFAR else "imagenet"]
    where = f"epochs at {', '.join(map(str, sides))} pixels timed in turns"
    word, said = _saving(where, 100 * saved, paper)
    if word == "reproduced" and sides != table["resolutions"]:
        word = "partly"  # smaller networks and images have other fixed costs
    parts: list[Part] = [(word, said)]
    if role == CIFAR:
        walls = [reading.wall_saving(results, n) for n in range(WORKERS + 1)]
        pooled = [100 * value for values in walls for value in values]
        if pooled:
            parts.append(_saving("wall time of the trainings", float(np.median(pooled)), paper))
    return combine(parts)


def _saving(where: str, percent: float, paper: float) -> Part:
    word = "reproduced" if percent >= paper else "partly" if percent > 0 else "not reproduced"
    return word, f"{where}: {percent:.1f} %, paper {paper:g} %"


def check_memory(results: Results) -> Verdict:
    """Judge whether the largest batch is predicted within the paper's error."""
    parts: list[Part] = []
    for role, key in ((CIFAR, "cifar"), (IMAGENET, "imagenet")):
        metrics = reading.measured(results, "memory", role)
        allowed = PAPER["figure13"][key]["error"]
        if not metrics:
            parts.append(("not run", f"{role}: no records"))
            continue
        error = 100 * (metrics["predicted_max"] / max(1, metrics["measured_max"]) - 1)
        word = "reproduced" if abs(error) <= allowed else "not reproduced"
        parts.append((word, f"{role}: {metrics['predicted_max']:,} predicted, "
                            f"{metrics['measured_max']:,} measured ({error:+.1f} %, paper "
                            f"{allowed:g} %)"))  # fmt: skip
    return combine(parts)


def check_imagenet_accuracy(results: Results) -> Verdict:
    """Judge whether three and four small-batch workers keep the baseline's accuracy on ImageNet."""
    trained = [r for r in results.select("train", setting="section 5.2.3") if r.status == "ok"]
    base = [r for r in trained if r.config["n_small"] == 0 and r.config["scheme"] == "hybrid"]
    if not base:
        return Verdict("not run", "trained under the profile paper alone, which needs ImageNet")
    before = final(base, "accuracy")
    parts: list[Part] = []
    for scheme in ("dual-batch", "hybrid"):
        for n in (3, 4):
            own = [r for r in trained if (r.config["n_small"], r.config["scheme"]) == (n, scheme)]
            if not own:
                parts.append(("not run", f"{scheme}, n_S = {n}: no records"))
                continue
            gap = difference(final(own, "accuracy"), before)
            word = "reproduced" if gap.mean >= -SAME_POINTS else "not reproduced"
            parts.append((word, f"{scheme}, n_S = {n}: {gap}, tolerance {SAME_POINTS:g} points"))
    return combine(parts)


def check_engines(results: Results) -> Verdict:
    """Judge whether both engines give the same weights for the same order of commits."""
    parts: list[Part] = []
    for record in results.select("train", workers=2, engine="ray"):
        if record.status != "ok":
            parts.append(("not reproduced", f"{record.status}: {record.error}"))
        elif record.metrics["same_weights"] is None:
            parts.append(("not run", "too large to train twice"))
        else:
            same = record.metrics["same_weights"]
            word = "reproduced" if same else "not reproduced"
            parts.append((word, f"{record.metrics['commits']} commits, every bit"))
    return combine(parts)
