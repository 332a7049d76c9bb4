"""What does a limit do to single kernels of AlexNet? (Figures 1, 6, 10 and 12)

The workspace that they need undivided, the divisions of conv2 and their gain, and the kernels that
get most of a workspace that is shared out (WD).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro import plots
from repro.experiments import judge
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, deterministic, or_none, unsure
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import Entry, divide, front, mib, ms
from repro.experiments.microconv.runs import AMPLE, LIMITS_MIB, MIB, PAPER, SMALL, Cell
from repro.experiments.query import Results
from repro.records import Record

if TYPE_CHECKING:
    from repro.microconv import Division

# Figure 1: each layer's workspace and time, undivided.

_KEPT = ("data (MiB)", "filters (MiB)")


def _layers(results: Results) -> pd.DataFrame:
    """AlexNet's layers, one a row: MiB of data and filters, MiB and ms of its kernels by limit.

    Data and filters with their gradients. NaN where a kernel does not fit undivided.
    """
    rows = []
    for entry in measured.entries(measured.alexnet(results)):
        row = {"layer": entry["layer"], "data (MiB)": 2 * entry["data_bytes"] / MIB}
        row["filters (MiB)"] = 2 * entry["filter_bytes"] / MIB
        for cell in map(Cell, LIMITS_MIB):
            best = divide(entry, cell.limit_mib(results.profile), "undivided")
            told = cell.told(results.profile)
            row[f"{told}: workspace"] = best.workspace_bytes / MIB if best else math.nan
            row[f"{told}: ms"] = 1e3 * best.time_s if best else math.nan
        rows.append(row)
    frame = pd.DataFrame(rows, columns=None if rows else ["layer", *_KEPT])
    sums = dict.fromkeys(frame.columns[3:], lambda own: own.sum(skipna=False))
    return frame.groupby("layer").agg({**dict.fromkeys(_KEPT, "first"), **sums})


def figure1_table(results: Results) -> list[dict[str, Any]]:
    """Workspace and time of the best undivided algorithms at each limit, by layer."""
    rows = _layers(results).map("{:,.1f}".format).replace("nan", "does not fit").reset_index()
    return rows.to_dict("records")


def figure1(results: Results) -> "plots.Figure":
    """Each layer's memory and time at every limit; no bar where a kernel does not fit."""
    figure, axes = plots.new_axes(1, 2, 10.5, 3.7)
    figure.suptitle(runs.title_of(measured.alexnet(results)), fontsize=11)
    frame = _layers(results)
    for axis, times, unit in zip(axes[0], (False, True), ("MiB", "ms"), strict=True):
        shown = frame.loc[:, frame.columns.str.endswith(": ms") == times]
        first = 2 * times  # data and filters have the first two colours, a limit the same in both
        _draw_bars(axis, shown, first, kind="bar", rot=0, xlabel="", ylabel=unit)
    return figure


def _draw_bars(
    axis: "plots.Axes", frame: pd.DataFrame, first: int = 0, *, kind: str, **options: Any
) -> None:
    """Draw the rows of a frame as groups of bars, a colour a column; nothing of an empty frame."""
    if frame.size:
        colours = plots.PALETTE[first : first + frame.shape[1]]
        frame.astype(float).plot(
            ax=axis, kind=kind, width=0.8, edgecolor="white", color=colours, **options
        )
        axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    axis.grid(axis="y" if kind == "barh" else "x", visible=False)


def workspace_as_large(results: Results) -> Cases:
    """The workspace of all fastest undivided kernels over data and filters of all layers."""
    frame, cell = _layers(results), Cell(AMPLE)
    if frame.empty:
        raise NotRun("no records")
    told = cell.told(results.profile)
    taken = frame[f"{told}: workspace"].sum(skipna=False)
    if math.isnan(taken):
        raise NotRun(f"not every kernel fits into {cell.limit_mib(results.profile)} MiB undivided")
    kept = frame[[*_KEPT]].sum().sum()
    text = f"{taken:,.1f} MiB of workspace within {told}, for {kept:,.1f} of data and filters:"
    over = max(taken, 1 / MIB) / kept  # a byte, where none is taken
    return {"AlexNet": deterministic(over, log=True).named(text)}


