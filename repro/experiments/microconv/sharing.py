"""Which kernels get one workspace that is shared out (WD)? (Figure 12)"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro.experiments.design import Exhibit, Results
from repro.experiments.judge import Cases, NotRun, unsure
from repro.experiments.microconv.comparing import (
    Entry,
    alexnet,
    divide,
    front,
    kernels_of,
    label,
    mib,
    ms,
)
from repro.experiments.microconv.runs import (
    CAFFES,
    MIB,
    PAPER,
    SMALL,
    alexnet_kernels,
    captioned,
    limit_of,
    title_of,
    told_limit,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.microconv import Division

FIGURE = PAPER["figure12"]


def _limit(results: Results, paper_mib: float) -> float:
    return limit_of(results.profile, "AlexNet", "WR", paper_mib)


def share_out(entries: Sequence[Entry], total_mib: float) -> "list[Division] | None":
    """The divisions that WD chooses, None where the total admits none."""
    from repro.microconv import assign_workspaces

    fronts = {index: front(entry) for index, entry in enumerate(entries)}
    try:
        chosen = assign_workspaces(fronts, int(total_mib * MIB))
    except ValueError:
        return None
    return [chosen[index] for index in range(len(entries))]


def assignment(results: Results) -> "list[tuple[Entry, Division]]":
    """AlexNet's kernels with the divisions that WD chooses; none where the total admits none.

    Raises:
        NotRun: Nothing was measured.
    """
    entries = kernels_of(alexnet(results))
    if not entries:
        raise NotRun("no records")
    chosen = share_out(entries, _limit(results, FIGURE["total_mib"])) or []
    return list(zip(entries, chosen, strict=False))


def table(results: Results) -> list[dict[str, Any]]:
    """The workspace that WD assigns to each kernel of AlexNet."""
    total = _limit(results, FIGURE["total_mib"]) * MIB
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
        for entry, division in (assignment(results) if alexnet(results) else [])
    ]


def figure(results: Results) -> "Figure":
    """The workspace of every kernel, WR at the small limit beside WD."""
    entries = kernels_of(alexnet(results))
    total, late = (_limit(results, FIGURE[key]) for key in ("total_mib", "conv4_conv5_mib"))
    chosen = share_out(entries, total) if entries else None
    drawn = draw_shares(entries, _limit(results, SMALL), total, chosen)
    title = title_of(alexnet(results), CAFFES)
    if chosen is not None:
        share = middle_share(list(zip(entries, chosen, strict=True)))
        title += f"\nWD gives conv2 and conv3 {share:.1f} % of what it gives; the paper's "
        title += f"{FIGURE['conv2_conv3_percent']} %"
        paper = f"paper: conv4 and conv5 under WD, at most {FIGURE['conv4_conv5_mib']:g} MiB"
        paper += f" ({late:g} here)" * (late != FIGURE["conv4_conv5_mib"])
        rows = [row for row, entry in enumerate(entries) if entry["layer"] in ("conv4", "conv5")]
        style: dict[str, Any] = {"color": "black", "linestyle": "--", "label": paper}
        drawn.axes[0].vlines(late, min(rows) - 0.45, max(rows) + 0.45, **style)
        drawn.legends[0].remove()
        from repro import plots

        plots.legend_below(drawn, 3)
    drawn.suptitle(title, fontsize=11)
    return drawn


def middle_share(chosen: "Sequence[tuple[Entry, Division]]") -> float:
    """The share that conv2 and conv3 have of the workspace that is taken, in percent."""
    whole = sum(division.workspace_bytes for _, division in chosen)
    main = sum(d.workspace_bytes for e, d in chosen if e["layer"] in ("conv2", "conv3"))
    return 100 * main / max(1, whole)


def draw_shares(
    entries: Sequence[Entry],
    each_mib: float,
    total_mib: float,
    chosen: "Sequence[Division] | None",
    largest_mib: float | None = None,
) -> "Figure":
    """Draw the workspace of kernels under WR and under WD as paired bars.

    Args:
        entries: The kernels.
        each_mib: The limit of each under WR.
        total_mib: The limit of all together under WD.
        chosen: What WD gives to each kernel, None where the total admits nothing.
        largest_mib: The right end of the axis; by default that of the bars.
    """
    from repro import plots
    from repro.experiments.microconv.drawing import LIMITS, UNFIT, draw_bars

    figure, axes = plots.new_axes(1, 1, 10.5, 1.9 + 0.36 * max(3, len(entries)))
    axis = axes[0, 0]
    columns = {
        f"WR, {round(each_mib, 1):g} MiB for each": [divide(entry, each_mib) for entry in entries],
        f"WD, {round(total_mib, 1):g} MiB for all": chosen or [None] * len(entries),
    }
    frame = pd.DataFrame(index=[label(entry) for entry in entries])
    for side, (name, divisions) in enumerate(columns.items()):
        needs = [division.workspace_bytes / MIB if division else None for division in divisions]
        frame[f"{name}: {sum(n or 0 for n in needs):,.1f} MiB in all"] = needs
        for row, need in enumerate(needs):
            text, ink = ("does not fit", UNFIT) if need is None else (f"{need:.1f}", "black")
            style: dict[str, Any] = {"va": "center", "fontsize": 7, "color": ink}
            axis.text(need or 0, row + 0.4 * side - 0.2, f" {text}", **style)
    draw_bars(axis, frame, (LIMITS[0], LIMITS[2]), kind="barh")
    axis.set_ylim(max(1, len(entries)) - 0.45, -0.55)
    axis.set_xlim(0, largest_mib)
    axis.set_xlabel("workspace (MiB)")
    plots.legend_below(figure, 3)
    return figure


def _shared_out(results: Results) -> "list[tuple[Entry, Division]]":
    """What WD assigns, where the total is less than the fastest divisions would take.

    Raises:
        NotRun: It excludes nothing, or admits none.
    """
    chosen, total = assignment(results), _limit(results, FIGURE["total_mib"])
    if not chosen:
        raise NotRun(f"not all kernels fit into {total} MiB")
    wanted = sum(front(entry)[-1].workspace_bytes for entry, _ in chosen) / MIB
    if wanted <= total:
        raise NotRun(
            f"no limit binds: the fastest divisions of all {len(chosen)} kernels take "
            f"{wanted:.1f} of {total} MiB at a mini-batch of {chosen[0][0]['batch']}"
        )
    return chosen


# The division follows times that were measured once: the spread of both is not known.


def middle_layers_most(results: Results) -> Cases:
    """The share of the workspace that conv2 and conv3 have, over a half."""
    share = middle_share(_shared_out(results))
    text = f"conv2 and conv3 hold {share:.1f} %; over a half:"
    return {"AlexNet": replace(unsure(share - 50, unit="points", digits=1), label=text)}


def late_layers_little(results: Results) -> Cases:
    """The largest workspace of a kernel of conv4 or conv5, over the paper's."""
    needs = {label(e): d.workspace_bytes / MIB for e, d in _shared_out(results)}
    late = {name: need for name, need in needs.items() if name.startswith(("conv4", "conv5"))}
    if not late:
        raise NotRun("no records of conv4 and conv5")
    most, paper = max(late, key=late.__getitem__), FIGURE["conv4_conv5_mib"]
    told = told_limit(results.profile, "AlexNet", "WR", paper)
    text = f"the most, {most}'s {late[most]:.2f} MiB, over {told}:"
    return {"AlexNet": replace(unsure(late[most] / _limit(results, paper), log=True), label=text)}


FIGURE12 = Exhibit(
    long=True,
    runs=lambda profile, chosen: alexnet_kernels(profile),
    table=table,
    figure=figure,
    caption=captioned(
        "The workspace that each kernel of AlexNet takes: forward (F), data gradient (BD), filter "
        "gradient (BF). Dashed: what the paper's late kernels take at most.",
        caffes=True,
        scaled=True,
    ),
    claims={"middle_layers_most": middle_layers_most, "late_layers_little": late_layers_little},
)
