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

from repro.experiments.design import Chosen, Exhibit, Results, Run, check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases
from repro.experiments.microconv.comparing import (
    beside_torch,
    gain_or_none,
    gained,
    held_s,
    kernels_of,
    left_to_ours,
    mib,
    ms,
    named,
    native_s,
    need,
    need_binding,
    over_torch,
    times,
    unfit,
    workspace_bytes,
)
from repro.experiments.microconv.runs import (
    AMPLE,
    CAFFES,
    LIMITS_MIB,
    MIB,
    MODERATE,
    MODES,
    PAPER,
    POLICIES,
    ROLES,
    SMALL,
    TABLE5_ALEXNET,
    at_papers_batch,
    captioned,
    limit_of,
    network,
    network_name,
    policies,
    precisions_of,
    profile_of,
    title_of,
    told_limit,
)
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CARDS = ("P100", "K80", "V100")  # the paper's
_NOTE = "Intervals: torch's own scatter. Left to ours: kernels of this package's algorithms alone."


def _measured(record: Record | None, baseline: Record | None) -> dict[str, str]:
    """The columns of one network's kernels, beside an undivided one."""
    columns = {
        "convolutions within the limit (ms)": DASH,
        "torch's own (ms)": DASH,
        "over undivided": DASH,
        "over torch's own": DASH,
        "left to ours": DASH,
        "workspace in all (MiB)": DASH,
    }
    if record is None:
        return columns
    cells = [f"does not fit: {len(unfit(record))} kernels", *[DASH] * 5]
    if not unfit(record):
        gain = gain_or_none(baseline, record)
        cells[:4] = (
            ms(held_s(record)),
            ms(native_s(record)),
            str(gain or DASH),
            str(over_torch(record)),
        )
        cells[5] = mib(workspace_bytes(record))
    cells[4] = f"{left_to_ours(record)[0]} of {len(kernels_of(record))}"
    return dict(zip(columns, cells, strict=True))


def _draw(
    title: str, groups: Mapping[str, Mapping[str, Record]], undivided: str, paper: Mapping[str, Any]
) -> "Figure":
    """Draw networks' times by layer over torch's own, and their speed-ups over undivided.

    Args:
        title: Whose they are.
        groups: By limit, then by label of a bar.
        undivided: The label of what speed-ups are over.
        paper: The paper's speed-up by (limit, label).
    """
    from repro import plots
    from repro.experiments.microconv.drawing import UNFIT, draw_bars

    bars = {(limit, name): r for limit, own in groups.items() for name, r in own.items()}
    figure, axes = plots.new_axes(1, 2, 10.5, 1.8 + 0.3 * len(bars))
    figure.suptitle(title, fontsize=11)
    layers, gains = axes[0]
    frame = pd.DataFrame([layer_times(record) for record in bars.values()])
    draw_bars(layers, frame, plots.PALETTE[1:], kind="barh", stacked=True)
    for row, (bar, record) in enumerate(bars.items()):
        if unfit(record):
            layers.text(0, row, " does not fit", va="center", fontsize=8, color=UNFIT)
        if (value := paper.get(bar)) is not None:
            gains.plot([value], [row - 0.2], "D", mfc="none", mec=plots.INK, label="paper, P100")
        gain = gain_or_none(groups[bar[0]].get(undivided), record)
        if gain is None or bar[1] == undivided:
            continue
        low, high = map(math.exp, gain.interval())
        if math.isfinite(low):
            style: dict[str, Any] = {"color": plots.OURS, "lw": 2.2}
            gains.plot([low, high], [row] * 2, "-", label="ours, 95 % interval", **style)
        gains.plot([math.exp(gain.mean)], [row], "o", color=plots.OURS, label="ours")
    layers.set_yticks(range(len(bars)), [", ".join(bar) for bar in bars], fontsize=8)
    gains.set_yticks(range(len(bars)), [])
    for axis, what in ((layers, "time of the convolutions over torch's own"), (gains, "speed-up")):
        axis.axvline(1, color="#48536a", linewidth=1, zorder=0)
        axis.set_ylim(max(1, len(bars)) - 0.4, -0.6)
        axis.set_xlim(left=0)
        axis.set_xlabel(f"{what} (×)")
        axis.grid(axis="y", visible=False)
    gains.set_title(f"over {undivided}", fontsize=10)
    plots.legend_below(figure, 4)
    return figure


