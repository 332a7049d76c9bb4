"""Whether what the paper says of μ-cuDNN holds in the records."""

import math

import numpy as np

from repro.experiments.design import Part, Results, Verdict, combine, reported
from repro.experiments.microconv import costs, layers, networks, reading
from repro.experiments.microconv.grids import LIMITS_MIB, MIB, ROLES
from repro.experiments.microconv.reading import one

PAPER = reported("microconv")
SAME = 0.05  # times count as equal within this share: what turns of one run scatter by


def gain(name: str, ratio: float | None, paper: float | None, of: str = "") -> Part:
    """Judge a speed-up: reproduced where it exceeds 5 % or the paper's, partly above 1, else not.

    `of` says what the paper's number is of, where it is not the same thing.
    """
    if ratio is None:
        return "not run", f"{name}: no records"
    enough = 1 + SAME if paper is None else min(paper, 1 + SAME)
    word = "reproduced" if ratio >= enough else "partly" if ratio > 1 else "not reproduced"
    published = "" if paper is None else f" (paper {paper:.2f}×{of and f', {of}'})"
    return word, f"{name} {ratio:.2f}×{published}"


def check_larger_workspace(results: Results) -> Verdict:
    """Judge whether undivided kernels are faster with the largest limit than with the least."""
    record = reading.best_candidates(results, "AlexNet")
    if record is None:
        return Verdict("not run", "no records")
    faster, unfit = [], 0
    for entry in record.metrics["kernels"]:
        small, large = (reading.divide(entry, limit, "undivided") for limit in (8, 512))
        if large is None:
            continue
        if small is None:
            unfit += 1
            continue
        faster.append(small.time_s / large.time_s)
    if not faster and not unfit:
        return Verdict("not run", "no kernel fits")
    gained = sum(ratio > 1 + SAME for ratio in faster) + unfit
    word = "reproduced" if 2 * gained >= len(faster) + unfit else "partly" if gained else (
        "not reproduced")  # fmt: skip
    return Verdict(
        word,
        f"{gained} of {len(faster) + unfit} kernels of AlexNet gain more than {100 * SAME:.0f} % "
        f"from 512 instead of 8 MiB, the most {max(faster, default=1):.2f}×; {unfit} of them fit "
        f"into 512 and not into 8 MiB",
    )


def check_front(results: Results) -> Verdict:
    """Judge whether conv2's front holds divided points that no undivided one equals."""
    entry = reading.conv2_entry(results)
    if entry is None:
        return Verdict("not run", "no records")
    points = reading.front(entry, PAPER["figure6"]["max_workspace_mib"])
    divided = sum(len(point.parts) > 1 for point in points)
    word = "reproduced" if divided else "not reproduced"
    return Verdict(word, f"{divided} of {len(points)} desirable divisions are divided")


def check_front_size(results: Results) -> Verdict:
    """Judge whether fronts stay as small as the paper's largest."""
    record = reading.best_candidates(results, "AlexNet")
    entries = list(record.metrics["kernels"]) if record else []
    conv2 = reading.conv2_entry(results)
    entries += [conv2] if conv2 else []
    if not entries:
        return Verdict("not run", "no records")
    largest = max(len(reading.front(entry)) for entry in entries)
    bound = PAPER["figure6"]["largest_front"]
    word = "reproduced" if largest <= bound else "not reproduced"
    return Verdict(word, f"the largest front has {largest} points, paper {bound}")


def check_layers(results: Results) -> Verdict:
    """Judge DeepBench's mean speed-up over the best undivided algorithm within the limit."""
    ratios = layers.flat(layers.layer_ratios(results, "fp32", "undivided"))
    if not ratios:
        return Verdict("not run", "no records")
    half = "V100, half precision"
    word, text = gain("mean", float(np.mean(ratios)), PAPER["figure8"]["mean"], half)
    return Verdict(
        word,
        f"{text}, up to {max(ratios):.2f}× (paper {PAPER['figure8']['largest']}×) on "
        f"{len(ratios)} layers where something undivided fits",
    )


def check_kernel_sizes(results: Results) -> Verdict:
    """Judge the mean speed-ups of 3×3 and 5×5 kernels."""
    ratios = layers.layer_ratios(results, "fp32", "undivided")
    paper = PAPER["figure8"]["three_by_three"]["P100"]
    return combine(
        [
            gain(
                size,
                float(np.mean(ratios[size])) if ratios.get(size) else None,
                published,
                "P100, half precision",
            )
            for size, published in (("3×3", paper), ("5×5", None))
        ]
    )


