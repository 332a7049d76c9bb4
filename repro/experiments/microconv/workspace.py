"""Which workspace do AlexNet's kernels need, and which get one that is shared out (WD)?

Figures 1 and 12.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro.experiments.judge import Cases, Exact, NotRun, deterministic, unsure
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import Entry, divide, front, mib, ms
from repro.experiments.microconv.runs import MIB, PAPER
from repro.experiments.query import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.microconv import Division


def limits_of(results: Results) -> dict[str, float]:
    """The limits of a kernel in MiB by their names, such as ``2 MiB (paper 8)``."""
    given = (results.profile, "AlexNet", "WR")
    return {runs.told_limit(*given, m): runs.limit_of(*given, m) for m in runs.LIMITS_MIB}


def _by_layer(results: Results) -> dict[str, list[Entry]]:
    kernels = measured.entries(measured.alexnet(results))
    return {k: list(own) for k, own in itertools.groupby(kernels, lambda entry: entry["layer"])}


def _undivided(
    kernels: Sequence[Entry], limit_mib: float
) -> tuple[float, float] | tuple[None, None]:
    """Bytes and seconds of the best undivided algorithms together, None where one does not fit."""
    divisions = [divide(entry, limit_mib, "undivided") for entry in kernels]
    fitting = [division for division in divisions if division]
    if not divisions or len(fitting) < len(divisions):
        return None, None
    return sum(d.workspace_bytes for d in fitting), sum(d.time_s for d in fitting)


def _memory(kernels: Sequence[Entry]) -> tuple[int, int]:
    """Bytes of a layer's data (which it reads and writes) and filters, gradients included."""
    return 2 * kernels[0]["data_bytes"], 2 * kernels[0]["filter_bytes"]


def figure1_table(results: Results) -> list[dict[str, Any]]:
    """Workspace and time of the best undivided algorithms at each limit, by layer."""
    rows = []
    for layer, kernels in _by_layer(results).items():
        data, filters = _memory(kernels)
        row = {"layer": layer, "data (MiB)": mib(data), "filters (MiB)": mib(filters)}
        for told, limit in limits_of(results).items():
            workspace, time = _undivided(kernels, limit)
            row[f"{told}: workspace"] = "does not fit" if time is None else mib(workspace)
            row[f"{told}: ms"] = ms(time)
        rows.append(row)
    return rows


def figure1(results: Results) -> "Figure":
    """Each layer's memory and time at every limit; no bar where a kernel does not fit."""
    from repro import plots
    from repro.experiments.microconv.drawing import LIMITS, draw_bars

    layers = _by_layer(results)
    memory = pd.DataFrame(map(_memory, layers.values()), list(layers), ["data", "filters"])
    time = pd.DataFrame(index=list(layers))
    for told, limit in limits_of(results).items():
        best = [_undivided(kernels, limit) for kernels in layers.values()]
        memory[f"best within {told}"] = [size for size, _ in best]
        time[f"best within {told}"] = [seconds for _, seconds in best]
    figure, axes = plots.new_axes(1, 2, 10.5, 3.7)
    figure.suptitle(runs.title_of(measured.alexnet(results), runs.CAFFES), fontsize=11)
    draw_bars(axes[0, 0], memory.astype(float) / MIB, ("#d3d8df", "#8a93a0", *LIMITS))
    draw_bars(axes[0, 1], 1e3 * time.astype(float), LIMITS)
    axes[0, 0].set(title="data, filters and workspace", ylabel="MiB")
    axes[0, 1].set(title="time, forward and backward", ylabel="ms")
    plots.legend_below(figure, 5)
    return figure


