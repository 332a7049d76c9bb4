"""Does a line through a few batches predict the largest batch that fits? (Figure 13)"""

from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run, check
from repro.experiments.dualbatch.describing import facts, whose
from repro.experiments.dualbatch.settings import CIFAR, MIB, PAPER, PARTS, ROLE, config_of, measured
from repro.experiments.dualbatch.settings import memory as measurement
from repro.experiments.dualbatch.times import Series, draw_series
from repro.experiments.judge import NotRun
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ERRORS = {role: PAPER["figure13"][part]["error"] for role, part in PARTS.items()}  # percent


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the search for the largest batch in place of both data sets."""
    return [measurement(profile, role) for role in PARTS]


def error_percent(metrics: dict[str, Any]) -> float | None:
    """Return how far the predicted largest batch lies above the measured, None for none."""
    most = metrics["measured_max"]
    return 100 * (metrics["predicted_max"] / most - 1) if most else None


def table(results: Results) -> list[dict[str, Any]]:
    """Return the memory models and the largest batch sizes that they predict."""
    rows = []
    for role, part in PARTS.items():
        paper = PAPER["figure13"][part]
        metrics = measured(results, "memory", role)
        row: dict[str, Any] = {
            "data": f"{role}-100" if role == CIFAR else role,
            "pixels, paper": paper["resolution"],
            "pixels": config_of(results, "memory", role).get("resolution"),
            "largest, paper's prediction": f"{paper['predicted_max']:,}",
            "error, paper": f"{paper['error']:.1f} %",
        }
        if metrics:
            error = error_percent(metrics)
            row |= {
                "parameters etc. (MiB)": f"{metrics['fixed_bytes'] / MIB:,.1f}",
                "a sample (MiB)": f"{metrics['bytes_per_sample'] / MIB:,.3f}",
                "limit (MiB)": f"{metrics['limit_bytes'] / MIB:,.0f}",
                "largest, predicted": f"{metrics['predicted_max']:,}",
                "largest, measured": f"{metrics['measured_max']:,}",
                "error": DASH if error is None else f"{error:+.1f} %",
            }
        rows.append(row)
    return rows


def figure(results: Results) -> "Figure":
    """Draw measured and predicted memory, and how far off the predicted largest batch is."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(1, len(PARTS) + 1, 9.6, 3.0)
    names = ("measured", "line fitted to the eight smallest")
    for axis, role in zip(axes[0], PARTS, strict=False):
        metrics = measured(results, "memory", role)
        axis.set_xlabel("batch size")
        if not metrics:
            continue
        records = results.ok("memory", role=role)
        beyond = [tuple(pair) for pair in metrics["beyond"]]
        sizes = [*metrics["batch_sizes"], *(n for n, _ in beyond)]
        peaks = [*metrics["peaks"], *(peak for _, peak in beyond)]
        line = [metrics["fixed_bytes"] + n * metrics["bytes_per_sample"] for n in sizes]
        side = config_of(results, "memory", role)["resolution"]
        title = f"in {role}'s place\n{whose(records, f'{side} px')}"
        draw_series(axis, title, Series(sizes, peaks, line), names, unit=1 / MIB)
        limit = metrics["limit_bytes"] / MIB
        axis.axhline(limit, color="#b3261e", ls=":", lw=1.4, label="ours: limit (SIMULATED)")
        axis.set_ylim(top=1.12 * limit)
    axes[0, 0].set_ylabel("peak memory (MiB)")
    _draw_errors(results, axes[0, -1])
    drawing.titled(
        axes[0, -1], f"predicted over found, ours solid\npaper (hollow, unsigned): {ROLE}"
    )
    plots.legend_below(figure, 4)
    return figure


def _draw_errors(results: Results, axis: Any) -> None:
    from repro import plots
    from repro.experiments.dualbatch import drawing

    rows = range(len(ERRORS))
    axis.axvline(0, color="#48536a", lw=1, label="_no error")
    style = drawing.HOLLOW | {"ls": "none"}
    axis.plot(ERRORS.values(), [row - 0.1 for row in rows], marker="D", label="paper", **style)
    for row, role in enumerate(ERRORS):
        metrics = measured(results, "memory", role)
        error = error_percent(metrics) if metrics else None
        if error is not None:
            axis.plot([error], [row + 0.1], "o", color=plots.OURS, ms=7, label="_ours")
    axis.set_yticks(list(rows), list(ERRORS))
    axis.set_ylim(len(ERRORS) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.15)
    axis.set_xlabel("error of the largest batch (%)")


@check(
    "The largest batch size that fits is predicted to "
    + " and ".join(f"{error:g} % ({role})" for role, error in ERRORS.items())
)
def largest_batch(results: Results) -> tuple[bool, str]:
    """Compare the predicted size with the one found by trying, which does not vary."""
    holds, said = [], []
    for role, allowed in ERRORS.items():
        metrics = measured(results, "memory", role)
        if not metrics:
            raise NotRun(f"{role}: no records")
        error = error_percent(metrics)
        holds.append(error is not None and abs(error) <= allowed)
        sizes = f"{metrics['predicted_max']:,} predicted, {metrics['measured_max']:,} measured"
        said.append(f"{role}: {sizes}" + ("" if error is None else f", {error:+.1f} %"))
    return all(holds), "; ".join(said)


FIGURE13 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "The largest batch under a limit: predicted by a line, and found by trying. On a CPU "
        "memory is that of live tensors, nearly a line by construction.",
        facts,
    ),
    checks=(largest_batch,),
)