def check_left(results: Results) -> Verdict:
    """Judge whether dividing beats what torch does today, whatever memory that takes."""
    ratios = layers.flat(layers.layer_ratios(results, "fp32", "torch"))
    if not ratios:
        return Verdict("not run", "no records")
    won = sum(ratio > 1 + SAME for ratio in ratios)
    word = "reproduced" if 2 * won >= len(ratios) else "partly" if won else "not reproduced"
    return Verdict(word, f"faster by more than 5 %: {layers.left_to_win(results)}")


def _alexnet(results: Results, limit: int, policy: str) -> float | None:
    base, record = (
        one(results, "network", role="AlexNet", mode="WR", setting="fp32", limit_mib=limit,
            policy=p)
        for p in ("undivided", policy)
    )  # fmt: skip
    return reading.speedup(base, record)


def _undivided_unfit(results: Results, role: str, limit: int) -> str | None:
    """Say which kernels fit into a limit divided only; None where that is not so."""
    shared = {"role": role, "mode": "WR", "setting": "fp32", "limit_mib": limit}
    undivided, divided = (
        one(results, "network", policy=policy, **shared) for policy in ("undivided", "all")
    )
    missing = reading.unfit(undivided) if undivided else []
    if not missing or reading.held_s(divided) is None:
        return None
    return f"divided all fit; undivided, {', '.join(missing)} do not fit into {limit} MiB"


def check_moderate(results: Results) -> Verdict:
    """Judge the speed-up at 64 MiB, policy all."""
    paper = PAPER["figure9"]["speedup_64"]["P100"][1]
    if unfit := _undivided_unfit(results, "AlexNet", 64):
        return Verdict("partly", unfit)
    return combine([gain("convolutions", _alexnet(results, 64, "all"), paper)])


def check_small(results: Results) -> Verdict:
    """Judge whether nothing is gained at 8 MiB."""
    if unfit := _undivided_unfit(results, "AlexNet", 8):
        return Verdict("not reproduced", unfit)
    ratio = _alexnet(results, 8, "all")
    if ratio is None:
        return Verdict("not run", "no records")
    word = "reproduced" if ratio <= 1 + SAME else "not reproduced"
    return Verdict(word, f"{ratio:.2f}× over undivided at 8 MiB")


def check_ample(results: Results) -> Verdict:
    """Judge whether nothing is gained at 512 MiB."""
    ratio = _alexnet(results, 512, "all")
    if ratio is None:
        return Verdict("not run", "no records")
    word = "reproduced" if abs(ratio - 1) <= SAME else "not reproduced"
    return Verdict(word, f"{ratio:.2f}× over undivided at 512 MiB")


def check_memory(results: Results) -> Verdict:
    """Judge the workspace saved by 64 MiB with all against undivided with 512 MiB."""
    shared = {"role": "AlexNet", "mode": "WR", "setting": "fp32"}
    large = one(results, "network", limit_mib=512, policy="undivided", **shared)
    small = one(results, "network", limit_mib=64, policy="all", **shared)
    ratio = reading.speedup(large, small)
    if ratio is None or large is None or small is None:
        return Verdict("not run", "no records")
    saved = reading.workspace_bytes(large) / max(1, reading.workspace_bytes(small))
    paper = PAPER["figure9"]
    published = paper["undivided_512_gib"] / paper["all_64_gib"]
    cost = 100 * (1 / ratio - 1)
    cheap = cost <= max(paper["overhead_percent"], 100 * SAME)
    word = "not reproduced"
    if saved > 1 and cheap:
        word = "reproduced" if saved >= published else "partly"
    return Verdict(
        word,
        f"{saved:.2f} times less workspace (paper {published:.2f}) for {cost:+.1f} % of time "
        f"(paper {paper['overhead_percent']:+.1f} %)",
    )


def check_accuracy(results: Results) -> Verdict:
    """Judge whether a tuned network computes the same loss and gradients."""
    records = [r for r in results.select("network") if r.status == "ok"]
    exact = [r for r in records if r.config["setting"] == "fp32"]
    if not exact:
        return Verdict("not run", "no records")
    losses = [r.metrics["loss_error"] for r in exact]
    loss = max(losses) if all(map(math.isfinite, losses)) else math.inf
    gaps = [(r.metrics["gradient_error"], r.metrics["own_gradient_error"]) for r in exact]
    close = sum(gap <= 1e-4 for gap, _ in gaps)
    beyond = [(gap, own) for gap, own in gaps if not gap <= 1e-4]
    as_own = all(gap <= 1.05 * own for gap, own in beyond)
    word = "not reproduced"
    if loss <= 1e-4:
        word = "partly" if not as_own else "reproduced"
    tuned = sum(r.metrics["tuned_kernels"] > 0 for r in exact)
    if not tuned:
        return Verdict("not run", f"{len(exact)} networks, and no kernel of them left torch's own")
    text = (
        f"over {len(exact)} networks, {tuned} of them with divided kernels, the loss differs by at "
        f"most {loss:.0e}; gradients by at most 1e-4 of their largest element in {close}"
    )
    if beyond:
        gap, own = max(beyond)
        text += (
            f", elsewhere by up to {gap:.0e}, where torch's own convolutions with and without "
            f"their library differ by {own:.0e} (a unit at the edge of its ReLU)"
        )
    return Verdict(word, text)


