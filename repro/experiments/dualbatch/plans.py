"""Do the equations give the paper's plans and schedules? Tables 1, 2, 6, 7 and 9: all solved."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Artefact
from repro.experiments.dualbatch.labels import artefact
from repro.experiments.dualbatch.runs import PAPER, PARTS, WORKERS, mix
from repro.experiments.judge import NotRun
from repro.experiments.query import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
QUANTITIES = {
    "small_batch": "B_S",
    "small_samples": "d_S",
    "large_samples": "d_L",
    "factor": "d_S/d_L",
}
ROUNDED = 6e-4  # a factor with three digits is one of this distance


def _solved(results: Results, experiment: str = "solve", **config: Any) -> list[dict[str, Any]]:
    """The rows of a solved table, none where it was not solved."""
    record = results.first(experiment, **config)
    return record.metrics["rows"] if record else []


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else value


# Tables 2 and 6: batch sizes and shares.


def _table2_rows(results: Results) -> list[tuple[str, Row, Row]]:
    """No name, then the paper's row of each k and n_S, and ours; empty where not solved."""
    ours = {(row["k"], row["n_small"]): row for row in _solved(results, table="table2")}
    rows = PAPER["table2"]["rows"]
    return [("", row, ours.get((row["k"], row["n_small"]), {})) for row in rows]


def _table6_rows(results: Results) -> list[tuple[str, Row, Row]]:
    """A part of Table 6, then the paper's row of each resolution and n_S, and ours."""
    ours = {(row["resolution"], row["n_small"]): row for row in _solved(results, table="table6")}
    rows: list[tuple[str, Row, Row]] = []
    for role, name in PARTS.items():
        part = PAPER["table6"][name]
        for index, side in enumerate(part["resolutions"]):
            for n in range(WORKERS + 1):
                row = {
                    "n_small": n,
                    "resolution": side,
                    "large_batch": part["large_batches"][index],
                }
                if n:
                    row["small_batch"] = part["small_batches"][n - 1][index]
                    row["small_samples"] = part["small_samples"][n - 1]
                if n < WORKERS:
                    row["large_samples"] = part["large_samples" if n else "baseline_samples"]
                rows.append((role, row, ours.get((side, n), {})))
    return rows


