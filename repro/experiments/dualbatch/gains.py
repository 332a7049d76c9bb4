"""What dual batches gain in accuracy, on one picture for a talk: Tables 5 and 8."""

from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run
from repro.experiments.dualbatch.accuracy import gains, table5_runs
from repro.experiments.dualbatch.hybrid import over_baseline, table8_runs
from repro.experiments.dualbatch.settings import WORKERS, K, facts, mix, section51, whose
from repro.experiments.judging import Gap
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the trainings of Tables 5 and 8."""
    tables = [*table5_runs(profile, chosen), *table8_runs(profile, chosen)]
    return [run for run in tables if run.experiment == "train"]


def table(results: Results) -> list[dict[str, Any]]:
    """Return the gains that are drawn."""
    return [
        {
            "trained with": title,
            "workers": workers,
            "gain, paper (points)": f"{paper:+.1f}",
            "gain (points)": DASH if gap is None else str(gap),
        }
        for title, changes in _panels(results).items()
        for workers, (gap, paper) in changes.items()
    ]


def _panels(results: Results) -> dict[str, dict[str, tuple[Gap | None, float]]]:
    panels = {f"{100 * (k - 1):.0f} % more time (Table 5)": gains(results, k) for k in K}
    hybrid = dict(over_baseline(results)["hybrid"])
    del hybrid[mix(0)]  # which has no small batches
    panels["resolution cycled as well (Table 8)"] = hybrid
    return panels


def draw(results: Results) -> "Figure":
    """Draw the gain over large batches alone with its 95 % intervals, the paper's beside ours."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    panels = _panels(results)
    figure, axes = plots.new_axes(1, len(panels), 9.8, 3.9)
    ticks = {mix(n): str(n) for n in range(1, WORKERS + 1)}
    for axis, (title, changes) in zip(axes[0], panels.items(), strict=True):
        drawing.draw_changes(axis, changes, ticks)
        axis.set_title(f"paper and ours:\n{title}", fontsize=11)
        axis.set_xlabel(f"workers with small batches, of {WORKERS}")
    axes[0, 0].set_ylabel("gain of accuracy over\nlarge batches alone (points)")
    drawing.on_one_scale(axes[0])
    ran = whose(section51(results, 1.0, 0))
    figure.suptitle(drawing.both(ran, curves=False), fontsize=9)
    plots.legend_below(figure, 2)
    return figure


GAINS = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=draw,
    caption=caption(
        "Points of accuracy after the last epoch over large batches alone, with intervals of 95 %; "
        "Tables 5 and 8 have the accuracies.",
        facts,
    ),
)