def check_conv2(results: Results) -> Verdict:
    """Judge conv2's speed-up by policy at 64 MiB, and at 8 MiB."""
    runs = layers.conv2_runs(results)
    if not runs:
        return Verdict("not run", "no records")
    parts: list[Part] = []
    policy = layers.best_policy(results)
    for limit in layers.FIGURE10_LIMITS:
        paper = PAPER["figure10"]["speedup_all"] if limit == 64 else None
        name = f"conv2 at {limit} MiB, {policy}"
        if (limit, "undivided") not in runs and (limit, policy) in runs:
            parts.append(("partly", f"{name}: fits divided only"))
        else:
            parts.append(gain(name, layers.conv2_gain(results, limit, policy), paper))
    return combine(parts)


def check_wd(results: Results) -> Verdict:
    """Judge WD against WR undivided with the same workspace in all."""
    parts = []
    for role, paper in (("AlexNet", PAPER["figure11"]["alexnet_120"][1]), ("ResNet-50", None)):
        wr, _ = networks.pair(results, role, 8, "undivided")
        for policy in ("all", "powerOfTwo"):
            _, wd = networks.pair(results, role, 8, policy)
            if wd is not None:
                break
        if wr is not None and reading.unfit(wr) and reading.held_s(wd) is not None:
            missing = len(reading.unfit(wr))
            parts.append(("partly", f"{role}: WD fits, {missing} kernels of WR do not"))
            continue
        parts.append(gain(role, reading.speedup(wr, wd), paper))
    return combine(parts)


def check_wd_saves(results: Results) -> Verdict:
    """Judge WD with an eighth of the workspace against WR undivided."""
    wr, _ = networks.pair(results, "AlexNet", 64, "undivided")
    _, wd = networks.pair(results, "AlexNet", 8, "all")
    paper = PAPER["figure11"]["alexnet_120_over_960"]
    if wr is not None and reading.unfit(wr) and reading.held_s(wd) is not None:
        return Verdict("partly", f"WD fits; undivided, {len(reading.unfit(wr))} kernels do not")
    ratio = reading.speedup(wr, wd)
    return combine([gain("120 against 960 MiB", ratio, paper, "iteration")])


def check_wd_resnet(results: Results) -> Verdict:
    """Judge WD with half of undivided's workspace on ResNet-50, convolutions alone."""
    shared = {"role": "ResNet-50", "setting": "fp32"}
    wr = one(results, "network", mode="WR", limit_mib=32, policy="undivided", **shared)
    total = networks.wd_total("ResNet-50", 16)
    wd = one(results, "network", mode="WD", limit_mib=total, policy="powerOfTwo", **shared)
    if wr is not None and reading.unfit(wr) and reading.held_s(wd) is not None:
        return Verdict("partly", f"WD fits; undivided, {len(reading.unfit(wr))} kernels do not")
    paper = PAPER["figure11"]["resnet50_2544"][1]
    return combine([gain("2,544 against 5,088 MiB", reading.speedup(wr, wd), paper)])


def check_assignment(results: Results) -> Verdict:
    """Judge whether conv2 and conv3 get most of the workspace, conv4 and conv5 little."""
    chosen = layers.assignment(results)
    if chosen is None:
        return Verdict("not run", "no records")
    whole = sum(division.workspace_bytes for _, division in chosen)
    if not whole:
        return Verdict("not reproduced", "WD takes no workspace")
    paper = PAPER["figure12"]
    main = sum(d.workspace_bytes for e, d in chosen if e["layer"] in ("conv2", "conv3"))
    late = [d.workspace_bytes / MIB for e, d in chosen if e["layer"] in ("conv4", "conv5")]
    share = 100 * main / whole
    most = max(late, default=0.0)
    holds = [share >= paper["conv2_conv3_percent"] - 100 * SAME, most <= paper["conv4_conv5_mib"]]
    word = "reproduced" if all(holds) else "partly" if share > 50 else "not reproduced"
    return Verdict(
        word,
        f"conv2 and conv3 hold {share:.1f} % (paper {paper['conv2_conv3_percent']} %), a kernel of "
        f"conv4 or conv5 at most {most:.1f} MiB (paper {paper['conv4_conv5_mib']:.0f})",
    )