def workspace_as_large(results: Results) -> Cases:
    """The workspace of all fastest undivided kernels over data and filters of all layers."""
    told, ample = list(limits_of(results).items())[-1]
    layers = _by_layer(results).values()
    if not layers:
        raise NotRun("no records")
    needs = [_undivided(kernels, ample)[0] for kernels in layers]
    if None in needs:
        raise NotRun(f"not every kernel fits into {ample} MiB undivided")
    taken, kept = sum(need or 0 for need in needs), sum(sum(_memory(own)) for own in layers)
    text = f"{mib(taken)} MiB of workspace within {told}, for {mib(kept)} of data and filters:"
    return {"AlexNet": replace(deterministic(max(1, taken) / kept, log=True), label=text)}


def fast_needs_more(results: Results) -> Cases:
    """Whether the fastest undivided algorithm of each kernel needs more than the small limit.

    The fastest is that within the ample limit; kernels for which there is none are left out. The
    evidence names the algorithm that fits into the small limit, and how many times as slow it is.
    """
    record = measured.alexnet(results)
    if record is None:
        raise NotRun("no records")
    small, *_, ample = limits_of(results).values()
    needs: dict[str, Exact] = {}
    for entry in measured.entries(record):
        if not (fastest := divide(entry, ample, "undivided")):
            continue
        instead = "nothing fits"
        if fitting := divide(entry, small, "undivided"):
            slower = f"×{fitting.time_s / fastest.time_s:.2f}"
            instead = f"{fitting.parts[0][1]} fits and takes {slower}"
        more = fastest.workspace_bytes > small * MIB
        text = f"needs more ({instead})" if more else "needs no more"
        needs[measured.label(entry)] = Exact(more, text)
    if not needs:
        raise NotRun(f"no kernel fits into {ample} MiB undivided")
    return needs


FIGURE1 = runs.artefact(
    "figure1",
    plan=lambda profile, chosen: runs.alexnet_kernels(profile),
    rows=figure1_table,
    draw=figure1,
    claims={"workspace_as_large": workspace_as_large, "fast_needs_more": fast_needs_more},
)


FIGURE = PAPER["figure12"]


def _limit(results: Results, paper_mib: float) -> float:
    return runs.limit_of(results.profile, "AlexNet", "WR", paper_mib)


def share_out(kernels: Sequence[Entry], total_mib: float) -> "list[Division]":
    """The divisions that WD chooses; none where the total admits none."""
    from repro.microconv import assign_workspaces

    fronts = {index: front(entry) for index, entry in enumerate(kernels)}
    try:
        chosen = assign_workspaces(fronts, int(total_mib * MIB))
    except ValueError:
        return []
    return [chosen[index] for index in range(len(kernels))]


def assignment(results: Results) -> "list[tuple[Entry, Division]]":
    """AlexNet's kernels with the divisions that WD chooses; none where it can choose none."""
    kernels = measured.entries(measured.alexnet(results))
    chosen = share_out(kernels, _limit(results, FIGURE["total_mib"])) if kernels else []
    return list(zip(kernels, chosen, strict=False))


def middle_share(chosen: "Sequence[tuple[Entry, Division]]") -> float:
    """The share that conv2 and conv3 have of the workspace that is taken, in percent."""
    whole = sum(division.workspace_bytes for _, division in chosen)
    main = sum(d.workspace_bytes for e, d in chosen if e["layer"] in ("conv2", "conv3"))
    return 100 * main / max(1, whole)


def figure12_table(results: Results) -> list[dict[str, Any]]:
    """The workspace that WD assigns to each kernel of AlexNet."""
    total = _limit(results, FIGURE["total_mib"]) * MIB
    return [
        {
            "kernel": measured.label(entry),
            "workspace (MiB)": mib(division.workspace_bytes),
            "share of the limit": f"{100 * division.workspace_bytes / total:.1f} %",
            "time (ms)": ms(division.time_s),
            "torch's own (ms)": ms(entry["native_s"]),
            "division": str(division),
        }
        for entry, division in assignment(results)
    ]