def fast_needs_more(results: Results) -> Cases:
    """Whether the fastest undivided algorithm of each kernel needs more than the small limit.

    The fastest within the ample limit; the evidence names the one that fits into the small one.
    """
    kernels = measured.entries(measured.alexnet(results))
    small, ample = (Cell(limit).limit_mib(results.profile) for limit in (SMALL, AMPLE))
    needs: dict[str, Exact] = {}
    for entry in kernels:
        if not (fastest := divide(entry, ample, "undivided")):
            continue
        instead = "nothing fits"
        if fitting := divide(entry, small, "undivided"):
            slower = fitting.time_s / fastest.time_s
            instead = f"{fitting.parts[0][1]} fits and takes ×{slower:.2f}"
        more = fastest.workspace_bytes > small * MIB
        text = f"needs more ({instead})" if more else "needs no more"
        needs[measured.label(entry)] = Exact(more, text)
    if kernels and not needs:
        raise NotRun(f"no kernel fits into {ample} MiB undivided")
    return needs


FIGURE1 = runs.artefact(
    "figure1",
    plan=lambda profile, chosen: runs.alexnet_kernels(profile),
    rows=figure1_table,
    draw=figure1,
    claims={"workspace_as_large": workspace_as_large, "fast_needs_more": fast_needs_more},
)


# Figure 6: the divisions of conv2 that are worth having.


def conv2_front(results: Results) -> "tuple[Entry | None, list[Division], str]":
    """AlexNet's second convolution, forward, its Pareto front, and the title of its figures."""
    record = results.first("candidates", layer="conv2")
    title = runs.title_of(record, f"that of {runs.CAFFES}", "conv2 of ")
    entry = next(iter(measured.entries(record)), None)
    return entry, front(entry, PAPER["figure6"]["max_workspace_mib"]) if entry else [], title


def figure6_table(results: Results) -> list[dict[str, Any]]:
    """The desirable divisions of conv2, forward."""
    return [
        {"workspace (MiB)": mib(d.workspace_bytes), "time (ms)": ms(d.time_s), "division": str(d)}
        for d in conv2_front(results)[1]
    ]


def draw_front(
    entry: Entry | None, divisions: "Sequence[Division]", title: str, limit_mib: float | None = None
) -> "plots.Figure":
    """Draw a kernel's Pareto front, and the division behind every point as a bar.

    A limit is a line, with a ring around the point chosen.
    """
    figure, axes = plots.new_axes(1, 2, 10.5, max(3.4, 1.6 + 0.3 * len(divisions)))
    curve, bars = axes[0]
    points = [(d.workspace_bytes / MIB, 1e3 * d.time_s) for d in divisions]
    if points:
        style: dict[str, Any] = {"color": plots.OURS, "drawstyle": "steps-post"}
        curve.plot(*zip(*points, strict=True), "o-", label="desirable divisions", **style)
    if entry:
        own = entry["native_bytes"] / MIB, 1e3 * entry["native_s"]
        curve.plot(*own, "s", color=plots.INK, ms=8, label="torch's own")
    if limit_mib is not None:
        curve.axvline(limit_mib, ls="--", lw=1.5, label="limit", color="#9a4a22")
        for point in [point for point in points if point[0] <= limit_mib][-1:]:
            curve.plot(*point, "o", ms=14, mfc="none", mew=2, color="#9a4a22", label="chosen")
    curve.set(xlabel="workspace (MiB)", ylabel="time (ms)", title="Pareto front")
    curve.set_ylim(bottom=0)
    looks = plots.styles(sorted({name for division in divisions for _, name in division.parts}))
    for row, division in enumerate(divisions):
        left = 0
        for size, name in division.parts:
            colour: dict[str, Any] = {"color": looks[name]["color"], "label": name, "alpha": 0.6}
            bars.barh(row, size, left=left, height=0.7, edgecolor="white", **colour)
            left += size
    bars.set_yticks(range(len(divisions)), [f"{size:.2f}" for size, _ in points])
    bars.set(xlabel="samples of the mini-batch", ylabel="workspace (MiB)", title="division")
    plots.legend_below(figure, 4)
    figure.suptitle(title, fontsize=11)
    return figure


FIGURE6 = runs.artefact(
    "figure6",
    plan=lambda profile, chosen: list(
        dict.fromkeys([runs.conv2(profile), *runs.alexnet_kernels(profile)])
    ),
    rows=figure6_table,
    draw=lambda results: draw_front(*conv2_front(results)),
)


# Figure 10: the divisions of conv2 as they run.

FIGURE10_LIMITS = (SMALL, PAPER["figure10"]["limit_mib"])
Ran = tuple[int, str]  # limit in MiB, policy


def _ran(record: Record) -> dict[Ran, dict[str, Any]]:
    return {(row["limit_mib"], row["policy"]): row for row in record.metrics["checked"]}


