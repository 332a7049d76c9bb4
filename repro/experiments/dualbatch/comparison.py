"""What do the three schemes train with, stage by stage? (Table 1)"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run, check
from repro.experiments.dualbatch.settings import PAPER, facts
from repro.experiments.judging import NotRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = PAPER["table1"]
QUANTITIES = {
    "rate": "rate",
    "batches": "batch sizes",
    "resolution": "resolution",
    "dropout": "dropout",
}
_COLOURS = ("#c3cad6", "#e07a3f", "#1f6fb4")


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the laying out of the schedules."""
    config = {"n_small": 1, "stages": TABLE["stages"]}
    return [Run("schemes", config, seeds=(0,), label="three schemes")]


def _rows(results: Results) -> list[dict[str, Any]]:
    record = results.first("schemes")
    return record.metrics["rows"] if record else []


def symbol(scheme: str, row: Mapping[str, Any], quantity: str) -> str:
    """Return the paper's symbol of what a scheme trains with in a sub-stage."""
    places = TABLE["rows"][scheme][quantity]
    # Dual-batch learning has one sub-stage where the others have several.
    whole = len(places) == TABLE["stages"]
    number = row["stage"] - 1 if whole else 0
    if not whole:
        number = (row["stage"] - 1) * TABLE["sub_stages"] + row["sub_stage"] - 1
    found: str = places[number]
    return found


def table(results: Results) -> list[dict[str, Any]]:
    """Return the settings of every sub-stage: the paper's symbols beside our schedule's numbers."""
    found = []
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
        found.append(cells)
    if not found:
        for scheme, places in TABLE["rows"].items():
            cells = {"scheme": scheme}
            found.append(
                cells | {f"{QUANTITIES[q]}, paper": ", ".join(p) for q, p in places.items()}
            )
    return found


def _cycled(results: Results) -> set[str]:
    return {row["scheme"] for row in _rows(results) if row["sub_stage"] > 1}


def draw(results: Results) -> "Figure":
    """Draw resolution and batch sizes by epoch, a line for each scheme."""
    from repro import plots

    figure, axes = plots.new_axes(1, 2, 8.6, 3.0)
    for axis, key, label in zip(
        axes[0], ("resolution", "batches"), ("resolution (pixels)", "batch size"), strict=True
    ):
        axis.set(title=label.partition(" (")[0], xlabel="epoch", ylabel=label)
        for scheme, colour, width in zip(TABLE["rows"], _COLOURS, (7, 4, 1.5), strict=True):
            own = [row for row in _rows(results) if row["scheme"] == scheme]
            for values in _lines(own, key):
                epochs = [e for row in own for e in (row["first"] - 1, row["last"])]
                # The later ones lie on the earlier where they are the same.
                style = {"color": colour, "lw": width, "label": scheme}
                axis.plot(epochs, [v for value in values for v in (value, value)], **style)
    plots.legend_below(figure, 3)
    return figure


def _lines(rows: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    """Return the values of a quantity by sub-stage: a line, or one for each of two batch sizes."""
    if not rows:
        return []
    if key != "batches":
        return [[row[key] for row in rows]]
    return [[row[key][place] for row in rows] for place in range(len(rows[0][key]))]


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
        own = [row for row in rows if row["scheme"] == scheme]
        for key in QUANTITIES:
            pairs = {(symbol(scheme, row, key), str(row[key])) for row in own}
            if not len(pairs) == len({s for s, _ in pairs}) == len({v for _, v in pairs}):
                wrong.append(f"{scheme}, {QUANTITIES[key]}")
    count = len(TABLE["rows"]) * len(QUANTITIES)
    return not wrong, f"{count - len(wrong)} of {count}{': not ' * bool(wrong)}{', '.join(wrong)}"


TABLE1 = Exhibit(
    runs=runs,
    table=table,
    figure=draw,
    caption=caption(
        "The paper compares the schemes in symbols; the numbers beside are what our schedules "
        "give for the first two stages of Table 7, with one small-batch worker.",
        facts,
    ),
    checks=(same_symbols,),
)
