"""Does dividing one convolution let a faster algorithm into a limit? (Figures 6 and 10)

AlexNet's second convolution: the divisions worth having, and their gain.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, Estimate, Exact, NotRun, deterministic, mean_of
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import Entry, divide, front, mib, ms, or_none, times
from repro.experiments.microconv.runs import MIB, PAPER
from repro.experiments.query import Results
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.microconv import Division


def conv2_entry(results: Results) -> Entry | None:
    """AlexNet's second convolution, forward."""
    return next(iter(measured.entries(results.first("candidates", layer="conv2"))), None)


def _conv2_front(results: Results) -> "list[Division]":
    entry = conv2_entry(results)
    return front(entry, PAPER["figure6"]["max_workspace_mib"]) if entry else []


def _conv2_title(results: Results) -> str:
    record = results.first("candidates", layer="conv2")
    return runs.title_of(record, f"that of {runs.CAFFES}", "conv2 of ")


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


def draw_front(
    entry: Entry | None,
    divisions: "Sequence[Division]",
    limit_mib: float | None = None,
    chosen: int | None = None,
) -> "Figure":
    """Draw a kernel's Pareto front, and the division behind every point as a bar.

    The axes are those of the whole front, whatever the limit. The limit is a line, and a ring marks
    the chosen point, whose number counts from 0.
    """
    from repro import plots
    from repro.experiments.microconv.drawing import UNFIT

    figure, axes = plots.new_axes(1, 2, 10.5, max(3.4, 1.6 + 0.3 * len(divisions)))
    curve, bars = axes[0]
    points = [(d.workspace_bytes / MIB, 1e3 * d.time_s) for d in divisions]
    if points:
        style: dict[str, Any] = {"color": plots.OURS, "drawstyle": "steps-post"}
        curve.plot(*zip(*points, strict=True), "o-", label="desirable divisions", **style)
    if entry:
        own = entry["native_bytes"] / MIB, 1e3 * entry["native_s"]
        curve.plot(*own, "s", color=plots.INK, ms=8, label="torch's own")
        wide, high = (1.1 * max(ends) for ends in zip(own, *points, strict=True))
        curve.set(xlim=(-0.03 * wide, max(wide, 1e-9)), ylim=(0, high))
    if limit_mib is not None:
        curve.axvline(limit_mib, color=UNFIT, linestyle="--", linewidth=1.5, label="limit")
    if chosen is not None:
        ring: dict[str, Any] = {"fillstyle": "none", "color": UNFIT, "markeredgewidth": 2}
        curve.plot(*points[chosen], "o", markersize=14, label="chosen", **ring)
    curve.set(xlabel="workspace (MiB)", ylabel="time (ms)", title="Pareto front")
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
    return figure


def divided_on_front(results: Results) -> tuple[bool, str]:
    """The divided points of conv2's front."""
    results.need("candidates", layer="conv2")
    points = _conv2_front(results)
    divided = sum(len(point.parts) > 1 for point in points)
    return divided > 0, f"{divided} of {len(points)} desirable divisions are divided"


FIGURE6 = runs.artefact(
    "figure6",
    plan=lambda profile, chosen: list(
        dict.fromkeys([runs.conv2(profile), *runs.alexnet_kernels(profile)])
    ),
    rows=figure6_table,
    draw=figure6,
    checks={"divided": divided_on_front},
)


FIGURE10_LIMITS = (runs.SMALL, PAPER["figure10"]["limit_mib"])
Cell = tuple[int, str]  # limit in MiB, policy


def _ran(metrics: dict[str, Any]) -> dict[Cell, dict[str, Any]]:
    return {(row["limit_mib"], row["policy"]): row for row in metrics["checked"]}


def conv2_cells(results: Results) -> dict[Cell, dict[str, Any] | None]:
    """The divisions of conv2 by limit and policy, None where nothing fits.

    A record says nothing of policies whose micro-batch sizes it does not hold.
    """
    record = results.first("candidates", layer="conv2")
    if record is None:
        return {}
    tried = [p for p in runs.POLICIES if p != "all" or record.config["policy"] == "all"]
    found = _ran(record.metrics)
    return {cell: found.get(cell) for cell in itertools.product(FIGURE10_LIMITS, tried)}


def conv2_gain(results: Results, cell: Cell) -> Estimate:
    """How much faster conv2 runs than undivided, each in turns with torch's own.

    By processes; of one alone the spread is not known.
    """
    gains = []
    for record in results.ok("candidates", layer="conv2"):
        ran = _ran(record.metrics)
        divided, undivided = ran.get(cell), ran.get((cell[0], "undivided"))
        if divided is None or undivided is None:
            raise NotRun(f"nothing undivided fits into {cell[0]} MiB, or nothing divided")
        before, after = (row["time_s"] / row["native_s"] for row in (undivided, divided))
        gains.append(1.0 if divided["parts"] == undivided["parts"] else before / after)
    return deterministic(1.0, log=True) if set(gains) == {1.0} else mean_of(gains, log=True)


def _division(cell: dict[str, Any]) -> str:
    """A division that was run, in words."""
    from repro.microconv import Division

    return str(Division(0.0, 0, [(int(size), str(name)) for size, name in cell["parts"]]))


