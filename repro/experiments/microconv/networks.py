"""What does a whole network gain within a limit? (Figures 9 and 11, Table V)

A limit for each kernel (WR), or one workspace that is shared out (WD). Where a limit excludes
nothing, dividing has nothing to gain, and claims that it gains are not judged.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro.experiments.design import Chosen, Run, check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import mib, ms, times, unfit
from repro.experiments.microconv.runs import (
    AMPLE,
    LIMITS_MIB,
    MODERATE,
    MODES,
    PAPER,
    POLICIES,
    SMALL,
    network,
    network_name,
    policies,
    told_limit,
)
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = (
    "convolutions within the limit (ms)",
    "torch's own (ms)",
    "over undivided",
    "over torch's own",
    "workspace in all (MiB)",
    "left to ours",
)


def _columns(record: Record | None, baseline: Record | None) -> dict[str, str]:
    """The columns of one network's kernels, beside an undivided one."""
    columns = dict.fromkeys(_COLUMNS, DASH)
    if record is None:
        return columns
    columns["left to ours"] = (
        f"{measured.left_to_ours(record)[0]} of {len(measured.entries(record))}"
    )
    if missing := unfit(record):
        return columns | {_COLUMNS[0]: f"{missing} do not fit"}
    rows, gain = measured.fitting(record), measured.gain_or_none(baseline, record)
    cells = [ms(rows.time_s.sum()), ms(rows.native_s.sum()), str(gain or DASH)]
    cells += [str(measured.over_torch(record)), mib(rows.workspace_bytes.sum())]
    return columns | dict(zip(_COLUMNS, cells, strict=False))


Groups = Mapping[str, Mapping[str, Record]]  # by limit, then by label of a bar


def _draw(groups: Groups, over: str, paper: Mapping[Any, float]) -> "Figure":
    """Draw networks' times by layer over torch's own, and their speed-ups over undivided.

    Args:
        groups: One bar each.
        over: The label of the undivided bar of each limit.
        paper: The paper's speed-up by (limit, label).
    """
    from repro import plots
    from repro.experiments.microconv.drawing import UNFIT, draw_bars

    bars = {(limit, name): r for limit, own in groups.items() for name, r in own.items()}
    figure, axes = plots.new_axes(1, 2, 10.5, 1.8 + 0.3 * len(bars))
    figure.suptitle(runs.title_of(next(iter(bars.values()), None), runs.CAFFES), fontsize=11)
    layers, gains = axes[0]
    frame = pd.DataFrame([layer_times(record) for record in bars.values()])
    draw_bars(layers, frame, plots.PALETTE[1:], kind="barh", stacked=True)
    for row, (bar, record) in enumerate(bars.items()):
        if unfit(record):
            layers.text(0, row, " does not fit", va="center", fontsize=8, color=UNFIT)
        if bar in paper:
            style: dict[str, Any] = {"mfc": "none", "mec": plots.INK, "label": "paper, P100"}
            gains.plot([paper[bar]], [row - 0.2], "D", **style)
        gain = measured.gain_or_none(groups[bar[0]].get(over), record)
        if gain is None or bar[1] == over:
            continue
        low, high = map(math.exp, gain.interval())
        if math.isfinite(low):
            style = {"color": plots.OURS, "lw": 2.2, "label": "ours, 95 % interval"}
            gains.plot([low, high], [row] * 2, "-", **style)
        gains.plot([math.exp(gain.mean)], [row], "o", color=plots.OURS, label="ours")
    for axis, what in ((layers, "time of the convolutions over torch's own"), (gains, "speed-up")):
        axis.axvline(1, color="#48536a", linewidth=1, zorder=0)
        axis.set_yticks(range(len(bars)), [", ".join(bar) for bar in bars], fontsize=8)
        axis.set_ylim(max(1, len(bars)) - 0.4, -0.6)
        axis.set_xlim(left=0)
        axis.set_xlabel(f"{what} (×)")
        axis.grid(axis="y", visible=False)
    gains.set_yticklabels([])
    gains.set_title(f"over {over}", fontsize=10)
    plots.legend_below(figure, 4)
    return figure


