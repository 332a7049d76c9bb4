"""What do the three schemes train with, stage by stage? (Table 1)"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run, check
from repro.experiments.dualbatch.describing import facts
from repro.experiments.dualbatch.settings import PAPER
from repro.experiments.judge import NotRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = PAPER["table1"]
QUANTITIES = {
    "rate": "rate",
    "batches": "batch sizes",
    "resolution": "resolution",
    "dropout": "dropout",
}


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the laying out of the schedules."""
    config = {"n_small": 1, "stages": TABLE["stages"]}
    return [Run("schemes", config, seeds=(0,), label="three schemes")]


def _rows(results: Results) -> list[dict[str, Any]]:
    record = results.first("schemes")
    return record.metrics["rows"] if record else []


def symbol(scheme: str, row: Mapping[str, Any], quantity: str) -> str:
    """Return the paper's symbol of what a scheme trains with in a sub-stage."""
    symbols = TABLE["rows"][scheme][quantity]
    # Dual-batch learning has one sub-stage where the others have several.
    whole = len(symbols) == TABLE["stages"]
    number = row["stage"] - 1 if whole else 0
    if not whole:
        number = (row["stage"] - 1) * TABLE["sub_stages"] + row["sub_stage"] - 1
    printed: str = symbols[number]
    return printed


def table(results: Results) -> list[dict[str, Any]]:
    """Return the settings of every sub-stage: the paper's symbols beside our schedule's numbers."""
    rows = []
    for row in _rows(results):
        cells: dict[str, Any] = {
            "scheme": row["scheme"],
            "stage": row["stage"],
            "sub-stage": row["sub_stage"] if row["scheme"] in _cycled(results) else None,
            "epochs": f"{row['first']}-{row['last']}",
        }
        for key, heading in QUANTITIES.items():
            value = row[key]
            shown = ", ".join(map(str, value)) if isinstance(value, list) else f"{value:g}"
            cells |= {f"{heading}, paper": symbol(row["scheme"], row, key), heading: shown}
        rows.append(cells)
    if not rows:
        for scheme, symbols in TABLE["rows"].items():
            cells = {"scheme": scheme}
            rows.append(
                cells | {f"{QUANTITIES[q]}, paper": ", ".join(p) for q, p in symbols.items()}
            )
    return rows


def _cycled(results: Results) -> set[str]:
    return {row["scheme"] for row in _rows(results) if row["sub_stage"] > 1}


def draw(results: Results) -> "Figure":
    """Draw resolution and batch sizes by epoch, a column for each scheme."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    figure, axes = plots.new_axes(2, len(TABLE["rows"]), 9.6, 3.8)
    axes[0, 0].set_ylabel("resolution (pixels)")
    axes[1, 0].set_ylabel("batch size")
    named = {  # small batches first, where there are two
        2: (("small batches", drawing.SMALL), ("large batches", drawing.LARGE)),
        1: (("large batches", drawing.LARGE),),
    }
    for (above, below), scheme in zip(axes.T, TABLE["rows"], strict=True):
        rows = [row for row in _rows(results) if row["scheme"] == scheme]
        epochs = [epoch for row in rows for epoch in (row["first"] - 1, row["last"])]
        drawing.titled(above, f"ours, solved: {scheme}")
        drawing.titled(below, "ours, solved")
        below.set_xlabel("epoch")
        if not rows:
            continue
        sides = [row["resolution"] for row in rows for _ in range(2)]
        above.plot(epochs, sides, color=plots.INK, lw=2, label="resolution")
        for number, (label, workers) in enumerate(named[len(rows[0]["batches"])]):
            sizes = [row["batches"][number] for row in rows for _ in range(2)]
            colour = drawing.STYLES[workers]["color"]
            below.plot(epochs, sizes, color=colour, lw=2, label=label)
    for row in axes:
        drawing.on_one_scale(row)
        row[0].set_ylim(bottom=0)
        for axis in row[1:]:
            axis.set_ylim(row[0].get_ylim())
    plots.legend_below(figure, 3)
    return figure


@check(
    "Where the paper's table has one symbol our schedules have one value, and where it has others "
    "they have others"
)
def same_symbols(results: Results) -> tuple[bool, str]:
    """Ask whether values and symbols stand for each other, scheme by scheme."""
    rows = _rows(results)
    if not rows:
        raise NotRun("no records")
    wrong = []
    for scheme in TABLE["rows"]:
        of_scheme = [row for row in rows if row["scheme"] == scheme]
        for key in QUANTITIES:
            pairs = {(symbol(scheme, row, key), str(row[key])) for row in of_scheme}
            if not len(pairs) == len({s for s, _ in pairs}) == len({v for _, v in pairs}):
                wrong.append(f"{scheme}, {QUANTITIES[key]}")
    count = len(TABLE["rows"]) * len(QUANTITIES)
    return not wrong, f"{count - len(wrong)} of {count}{': not ' * bool(wrong)}{', '.join(wrong)}"


TABLE1 = Exhibit(
    runs=runs,
    table=table,
    figure=draw,
    caption=caption(
        "The paper's symbols beside what our schedules give for the first two stages of Table 7, "
        "with one small-batch worker.",
        facts,
    ),
    checks=(same_symbols,),
)
