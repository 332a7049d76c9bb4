"""Do the equations give the paper's plans and schedules? Tables 1, 2, 6, 7 and 9: all solved."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from repro.experiments.dualbatch.cells import artefact
from repro.experiments.dualbatch.runs import PAPER, PARTS, WORKERS, mix
from repro.experiments.judge import NotRun
from repro.experiments.query import Results

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


def _table6_paper() -> Iterator[tuple[dict[str, Any], Row]]:
    """Yield columns and the paper's row of each resolution and n_S of Table 6."""
    for role, name in PARTS.items():
        part = PAPER["table6"][name]
        for index, (side, large) in enumerate(
            zip(part["resolutions"], part["large_batches"], strict=True)
        ):
            for n in range(WORKERS + 1):
                row = {"n_small": n, "resolution": side}
                if n:
                    row["small_batch"] = part["small_batches"][n - 1][index]
                    row["small_samples"] = part["small_samples"][n - 1]
                if n < WORKERS:
                    row["large_samples"] = part["large_samples" if n else "baseline_samples"]
                yield {"data": role, "resolution": side, "B_L": large}, row


def _pairs(results: Results, table: str) -> list[tuple[dict[str, Any], Row, Row]]:
    """First columns, then the paper's row and ours; ours is empty where not solved."""
    by = "k" if table == "table2" else "resolution"
    ours = {(row[by], row["n_small"]): row for row in _solved(results, table=table)}
    paper = [({"k": f"{row['k']:.2f}"}, row) for row in PAPER["table2"]["rows"]]
    return [
        (first, row, ours.get((row[by], row["n_small"]), {}))
        for first, row in (paper if table == "table2" else _table6_paper())
    ]


def sizes_table(results: Results, table: str) -> list[dict[str, Any]]:
    """Batch sizes and shares of Table 2 or 6, the paper's with ours."""
    quantities = list(QUANTITIES.items())[: 4 if table == "table2" else 3]
    rows = []
    for first, paper, ours in _pairs(results, table):
        row = first | {"workers": mix(paper["n_small"])}
        for key, name in quantities:
            row |= {f"{name}, paper": _cell(paper.get(key))}
            row[name] = _cell(ours.get(key)) if key in paper else None
        rows.append(row)
    for row, size in zip(rows, _raw_sizes(results), strict=False):
        row["B_S, raw data"] = size
    return rows


def equations(results: Results, table: str) -> tuple[bool, str]:
    """Compare every quantity that the paper's rows have: to the last digit, factors as rounded."""
    right: dict[str, list[bool]] = {}
    for first, paper, ours in _pairs(results, table):
        if not ours:
            raise NotRun("no records")
        for key in QUANTITIES.keys() & paper.keys():
            name = f"{first['data']}, {QUANTITIES[key]}" if "data" in first else QUANTITIES[key]
            same = abs(ours[key] - paper[key]) <= (ROUNDED if key == "factor" else 0)
            right.setdefault(name, []).append(same)
    said = "; ".join(f"{name}: {sum(of)} of {len(of)}" for name, of in sorted(right.items()))
    return all(map(all, right.values())), said


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
    partial(sizes_table, table="table2"),
    checks={"equations": partial(equations, table="table2"), "raw_plan": raw_plan},
)
TABLE6 = artefact(
    "table6",
    partial(sizes_table, table="table6"),
    checks={"equations": partial(equations, table="table6")},
)

# Tables 7 and 9: the schedules.


def schedule(results: Results, table: str) -> list[dict[str, Any]]:
    """For each span of epochs, the paper's and our values by column."""
    part, paper = PAPER["table6"]["cifar" if table == "table7" else "imagenet"], PAPER[table]
    count, rows = len(part["resolutions"]), []
    for row in _solved(results, table=table):
        # Dual-batch learning alone has the last resolution for a whole stage.
        cycled, first = row["scheme"] == "hybrid", (row["stage"] - 1) * count
        index = row["sub_stage"] - 1 if cycled else count - 1
        begin, end = (first + index, first + index) if cycled else (first, first + count - 1)
        spans = [paper["epochs"][begin][0], paper["epochs"][end][1]]
        batches = [part["small_batches"][0][index], part["large_batches"][index]]
        cells = {
            "scheme": row["scheme"],
            "stage": row["stage"],
            "rate": row["lr"],
            "resolution": row["resolution"],
            "dropout": row["dropout"],
            "epochs, paper": spans,
            "epochs": [row["first"], row["last"]],
            "B_S, B_L, paper": batches,
            "B_S, B_L": [row["small_batch"], row["large_batch"]],
        }
        rows.append({name: _cell(value) for name, value in cells.items()})
    return rows


def same_schedule(results: Results, table: str) -> tuple[bool, str]:
    """Compare spans of epochs, and batch sizes, with the paper's."""
    found = schedule(results, table)
    if not found:
        raise NotRun("no records")
    equal = [row[key] == row[f"{key}, paper"] for row in found for key in ("epochs", "B_S, B_L")]
    return all(equal), f"{sum(equal)} of {len(equal)} spans of epochs and pairs of batch sizes"


TABLE7, TABLE9 = (
    artefact(
        table,
        partial(schedule, table=table),
        checks={"same": partial(same_schedule, table=table)},
    )
    for table in ("table7", "table9")
)

# Table 1: the three schemes, in symbols.

SYMBOLS = PAPER["table1"]["rows"]
HEADINGS = ("rate", "batches", "resolution", "dropout")


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
        for name in HEADINGS:
            cells |= {f"{name}, paper": _symbol(row, name), name: _cell(row[name])}
        rows.append(cells)
    return rows


TABLE1 = artefact("table1", table1)