def layer_times(record: Record) -> dict[str, float]:
    """Each layer's time over torch's own for all layers; empty where not all kernels fit.

    Torch's own were timed in turns with them: two runs compare by these ratios, and not by their
    milliseconds.
    """
    if unfit(record):
        return {}
    rows = measured.fitting(record)
    taken: dict[str, float] = rows.time_s.groupby(rows.layer, sort=False).sum().to_dict()
    return {layer: time / rows.native_s.sum() for layer, time in taken.items()}


def figure9_runs(profile: str, chosen: Chosen) -> list[Run]:
    """AlexNet at three limits with three policies."""
    return [
        network(profile, "AlexNet", "WR", limit, policy, precision)
        for precision in runs.profile_of(profile)["precisions"]
        for limit in LIMITS_MIB
        for policy in policies(profile)
        if precision == "fp32" or policy != "all"
    ]


def _by_policy(
    results: Results, role: str, limit_mib: int, precision: str = "fp32"
) -> dict[str, Record | None]:
    of = results, role, "WR", limit_mib
    return {policy: measured.held(*of, policy, precision) for policy in POLICIES}


def figure9_table(results: Results) -> list[dict[str, Any]]:
    """AlexNet at three limits with three policies; the paper's numbers of `all` by its GPUs."""
    rows = []
    best = MODERATE, policies(results.profile)[-1]
    for precision, limit in itertools.product(runs.precisions_of(results), LIMITS_MIB):
        records = _by_policy(results, "AlexNet", limit, precision)
        for policy, record in records.items():
            told = told_limit(results.profile, "AlexNet", "WR", limit)
            row = {"setting": precision, "limit": told, "policy": policy}
            for card, (_, convolutions) in PAPER["figure9"]["speedup_64"].items():
                row[f"paper, {card}"] = times(convolutions) if (limit, policy) == best else DASH
            rows.append(row | _columns(record, records["undivided"]))
    return rows


def figure9(results: Results) -> "Figure":
    """Each layer's time within the limit for every limit and policy, and speed-ups beside."""
    precision = runs.precisions_of(results)[0]
    groups: dict[str, dict[str, Record]] = {}
    for limit in LIMITS_MIB:
        records = _by_policy(results, "AlexNet", limit, precision)
        told = told_limit(results.profile, "AlexNet", "WR", limit)
        groups[told] = {policy: record for policy, record in records.items() if record}
    best = list(groups)[1], policies(results.profile)[-1]
    return _draw(groups, "undivided", {best: PAPER["figure9"]["speedup_64"]["P100"][1]})


def _alexnet(results: Results, limit_mib: int, *wanted: str) -> Record:
    return measured.need(results, "AlexNet", "WR", limit_mib, *wanted)


def _divided(results: Results, limit_mib: int) -> Record:
    """AlexNet with all sizes as in the paper, or powers of two where all was not run."""
    return _alexnet(results, limit_mib, "all", "powerOfTwo")


def _estimate(before: Record, after: Record, label: str, *beside: Record) -> Cases:
    """How much faster AlexNet is after, with the note of `beside_torch`."""

    def estimate(_: str) -> Estimate:
        gain = replace(measured.gained(before, after), label=label)
        return measured.beside_torch(gain, *(beside or (before, after)))

    return cases(["AlexNet"], estimate)


def _label(results: Results, divided: Record, *limits_mib: int) -> str:
    """What was timed, for the evidence: over undivided, with that one's limit last."""
    within, *over = (told_limit(results.profile, "AlexNet", "WR", limit) for limit in limits_mib)
    undivided = f" over undivided within {over[0]}" if over else ""
    return f"{network_name(divided, True)}, {divided.config['policy']} within {within}{undivided}:"