def layer_times(record: Record) -> dict[str, float]:
    """Each layer's time over torch's own for all layers; empty where not all kernels fit.

    Torch's own were timed in turns with them: two runs compare by these ratios, and not by their
    milliseconds.
    """
    layers: dict[str, float] = {}
    for row in () if unfit(record) else kernels_of(record):
        over = row["time_s"] / native_s(record)
        layers[row["layer"]] = layers.get(row["layer"], 0.0) + over
    return layers


def figure9_runs(profile: str, chosen: Chosen) -> list[Run]:
    """AlexNet at three limits with three policies."""
    return [
        network(profile, "AlexNet", "WR", limit, policy, precision)
        for precision in profile_of(profile)["precisions"]
        for limit in LIMITS_MIB
        for policy in policies(profile)
        if precision == "fp32" or policy != "all"
    ]


def _by_policy(
    results: Results, role: str, limit_mib: int, precision: str
) -> dict[str, Record | None]:
    limit = limit_of(results.profile, role, "WR", limit_mib)
    config = {"role": role, "limit_mib": limit, "setting": precision}
    return {policy: results.first("network", policy=policy, **config) for policy in POLICIES}


def figure9_table(results: Results) -> list[dict[str, Any]]:
    """AlexNet at three limits with three policies; the paper's numbers of `all` by its GPUs."""
    rows = []
    for precision, limit in itertools.product(precisions_of(results), LIMITS_MIB):
        records = _by_policy(results, "AlexNet", limit, precision)
        for policy, record in records.items():
            shown = (limit, policy) == (MODERATE, policies(results.profile)[-1])
            published = PAPER["figure9"]["speedup_64"] if shown else {}
            rows.append(
                {
                    "setting": precision,
                    "limit": told_limit(results.profile, "AlexNet", "WR", limit),
                    "policy": policy,
                    **{
                        f"paper, {card}": times(published[card][1]) if published else DASH
                        for card in CARDS
                    },
                    **_measured(record, records["undivided"]),
                }
            )
    return rows


def figure9(results: Results) -> "Figure":
    """Each layer's time within the limit for every limit and policy, and speed-ups beside."""
    precision = next(iter(precisions_of(results)), "fp32")
    groups: dict[str, dict[str, Record]] = {}
    for limit in LIMITS_MIB:
        records = _by_policy(results, "AlexNet", limit, precision)
        told = told_limit(results.profile, "AlexNet", "WR", limit)
        groups[told] = {policy: record for policy, record in records.items() if record}
    paper = {
        (list(groups)[1], policies(results.profile)[-1]): PAPER["figure9"]["speedup_64"]["P100"][1]
    }
    ran = next((record for own in groups.values() for record in own.values()), None)
    return _draw(title_of(ran, CAFFES), groups, "undivided", paper)


def _alexnet(results: Results, limit_mib: int, *wanted: str) -> Record:
    return need(results, "AlexNet", "WR", limit_mib, *wanted)


def _divided(results: Results, limit_mib: int) -> Record:
    """AlexNet with all sizes as in the paper, or powers of two where all was not run."""
    return _alexnet(results, limit_mib, "all", "powerOfTwo")


def _label(results: Results, divided: Record, *limits_mib: int) -> str:
    """What was timed, for the evidence: over undivided, with that one's limit last."""
    within, *over = (told_limit(results.profile, "AlexNet", "WR", limit) for limit in limits_mib)
    undivided = f" over undivided within {over[0]}" if over else ""
    return f"{network_name(divided, True)}, {divided.config['policy']} within {within}{undivided}:"


