"""Is one workspace that is shared out worth more than a limit for each kernel? (Figures 11 and 12)

WD, which gives each kernel its part of one workspace, against WR, which gives the same to each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import Cases, Estimate, NotRun, cases, unsure
from repro.experiments.microconv.comparing import (
    beside_torch,
    gain_or_none,
    gained,
    need,
    need_binding,
)
from repro.experiments.microconv.describing import CAFFES, network_name, scaled_marks, whose
from repro.experiments.microconv.networks import (
    BESIDE,
    COLUMNS,
    layer_times,
    network_row,
)
from repro.experiments.microconv.settings import (
    LIMITS_MIB,
    MIB,
    MODES,
    PAPER,
    POLICIES,
    Entry,
    alexnet_kernels,
    best_candidates,
    divide,
    front,
    kernels_of,
    label,
    limit_of,
    mib,
    ms,
    network,
    policies,
    times,
    told_limit,
)
from repro.experiments.query import Results
from repro.experiments.view import caption
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.microconv import Division

SMALL, MODERATE, AMPLE = LIMITS_MIB
KERNELS: dict[str, int] = PAPER["figure11"]["kernels"]
# ResNet-50's limits for each kernel in Figure 11: WD, and WR undivided with twice as much.
RESNET_WD_MIB, RESNET_WR_MIB = PAPER["figure11"]["resnet50_each_mib"]


def figure11_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return AlexNet and ResNet-50 under WR, and under WD with the same workspace in all."""
    widest = policies(profile, "AlexNet")[-1]
    alexnet = [
        network(profile, "AlexNet", mode, limit, policy)
        for limit in LIMITS_MIB
        for policy in policies(profile, "AlexNet")
        for mode in MODES
        # WD with more than it can use, or between the two ends, says little: spared.
        if mode == "WR"
        or profile == "paper"
        or (limit, policy) in ((SMALL, "undivided"), (SMALL, widest), (MODERATE, widest))
    ]
    # The paper: WD with half of what undivided has in all.
    pairs = [
        ("WR", SMALL, "undivided"),
        ("WR", SMALL, "powerOfTwo"),
        ("WD", SMALL, "powerOfTwo"),
        ("WR", RESNET_WR_MIB, "undivided"),
        ("WD", RESNET_WD_MIB, "powerOfTwo"),
    ]
    return alexnet + [
        network(profile, "ResNet-50", mode, limit, policy, caffe=True)
        for mode, limit, policy in pairs
    ]


def wr_and_wd(results: Results, role: str, limit_mib: int, policy: str) -> dict[str, Record | None]:
    """Return the records of WR and WD with the same workspace in all."""
    limits = {m: limit_of(results.profile, role, m, limit_mib, caffe=True) for m in MODES}
    shared = {"role": role, "policy": policy, "setting": "fp32"}
    return {
        mode: results.first("network", mode=mode, limit_mib=limits[mode], **shared)
        for mode in MODES
    }


def figure11_table(results: Results) -> list[dict[str, Any]]:
    """Return WR beside WD with the same workspace in all."""
    rows = []
    widest = policies(results.profile, "AlexNet")[-1]
    for role in KERNELS:
        for limit in (SMALL, RESNET_WD_MIB, RESNET_WR_MIB, MODERATE, AMPLE):
            against = RESNET_WR_MIB if limit == RESNET_WD_MIB else limit
            base = wr_and_wd(results, role, against, "undivided")["WR"]
            for policy in POLICIES:
                for mode, record in wr_and_wd(results, role, limit, policy).items():
                    if record is None:
                        continue
                    row = network_row(record, base)
                    told = told_limit(results.profile, role, mode, limit, caffe=True)
                    total = f"{told} {'in all' if mode == 'WD' else 'each'}"
                    paper = DASH
                    if (role, limit, mode, policy) == ("AlexNet", SMALL, "WD", widest):
                        paper = times(PAPER["figure11"]["alexnet_120"][1])
                    rows.append(
                        {
                            "network": network_name(record, True),
                            "mode": mode,
                            "limit": total,
                            "policy": policy,
                            "paper, P100": paper,
                            **{name: row[name] for name in COLUMNS},
                            "variables": record.metrics["variables"] or DASH,
                            "solved (ms)": ms(record.metrics["optimise_s"]),
                        }
                    )
    return rows