def _scaled(results: Results, limit_mib: int) -> tuple[Record, Record]:
    """AlexNet undivided and divided, under a limit no looser than the paper's."""
    undivided, divided = _alexnet(results, limit_mib, "undivided"), _divided(results, limit_mib)
    if (at_papers := runs.at_papers_batch(undivided)) > limit_mib:
        raise NotRun(
            f"no such limit was run: {limit_mib} MiB at a mini-batch of "
            f"{undivided.config['batch']} stand for {at_papers:,.0f} at the paper's"
        )
    return undivided, divided


def moderate_faster(results: Results) -> Cases:
    """AlexNet's convolutions with the widest policy that ran over undivided."""
    undivided, divided = _alexnet(results, MODERATE, "undivided"), _divided(results, MODERATE)
    measured.need_binding(undivided, [_roomier(results), divided])
    return _estimate(undivided, divided, _label(results, divided, MODERATE))


def small_no_gain(results: Results) -> Cases:
    """The gain of dividing within the small limit; to fit only divided is a gain."""
    undivided, divided = _scaled(results, SMALL)
    if unfit(undivided) and not unfit(divided):
        return {"AlexNet": Exact(False, f"only divided, {unfit(undivided)} fit")}
    return _estimate(undivided, divided, _label(results, divided, SMALL))


def ample_no_gain(results: Results) -> Cases:
    """The gain of dividing within the ample limit."""
    undivided, divided = _scaled(results, AMPLE)
    return _estimate(undivided, divided, _label(results, divided, AMPLE))


def _roomier(results: Results) -> Record | None:
    return _by_policy(results, "AlexNet", AMPLE)["undivided"]


def _moderate_for_ample(results: Results) -> tuple[Record, Record]:
    """Undivided with ample workspace and divided with a moderate one, where that binds."""
    large, small = _alexnet(results, AMPLE, "undivided"), _divided(results, MODERATE)
    measured.need_binding(_alexnet(results, MODERATE, "undivided"), [large, small])
    return large, small


def memory_cost(results: Results) -> Cases:
    """The time that the smaller workspace costs."""
    large, small = _moderate_for_ample(results)
    label = f"time of {_label(results, small, MODERATE, AMPLE)}"
    return _estimate(small, large, label, large, small)


def power_of_two_as_good(results: Results) -> Cases:
    """The time of powerOfTwo over that of all, at each limit that binds."""

    def cost(limit: str) -> Estimate:
        undivided, two, every = (_alexnet(results, int(limit), policy) for policy in POLICIES)
        measured.need_binding(undivided, [_roomier(results), two, every])
        return replace(measured.gained(two, every), label=f"{limit} MiB, powerOfTwo over all:")

    found = cases(map(str, LIMITS_MIB), cost)
    return {name: case for name, case in found.items() if isinstance(case, Estimate)} or found


@check(
    f"Divided within {MODERATE} MiB for each kernel, AlexNet takes less workspace in all than "
    f"undivided within {AMPLE} MiB"
)
def less_workspace(results: Results) -> tuple[bool, str]:
    """Compare the bytes of all kernels together."""
    large, small = map(measured.fitting, _moderate_for_ample(results))
    paper = PAPER["figure9"]["all_64_gib"] / PAPER["figure9"]["undivided_512_gib"]
    share = small.workspace_bytes.sum() / max(1, large.workspace_bytes.sum())
    return bool(share < 1), f"{times(share)} (paper {times(paper)})"


@check(
    "With more micro-batch sizes to choose from, no division is planned that is slower: by the "
    "times of the parts, all takes at most powerOfTwo's, and that at most undivided's"
)
def more_sizes_no_slower(results: Results) -> tuple[bool, str]:
    """Compare the planned times of the kernels that fit with both of two policies."""
    plans = []
    for precision, limit in itertools.product(runs.precisions_of(results), LIMITS_MIB):
        records = _by_policy(results, "AlexNet", limit, precision)
        for pair in itertools.pairwise(map(measured.entries, records.values())):
            plans += [
                (fewer["predicted_s"], more.get("predicted_s", math.inf))
                for fewer, more in zip(*pair, strict=False)
                if "predicted_s" in fewer
            ]
    if not plans:
        raise NotRun("no records")
    slower = sum(more > fewer * (1 + 1e-9) for fewer, more in plans)
    return not slower, f"{slower} of {len(plans)} kernels are planned slower"