def conv2_gain(results: Results, cell: Ran) -> Estimate:
    """How much faster conv2 runs than undivided, each in turns with torch's own, by processes."""
    gains = []
    for record in results.ok("candidates", layer="conv2"):
        divided, undivided = _ran(record).get(cell), _ran(record).get((cell[0], "undivided"))
        if divided is None or undivided is None:
            raise NotRun(f"nothing undivided fits into {cell[0]} MiB, or nothing divided")
        before, after = (row["time_s"] / row["native_s"] for row in (undivided, divided))
        gains.append(1.0 if divided["parts"] == undivided["parts"] else before / after)
    return deterministic(1.0, log=True) if set(gains) == {1.0} else judge.mean_of(gains, log=True)


def conv2_rows(results: Results) -> Iterator[dict[str, Any]]:
    """The divisions of conv2 by limit and policy, those of the micro-batch sizes that it has."""
    from repro.microconv import Division

    for record in results.ok("candidates", layer="conv2")[:1]:
        ran, widest = _ran(record), record.config["policy"]
        for cell in itertools.product(FIGURE10_LIMITS, runs.POLICIES):
            if cell[1] == "all" != widest:
                continue
            found = ran.get(cell, {})
            paper = PAPER["figure10"]["speedup_all"] if cell == (64, widest) else None
            row = {"limit": f"{cell[0]} MiB", "policy": cell[1], "paper": paper}
            papers = PAPER["figure10"]["workspace"] if cell[0] == 64 else {}
            row["workspace, paper"] = papers.get(cell[1])
            row["division"] = str(Division(0.0, 0, found["parts"])) if found else "does not fit"
            row["workspace (MiB)"] = mib(found.get("workspace_bytes"))
            row["time (ms)"] = ms(found.get("time_s"))
            row["torch's own (ms)"] = ms(found.get("native_s"))
            gain = None if cell[1] == "undivided" else or_none(conv2_gain, results, cell)
            yield row | {measured.UNDIVIDED: gain}


def figure10(results: Results) -> "plots.Figure":
    """The speed-ups of conv2's divisions over undivided within the same limit."""
    told, title = "speed-up of conv2, forward", conv2_front(results)[2]
    return measured.draw(conv2_rows(results), ["limit", "policy"], "division", told, title)


def _bound_cell(results: Results) -> tuple[Ran, dict[str, Any], Entry]:
    """The cell of conv2 at the largest limit that excludes the fastest undivided algorithm."""
    record = results.need("candidates", layer="conv2")
    entry, ran = measured.entries(record)[0], _ran(record)
    policy = "all" if any(name == "all" for _, name in ran) else "powerOfTwo"
    fastest = divide(entry, AMPLE, "undivided")
    need = fastest.workspace_bytes / MIB if fastest else AMPLE
    bound = [limit for limit in FIGURE10_LIMITS if need > limit]
    if not bound:
        needed = f"{fastest} needs {need:.1f} MiB at a mini-batch of {entry['batch']}"
        raise NotRun(f"no limit binds: the fastest undivided, {needed}")
    cell = max(bound), policy
    if cell not in ran:
        raise NotRun(f"nothing fits into {cell[0]} MiB")
    return cell, ran[cell], entry


def admits_algorithm(results: Results) -> Cases:
    """Whether the division takes an algorithm that the whole mini-batch has no room for."""
    (limit, policy), row, entry = _bound_cell(results)
    needs = {name: size / MIB for name, _, size in entry["candidates"][str(entry["batch"])]}
    needs[measured.NATIVE] = entry["native_bytes"] / MIB
    taken = sorted(measured.algorithms(row))
    admitted = [f"{name} ({needs[name]:.1f} MiB)" for name in taken if needs.get(name, 0) > limit]
    text = f"{limit} MiB, {policy}: takes {', '.join(taken)}; excluded undivided: "
    return {"conv2": Exact(bool(admitted), text + (", ".join(admitted) or "none of them"))}


def conv2_faster(results: Results) -> Cases:
    """The speed-up of conv2."""
    cell, _, _ = _bound_cell(results)
    return {"conv2": conv2_gain(results, cell).named(f"conv2, {cell[0]} MiB, {cell[1]}:")}


FIGURE10 = runs.artefact(
    "figure10",
    plan=lambda profile, chosen: [runs.conv2(profile)],
    rows=lambda results: measured.told(conv2_rows(results)),
    draw=figure10,
    claims={"admits_algorithm": admits_algorithm, "conv2_faster": conv2_faster},
)


# Figure 12: one workspace for all kernels.

