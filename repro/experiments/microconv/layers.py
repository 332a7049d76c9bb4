"""Does dividing one convolution let a faster algorithm into a limit? (Figures 1, 6 and 10)

From the layers of AlexNet: what undivided algorithms need, which divisions are worth having, and
what they gain for the second convolution.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, exactly, mean_of
from repro.experiments.microconv.describing import CAFFES, caffe_marks, scaled_marks, whose
from repro.experiments.microconv.settings import (
    BATCHES,
    LIMITS_MIB,
    MIB,
    NATIVE,
    PAPER,
    POLICIES,
    Entry,
    alexnet_kernels,
    best_candidates,
    candidates_of,
    conv2,
    conv2_entry,
    divide,
    front,
    kernels_of,
    label,
    limit_of,
    mib,
    ms,
    policies,
    times,
    told_limit,
)
from repro.experiments.query import Results
from repro.experiments.view import caption
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from repro.microconv import Division

SMALL, AMPLE = LIMITS_MIB[0], LIMITS_MIB[-1]
Parts = Sequence[tuple[int, str]]  # of a division: sizes and algorithms


def alexnet_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the measurement of AlexNet's kernels."""
    return alexnet_kernels(profile, policies(profile, "AlexNet")[-1])


def conv2_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the measurement of AlexNet's second convolution."""
    return [conv2(profile)]


def limits_of(results: Results) -> dict[str, float]:
    """Return the limit of a kernel in MiB by what it is called, such as ``2 MiB (paper 8)``."""
    return {
        told_limit(results.profile, "AlexNet", "WR", limit): limit_of(
            results.profile, "AlexNet", "WR", limit
        )
        for limit in LIMITS_MIB
    }


def _undivided(
    entries: Sequence[Entry], limit_mib: float
) -> tuple[float, float] | tuple[None, None]:
    """Return bytes and seconds of the best undivided algorithms together, if all kernels fit."""
    divisions = [divide(entry, limit_mib, "undivided") for entry in entries]
    fitting = [division for division in divisions if division is not None]
    if not divisions or len(fitting) < len(divisions):
        return None, None
    return sum(d.workspace_bytes for d in fitting), sum(d.time_s for d in fitting)


def _by_layer(results: Results) -> dict[str, list[Entry]]:
    grouped: dict[str, list[Entry]] = {}
    for entry in kernels_of(best_candidates(results, "AlexNet")):
        grouped.setdefault(entry["layer"], []).append(entry)
    return grouped