FIGURE9 = runs.artefact(
    "figure9",
    plan=figure9_runs,
    rows=figure9_table,
    draw=figure9,
    claims={
        "moderate_faster": moderate_faster,
        "small_no_gain": small_no_gain,
        "ample_no_gain": ample_no_gain,
        "memory_cost": memory_cost,
        "power_of_two_as_good": power_of_two_as_good,
    },
    checks=(more_sizes_no_slower, less_workspace),
)


def _table5_role(profile: str, role: str) -> str:
    """The name under which Table V's network runs: its AlexNet is not that of the figures."""
    letter = role == "AlexNet" and profile in runs.TO_THE_LETTER
    return runs.TABLE5_ALEXNET if letter else role


def table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    """All three networks at 64 MiB for each kernel."""
    return [
        network(profile, name, "WR", MODERATE, policy)
        for name in (_table5_role(profile, role) for role in runs.ROLES)
        for policy in policies(profile, name)
    ]


def table5(results: Results) -> list[dict[str, Any]]:
    """The time of each network by policy."""
    rows = []
    for role, paper in PAPER["table5"].items():
        records = _by_policy(results, _table5_role(results.profile, role), MODERATE)
        ran = next(filter(None, records.values()), None)
        for policy, record in records.items():
            row = {"network": network_name(ran) if ran else role, "policy": policy}
            ratio = times(paper["undivided"] / paper[policy])
            row |= {"paper (ms)": f"{paper[policy]:.1f} ({ratio})"}
            rows.append(row | _columns(record, records["undivided"]))
    return rows


TABLE5 = runs.artefact(
    "table5",
    plan=table5_runs,
    rows=table5,
)


# ResNet-50's limits for each kernel in Figure 11: WD, and WR undivided with twice as much.
RESNET_WD_MIB, RESNET_WR_MIB = PAPER["figure11"]["resnet50_each_mib"]
_RESNET50: tuple[tuple[str, int, str], ...] = (
    ("WR", SMALL, "undivided"),
    ("WR", SMALL, "powerOfTwo"),
    ("WD", SMALL, "powerOfTwo"),
    ("WR", RESNET_WR_MIB, "undivided"),
    ("WD", RESNET_WD_MIB, "powerOfTwo"),
)
# The paper's comparisons: network, limit of each kernel of WR undivided, and WD's total, given
# for each kernel.
COMPARISONS = {
    "AlexNet, as much": ("AlexNet", SMALL, SMALL),
    "AlexNet, an eighth": ("AlexNet", MODERATE, SMALL),
    "ResNet-50, half": ("ResNet-50", RESNET_WR_MIB, RESNET_WD_MIB),
}


def figure11_runs(profile: str, chosen: Chosen) -> list[Run]:
    """AlexNet and ResNet-50 under WR, and under WD with the same workspace in all."""
    widest = policies(profile)[-1]
    alexnet = [
        network(profile, "AlexNet", mode, limit, policy)
        for limit in LIMITS_MIB
        for policy in policies(profile)
        for mode in MODES
        # WD with more than it can use, or between the two ends, says little: spared.
        if mode == "WR"
        or profile == "paper"
        or (limit, policy) in ((SMALL, "undivided"), (SMALL, widest), (MODERATE, widest))
    ]
    return alexnet + [network(profile, "ResNet-50", *cell, caffe=True) for cell in _RESNET50]


def _by_mode(results: Results, role: str, limit_mib: int, policy: str) -> dict[str, Record]:
    """The records of WR and WD with the same workspace in all."""
    found = {m: measured.held(results, role, m, limit_mib, policy, caffe=True) for m in MODES}
    return {mode: record for mode, record in found.items() if record}