def figure10_table(results: Results) -> list[dict[str, Any]]:
    """The divisions of conv2 by limit and policy."""
    published = PAPER["figure10"]
    paper = {
        "undivided": f"GEMM, {published['undivided_kib']} KiB; FFT, {published['fft_mib']} MiB",
        "powerOfTwo": f"{published['power_of_two_mib']} MiB, 32s",
        "all": times(published["speedup_all"]),
    }
    rows = []
    for (limit, policy), cell in conv2_cells(results).items():
        shown = {"limit (MiB)": limit, "policy": policy}
        shown["paper"] = paper[policy] if limit == published["limit_mib"] else DASH
        told = ["does not fit", DASH, DASH, DASH, DASH]
        if cell:
            numbers = mib(cell["workspace_bytes"]), ms(cell["time_s"]), ms(cell["native_s"])
            gain = or_none(conv2_gain, results, (limit, policy)) or DASH
            told = [_division(cell), *numbers, str(gain)]
        columns = "division", "workspace (MiB)", "time (ms)", "torch's own (ms)", "over undivided"
        rows.append(shown | dict(zip(columns, told, strict=True)))
    return rows


def figure10(results: Results) -> "Figure":
    """The speed-ups of conv2's divisions over undivided within the same limit."""
    from repro.experiments.microconv.drawing import Effect, effect, effects

    groups: dict[str, list[Effect]] = {}
    cells = conv2_cells(results)
    for (limit, policy), cell in cells.items():
        rows = groups.setdefault(f"within {limit} MiB", [])
        # The paper's is with all sizes: ours is with the most that ran.
        papers = (limit, policy) == list(cells)[-1]
        gain = or_none(conv2_gain, results, (limit, policy))
        label = f"{policy}: {_division(cell) if cell else 'does not fit'}"
        rows.append(effect(label, PAPER["figure10"]["speedup_all"] if papers else None, gain))
    return effects(groups, "speed-up of conv2, forward, over undivided", _conv2_title(results))


def _bound_cell(results: Results) -> tuple[Cell, dict[str, Any]]:
    """The cell of conv2 at the largest limit that excludes the fastest undivided algorithm."""
    record = results.need("candidates", layer="conv2")
    entry, ran = measured.entries(record)[0], _ran(record.metrics)
    policy = "all" if any(name == "all" for _, name in ran) else "powerOfTwo"
    fastest = divide(entry, runs.AMPLE, "undivided")
    need = fastest.workspace_bytes / MIB if fastest else runs.AMPLE
    bound = [limit for limit in FIGURE10_LIMITS if need > limit]
    if not bound:
        needed = f"{fastest} needs {need:.1f} MiB at a mini-batch of {entry['batch']}"
        raise NotRun(f"no limit binds: the fastest undivided, {needed}")
    cell = max(bound), policy
    if cell not in ran:
        raise NotRun(f"nothing fits into {cell[0]} MiB")
    return cell, ran[cell]


def admits_algorithm(results: Results) -> Cases:
    """Whether the division takes an algorithm that the whole mini-batch has no room for."""
    (limit, policy), row = _bound_cell(results)
    entry = measured.entries(results.need("candidates", layer="conv2"))[0]
    needs = {name: size / MIB for name, _, size in entry["candidates"][str(entry["batch"])]}
    needs[measured.NATIVE] = entry["native_bytes"] / MIB
    taken = sorted(measured.algorithms(row))
    admitted = [f"{name} ({needs[name]:.1f} MiB)" for name in taken if needs.get(name, 0) > limit]
    text = f"{limit} MiB, {policy}: takes {', '.join(taken)}; excluded undivided: "
    return {"conv2": Exact(bool(admitted), text + (", ".join(admitted) or "none of them"))}


def conv2_faster(results: Results) -> Cases:
    """The speed-up of conv2."""
    cell, _ = _bound_cell(results)
    return {"conv2": replace(conv2_gain(results, cell), label=f"conv2, {cell[0]} MiB, {cell[1]}:")}


def fft_workspace_bytes(batch: int, inputs: int, outputs: int, side: int) -> int:
    """Bytes that a convolution by one FFT of whole images keeps in float32.

    All images, results and filters (of one group: `inputs` to `outputs` channels) are there as
    spectra at once. A real image of n × n pixels, n = `side` being the padded image's, rounded up
    to a power of two, has a spectrum of n × (n / 2 + 1) complex numbers, of 8 bytes each.
    """
    spectra = batch * inputs + batch * outputs + inputs * outputs
    return 8 * spectra * side * (side // 2 + 1)


def fft_workspaces(results: Results) -> tuple[bool, str]:
    """The formula's bytes and the paper's printed digits; needs no records."""
    paper, said, close = PAPER["figure10"], [], []
    for batch, printed, half_a_digit in (
        (PAPER["batches"]["AlexNet"], paper["fft_mib"], 0.5),
        (paper["power_of_two_batch"], paper["power_of_two_mib"], 0.05),
    ):
        size = fft_workspace_bytes(batch, 48, 128, 32) / MIB
        close.append(abs(size - printed) <= half_a_digit)
        said.append(f"{size:.1f} MiB for {printed} at {batch} samples")
    return all(close), "; ".join(said)


FIGURE10 = runs.artefact(
    "figure10",
    plan=lambda profile, chosen: [runs.conv2(profile)],
    rows=figure10_table,
    draw=figure10,
    claims={"admits_algorithm": admits_algorithm, "conv2_faster": conv2_faster},
    checks={"fft": fft_workspaces},
)
