"""The cells that tables and claims compare: trainings by seed, measurements by process."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from repro.experiments.dualbatch import runs
from repro.experiments.dualbatch.labels import said_of, trained
from repro.experiments.judge import BySeed, Cases, Cell, Estimate, NotRun, cases, difference
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary

Records = Sequence[Record]


def section51(results: Results, k: float, n_small: int, factor: str = "linear") -> list[Record]:
    """The trainings of section 5.1 that ended; the baseline has n_small = 0 at any k."""
    k = k if n_small else 1.0
    return results.ok("train", setting=runs.SECTION_5_1, n_small=n_small, k=k, factor=factor)


def section52(
    results: Results, scheme: str, n_small: int, setting: str = runs.SECTION_5_2
) -> list[Record]:
    """The trainings of section 5.2 that ended: ``dual-batch`` or ``hybrid``."""
    return results.ok("train", setting=setting, n_small=n_small, scheme=scheme)


def kept(results: Results, n_small: int) -> list[Record]:
    """The trainings of a mix at the larger k with momentum kept from share to share."""
    return results.ok("train", setting=runs.KEPT, n_small=n_small)


def final(results: Results, records: Records, metric: str) -> BySeed:
    """A metric after the last epoch, one value for each seed."""

    def read(record: Record) -> float:
        return float(record.metrics[metric][-1])

    # All seeds with momentum kept were planned before any was looked at.
    if records and records[0].config.get("setting") == runs.KEPT:
        return BySeed.of(records, read)
    return results.cell(records, read)


def by_process(results: Results, experiment: str, values: Sequence[float]) -> Cell:
    """One value of each process with its number; of one process its rounds as they are."""
    records = results.ok(experiment)
    if len(records) < 2:
        return values
    of = dict(zip((record.seed for record in records), values, strict=True))
    return results.cell(records, lambda record: of[record.seed])


def change(results: Results, records: Records, base: Records, metric: str = "accuracy") -> Estimate:
    """How far a metric lies above that of other trainings, seed by seed.

    Raises:
        NotRun: There are no records of one of them, or they share no seed.
    """
    ours, others = (final(results, of, metric) for of in (records, base))
    return difference(ours, others, *(("points", 2) if metric == "accuracy" else ("", 3)))


def compared(
    results: Results, pairs: Mapping[str, tuple[Records, Records]], baseline: bool = False
) -> Cases:
    """By case, the accuracy of trainings over that of others; with the end of large batches alone.

    Args:
        results: Of the trainings.
        pairs: By case, trainings and those that they are compared with.
        baseline: Whether the others are large batches alone.
    """
    found = cases(pairs, lambda name: change(results, *pairs[name]))
    ours = next((records for records, _ in pairs.values() if records), ())
    notes = [trained(ours)]
    base = next((records for _, records in pairs.values() if records), ())
    if baseline and base:
        mean = np.mean(final(results, base, "accuracy"))
        notes.append(f"large batches alone end at {mean:.1f} %")
    return said_of(found, *notes)


def gain(results: Results, records: Records, base: Records) -> str:
    """The gain in points of accuracy with its interval, as a cell."""
    try:
        return str(change(results, records, base))
    except NotRun:
        return DASH


def outcome(
    results: Results,
    records: Records,
    paper: Mapping[str, float],
    base: Records = (),
    paper_base: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Columns of final loss and accuracy, and of the gain over a base, the paper's with ours."""
    accuracy = final(results, records, "accuracy")
    cells = {
        "loss, paper": f"{paper['loss']:.3f}",
        "loss": Summary.of(final(results, records, "test_loss")).text(3),
        "accuracy, paper (%)": f"{paper['accuracy']:.1f}",
        "accuracy (%)": Summary.of(accuracy).text(),
        "n": len(accuracy),
    }
    if paper_base is None:
        return cells
    points = f"{paper['accuracy'] - paper_base['accuracy']:+.1f}"
    return cells | {"gain, paper": points, "gain": gain(results, records, base)}


def batch_sizes(records: Records) -> dict[str, str]:
    """Columns of the batch sizes of the plans that trainings went by, for each resolution."""
    cells = {}
    for name, kind in (("B_S", "small"), ("B_L", "large")):
        plans = records[0].metrics["plans"] if records else []
        sizes = [plan[f"{kind}_batch"] if plan[f"{kind}_samples"] else DASH for plan in plans]
        cells[name] = ", ".join(map(str, sizes)) or DASH
    return cells


def scheme_rows(results: Results, table: str, setting: str, base: str) -> list[dict[str, Any]]:
    """Table 8 or 10: dual-batch learning and the hybrid scheme; gains are over `base`, 4 large."""
    paper, rows = runs.PAPER[table], []
    compared, paper_base = section52(results, base, 0, setting), paper[runs.SCHEMES[base]][0]
    for scheme, key in runs.SCHEMES.items():
        for n, published in enumerate(paper[key]):
            records = section52(results, scheme, n, setting)
            over = (compared, paper_base) if n or scheme != base else ()
            row = {"scheme": scheme, "workers": runs.mix(n), **batch_sizes(records)}
            rows.append(row | outcome(results, records, published, *over))
    return rows