FIGURE12_PAPER = PAPER["figure12"]


def share_out(record: Record | None, total_mib: float) -> "list[tuple[Entry, Division]]":
    """A network's kernels with the divisions that WD chooses; none where it can choose none."""
    from repro.microconv import assign_workspaces

    kernels = measured.entries(record)
    try:
        chosen = assign_workspaces(dict(enumerate(map(front, kernels))), int(total_mib * MIB))
    except ValueError:
        return []
    return [(entry, chosen[index]) for index, entry in enumerate(kernels)]


def _total_mib(results: Results) -> float:
    return Cell(FIGURE12_PAPER["total_mib"]).limit_mib(results.profile)


def figure12_table(results: Results) -> list[dict[str, Any]]:
    """The workspace that WD assigns to each kernel of AlexNet."""
    return [
        {
            "kernel": measured.label(entry),
            "workspace (MiB)": mib(division.workspace_bytes),
            "time (ms)": ms(division.time_s),
            "division": str(division),
        }
        for entry, division in share_out(measured.alexnet(results), _total_mib(results))
    ]


def draw_shares(record: Record | None, each_mib: float, total_mib: float) -> "plots.Figure":
    """Draw the workspace of a network's kernels under WR and under WD as paired bars."""
    kernels = measured.entries(record)
    figure, axes = plots.new_axes(1, 1, 10.5, 1.9 + 0.36 * max(3, len(kernels)))
    axis = axes[0, 0]
    frame = pd.DataFrame(index=[measured.label(entry) for entry in kernels])
    for name, divisions in (
        (f"WR, {each_mib:,.1f} MiB for each", [divide(entry, each_mib) for entry in kernels]),
        (f"WD, {total_mib:,.1f} MiB for all", [d for _, d in share_out(record, total_mib)]),
    ):
        needs = [division.workspace_bytes / MIB if division else None for division in divisions]
        frame[name] = needs or math.nan
    _draw_bars(axis, frame, kind="barh", xlabel="workspace (MiB); no bar: does not fit")
    axis.invert_yaxis()
    figure.suptitle(runs.title_of(record), fontsize=11)
    return figure


def _shared_out(results: Results) -> "list[tuple[Entry, Division]]":
    """The divisions of WD, where the total is less than the fastest divisions would take."""
    if (record := measured.alexnet(results)) is None:
        raise NotRun("no records")
    total = _total_mib(results)
    if not (chosen := share_out(record, total)):
        raise NotRun(f"not all kernels fit into {total} MiB")
    wanted = sum(front(entry)[-1].workspace_bytes for entry, _ in chosen) / MIB
    if wanted <= total:
        raise NotRun(
            f"no limit binds: the fastest divisions of all {len(chosen)} kernels take "
            f"{wanted:.1f} of {total} MiB at a mini-batch of {chosen[0][0]['batch']}"
        )
    return chosen


def middle_layers_most(results: Results) -> Cases:
    """The share of the workspace that conv2 and conv3 have, over a half."""
    needs = [(entry["layer"], d.workspace_bytes) for entry, d in _shared_out(results)]
    middle = sum(need for layer, need in needs if layer in ("conv2", "conv3"))
    share = 100 * middle / max(1, sum(need for _, need in needs))
    text = f"conv2 and conv3 hold {share:.1f} %; over a half:"
    return {"AlexNet": unsure(share - 50, unit="points", digits=1).named(text)}


def late_layers_little(results: Results) -> Cases:
    """The largest workspace of a kernel of conv4 or conv5, over the paper's."""
    needs = {measured.label(entry): d.workspace_bytes / MIB for entry, d in _shared_out(results)}
    late = {name: need for name, need in needs.items() if name.startswith(("conv4", "conv5"))}
    most, paper = max(late, key=late.__getitem__), Cell(FIGURE12_PAPER["conv4_conv5_mib"])
    text = f"the most, {most}'s {late[most]:.2f} MiB, over {paper.told(results.profile)}:"
    # A byte, where none has anything.
    over = max(late[most], 1 / MIB) / paper.limit_mib(results.profile)
    return {"AlexNet": unsure(over, log=True).named(text)}


FIGURE12 = runs.artefact(
    "figure12",
    plan=lambda profile, chosen: runs.alexnet_kernels(profile),
    rows=figure12_table,
    draw=lambda results: draw_shares(
        measured.alexnet(results), Cell(SMALL).limit_mib(results.profile), _total_mib(results)
    ),
    claims={"middle_layers_most": middle_layers_most, "late_layers_little": late_layers_little},
)
