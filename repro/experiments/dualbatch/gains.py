"""What dual batches gain in accuracy, on one picture for a talk: Tables 5 and 8."""

from matplotlib.figure import Figure

from repro import plots
from repro.experiments.captions import signature
from repro.experiments.design import Results
from repro.experiments.dualbatch import drawing
from repro.experiments.dualbatch.accuracy import TABLE5, gains
from repro.experiments.dualbatch.hybrid import over_baseline
from repro.experiments.dualbatch.settings import WORKERS, K, mix, section51, whose


def draw(table5: Results, table8: Results) -> Figure:
    """Draw the gain over large batches alone with its 95 % intervals, the paper's beside ours.

    Args:
        table5: The records of Table 5.
        table8: Those of Table 8.
    """
    panels = {f"{100 * (k - 1):.0f} % more time (Table 5)": gains(table5, k) for k in K}
    hybrid = over_baseline(table8)["hybrid"]
    del hybrid[mix(0)]  # which has no small batches
    panels["resolution cycled as well (Table 8)"] = hybrid
    figure, axes = plots.new_axes(1, len(panels), 9.8, 3.9)
    ticks = {mix(n): str(n) for n in range(1, WORKERS + 1)}
    for axis, (title, changes) in zip(axes[0], panels.items(), strict=True):
        drawing.draw_changes(axis, changes, ticks)
        axis.set_title(title, fontsize=12)
        axis.set_xlabel(f"workers with small batches, of {WORKERS}")
    axes[0, 0].set_ylabel("gain of accuracy over\nlarge batches alone (points)")
    drawing.on_one_scale(axes[0])
    ran = whose(section51(table5, 1.0, 0))
    figure.suptitle(drawing.both(ran, curves=False), fontsize=9)
    plots.sign(figure, signature(table5, TABLE5.caption(table5)))
    return figure