def _columns(paper: Row, ours: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {"workers": mix(paper["n_small"])}
    for key, name in QUANTITIES.items():
        there = key in paper
        cells |= {f"{name}, paper": _cell(paper.get(key))}
        cells |= {name: _cell(ours.get(key)) if there else None}
    return cells


def table2(results: Results) -> list[dict[str, Any]]:
    """Batch sizes and shares, solved; and batch sizes of the authors' raw measurements."""
    rows = _table2_rows(results)
    raw: list[Any] = _raw_sizes(results) or [None] * len(rows)
    return [
        {"k": f"{paper['k']:.2f}", **_columns(paper, ours), "B_S, raw data": size}
        for (_, paper, ours), size in zip(rows, raw, strict=True)
    ]


def table6(results: Results) -> list[dict[str, Any]]:
    """Batch sizes and shares at every resolution, solved."""
    rows = []
    for role, paper, ours in _table6_rows(results):
        cells = {"data": role, "resolution": paper["resolution"], "B_L": paper["large_batch"]}
        columns = _columns(paper, ours).items()
        rows.append(cells | {name: value for name, value in columns if "/" not in name})
    return rows


def _equal(rows: Iterable[tuple[str, Row, Row]]) -> tuple[bool, str]:
    """Compare every quantity that the paper's rows have: to the last digit, factors as rounded."""
    right: dict[str, list[bool]] = {}
    first_wrong: dict[str, str] = {}
    for part, paper, ours in rows:
        if not ours:
            raise NotRun("no records")
        for key, quantity in QUANTITIES.items():
            if key not in paper:
                continue
            name = f"{part}, {quantity}" if part else quantity
            same = abs(ours[key] - paper[key]) <= (ROUNDED if key == "factor" else 0)
            right.setdefault(name, []).append(same)
            if not same:
                first_wrong.setdefault(name, f" (not {ours[key]:g} for {paper[key]:g})")
    said = [
        f"{name}: {sum(same)} of {len(same)}{first_wrong.get(name, '')}"
        for name, same in right.items()
    ]
    return not first_wrong, "; ".join(said)


def _raw_sizes(results: Results) -> list[int]:
    """Small batch sizes by the line through TensorFlow's times in the authors' measurements."""
    record = results.first("published")
    return record.metrics["frameworks"]["TensorFlow"]["table2"] if record else []


def raw_plan(results: Results) -> tuple[bool, str]:
    """Compare the batch sizes of the authors' raw measurements with Table 2's."""
    raw, paper = _raw_sizes(results), [row["small_batch"] for row in PAPER["table2"]["rows"]]
    if not raw:
        raise NotRun("the authors' raw data is not at hand")
    pairs = list(zip(raw, paper, strict=True))
    off = max(abs(ours / theirs - 1) for ours, theirs in pairs)
    said = ", ".join(f"{ours} for {theirs}" for ours, theirs in pairs)
    return raw == paper, f"{said}; at most {100 * off:.1f} % off"


TABLE2 = artefact(
    "table2",
    table2,
    checks={"equations": lambda results: _equal(_table2_rows(results)), "raw_plan": raw_plan},
)
TABLE6 = artefact(
    "table6",
    table6,
    checks={"equations": lambda results: _equal(_table6_rows(results))},
)

# Tables 7 and 9: the schedules.


def _schedule(results: Results, table: str) -> list[dict[str, Any]]:
    """For each span of epochs, the paper's and our values by column."""
    part, paper = PAPER["table6"]["cifar" if table == "table7" else "imagenet"], PAPER[table]
    count, rows = len(part["resolutions"]), []
    for row in _solved(results, table=table):
        # Dual-batch learning alone has the last resolution for a whole stage.
        cycled, first = row["scheme"] == "hybrid", (row["stage"] - 1) * count
        index = row["sub_stage"] - 1 if cycled else count - 1
        begin, end = (first + index, first + index) if cycled else (first, first + count - 1)
        rows.append(
            {
                "scheme": row["scheme"],
                "stage": row["stage"],
                "epochs, paper": [paper["epochs"][begin][0], paper["epochs"][end][1]],
                "epochs": [row["first"], row["last"]],
                "rate, paper": paper["stages"][row["stage"] - 1][1],
                "rate": row["lr"],
                "B_S, B_L, paper": [part["small_batches"][0][index], part["large_batches"][index]],
                "B_S, B_L": [row["small_batch"], row["large_batch"]],
                "resolution, paper": part["resolutions"][index],
                "resolution": row["resolution"],
                "dropout, paper": paper["dropouts"][index],
                "dropout": row["dropout"],
            }
        )
    return rows


def _schedule_artefact(table: str) -> Artefact:
    def rows(results: Results) -> list[dict[str, Any]]:
        found = _schedule(results, table)
        return [{name: _cell(value) for name, value in row.items()} for row in found]

    def same(results: Results) -> tuple[bool, str]:
        found = _schedule(results, table)
        if not found:
            raise NotRun("no records")
        equal = [
            row[key] == row[f"{key}, paper"] for row in found for key in ("epochs", "B_S, B_L")
        ]
        evidence = f"{sum(equal)} of {len(equal)} spans of epochs and pairs of batch sizes"
        return all(equal), evidence

    return artefact(table, rows, checks={"same": same})


TABLE7, TABLE9 = map(_schedule_artefact, ("table7", "table9"))

# Table 1: the three schemes, in symbols.

SYMBOLS = PAPER["table1"]["rows"]
HEADINGS = {
    "rate": "rate",
    "batches": "batch sizes",
    "resolution": "resolution",
    "dropout": "dropout",
}


def _symbol(row: Row, quantity: str) -> str:
    """The paper's symbol of a quantity in a sub-stage; a stage without sub-stages has one."""
    symbols: list[str] = SYMBOLS[row["scheme"]][quantity]
    each = len(symbols) // PAPER["table1"]["stages"]
    return symbols[(row["stage"] - 1) * each + (row["sub_stage"] - 1 if each > 1 else 0)]


def table1(results: Results) -> list[dict[str, Any]]:
    """The settings of every sub-stage: the paper's symbols and our schedule's numbers."""
    rows = []
    for row in _solved(results, "schemes"):
        cells = {"scheme": row["scheme"], "epochs": f"{row['first']}-{row['last']}"}
        for key, name in HEADINGS.items():
            cells |= {f"{name}, paper": _symbol(row, key), name: _cell(row[key])}
        rows.append(cells)
    for scheme, symbols in SYMBOLS.items() if not rows else ():
        printed = {f"{HEADINGS[key]}, paper": ", ".join(of) for key, of in symbols.items()}
        rows.append({"scheme": scheme, **printed})
    return rows


def draw_schemes(results: Results) -> "Figure":
    """Draw resolution and batch sizes by epoch, a column for each scheme."""
    from repro.experiments.dualbatch import drawing

    figure, axes = drawing.plots.new_axes(2, len(SYMBOLS), 9.6, 3.8)
    for (above, below), scheme in zip(axes.T, SYMBOLS, strict=True):
        rows = [row for row in _solved(results, "schemes") if row["scheme"] == scheme]
        epochs = [epoch for row in rows for epoch in (row["first"] - 1, row["last"])]
        drawing.titled(above, f"ours, solved: {scheme}")
        above.plot(
            epochs, [row["resolution"] for row in rows for _ in range(2)], label="resolution"
        )
        for place, workers in ((-1, drawing.LARGE), (-2, drawing.SMALL)):  # small come first
            if rows and len(rows[0]["batches"]) >= -place:
                sizes = [row["batches"][place] for row in rows for _ in range(2)]
                style = {"color": drawing.STYLES[workers]["color"]}
                below.plot(epochs, sizes, label=f"{workers.split()[1]} batches", **style)
    axes[0, 0].set_ylabel("resolution (pixels)")
    axes[1, 0].set(xlabel="epoch", ylabel="batch size")
    for row in axes:
        drawing.on_one_scale(row)
    drawing.plots.legend_below(figure, 3)
    return figure


def same_symbols(results: Results) -> tuple[bool, str]:
    """Compare values and symbols, scheme by scheme."""
    rows, wrong = _solved(results, "schemes"), []
    if not rows:
        raise NotRun("no records")
    for scheme in SYMBOLS:
        for key, name in HEADINGS.items():
            pairs = {(_symbol(r, key), str(r[key])) for r in rows if r["scheme"] == scheme}
            if not len(pairs) == len({s for s, _ in pairs}) == len({v for _, v in pairs}):
                wrong.append(f"{scheme}, {name}")
    count = len(SYMBOLS) * len(HEADINGS)
    return not wrong, f"{count - len(wrong)} of {count}{': not ' * bool(wrong)}{', '.join(wrong)}"


TABLE1 = artefact("table1", table1, draw_schemes, checks={"same_symbols": same_symbols})
