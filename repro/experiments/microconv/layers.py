"""Does dividing one convolution let a faster algorithm into a limit? (Figures 1, 6 and 10)

From the layers of AlexNet: what undivided algorithms need, which divisions are worth having, and
what they gain for the second convolution.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro.experiments.design import Exhibit, Results, check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, exactly, mean_of
from repro.experiments.microconv.comparing import (
    NATIVE,
    Entry,
    alexnet,
    candidates_of,
    divide,
    front,
    kernels_of,
    label,
    mib,
    ms,
    times,
)
from repro.experiments.microconv.runs import (
    AMPLE,
    CAFFES,
    LIMITS_MIB,
    MIB,
    PAPER,
    POLICIES,
    SMALL,
    alexnet_kernels,
    captioned,
    conv2,
    limit_of,
    title_of,
    told_limit,
)
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.microconv import Division


def limits_of(results: Results) -> dict[str, float]:
    """The limits of a kernel in MiB by their names, such as ``2 MiB (paper 8)``."""
    given = (results.profile, "AlexNet", "WR")
    return {told_limit(*given, limit): limit_of(*given, limit) for limit in LIMITS_MIB}


def _by_layer(results: Results) -> dict[str, list[Entry]]:
    entries = kernels_of(alexnet(results))
    return {k: list(own) for k, own in itertools.groupby(entries, lambda entry: entry["layer"])}


def _undivided(
    entries: Sequence[Entry], limit_mib: float
) -> tuple[float, float] | tuple[None, None]:
    """Bytes and seconds of the best undivided algorithms together, None where one does not fit."""
    divisions = [divide(entry, limit_mib, "undivided") for entry in entries]
    fitting = [division for division in divisions if division is not None]
    if not divisions or len(fitting) < len(divisions):
        return None, None
    return sum(d.workspace_bytes for d in fitting), sum(d.time_s for d in fitting)


def _memory(entries: Sequence[Entry]) -> tuple[int, int]:
    """Bytes of a layer's data (which it reads and writes) and filters, gradients included."""
    return 2 * entries[0]["data_bytes"], 2 * entries[0]["filter_bytes"]


def figure1_table(results: Results) -> list[dict[str, Any]]:
    """Workspace and time of the best undivided algorithms at each limit, by layer."""
    rows = []
    for layer, entries in _by_layer(results).items():
        data, filters = _memory(entries)
        row = {"layer": layer, "kernels": len(entries)}
        row |= {"data (MiB)": mib(data), "filters (MiB)": mib(filters)}
        for told, limit in limits_of(results).items():
            workspace, time = _undivided(entries, limit)
            row[f"{told}: workspace"] = "does not fit" if time is None else mib(workspace)
            row[f"{told}: ms"] = ms(time)
        row["torch's own: MiB"] = mib(sum(entry["native_bytes"] for entry in entries))
        row["torch's own: ms"] = ms(sum(entry["native_s"] for entry in entries))
        rows.append(row)
    return rows


def figure1(results: Results) -> "Figure":
    """Each layer's memory and time at every limit, side by side; no bar of what does not fit."""
    from repro import plots
    from repro.experiments.microconv.drawing import LIMITS, draw_bars

    layers, limits = _by_layer(results), limits_of(results)
    best = {
        f"best within {told}": [_undivided(entries, limit) for entries in layers.values()]
        for told, limit in limits.items()
    }
    kept = pd.DataFrame(map(_memory, layers.values()), list(layers), ["data", "filters"])
    needs = {told: [size for size, _ in pairs] for told, pairs in best.items()}
    seconds = {told: [time for _, time in pairs] for told, pairs in best.items()}
    figure, axes = plots.new_axes(1, 2, 10.5, 3.7)
    figure.suptitle(title_of(alexnet(results), CAFFES), fontsize=11)
    memory, time = axes[0]
    sizes = pd.concat([kept, pd.DataFrame(needs, list(layers))], axis=1).astype(float) / MIB
    draw_bars(memory, sizes, ("#d3d8df", "#8a93a0", *LIMITS))
    draw_bars(time, 1e3 * pd.DataFrame(seconds, list(layers)).astype(float), LIMITS)
    memory.set(title="data, filters and workspace", ylabel="MiB")
    time.set(title="time, forward and backward", ylabel="ms")
    plots.legend_below(figure, 5)
    return figure