def figure11(results: Results) -> "Figure":
    """Draw AlexNet under WR and WD policy by policy, and speed-ups over undivided WR beside."""
    from repro.experiments.microconv.drawing import Bar, Dot, draw_layers

    panels: dict[str, list[Bar]] = {}
    ran: Record | None = None
    widest = policies(results.profile, "AlexNet")[-1]
    for limit in LIMITS_MIB:
        undivided = wr_and_wd(results, "AlexNet", limit, "undivided")["WR"]
        apiece, total = (told_limit(results.profile, "AlexNet", m, limit) for m in MODES)
        title = f"WR: {apiece} for each kernel; WD: {total} in all"
        bars = panels[title] = []
        for policy in POLICIES:
            for mode, record in wr_and_wd(results, "AlexNet", limit, policy).items():
                if record is None:
                    continue
                ran = ran or record
                papers: dict[str, float] = {}
                if (limit, mode, policy) == (SMALL, "WD", widest):
                    papers = {"P100": PAPER["figure11"]["alexnet_120"][1]}
                gap = None if record is undivided else gain_or_none(undivided, record)
                dot = Dot.of(gap, papers)
                name = f"{mode}, {policy}"
                bars.append(Bar(name, policy, *layer_times(record), dot, shaded=mode == "WD"))
    return draw_layers(whose(ran, CAFFES), panels, "WR, undivided")


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
    fullest, over = 0.0, 0
    records = results.ok("network")
    for record in records:
        needs = [row["workspace_bytes"] for row in kernels_of(record) if "time_s" in row]
        taken = max(needs, default=0) if record.config["mode"] == "WR" else sum(needs)
        share = taken / (record.config["limit_mib"] * MIB)
        fullest, over = max(fullest, share), over + (share > 1)
    if not records:
        raise NotRun("no records")
    return not over, f"{len(records)} networks take at most {100 * fullest:.0f} % of their limits"


FIGURE11 = Exhibit(
    long=True,
    runs=figure11_runs,
    table=figure11_table,
    figure=figure11,
    caption=caption(
        f"A limit for each kernel (WR), one workspace for all (WD, hatched). {BESIDE}",
        scaled_marks,
    ),
    claims={"wd_faster": wd_faster},
    checks=(within_limits,),
)


def figure12_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the measurement of AlexNet's kernels, from which WD is worked out."""
    return alexnet_kernels(profile, policies(profile, "AlexNet")[-1])


def wd_total_mib(results: Results) -> float:
    """Return the total of Figure 12 as it is run."""
    return limit_of(results.profile, "AlexNet", "WR", PAPER["figure12"]["total_mib"])


def late_mib(results: Results) -> float:
    """Return what stands for the most that the paper's kernels of conv4 and conv5 take."""
    return limit_of(results.profile, "AlexNet", "WR", PAPER["figure12"]["conv4_conv5_mib"])


def share_out(entries: Sequence[Entry], total_mib: float) -> "list[Division] | None":
    """Return the divisions that WD chooses, None where the total admits none."""
    from repro.microconv import assign_workspaces

    fronts = {index: front(entry) for index, entry in enumerate(entries)}
    try:
        chosen = assign_workspaces(fronts, int(total_mib * MIB))
    except ValueError:
        return None
    return [chosen[index] for index in range(len(entries))]


def assignment(results: Results) -> "list[tuple[Entry, Division]] | None":
    """Return AlexNet's kernels with the divisions that WD chooses, None where nothing fits."""
    entries = kernels_of(best_candidates(results, "AlexNet"))
    chosen = share_out(entries, wd_total_mib(results)) if entries else None
    return None if chosen is None else list(zip(entries, chosen, strict=True))


def figure12_table(results: Results) -> list[dict[str, Any]]:
    """Return what WD assigns to each kernel of AlexNet."""
    total = wd_total_mib(results) * MIB
    return [
        {
            "kernel": label(entry),
            "workspace (MiB)": mib(division.workspace_bytes),
            "share of the limit": f"{100 * division.workspace_bytes / total:.1f} %",
            "time (ms)": ms(division.time_s),
            "torch's own (ms)": ms(entry["native_s"]),
            "torch's own (MiB)": mib(entry["native_bytes"]),
            "division": str(division),
        }
        for entry, division in assignment(results) or []
    ]


def figure12(results: Results) -> "Figure":
    """Draw the workspace of every kernel, WR at the small limit beside WD."""
    record = best_candidates(results, "AlexNet")
    entries = kernels_of(record)
    total_mib, late = wd_total_mib(results), late_mib(results)
    chosen = share_out(entries, total_mib) if entries else None
    each_mib = limit_of(results.profile, "AlexNet", "WR", SMALL)
    figure = draw_shares(entries, each_mib, total_mib, chosen, late_mib=late)
    title = whose(record, CAFFES)
    if chosen is not None:
        paper = PAPER["figure12"]["conv2_conv3_percent"]
        share = middle_share(list(zip(entries, chosen, strict=True)))
        title += f"\nWD gives conv2 and conv3 {share:.1f} % of what it gives; the paper's {paper} %"
    figure.suptitle(title, fontsize=11)
    return figure


def middle_share(chosen: "Sequence[tuple[Entry, Division]]") -> float:
    """Return how much of the workspace that is taken conv2 and conv3 have, in percent."""
    whole = sum(division.workspace_bytes for _, division in chosen)
    main = sum(d.workspace_bytes for e, d in chosen if e["layer"] in ("conv2", "conv3"))
    return 100 * main / max(1, whole)