def _over_undivided(results: Results, undivided: Record, divided: Record, limit: int) -> Cases:
    def estimate(_: str) -> Estimate:
        gain = replace(gained(undivided, divided), label=_label(results, divided, limit))
        return beside_torch(gain, undivided, divided)

    return cases(["AlexNet"], estimate)


def _scaled(results: Results, limit_mib: int) -> tuple[Record, Record]:
    """AlexNet undivided and divided, under a limit no looser than the paper's.

    Raises:
        NotRun: It stands for more at the paper's mini-batch.
    """
    undivided, divided = _alexnet(results, limit_mib, "undivided"), _divided(results, limit_mib)
    if (at_papers := at_papers_batch(undivided)) > limit_mib:
        raise NotRun(
            f"no such limit was run: {limit_mib} MiB at a mini-batch of "
            f"{undivided.config['batch']} stand for {at_papers:,.0f} at the paper's"
        )
    return undivided, divided


def moderate_faster(results: Results) -> Cases:
    """AlexNet's convolutions with the widest policy that ran over undivided."""
    undivided, divided = _alexnet(results, MODERATE, "undivided"), _divided(results, MODERATE)
    need_binding(undivided, [_roomier(results), divided])
    return _over_undivided(results, undivided, divided, MODERATE)


def small_no_gain(results: Results) -> Cases:
    """What dividing gains within the small limit; what fits divided only is a gain."""
    undivided, divided = _scaled(results, SMALL)
    if unfit(undivided) and not unfit(divided):
        return {"AlexNet": Exact(False, f"only divided, {named(unfit(undivided))} fit")}
    return _over_undivided(results, undivided, divided, SMALL)


def ample_no_gain(results: Results) -> Cases:
    """What dividing gains within the ample limit."""
    return _over_undivided(results, *_scaled(results, AMPLE), AMPLE)


def _roomier(results: Results) -> Record | None:
    return _by_policy(results, "AlexNet", AMPLE, "fp32")["undivided"]


def _moderate_for_ample(results: Results) -> tuple[Record, Record]:
    """Undivided with ample workspace and divided with a moderate one, where that binds."""
    large, small = _alexnet(results, AMPLE, "undivided"), _divided(results, MODERATE)
    need_binding(_alexnet(results, MODERATE, "undivided"), [large, small])
    return large, small


def memory_cost(results: Results) -> Cases:
    """The time that the smaller workspace costs."""
    large, small = _moderate_for_ample(results)
    label = f"time of {_label(results, small, MODERATE, AMPLE)}"

    def cost(_: str) -> Estimate:
        return beside_torch(replace(gained(small, large), label=label), large, small)

    return cases(["AlexNet"], cost)


def power_of_two_as_good(results: Results) -> Cases:
    """The time of powerOfTwo over that of all, at each limit that binds."""

    def cost(limit: str) -> Estimate:
        undivided, two, every = (_alexnet(results, int(limit), policy) for policy in POLICIES)
        need_binding(undivided, [_roomier(results), two, every])
        return replace(gained(two, every), label=f"{limit} MiB, powerOfTwo over all:")

    found = cases(map(str, LIMITS_MIB), cost)
    return {name: case for name, case in found.items() if isinstance(case, Estimate)} or found


@check(
    f"Divided within {MODERATE} MiB for each kernel, AlexNet takes less workspace in all than "
    f"undivided within {AMPLE} MiB"
)
def less_workspace(results: Results) -> tuple[bool, str]:
    """Compare the bytes of all kernels together."""
    large, small = _moderate_for_ample(results)
    if missing := unfit(large) + unfit(small):
        raise NotRun(f"{named(missing)} fit not at all")
    paper = PAPER["figure9"]["all_64_gib"] / PAPER["figure9"]["undivided_512_gib"]
    share = workspace_bytes(small) / max(1, workspace_bytes(large))
    return share < 1, f"{times(share)} (paper {times(paper)})"