def workspace_as_large(results: Results) -> Cases:
    """The workspace of all fastest undivided kernels over data and filters of all layers."""
    told, ample = list(limits_of(results).items())[-1]
    layers = _by_layer(results).values()
    if not layers:
        raise NotRun("no records")
    needs = [_undivided(entries, ample)[0] for entries in layers]
    if None in needs:
        raise NotRun(f"not every kernel fits into {ample} MiB undivided")
    taken = int(sum(need for need in needs if need))
    kept = sum(sum(_memory(entries)) for entries in layers)
    text = f"{mib(taken)} MiB of workspace within {told}, for {mib(kept)} of data and filters:"
    return {"AlexNet": replace(exactly(max(1, taken) / kept, log=True), label=text)}


def fast_needs_more(results: Results) -> Cases:
    """Whether the fastest undivided algorithm of each kernel needs more than the small limit.

    The fastest is that within the ample limit; kernels for which there is none are left out. The
    evidence names the algorithm that fits into the small limit, and how many times as slow it is.
    """
    record = alexnet(results)
    if record is None:
        raise NotRun("no records")
    small, *_, ample = limits_of(results).values()
    needs: dict[str, Exact] = {}
    for entry in kernels_of(record):
        if (fastest := divide(entry, ample, "undivided")) is None:
            continue
        instead = "nothing fits"
        if (fitting := divide(entry, small, "undivided")) is not None:
            ((_, algorithm),) = fitting.parts
            instead = f"{algorithm} fits and takes ×{fitting.time_s / fastest.time_s:.2f}"
        more = fastest.workspace_bytes > small * MIB
        needs[label(entry)] = Exact(more, f"needs more ({instead})" if more else "needs no more")
    if not needs:
        raise NotRun(f"no kernel fits into {ample} MiB undivided")
    return needs


def _all_the_same(results: Results) -> Iterator[str]:
    try:
        needs = fast_needs_more(results).values()
    except NotRun:
        return
    if not any(isinstance(case, Exact) and case.holds for case in needs):
        yield (
            "All limits show the same: of no kernel the fastest algorithm needs more than "
            f"{next(iter(limits_of(results)))}."
        )


FIGURE1 = Exhibit(
    long=True,
    runs=lambda profile, chosen: alexnet_kernels(profile),
    table=figure1_table,
    figure=figure1,
    caption=captioned(
        "The best undivided algorithms of each layer within a limit for each kernel: workspace "
        "beside data and filters with gradients, and the sum of median times.",
        _all_the_same,
        caffes=True,
        scaled=True,
    ),
    claims={"workspace_as_large": workspace_as_large, "fast_needs_more": fast_needs_more},
)


def conv2_entry(results: Results) -> Entry | None:
    """AlexNet's second convolution, forward."""
    entries = kernels_of(results.first("candidates", layer="conv2"))
    return next((entry for entry in entries if entry["kind"] == "forward"), None)


def _conv2_front(results: Results) -> "list[Division]":
    entry = conv2_entry(results)
    return [] if entry is None else front(entry, PAPER["figure6"]["max_workspace_mib"])


def figure6_table(results: Results) -> list[dict[str, Any]]:
    """The desirable divisions of conv2, forward."""
    return [
        {
            "point": number,
            "workspace (MiB)": f"{division.workspace_bytes / MIB:,.2f}",
            "time (ms)": ms(division.time_s),
            "division": str(division),
        }
        for number, division in enumerate(_conv2_front(results), 1)
    ]


def figure6(results: Results) -> "Figure":
    """The Pareto front of conv2."""
    figure = draw_front(conv2_entry(results), _conv2_front(results))
    figure.suptitle(_conv2_title(results), fontsize=11)
    return figure