def layer_memory(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """Return bytes of a layer's data and of its filters, gradients included; None of old records.

    Data are what the convolution reads and writes, each beside its gradient in training.
    """
    if any("data_bytes" not in entry for entry in entries):
        return None
    return 2 * entries[0]["data_bytes"], 2 * entries[0]["filter_bytes"]


def figure1_table(results: Results) -> list[dict[str, Any]]:
    """Return, by layer, workspace and time of the best undivided algorithms at each limit."""
    rows = []
    for layer, entries in _by_layer(results).items():
        row: dict[str, Any] = {"layer": layer, "kernels": len(entries)}
        memory = layer_memory(entries)
        row |= {"data (MiB)": mib(memory and memory[0]), "filters (MiB)": mib(memory and memory[1])}
        for told, limit in limits_of(results).items():
            workspace, time = _undivided(entries, limit)
            row[f"{told}: workspace"] = "does not fit" if time is None else mib(workspace)
            row[f"{told}: ms"] = ms(time)
        row["torch's own: MiB"] = mib(sum(entry["native_bytes"] for entry in entries))
        row["torch's own: ms"] = ms(sum(entry["native_s"] for entry in entries))
        rows.append(row)
    return rows


def figure1(results: Results) -> "Figure":
    """Draw each layer's memory and time at every limit, side by side."""
    from repro import plots
    from repro.experiments.microconv.drawing import LIMITS, UNFIT

    layers = _by_layer(results)
    figure, axes = plots.new_axes(1, 2, 10.5, 3.7)
    title = whose(best_candidates(results, "AlexNet"), CAFFES)
    figure.suptitle(title, fontsize=11)
    memory, time = axes[0]
    kept = np.array([layer_memory(entries) or (0, 0) for entries in layers.values()])
    kept = kept.reshape(-1, 2).T / MIB  # data, then filters: MiB of each layer
    positions, width = np.arange(len(layers)), 0.27
    told_limits = zip(limits_of(results).items(), LIMITS, strict=True)
    for number, ((told, limit), colour) in enumerate(told_limits):
        lefts = positions + (number - 1) * width
        below = np.zeros(len(layers))
        for row, name, shade in ((0, "data", "#d3d8df"), (1, "filters", "#8a93a0")):
            memory.bar(lefts, kept[row], 0.9 * width, bottom=below, color=shade, label=name)
            below = below + kept[row]
        for left, base, entries in zip(lefts, below, layers.values(), strict=True):
            workspace, seconds = _undivided(entries, limit)
            if workspace is None or seconds is None:
                style = {"rotation": 90, "fontsize": 7, "color": UNFIT, "ha": "center"}
                time.text(left, 0, " does not fit", va="bottom", **style)
                continue
            style = {"color": colour, "label": f"best within {told}"}
            memory.bar(left, workspace / MIB, 0.9 * width, bottom=base, **style)
            time.bar(left, 1e3 * seconds, 0.9 * width, **style)
    for axis in (memory, time):
        axis.set_xticks(positions, list(layers))
        axis.grid(axis="x", visible=False)
        axis.set_ylim(bottom=0)
    memory.set(title="memory: workspace on top", ylabel="MiB")
    time.set(title="time, forward and backward", ylabel="ms")
    plots.legend_below(figure, 5)
    return figure


def workspace_beside_memory(results: Results, limit_mib: float) -> tuple[int, int]:
    """Return bytes of workspace of all fastest undivided kernels, and of the layers' memory.

    Args:
        results: Of AlexNet's kernels.
        limit_mib: Of each kernel.

    Raises:
        NotRun: Nothing was measured, or not every kernel fits.
    """
    layers = _by_layer(results)
    if not layers:
        raise NotRun("no records")
    memory = [layer_memory(entries) for entries in layers.values()]
    pairs = [_undivided(entries, limit_mib) for entries in layers.values()]
    if None in memory:
        raise NotRun("its records are from before the layers' memory was kept")
    if any(workspace is None for workspace, _ in pairs):
        raise NotRun(f"not every kernel fits into {limit_mib} MiB undivided")
    kept = sum(sum(parts) for parts in memory if parts)
    return int(sum(workspace for workspace, _ in pairs if workspace)), kept


def workspace_as_large(results: Results) -> Cases:
    """The workspace of all kernels over the memory of all layers."""
    told, ample = list(limits_of(results).items())[-1]
    taken, kept = workspace_beside_memory(results, ample)
    share = exactly(max(1, taken) / kept, log=True)
    label = f"{mib(taken)} MiB of workspace within {told}, for {mib(kept)} of data and filters:"
    return {"AlexNet": replace(share, label=label)}


def kernels_that_need_more(
    record: Record, small_mib: float, ample_mib: float
) -> list[tuple[str, bool, str]]:
    """Return of each kernel whether its fastest algorithm needs more than the small limit gives.

    Algorithms run undivided, and the fastest is that within the ample limit; kernels for which
    there is none are left out. Last stands which algorithm fits into the small limit and how many
    times as slow it is.
    """
    needs = []
    for entry in kernels_of(record):
        fastest = divide(entry, ample_mib, "undivided")
        if fastest is None:
            continue
        fitting = divide(entry, small_mib, "undivided")
        instead = "nothing fits"
        if fitting is not None:
            ((_, algorithm),) = fitting.parts
            instead = f"{algorithm} fits and takes ×{fitting.time_s / fastest.time_s:.2f}"
        needs.append((label(entry), fastest.workspace_bytes > small_mib * MIB, instead))
    return needs


def fast_needs_more(results: Results) -> Cases:
    """Whether the fastest undivided algorithm of each kernel needs more than the small limit."""
    record = best_candidates(results, "AlexNet")
    if record is None:
        raise NotRun("no records")
    small, *_, ample = limits_of(results).values()
    needs = kernels_that_need_more(record, small, ample)
    if not needs:
        raise NotRun(f"no kernel fits into {ample} MiB undivided")
    return {
        name: Exact(more, f"needs more ({instead})" if more else "needs no more")
        for name, more, instead in needs
    }


def _figure1_marks(results: Results) -> Iterator[str]:
    yield from scaled_marks(results)
    record = best_candidates(results, "AlexNet")
    limits = list(limits_of(results))
    small, *_, ample = limits_of(results).values()
    if record is not None:
        needs = kernels_that_need_more(record, small, ample)
        if needs and not any(more for _, more, _ in needs):
            yield (
                f"All limits show the same: of no kernel the fastest algorithm needs more than "
                f"{limits[0]}."
            )


FIGURE1 = Exhibit(
    long=True,
    runs=alexnet_runs,
    table=figure1_table,
    figure=figure1,
    caption=caption(
        "The best undivided algorithms of each layer within a limit for each kernel: workspace, on "
        "top of data and filters with gradients, and the sum of median times.",
        _figure1_marks,
    ),
    claims={"workspace_as_large": workspace_as_large, "fast_needs_more": fast_needs_more},
)


def figure6_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the measurements of conv2, and of all kernels for the size of their fronts."""
    return list(dict.fromkeys(conv2_runs(profile, chosen) + alexnet_runs(profile, chosen)))


def _conv2_front(results: Results) -> "list[Division]":
    entry = conv2_entry(results)
    return [] if entry is None else front(entry, PAPER["figure6"]["max_workspace_mib"])


def figure6_table(results: Results) -> list[dict[str, Any]]:
    """Return the desirable divisions of conv2, forward."""
    return [
        {
            "point": number + 1,
            "workspace (MiB)": f"{division.workspace_bytes / MIB:,.2f}",
            "time (ms)": ms(division.time_s),
            "division": str(division),
        }
        for number, division in enumerate(_conv2_front(results))
    ]


def figure6(results: Results) -> "Figure":
    """Draw conv2's Pareto front."""
    figure = draw_front(conv2_entry(results), _conv2_front(results))
    figure.suptitle(_conv2s(results), fontsize=11)
    return figure


def _conv2s(results: Results) -> str:
    record = results.first("candidates", layer="conv2")
    return whose(record, f"that of {CAFFES}", "conv2 of ")


def draw_front(
    entry: Entry | None,
    divisions: "Sequence[Division]",
    limit_mib: float | None = None,
    chosen: int | None = None,
) -> "Figure":
    """Draw a kernel's Pareto front, and the division behind every point as a bar.

    The axes are those of the whole front, whatever the limit.

    Args:
        entry: The kernel, None where nothing was measured.
        divisions: Its desirable divisions, ascending in workspace.
        limit_mib: Drawn as a line.
        chosen: Which point is marked.
    """
    from repro import plots
    from repro.experiments.microconv.drawing import POLICIES, TORCHS, UNFIT

    figure, axes = plots.new_axes(1, 2, 10.5, max(3.4, 1.6 + 0.3 * len(divisions)))
    curve, bars = axes[0]
    points = [(d.workspace_bytes / MIB, 1e3 * d.time_s) for d in divisions]
    shown = list(points)
    if points:
        style = {"color": plots.OURS, "drawstyle": "steps-post"}
        curve.plot(*zip(*points, strict=True), "o-", label="desirable divisions", **style)
    for number, point in enumerate(points):
        offset = {"xytext": (5, 5), "textcoords": "offset points"}
        curve.annotate(str(number + 1), point, fontsize=8, **offset)
    if entry is not None:
        native = entry["native_bytes"] / MIB, 1e3 * entry["native_s"]
        shown.append(native)
        look = POLICIES[TORCHS]
        curve.plot(*native, look["marker"], color=look["color"], ms=8, label=TORCHS)
    if limit_mib is not None:
        curve.axvline(limit_mib, color=UNFIT, linestyle="--", linewidth=1.5, label="limit")
    if chosen is not None:
        ring = {"fillstyle": "none", "color": UNFIT, "markeredgewidth": 2}
        curve.plot(*points[chosen], "o", markersize=14, label="chosen", **ring)
    curve.set(xlabel="workspace (MiB)", ylabel="time (ms)", title="Pareto front")
    if shown:
        wide, high = (1.1 * max([*side, 1e-9]) for side in zip(*shown, strict=True))
        curve.set(xlim=(-0.03 * wide, wide), ylim=(0, high))
    _draw_divisions(bars, [division.parts for division in divisions], chosen)
    bars.set(xlabel="samples of the mini-batch", ylabel="point", title="division: number × size")
    plots.legend_below(figure, 4)
    return figure


def sizes(parts: Parts) -> str:
    """Return the micro-batch sizes of a division, such as ``2×3 + 2``."""
    counts: dict[int, int] = {}
    for size, _ in parts:
        counts[size] = counts.get(size, 0) + 1
    return " + ".join(f"{n}×{size}" if n > 1 else str(size) for size, n in counts.items())


def _draw_divisions(axis: "Axes", rows: Sequence[Parts], chosen: int | None) -> None:
    from repro.experiments.microconv.drawing import UNFIT

    named: set[str] = set()
    for row, parts in enumerate(rows):
        left = 0
        for size, name in parts:
            _draw_part(axis, row, left, size, name, named)
            left += size
        axis.text(left, row, f"  {sizes(parts)}", ha="left", va="center", fontsize=8)
    whole = max([sum(size for size, _ in parts) for parts in rows], default=1)
    axis.set_xlim(0, 1.3 * whole)
    axis.set_xticks(sorted({whole * quarter // 4 for quarter in range(5)}))
    axis.set_yticks(range(len(rows)), [str(row + 1) for row in range(len(rows))])
    if chosen is not None:
        axis.get_yticklabels()[chosen].set(color=UNFIT, weight="bold")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


def _draw_part(
    axis: "Axes", row: int, left: float, width: float, name: str, named: set[str], size: str = ""
) -> None:
    """Draw one micro-batch, with its size if it is given; the legend names each algorithm once."""
    from repro.experiments.microconv.drawing import algorithm_colours, ink_on

    colour = algorithm_colours([name])[name]
    style: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 0.6}
    label = None if name in named else name
    axis.barh(row, width, left=left, height=0.7, label=label, **style)
    named.add(name)
    if size:
        text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
        axis.text(left + width / 2, row, size, color=ink_on(colour), **text)


@check("conv2's Pareto front holds divided configurations, which no undivided one equals")
def divided_on_front(results: Results) -> tuple[bool, str]:
    """Count the divided points of conv2's front."""
    results.need("candidates", layer="conv2")
    points = _conv2_front(results)
    divided = sum(len(point.parts) > 1 for point in points)
    return divided > 0, f"{divided} of {len(points)} desirable divisions are divided"


@check(
    f"Few configurations are desirable: no front has more than the paper's largest, "
    f"{PAPER['figure6']['largest_front']} points. With few algorithms and a small mini-batch it "
    f"hardly could"
)
def few_desirable(results: Results) -> tuple[bool, str]:
    """Count the points of every measured kernel's front."""
    fronts = [front(entry) for r in results.ok("candidates") for entry in kernels_of(r)]
    if not fronts:
        raise NotRun("no records")
    largest = max(map(len, fronts))
    evidence = f"the largest of {len(fronts)} fronts has {largest} points"
    return largest <= PAPER["figure6"]["largest_front"], evidence


FIGURE6 = Exhibit(
    runs=figure6_runs,
    table=figure6_table,
    figure=figure6,
    caption=caption(
        "Every desirable division of AlexNet's second convolution, forward: no other one needs "
        "less workspace and less time. A time is a sum of medians, one for each micro-batch.",
        caffe_marks,
    ),
    checks=(few_desirable, divided_on_front),
)


FIGURE10_LIMITS = (SMALL, PAPER["figure10"]["limit_mib"])
Cell = tuple[int, str]  # limit in MiB, policy


def conv2_cells(results: Results) -> dict[Cell, dict[str, Any]]:
    """Return what was measured of conv2's divisions, by limit and policy."""
    record = results.first("candidates", layer="conv2")
    return _cells(record) if record else {}


def _cells(record: Record) -> dict[Cell, dict[str, Any]]:
    return {(row["limit_mib"], row["policy"]): row for row in record.metrics["checked"]}


def tried_policies(record: Record | None) -> tuple[str, ...]:
    """Return the policies whose micro-batch sizes a record holds; it says nothing of others."""
    if record is None:
        return ()
    return tuple(p for p in POLICIES if p != "all" or record.config["policy"] == "all")


def conv2_gain(results: Results, cell: Cell) -> Estimate:
    """Return how much faster conv2 runs than undivided, each in turns with torch's own.

    By processes; of one alone the spread is not known.

    Raises:
        NotRun: A process has no division within the limit, or none undivided.
    """
    gains = []
    for record in results.ok("candidates", layer="conv2"):
        held = _cells(record)
        divided, undivided = held.get(cell), held.get((cell[0], "undivided"))
        if divided is None or undivided is None:
            raise NotRun(f"nothing undivided fits into {cell[0]} MiB, or nothing divided")
        before, after = (row["time_s"] / row["native_s"] for row in (undivided, divided))
        gains.append(1.0 if divided["parts"] == undivided["parts"] else before / after)
    if set(gains) == {1.0}:
        return exactly(1.0, log=True)
    return mean_of(gains, log=True)


def _told_gain(results: Results, cell: Cell) -> str:
    try:
        return str(conv2_gain(results, cell))
    except NotRun:
        return DASH


def figure10_table(results: Results) -> list[dict[str, Any]]:
    """Return conv2's divisions by limit and policy."""
    from repro.microconv import Division

    cells = conv2_cells(results)
    record = results.first("candidates", layer="conv2")
    published = PAPER["figure10"]
    paper = {
        "undivided": f"GEMM, {published['undivided_kib']} KiB; FFT, {published['fft_mib']} MiB",
        "powerOfTwo": f"{published['power_of_two_mib']} MiB, 32s",
        "all": times(published["speedup_all"]),
    }
    rows = []
    for limit in FIGURE10_LIMITS:
        for policy in POLICIES:
            row = cells.get((limit, policy))
            parts = [(int(size), str(name)) for size, name in row["parts"]] if row else []
            absent = "does not fit" if policy in tried_policies(record) else DASH
            rows.append(
                {
                    "limit (MiB)": limit,
                    "policy": policy,
                    "paper": paper[policy] if limit == published["limit_mib"] else DASH,
                    "division": str(Division(0.0, 0, parts)) if row else absent,
                    "workspace (MiB)": mib(row["workspace_bytes"] if row else None),
                    "time (ms)": ms(row["time_s"] if row else None),
                    "sum of parts (ms)": ms(row["predicted_s"] if row else None),
                    "torch's own (ms)": ms(row["native_s"] if row else None),
                    "over undivided": _told_gain(results, (limit, policy)),
                }
            )
    return rows


def figure10(results: Results) -> "Figure":
    """Draw conv2's micro-batches one after the other in time, with sizes and algorithms.

    A policy that the record was not made with is not drawn.
    """
    from repro import plots
    from repro.experiments.microconv.drawing import UNFIT

    entry, cells = conv2_entry(results), conv2_cells(results)
    record = results.first("candidates", layer="conv2")
    tried = itertools.product(FIGURE10_LIMITS, tried_policies(record) if entry else ())
    rows: list[tuple[str, list[tuple[int, str, float]], Cell]] = []
    for limit, policy in tried:
        assert entry is not None
        division = divide(entry, limit, policy)
        parts = [] if division is None else part_times(entry, division, policy)
        rows.append((f"{limit} MiB, {policy}", parts, (limit, policy)))
    figure, axes = plots.new_axes(1, 1, 10.5, 1.9 + 0.4 * len(rows))
    axis = axes[0, 0]
    ends = [sum(time for *_, time in parts) for _, parts, _ in rows]
    ends += [1e3 * max(row["time_s"], row["native_s"]) for row in cells.values()]
    longest = max(ends, default=0.0) or 1.0
    named: set[str] = set()
    for row, (_, parts, cell) in enumerate(rows):
        left = 0.0
        for size, name, time in parts:
            _draw_part(axis, row, left, time, name, named, str(size) * (time > longest / 40))
            left += time
        if not parts:
            axis.text(0, row, " does not fit", va="center", fontsize=8, color=UNFIT)
        if cell in cells and cell[1] in tried_policies(record):
            for key, label, marker in (
                ("time_s", "run as a whole", "v"),
                ("native_s", "torch's own, in turns with it", "|"),
            ):
                style = {"color": plots.INK, "ms": 9, "mew": 2, "label": label}
                axis.plot([1e3 * cells[cell][key]], [row], marker, **style)
    axis.set_yticks(range(len(rows)), [text for text, *_ in rows])
    axis.set_xlim(0, 1.06 * longest)
    axis.set_ylim(max(1, len(rows)) - 0.45, -0.55)
    axis.grid(axis="y", visible=False)
    axis.set_title(_conv2s(results), fontsize=11)
    axis.set_xlabel("time of the forward pass (ms); bars: part by part, with micro-batch sizes")
    plots.legend_below(figure, 5)
    return figure


def part_times(
    entry: Entry, division: "Division", policy: str = "all"
) -> list[tuple[int, str, float]]:
    """Return (size, algorithm, ms) of every part of a division."""
    measured = {
        (size, way.algorithm): 1e3 * way.time_s
        for size, ways in candidates_of(entry, policy).items()
        for way in ways
    }
    return [(size, name, measured[size, name]) for size, name in division.parts]


def _bound_cell(results: Results) -> tuple[dict[Cell, dict[str, Any]], Cell]:
    """Return conv2's cells, and the largest limit that excludes the fastest undivided algorithm.

    Raises:
        NotRun: No limit does, or nothing was measured.
    """
    record = results.need("candidates", layer="conv2")
    entry, cells = kernels_of(record)[0], conv2_cells(results)
    policy = "all" if any(name == "all" for _, name in cells) else "powerOfTwo"
    fastest = divide(entry, AMPLE, "undivided")
    need = None if fastest is None else fastest.workspace_bytes / MIB
    bound = [limit for limit in FIGURE10_LIMITS if need is None or need > limit]
    if not bound:
        needed = f"{fastest} needs {need:.1f} MiB at a mini-batch of {entry['batch']}"
        raise NotRun(f"no limit binds: the fastest undivided, {needed}")
    cell = max(bound), policy
    if cell not in cells:
        raise NotRun(f"nothing fits into {cell[0]} MiB")
    return cells, cell


def admits_algorithm(results: Results) -> Cases:
    """Whether the division takes an algorithm that the whole mini-batch has no room for."""
    cells, (limit, policy) = _bound_cell(results)
    entry = conv2_entry(results)
    if entry is None:
        raise NotRun("no records")
    needs = {name: size / MIB for name, _, size in entry["candidates"][str(entry["batch"])]}
    needs[NATIVE] = entry["native_bytes"] / MIB
    taken = sorted({str(name) for _, name in cells[limit, policy]["parts"]})
    admitted = [f"{name} ({needs[name]:.1f} MiB)" for name in taken if needs.get(name, 0) > limit]
    text = f"{limit} MiB, {policy}: takes {', '.join(taken)}; excluded undivided: "
    return {"conv2": Exact(bool(admitted), text + (", ".join(admitted) or "none of them"))}


def conv2_faster(results: Results) -> Cases:
    """conv2's speed-up."""
    _, cell = _bound_cell(results)
    gain = conv2_gain(results, cell)
    return {"conv2": replace(gain, label=f"conv2, {cell[0]} MiB, {cell[1]}:")}


def fft_workspace_bytes(batch: int, inputs: int, outputs: int, side: int) -> int:
    """Return the bytes that a convolution by one FFT of whole images keeps in float32.

    All images, results and filters are there as spectra at once. A real image of n × n pixels has
    a spectrum of n × (n / 2 + 1) complex numbers, of 8 bytes each.

    Args:
        batch: Samples.
        inputs: Channels that are read, of one group.
        outputs: Channels that are written, of one group.
        side: n: of the padded image, rounded up to a power of two.
    """
    spectra = batch * inputs + batch * outputs + inputs * outputs
    return 8 * spectra * side * (side // 2 + 1)


@check(
    "The paper's workspaces of FFT are those of one group of Caffe's conv2 (48 to 128 channels, "
    "27×27 pixels and padding: 32×17 complex numbers)"
)
def fft_workspaces(results: Results) -> tuple[bool, str]:
    """Compare the formula with the paper's printed digits; needs no records."""
    paper = PAPER["figure10"]
    said, close = [], []
    for batch, printed, half_a_digit in (
        (BATCHES["AlexNet"], paper["fft_mib"], 0.5),
        (paper["power_of_two_batch"], paper["power_of_two_mib"], 0.05),
    ):
        caffes, torchvisions = (
            fft_workspace_bytes(batch, *channels, 32) / MIB for channels in ((48, 128), (64, 192))
        )
        close.append(abs(caffes - printed) <= half_a_digit)
        said.append(
            f"{caffes:.1f} MiB for {printed} at {batch} samples (without groups, as in "
            f"torchvision's, {torchvisions:.0f})"
        )
    return all(close), "; ".join(said)


FIGURE10 = Exhibit(
    long=True,
    runs=conv2_runs,
    table=figure10_table,
    figure=figure10,
    caption=caption(
        "Divisions of AlexNet's second convolution, forward: bars as their parts were measured one "
        "by one, marks as the whole division ran in turns with torch's own.",
        caffe_marks,
    ),
    claims={"admits_algorithm": admits_algorithm, "conv2_faster": conv2_faster},
    checks=(fft_workspaces,),
)