def draw_shares(
    entries: Sequence[Entry],
    each_mib: float,
    total_mib: float,
    chosen: "Sequence[Division] | None",
    largest_mib: float | None = None,
    late_mib: float | None = None,
) -> "Figure":
    """Draw the workspace of kernels under WR and under WD as paired bars.

    Args:
        entries: The kernels.
        each_mib: The limit of each under WR.
        total_mib: The limit of all together under WD.
        chosen: What WD gives to each kernel, None where the total admits nothing.
        largest_mib: The right end of the axis; by default what is drawn.
        late_mib: What stands for the most that conv4's and conv5's kernels take in the paper, as a
            dashed line.
    """
    from repro import plots
    from repro.experiments.microconv.drawing import LIMITS, UNFIT

    figure, axes = plots.new_axes(1, 1, 10.5, 1.9 + 0.36 * max(3, len(entries)))
    axis = axes[0, 0]
    alone = [divide(entry, each_mib) for entry in entries]
    shared = [None] * len(entries) if chosen is None else list(chosen)
    ways: tuple[tuple[str, str, str | None, Sequence[Division | None], float], ...] = (
        (f"WR, {round(each_mib, 1):g} MiB for each", LIMITS[0], None, alone, -0.2),
        (f"WD, {round(total_mib, 1):g} MiB for all", LIMITS[2], "////", shared, 0.2),
    )
    for way, colour, hatch, divisions, offset in ways:
        taken = sum(division.workspace_bytes for division in divisions if division) / MIB
        name = f"{way}: {taken:,.1f} MiB in all"
        style: dict[str, Any] = {"color": colour, "edgecolor": "white", "hatch": hatch}
        for row, division in enumerate(divisions):
            if division is None:
                text = " does not fit"
                axis.text(0, row + offset, text, fontsize=7, color=UNFIT, va="center")
                continue
            size = division.workspace_bytes / MIB
            axis.barh(row + offset, size, 0.38, label=name, **style)
            axis.text(size, row + offset, f" {size:.1f}", va="center", fontsize=7)
    late = [row for row, entry in enumerate(entries) if entry["layer"] in ("conv4", "conv5")]
    if late and late_mib is not None:
        style = {"color": plots.INK, "linestyle": "--", "linewidth": 1.3}
        paper = PAPER["figure12"]["conv4_conv5_mib"]
        name = f"paper: conv4 and conv5 under WD, at most {paper:g} MiB"
        name += f" ({late_mib:g} here)" * (late_mib != paper)
        axis.vlines(late_mib, min(late) - 0.45, max(late) + 0.45, label=name, **style)
    axis.set_yticks(range(len(entries)), [label(entry) for entry in entries])
    axis.set_ylim(max(1, len(entries)) - 0.45, -0.55)
    drawn = [patch.get_width() for patch in axis.patches]
    axis.set_xlim(0, largest_mib or 1.06 * max([*drawn, 1e-9]))
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("workspace (MiB)")
    plots.legend_below(figure, 3)
    return figure


def _shared_out(results: Results) -> "list[tuple[Entry, Division]]":
    """Return what WD assigns, where the total is less than the fastest divisions would take.

    Raises:
        NotRun: It excludes nothing, or admits none.
    """
    if best_candidates(results, "AlexNet") is None:
        raise NotRun("no records")
    chosen, total = assignment(results), wd_total_mib(results)
    if chosen is None:
        raise NotRun(f"not all kernels fit into {total} MiB")
    wanted = sum(front(entry)[-1].workspace_bytes for entry, _ in chosen) / MIB
    if wanted <= total:
        raise NotRun(
            f"no limit binds: the fastest divisions of all {len(chosen)} kernels take "
            f"{wanted:.1f} of {total} MiB at a mini-batch of {chosen[0][0]['batch']}"
        )
    return chosen


def middle_layers_most(results: Results) -> Cases:
    """The share of the workspace that conv2 and conv3 have, over a half.

    What is shared out follows from times that were measured once, so that its spread is not known.
    """
    share = middle_share(_shared_out(results))
    label = f"conv2 and conv3 hold {share:.1f} %; over a half:"
    return {"AlexNet": replace(unsure(share - 50, unit="points", digits=1), label=label)}


def late_layers_little(results: Results) -> Cases:
    """The largest workspace of a kernel of conv4 or conv5."""
    chosen = _shared_out(results)
    late = {
        label(e): d.workspace_bytes / MIB for e, d in chosen if e["layer"] in ("conv4", "conv5")
    }
    if not late:
        raise NotRun("no records of conv4 and conv5")
    most = max(late, key=lambda name: late[name])
    told = told_limit(results.profile, "AlexNet", "WR", PAPER["figure12"]["conv4_conv5_mib"])
    # The division follows times that were measured once, as that of `middle_layers_most` does.
    over = unsure(late[most] / late_mib(results), log=True)
    return {
        "AlexNet": replace(over, label=f"the most, {most}'s {late[most]:.2f} MiB, over {told}:")
    }


FIGURE12 = Exhibit(
    long=True,
    runs=figure12_runs,
    table=figure12_table,
    figure=figure12,
    caption=caption(
        "The workspace that each kernel of AlexNet takes: forward (F), data gradient (BD), filter "
        "gradient (BF). Dashed: what the paper's late kernels take at most.",
        scaled_marks,
    ),
    claims={"middle_layers_most": middle_layers_most, "late_layers_little": late_layers_little},
)
