"""Do the equations give the paper's plans and schedules? Tables 1, 2, 6, 7 and 9: all solved."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from repro.experiments.design import Artefact, Rows
from repro.experiments.dualbatch.cells import artefact
from repro.experiments.dualbatch.runs import PAPER, PARTS, WORKERS, mix
from repro.experiments.judge import NotRun
from repro.experiments.query import Results

Row = Mapping[str, Any]
QUANTITIES = {"small_batch": "B_S", "small_samples": "d_S", "large_samples": "d_L"}


def _solved(results: Results, experiment: str = "solve", **config: Any) -> list[dict[str, Any]]:
    """The rows of a solved table, none where it was not solved."""
    record = results.first(experiment, **config)
    return record.metrics["rows"] if record else []


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else value


def _as_printed(results: Results, rows: Callable[[Results], Rows]) -> tuple[bool, str]:
    """Compare every cell with the paper's beside it, as they are printed."""
    equal = [
        row[name.removesuffix(", paper")] == paper
        for row in rows(results)
        for name, paper in row.items()
        if name.endswith(", paper") and paper is not None
    ]
    if not equal:
        raise NotRun("no records")
    return all(equal), f"{sum(equal)} of {len(equal)} cells"


def _solved_table(table: str, rows: Callable[..., Rows]) -> Artefact:
    """A table whose check says whether its cells are the paper's."""
    own = partial(rows, table=table)
    return artefact(table, rows=own, checks={"as_printed": partial(_as_printed, rows=own)})


# Tables 2 and 6: batch sizes and shares.


def _paper_sizes(ours: Row) -> tuple[dict[str, Any], Row]:
    """First columns, and the paper's quantities, of a row of Table 2 or 6."""
    side, n, workers = ours["resolution"], ours["n_small"], mix(ours["n_small"])
    if side is None:
        rows = PAPER["table2"]["rows"]
        (row,) = [row for row in rows if (row["k"], row["n_small"]) == (ours["k"], n)]
        return {"k": f"{ours['k']:.2f}", "workers": workers}, row
    (role,) = [r for r, name in PARTS.items() if side in PAPER["table6"][name]["resolutions"]]
    part, paper = PAPER["table6"][PARTS[role]], {}
    if n:
        index = part["resolutions"].index(side)
        paper["small_batch"] = part["small_batches"][n - 1][index]
        paper["small_samples"] = part["small_samples"][n - 1]
    if n < WORKERS:
        paper["large_samples"] = part["large_samples" if n else "baseline_samples"]
    first = {"data": role, "resolution": side, "B_L": ours["large_batch"], "workers": workers}
    return first, paper


def sizes_table(results: Results, table: str) -> list[dict[str, Any]]:
    """Batch sizes and shares of Table 2 or 6, the paper's with ours."""
    rows = []
    for ours in _solved(results, table=table):
        row, paper = _paper_sizes(ours)
        factor = {"factor": "d_S/d_L"} if table == "table2" else {}
        for key, name in (QUANTITIES | factor).items():
            row[f"{name}, paper"] = _cell(paper.get(key))
            row[name] = _cell(ours[key]) if key in paper else None
        rows.append(row)
    # By the line through TensorFlow's times in the authors' measurements.
    if rows and (record := results.first("published")):
        sizes = record.metrics["frameworks"]["TensorFlow"]["table2"]
        rows = [row | {"B_S, raw data": size} for row, size in zip(rows, sizes, strict=True)]
    return rows


TABLE2, TABLE6 = (_solved_table(table, sizes_table) for table in ("table2", "table6"))

# Tables 7 and 9: the schedules.


def schedule(results: Results, table: str) -> Iterator[dict[str, Any]]:
    """The hybrid scheme's spans of epochs with the same settings, the paper's with ours."""
    part = PAPER["table6"]["cifar" if table == "table7" else "imagenet"]
    spans = [row for row in _solved(results, table=table) if row["scheme"] == "hybrid"]
    for row, paper in zip(spans, PAPER[table]["epochs"], strict=True) if spans else ():
        index = row["sub_stage"] - 1
        cells = {name: row[name] for name in ("stage", "lr", "resolution", "dropout")} | {
            "epochs, paper": paper,
            "epochs": [row["first"], row["last"]],
            "B_S, B_L, paper": [part["small_batches"][0][index], part["large_batches"][index]],
            "B_S, B_L": [row["small_batch"], row["large_batch"]],
        }
        yield {name: _cell(value) for name, value in cells.items()}


TABLE7, TABLE9 = (_solved_table(table, schedule) for table in ("table7", "table9"))

# Table 1: the three schemes, in symbols.


def table1(results: Results) -> Iterator[dict[str, Any]]:
    """The settings of every sub-stage: the paper's symbols and our schedule's numbers."""
    for row in _solved(results, "schemes"):
        cells = {"scheme": row["scheme"], "epochs": f"{row['first']}-{row['last']}"}
        for name, symbols in PAPER["table1"]["rows"][row["scheme"]].items():
            # A symbol for each stage, or for each sub-stage.
            each = len(symbols) // PAPER["table1"]["stages"]
            symbol = symbols[(row["stage"] - 1) * each + (row["sub_stage"] - 1) * (each > 1)]
            cells |= {f"{name}, paper": symbol, name: _cell(row[name])}
        yield cells


TABLE1 = artefact("table1", rows=table1)