def check_cluster(results: Results) -> Verdict:
    """Judge the speed-up of all devices over one slow one."""
    measured, _ = costs.device_times(results)
    record = one(results, "cluster")
    if record is None:
        return Verdict("not run", "no records")
    combinations = costs.splits(measured, record.config["batch"])
    base = min(costs.slowest(combinations[name][0]) for name in ("fast", "slow"))
    split = combinations["2 fast + slow"][0]
    part = gain("2 fast + slow", base / costs.slowest(split), PAPER["figure13"]["speedup_k80_k20"])
    if len(split) < 3:
        part = (
            "partly" if len(split) == 2 else "not reproduced",
            f"{part[1]}, on {len(split)} of 3",
        )
    return combine([part])


def check_even(results: Results) -> Verdict:
    """Judge how much slower an even split is."""
    record = one(results, "cluster")
    if record is None:
        return Verdict("not run", "no records")
    measured, _ = costs.device_times(results)
    best, even = costs.splits(measured, record.config["batch"])["fast + slow"]
    here = costs.slowest(even) / costs.slowest(best) if even else None
    parts = [gain("measured here", here, None)]
    split, even_s = costs.published_split()
    ratio = even_s / costs.slowest(split)
    published = PAPER["figure13"]["even_slowdown"]
    near = abs(ratio / published - 1) <= SAME
    parts.append(("reproduced" if near else "partly",
                  f"from the paper's times {ratio:.2f}× (paper {published}×)"))  # fmt: skip
    return combine(parts)


def check_table5(results: Results) -> Verdict:
    """Judge the three networks' speed-ups with powerOfTwo at 64 MiB, convolutions alone."""
    parts = []
    for role in ROLES:
        base, record = (
            one(results, "network", role=role, setting="fp32", limit_mib=64, policy=policy)
            for policy in ("undivided", "powerOfTwo")
        )
        if base is not None and reading.unfit(base) and reading.held_s(record) is not None:
            parts.append(("partly", f"{role}: fits divided only"))
            continue
        paper = PAPER["table5"][role]
        ratio = reading.speedup(base, record)
        published = paper["undivided"] / paper["powerOfTwo"]
        parts.append(gain(f"{role}'s convolutions", ratio, published, "iteration"))
    return combine(parts)


def check_policies(results: Results) -> Verdict:
    """Judge whether powerOfTwo is as fast as all where both were run."""
    parts: list[Part] = []
    for role in ROLES:
        for limit in LIMITS_MIB:
            two, every = (
                one(results, "network", role=role, mode="WR", setting="fp32", limit_mib=limit,
                    policy=policy)
                for policy in ("powerOfTwo", "all")
            )  # fmt: skip
            ratio = reading.speedup(two, every)
            if ratio is not None:
                word = "reproduced" if ratio <= 1 + SAME else "not reproduced"
                parts.append((word, f"{role} at {limit} MiB: all is {ratio:.2f}× as fast"))
    return combine(parts)


def check_optimisation(results: Results) -> Verdict:
    """Judge how much less powerOfTwo measures than all."""
    seconds = []
    for policy in ("all", "powerOfTwo"):
        record = one(results, "candidates", policy=policy)
        if record is None:
            return Verdict("not run", "no records")
        seconds.append(record.metrics["benchmark_s"] + record.metrics["optimise_s"])
    paper = PAPER["optimisation"]
    published = paper["all_s"] / paper["power_of_two_s"]
    ratio = seconds[0] / seconds[1]
    word = "reproduced" if ratio >= 2 else "partly" if ratio > 1 else "not reproduced"
    return Verdict(
        word,
        f"all takes {seconds[0]:.1f} s, powerOfTwo {seconds[1]:.1f} s: {ratio:.1f} times less "
        f"(paper {published:.1f}, at a mini-batch of 256)",
    )


def check_solver(results: Results) -> Verdict:
    """Judge whether the programmes of the paper's sizes are solved in practical time."""
    record = one(results, "solver")
    if record is None:
        return Verdict("not run", "no records")
    paper = PAPER["optimisation"]
    bounds = {"WD, 562 variables": 0.25, "WD, 2500 variables": paper["resnet152_ms"] / 1e3}
    seconds = {name: reading.median(record, name) for name in bounds}
    held = [seconds[name] <= bound for name, bound in bounds.items()]
    word = "reproduced" if all(held) else "partly" if any(held) else "not reproduced"
    text = ", ".join(f"{name}: {1e3 * seconds[name]:.0f} ms" for name in bounds)
    return Verdict(
        word,
        f"{text} (paper, GLPK: {paper['resnet50'][1]} ms for 562, at most "
        f"{paper['resnet152_ms']} ms); made-up fronts",
    )