def _conv2_title(results: Results) -> str:
    record = results.first("candidates", layer="conv2")
    return title_of(record, f"that of {CAFFES}", "conv2 of ")


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
        chosen: The number of the point that is marked, from 0.
    """
    from repro import plots
    from repro.experiments.microconv.drawing import UNFIT, draw_parts

    figure, axes = plots.new_axes(1, 2, 10.5, max(3.4, 1.6 + 0.3 * len(divisions)))
    curve, bars = axes[0]
    points = [(d.workspace_bytes / MIB, 1e3 * d.time_s) for d in divisions]
    shown = list(points)
    if points:
        style: dict[str, Any] = {"color": plots.OURS, "drawstyle": "steps-post"}
        curve.plot(*zip(*points, strict=True), "o-", label="desirable divisions", **style)
    for number, point in enumerate(points, 1):
        curve.annotate(str(number), point, (5, 5), textcoords="offset points", fontsize=8)
    if entry is not None:
        shown.append((entry["native_bytes"] / MIB, 1e3 * entry["native_s"]))
        curve.plot(*shown[-1], "s", color=plots.INK, ms=8, label="torch's own")
    if limit_mib is not None:
        curve.axvline(limit_mib, color=UNFIT, linestyle="--", linewidth=1.5, label="limit")
    if chosen is not None:
        ring: dict[str, Any] = {"fillstyle": "none", "color": UNFIT, "markeredgewidth": 2}
        curve.plot(*points[chosen], "o", markersize=14, label="chosen", **ring)
    curve.set(xlabel="workspace (MiB)", ylabel="time (ms)", title="Pareto front")
    if shown:
        wide, high = (1.1 * max([*side, 1e-9]) for side in zip(*shown, strict=True))
        curve.set(xlim=(-0.03 * wide, wide), ylim=(0, high))
    draw_parts(bars, [[(name, size, str(size)) for size, name in d.parts] for d in divisions])
    bars.set_yticks(range(len(divisions)), [str(n) for n in range(1, len(divisions) + 1)])
    if chosen is not None:
        bars.get_yticklabels()[chosen].set(color=UNFIT, weight="bold")
    bars.set(xlabel="samples of the mini-batch", ylabel="point", title="division")
    plots.legend_below(figure, 4)
    return figure


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
    runs=lambda profile, chosen: list(dict.fromkeys([conv2(profile), *alexnet_kernels(profile)])),
    table=figure6_table,
    figure=figure6,
    caption=captioned(
        "Every desirable division of AlexNet's second convolution, forward: no other one needs "
        "less workspace and less time. A time is a sum of medians, one for each micro-batch.",
        caffes=True,
    ),
    checks=(few_desirable, divided_on_front),
)


FIGURE10_LIMITS = (SMALL, PAPER["figure10"]["limit_mib"])
Cell = tuple[int, str]  # limit in MiB, policy
Cells = dict[Cell, dict[str, Any]]  # what was measured of conv2's divisions


def _cells(metrics: dict[str, Any]) -> Cells:
    return {(row["limit_mib"], row["policy"]): row for row in metrics["checked"]}


def conv2_cells(results: Results) -> dict[Cell, dict[str, Any] | None]:
    """conv2's divisions by limit and policy, None where nothing fits.

    A record says nothing of policies whose micro-batch sizes it does not hold.
    """
    record = results.first("candidates", layer="conv2")
    if record is None:
        return {}
    tried = [p for p in POLICIES if p != "all" or record.config["policy"] == "all"]
    found = _cells(record.metrics)
    return {cell: found.get(cell) for cell in itertools.product(FIGURE10_LIMITS, tried)}


def conv2_gain(results: Results, cell: Cell) -> Estimate:
    """How much faster conv2 runs than undivided, each in turns with torch's own.

    By processes; of one alone the spread is not known.

    Raises:
        NotRun: A process has no division within the limit, or none undivided.
    """
    gains = []
    for record in results.ok("candidates", layer="conv2"):
        held = _cells(record.metrics)
        divided, undivided = held.get(cell), held.get((cell[0], "undivided"))
        if divided is None or undivided is None:
            raise NotRun(f"nothing undivided fits into {cell[0]} MiB, or nothing divided")
        before, after = (row["time_s"] / row["native_s"] for row in (undivided, divided))
        gains.append(1.0 if divided["parts"] == undivided["parts"] else before / after)
    return exactly(1.0, log=True) if set(gains) == {1.0} else mean_of(gains, log=True)


def figure10_table(results: Results) -> list[dict[str, Any]]:
    """conv2's divisions by limit and policy."""
    from repro.microconv import Division

    cells, published = conv2_cells(results), PAPER["figure10"]
    paper = {
        "undivided": f"GEMM, {published['undivided_kib']} KiB; FFT, {published['fft_mib']} MiB",
        "powerOfTwo": f"{published['power_of_two_mib']} MiB, 32s",
        "all": times(published["speedup_all"]),
    }
    rows = []
    for limit, policy in itertools.product(FIGURE10_LIMITS, POLICIES):
        cell = cells.get((limit, policy))
        shown = {
            "limit (MiB)": limit,
            "policy": policy,
            "paper": paper[policy] if limit == published["limit_mib"] else DASH,
            "division": "does not fit" if (limit, policy) in cells else DASH,
        }
        shown |= dict.fromkeys(
            ("workspace (MiB)", "time (ms)", "torch's own (ms)", "over undivided"), DASH
        )
        if cell:
            parts = [(int(size), str(name)) for size, name in cell["parts"]]
            shown |= {
                "division": str(Division(0.0, 0, parts)),
                "workspace (MiB)": mib(cell["workspace_bytes"]),
                "time (ms)": ms(cell["time_s"]),
                "torch's own (ms)": ms(cell["native_s"]),
            }
            if cells[limit, "undivided"]:
                shown["over undivided"] = str(conv2_gain(results, (limit, policy)))
        rows.append(shown)
    return rows