def figure11_table(results: Results) -> list[dict[str, Any]]:
    """WR beside WD with the same workspace in all."""
    rows = []
    limits = (SMALL, RESNET_WD_MIB, RESNET_WR_MIB, MODERATE, AMPLE)
    best = ("AlexNet", SMALL, policies(results.profile)[-1], "WD")
    for role, limit, policy in itertools.product(PAPER["figure11"]["kernels"], limits, POLICIES):
        against = RESNET_WR_MIB if limit == RESNET_WD_MIB else limit
        base = _by_mode(results, role, against, "undivided").get("WR")
        for mode, record in _by_mode(results, role, limit, policy).items():
            told = told_limit(results.profile, role, mode, limit, caffe=True)
            told += " in all" if mode == "WD" else " each"
            row = {"network": network_name(record, True), "mode": mode, "limit": told}
            shown = (role, limit, policy, mode) == best
            paper = times(PAPER["figure11"]["alexnet_120"][1]) if shown else DASH
            row |= {"policy": policy, "paper, P100": paper, **_columns(record, base)}
            row |= {"variables": record.metrics["variables"] or DASH}
            rows.append(row | {"solved (ms)": ms(record.metrics["optimise_s"])})
    return rows


def figure11(results: Results) -> "Figure":
    """AlexNet under WR and WD policy by policy, and speed-ups over undivided WR beside."""
    groups: dict[str, dict[str, Record]] = {}
    for limit in LIMITS_MIB:
        told = " or ".join(told_limit(results.profile, "AlexNet", m, limit) for m in MODES)
        groups[told] = {
            f"{mode} {policy}": record
            for policy in POLICIES
            for mode, record in _by_mode(results, "AlexNet", limit, policy).items()
        }
    best = next(iter(groups)), f"WD {policies(results.profile)[-1]}"
    return _draw(groups, "WR undivided", {best: PAPER["figure11"]["alexnet_120"][1]})


def wd_faster(results: Results) -> Cases:
    """How much faster WD is than WR undivided, with as much workspace in all or with less."""

    def faster(name: str) -> Estimate:
        role, each_mib, wd_each_mib = COMPARISONS[name]
        undivided = measured.need(results, role, "WR", each_mib, "undivided", caffe=True)
        wd = measured.need(results, role, "WD", wd_each_mib, "all", "powerOfTwo", caffe=True)
        shared = {"role": role, "mode": "WR", "setting": "fp32", "policy": "undivided"}
        limit = undivided.config["limit_mib"]
        more = [r for r in results.ok("network", **shared) if r.config["limit_mib"] > limit]
        measured.need_binding(undivided, [*more, wd])
        total = told_limit(results.profile, role, "WD", wd_each_mib, caffe=True)
        apiece = told_limit(results.profile, role, "WR", each_mib, caffe=True)
        label = f"{network_name(wd, True)}, {total} in all over {apiece} for each:"
        gain = replace(measured.gained(undivided, wd), label=label)
        return measured.beside_torch(gain, undivided, wd)

    return cases(COMPARISONS, faster)


@check("No kernel takes more than the limit for each, and under WD all together no more than that")
def within_limits(results: Results) -> tuple[bool, str]:
    """Compare the workspaces of all kernels that fit with the limits."""
    results.need("network")
    shares = []
    for record in results.ok("network"):
        needs = [row["workspace_bytes"] for row in measured.entries(record) if "time_s" in row]
        taken = max(needs, default=0) if record.config["mode"] == "WR" else sum(needs)
        shares.append(taken / (record.config["limit_mib"] * runs.MIB))
    told = f"{len(shares)} networks take at most {100 * max(shares):.0f} % of their limits"
    return max(shares) <= 1, told


FIGURE11 = runs.artefact(
    "figure11",
    plan=figure11_runs,
    rows=figure11_table,
    draw=figure11,
    claims={"wd_faster": wd_faster},
    checks=(within_limits,),
)