def figure12(results: Results) -> "Figure":
    """The workspace of every kernel, by WR at the small limit and by WD."""
    kernels, title = (
        measured.entries(measured.alexnet(results)),
        runs.title_of(measured.alexnet(results), runs.CAFFES),
    )
    if chosen := assignment(results):
        paper, share = FIGURE["conv2_conv3_percent"], middle_share(chosen)
        title += f"\nWD gives conv2 and conv3 {share:.1f} % of its total; the paper's {paper} %"
    total = _limit(results, FIGURE["total_mib"])
    drawn = draw_shares(kernels, _limit(results, runs.SMALL), total)
    drawn.suptitle(title, fontsize=11)
    return drawn


def draw_shares(
    kernels: Sequence[Entry], each_mib: float, total_mib: float, largest_mib: float | None = None
) -> "Figure":
    """Draw the workspace of kernels under WR and under WD as paired bars.

    Args:
        kernels: One pair each.
        each_mib: The limit of each under WR.
        total_mib: The limit of all together under WD.
        largest_mib: The right end of the axis; by default that of the bars.
    """
    from repro import plots
    from repro.experiments.microconv.drawing import LIMITS, draw_bars

    figure, axes = plots.new_axes(1, 1, 10.5, 1.9 + 0.36 * max(3, len(kernels)))
    axis = axes[0, 0]
    shared: Sequence[Division | None] = share_out(kernels, total_mib) or [None] * len(kernels)
    frame = pd.DataFrame(index=[measured.label(entry) for entry in kernels])
    for name, divisions in (
        (f"WR, {round(each_mib, 1):g} MiB for each", [divide(e, each_mib) for e in kernels]),
        (f"WD, {round(total_mib, 1):g} MiB for all", shared),
    ):
        needs = [division.workspace_bytes / MIB if division else None for division in divisions]
        unfit = f", {needs.count(None)} kernels do not fit" * (None in needs)
        frame[f"{name}: {sum(n or 0 for n in needs):,.1f} MiB in all{unfit}"] = needs
    draw_bars(axis, frame, (LIMITS[0], LIMITS[2]), kind="barh")
    axis.set_ylim(max(1, len(kernels)) - 0.45, -0.55)
    axis.set_xlim(0, largest_mib)
    axis.set_xlabel("workspace (MiB)")
    plots.legend_below(figure, 3)
    return figure


def _shared_out(results: Results) -> "list[tuple[Entry, Division]]":
    """The divisions of WD, where the total is less than the fastest divisions would take.

    They follow times that were measured once: the spread of any number made of them is not known.
    """
    if measured.alexnet(results) is None:
        raise NotRun("no records")
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


def middle_layers_most(results: Results) -> Cases:
    """The share of the workspace that conv2 and conv3 have, over a half."""
    share = middle_share(_shared_out(results))
    text = f"conv2 and conv3 hold {share:.1f} %; over a half:"
    return {"AlexNet": replace(unsure(share - 50, unit="points", digits=1), label=text)}


def late_layers_little(results: Results) -> Cases:
    """The largest workspace of a kernel of conv4 or conv5, over the paper's."""
    needs = {measured.label(entry): d.workspace_bytes / MIB for entry, d in _shared_out(results)}
    late = {name: need for name, need in needs.items() if name.startswith(("conv4", "conv5"))}
    if not late:
        raise NotRun("no records of conv4 and conv5")
    most, paper = max(late, key=late.__getitem__), FIGURE["conv4_conv5_mib"]
    told = runs.told_limit(results.profile, "AlexNet", "WR", paper)
    text = f"the most, {most}'s {late[most]:.2f} MiB, over {told}:"
    over = max(late[most], 1 / MIB) / _limit(results, paper)  # a byte, where none has anything
    return {"AlexNet": replace(unsure(over, log=True), label=text)}


FIGURE12 = runs.artefact(
    "figure12",
    plan=lambda profile, chosen: runs.alexnet_kernels(profile),
    rows=figure12_table,
    draw=figure12,
    claims={"middle_layers_most": middle_layers_most, "late_layers_little": late_layers_little},
)