def figure10(results: Results) -> "Figure":
    """conv2's micro-batches one after the other in time, with sizes and algorithms."""
    from repro import plots
    from repro.experiments.microconv.drawing import draw_parts

    entry, cells = conv2_entry(results), conv2_cells(results)
    figure, axes = plots.new_axes(1, 1, 10.5, 1.9 + 0.4 * len(cells))
    axis = axes[0, 0]
    draw_parts(axis, [part_times(entry, *cell) for cell in cells] if entry else [])
    for row, cell in enumerate(cells.values()):
        style: dict[str, Any] = {"color": plots.INK, "ms": 9, "mew": 2}
        if cell:
            axis.plot(1e3 * cell["time_s"], row, "v", label="run as a whole", **style)
            own = "torch's own, in turns with it"
            axis.plot(1e3 * cell["native_s"], row, "|", label=own, **style)
    axis.set_yticks(range(len(cells)), [f"{limit} MiB, {policy}" for limit, policy in cells])
    axis.set_xlim(left=0)
    axis.set_title(_conv2_title(results), fontsize=11)
    axis.set_xlabel("time of the forward pass (ms); bars: part by part, with micro-batch sizes")
    plots.legend_below(figure, 5)
    return figure


def part_times(entry: Entry, limit_mib: float, policy: str) -> list[tuple[str, float, str]]:
    """Algorithm, ms and size of every part of a kernel's division; none where nothing fits."""
    division = divide(entry, limit_mib, policy)
    measured = {
        (size, way.algorithm): 1e3 * way.time_s
        for size, ways in candidates_of(entry, policy).items()
        for way in ways
    }
    parts = division.parts if division else []
    return [(name, measured[size, name], str(size)) for size, name in parts]


def _bound_cell(results: Results) -> tuple[Cell, dict[str, Any]]:
    """conv2's cell at the largest limit that excludes the fastest undivided algorithm.

    Raises:
        NotRun: No limit does, or nothing was measured.
    """
    record = results.need("candidates", layer="conv2")
    entry, cells = kernels_of(record)[0], _cells(record.metrics)
    policy = "all" if any(name == "all" for _, name in cells) else "powerOfTwo"
    fastest = divide(entry, AMPLE, "undivided")
    need = AMPLE if fastest is None else fastest.workspace_bytes / MIB
    bound = [limit for limit in FIGURE10_LIMITS if need > limit]
    if not bound:
        needed = f"{fastest} needs {need:.1f} MiB at a mini-batch of {entry['batch']}"
        raise NotRun(f"no limit binds: the fastest undivided, {needed}")
    cell = max(bound), policy
    if cell not in cells:
        raise NotRun(f"nothing fits into {cell[0]} MiB")
    return cell, cells[cell]


def admits_algorithm(results: Results) -> Cases:
    """Whether the division takes an algorithm that the whole mini-batch has no room for."""
    (limit, policy), row = _bound_cell(results)
    entry = kernels_of(results.need("candidates", layer="conv2"))[0]
    needs = {name: size / MIB for name, _, size in entry["candidates"][str(entry["batch"])]}
    needs[NATIVE] = entry["native_bytes"] / MIB
    taken = sorted({str(name) for _, name in row["parts"]})
    admitted = [f"{name} ({needs[name]:.1f} MiB)" for name in taken if needs.get(name, 0) > limit]
    text = f"{limit} MiB, {policy}: takes {', '.join(taken)}; excluded undivided: "
    return {"conv2": Exact(bool(admitted), text + (", ".join(admitted) or "none of them"))}


def conv2_faster(results: Results) -> Cases:
    """The speed-up of conv2."""
    cell, _ = _bound_cell(results)
    return {"conv2": replace(conv2_gain(results, cell), label=f"conv2, {cell[0]} MiB, {cell[1]}:")}


def fft_workspace_bytes(batch: int, inputs: int, outputs: int, side: int) -> int:
    """Bytes that a convolution by one FFT of whole images keeps in float32.

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
    paper, said, close = PAPER["figure10"], [], []
    for batch, printed, half_a_digit in (
        (PAPER["batches"]["AlexNet"], paper["fft_mib"], 0.5),
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
    runs=lambda profile, chosen: [conv2(profile)],
    table=figure10_table,
    figure=figure10,
    caption=captioned(
        "Divisions of AlexNet's second convolution, forward: bars as their parts were measured one "
        "by one, marks as the whole division ran in turns with torch's own.",
        caffes=True,
    ),
    claims={"admits_algorithm": admits_algorithm, "conv2_faster": conv2_faster},
    checks=(fft_workspaces,),
)