@check(
    "With more micro-batch sizes to choose from, no division is planned that is slower: by the "
    "times of the parts, all takes at most powerOfTwo's, and that at most undivided's"
)
def more_sizes_no_slower(results: Results) -> tuple[bool, str]:
    """Compare the planned times of the kernels that fit with both of two policies."""
    plans = []
    for precision, limit in itertools.product(precisions_of(results), LIMITS_MIB):
        records = _by_policy(results, "AlexNet", limit, precision)
        for fewer, more in itertools.pairwise(POLICIES):
            pairs = zip(kernels_of(records[fewer]), kernels_of(records[more]), strict=False)
            plans += [
                (a["predicted_s"], b.get("predicted_s", math.inf))
                for a, b in pairs
                if "predicted_s" in a
            ]
    if not plans:
        raise NotRun("no records")
    slower = sum(b > a * (1 + 1e-9) for a, b in plans)
    return not slower, f"{slower} of {len(plans)} kernels are planned slower"


FIGURE9 = Exhibit(
    long=True,
    runs=figure9_runs,
    table=figure9_table,
    figure=figure9,
    caption=captioned(
        f"AlexNet's convolutions by layer, a limit for each kernel (WR). {_NOTE}",
        caffes=True,
        scaled=True,
    ),
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
    letter = role == "AlexNet" and TABLE5_ALEXNET in profile_of(profile)["networks"]
    return TABLE5_ALEXNET if letter else role


def table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    """All three networks at 64 MiB for each kernel."""
    return [
        network(profile, name, "WR", MODERATE, policy)
        for name in (_table5_role(profile, role) for role in ROLES)
        for policy in policies(profile, name)
    ]


def table5(results: Results) -> list[dict[str, Any]]:
    """The time of each network by policy."""
    rows = []
    for role, precision in itertools.product(ROLES, precisions_of(results)):
        name, paper = _table5_role(results.profile, role), PAPER["table5"][role]
        records = _by_policy(results, name, MODERATE, precision)
        ran = next(filter(None, records.values()), None)
        for policy, record in records.items():
            ratio = paper["undivided"] / paper[policy]
            rows.append(
                {
                    "network": network_name(ran) if ran else role,
                    "policy": policy,
                    "paper (ms)": f"{paper[policy]:.1f} ({ratio:.2f}×)",
                    **_measured(record, records["undivided"]),
                }
            )
    return rows


TABLE5 = Exhibit(
    long=True,
    runs=table5_runs,
    table=table5,
    caption=captioned(
        f"Convolutions within the paper's {MODERATE} MiB for each kernel; its times are of "
        f"iterations. {_NOTE}",
        scaled=True,
    ),
)


# ResNet-50's limits for each kernel in Figure 11: WD, and WR undivided with twice as much.
RESNET_WD_MIB, RESNET_WR_MIB = PAPER["figure11"]["resnet50_each_mib"]
_RESNET50 = (
    ("WR", SMALL, "undivided"),
    ("WR", SMALL, "powerOfTwo"),
    ("WD", SMALL, "powerOfTwo"),
    ("WR", RESNET_WR_MIB, "undivided"),
    ("WD", RESNET_WD_MIB, "powerOfTwo"),
)


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


def _wr_and_wd(
    results: Results, role: str, limit_mib: int, policy: str
) -> dict[str, Record | None]:
    """The records of WR and WD with the same workspace in all, by mode."""
    found = {}
    for mode in MODES:
        limit = limit_of(results.profile, role, mode, limit_mib, caffe=True)
        config = {"role": role, "policy": policy, "setting": "fp32", "limit_mib": limit}
        found[mode] = results.first("network", mode=mode, **config)
    return found


def figure11_table(results: Results) -> list[dict[str, Any]]:
    """WR beside WD with the same workspace in all."""
    rows = []
    limits = (SMALL, RESNET_WD_MIB, RESNET_WR_MIB, MODERATE, AMPLE)
    best = ("AlexNet", SMALL, policies(results.profile)[-1], "WD")
    for role, limit, policy in itertools.product(PAPER["figure11"]["kernels"], limits, POLICIES):
        against = RESNET_WR_MIB if limit == RESNET_WD_MIB else limit
        base = _wr_and_wd(results, role, against, "undivided")["WR"]
        for mode, record in _wr_and_wd(results, role, limit, policy).items():
            if record is None:
                continue
            told = told_limit(results.profile, role, mode, limit, caffe=True)
            paper = PAPER["figure11"]["alexnet_120"][1]
            rows.append(
                {
                    "network": network_name(record, True),
                    "mode": mode,
                    "limit": f"{told} {'in all' if mode == 'WD' else 'each'}",
                    "policy": policy,
                    "paper, P100": times(paper) if (role, limit, policy, mode) == best else DASH,
                    **_measured(record, base),
                    "variables": record.metrics["variables"] or DASH,
                    "solved (ms)": ms(record.metrics["optimise_s"]),
                }
            )
    return rows


def figure11(results: Results) -> "Figure":
    """AlexNet under WR and WD policy by policy, and speed-ups over undivided WR beside."""
    groups: dict[str, dict[str, Record]] = {}
    for limit in LIMITS_MIB:
        told = " or ".join(told_limit(results.profile, "AlexNet", m, limit) for m in MODES)
        groups[told] = {
            f"{mode} {policy}": record
            for policy in POLICIES
            for mode, record in _wr_and_wd(results, "AlexNet", limit, policy).items()
            if record
        }
    best = (next(iter(groups)), f"WD {policies(results.profile)[-1]}")
    ran = next((record for own in groups.values() for record in own.values()), None)
    paper = {best: PAPER["figure11"]["alexnet_120"][1]}
    return _draw(title_of(ran, CAFFES), groups, "WR undivided", paper)


# The paper's comparisons: network, limit of each kernel of WR undivided, and what WD has in all,
# given for each kernel.
COMPARISONS = {
    "AlexNet, as much": ("AlexNet", SMALL, SMALL),
    "AlexNet, an eighth": ("AlexNet", MODERATE, SMALL),
    "ResNet-50, half": ("ResNet-50", RESNET_WR_MIB, RESNET_WD_MIB),
}


def wd_faster(results: Results) -> Cases:
    """How much faster WD is than WR undivided, with as much workspace in all or with less."""

    def faster(name: str) -> Estimate:
        role, each_mib, wd_each_mib = COMPARISONS[name]
        undivided = need(results, role, "WR", each_mib, "undivided", caffe=True)
        wd = need(results, role, "WD", wd_each_mib, "all", "powerOfTwo", caffe=True)
        shared = {"role": role, "mode": "WR", "setting": "fp32", "policy": "undivided"}
        limit = undivided.config["limit_mib"]
        more = [r for r in results.ok("network", **shared) if r.config["limit_mib"] > limit]
        need_binding(undivided, [*more, wd])
        total = told_limit(results.profile, role, "WD", wd_each_mib, caffe=True)
        apiece = told_limit(results.profile, role, "WR", each_mib, caffe=True)
        label = f"{network_name(wd, True)}, {total} in all over {apiece} for each:"
        return beside_torch(replace(gained(undivided, wd), label=label), undivided, wd)

    return cases(COMPARISONS, faster)


@check("No kernel takes more than the limit for each, and under WD all together no more than that")
def within_limits(results: Results) -> tuple[bool, str]:
    """Compare the workspaces of all kernels that fit with the limits."""
    shares = []
    for record in results.ok("network"):
        needs = [row["workspace_bytes"] for row in kernels_of(record) if "time_s" in row]
        taken = max(needs, default=0) if record.config["mode"] == "WR" else sum(needs)
        shares.append(taken / (record.config["limit_mib"] * MIB))
    if not shares:
        raise NotRun("no records")
    fullest = max(shares)
    told = f"{len(shares)} networks take at most {100 * fullest:.0f} % of their limits"
    return fullest <= 1, told


FIGURE11 = Exhibit(
    long=True,
    runs=figure11_runs,
    table=figure11_table,
    figure=figure11,
    caption=captioned(
        f"A limit for each kernel (WR), one workspace for all (WD). {_NOTE}",
        caffes=True,
        scaled=True,
    ),
    claims={"wd_faster": wd_faster},
    checks=(within_limits,),
)
