"""Do the equations give the paper's plans? Tables 2 and 6, by equations 4 to 8."""

from collections.abc import Sequence
from typing import Any

from repro.experiments.captions import caption
from repro.experiments.design import Exhibit, Results, check
from repro.experiments.dualbatch.describing import facts
from repro.experiments.dualbatch.settings import (
    CIFAR,
    PAPER,
    PARTS,
    WORKERS,
    frameworks,
    published_times,
    solved,
    solved_rows,
    workers,
)
from repro.experiments.dualbatch.times import raw_fits
from repro.experiments.judge import NotRun
from repro.report import DASH

ROUNDED = 6e-4  # a factor with three digits is one of this distance


def table2(results: Results) -> list[dict[str, Any]]:
    """Return batch sizes and shares, solved."""
    ours = {(row["k"], row["n_small"]): row for row in solved_rows(results, "table2")}
    raw = frameworks(results).get("TensorFlow", {}).get("table2", [])
    rows = []
    for number, paper in enumerate(PAPER["table2"]["rows"]):
        ours_row = ours.get((paper["k"], paper["n_small"]), {})
        both = paper["n_small"] < WORKERS
        rows.append(
            {
                "k": f"{paper['k']:.2f}",
                "(n_S, n_L)": workers(paper["n_small"]),
                "B_S, paper": paper["small_batch"],
                "B_S": ours_row.get("small_batch"),
                "d_S, paper": paper["small_samples"],
                "d_S": ours_row.get("small_samples"),
                "d_L, paper": paper.get("large_samples"),
                "d_L": ours_row.get("large_samples") if both else None,
                "d_S/d_L, paper": f"{paper['factor']:.3f}" if both else None,
                "d_S/d_L": f"{ours_row['factor']:.3f}" if both and ours_row else None,
                "B_S, raw data": raw[number] if raw else None,
            }
        )
    return rows


Pairs = dict[str, list[tuple[float, float]]]  # by quantity: ours and the paper's
QUANTITIES = {"small_batch": "B_S", "small_samples": "d_S", "large_samples": "d_L"}


def _all_equal(pairs: Pairs) -> tuple[bool, str]:
    """Compare each quantity: to the last digit, but a factor as rounded."""
    all_wrong, said = [], []
    for name, values in pairs.items():
        allowed = ROUNDED if name == "d_S/d_L" else 0
        wrong = [
            f"{value:g} for {paper:g}" for value, paper in values if abs(value - paper) > allowed
        ]
        evidence = f"{name}: {len(values) - len(wrong)} of {len(values)}"
        said.append(f"{evidence}{f' (not {wrong[0]})' if wrong else ''}")
        all_wrong += wrong
    return not all_wrong, "; ".join(said)


@check("Equations 4 to 8 give the values of Table 2, with one b / a that is chosen to give them")
def equations_table2(results: Results) -> tuple[bool, str]:
    """Compare every batch size, share and factor."""
    ours = {(row["k"], row["n_small"]): row for row in solved_rows(results, "table2")}
    pairs: Pairs = {}
    for paper in PAPER["table2"]["rows"]:
        ours_row = ours.get((paper["k"], paper["n_small"]))
        if ours_row is None:
            raise NotRun("no records")
        for key, name in (*QUANTITIES.items(), ("factor", "d_S/d_L")):
            if key in paper:
                pairs.setdefault(name, []).append((ours_row[key], paper[key]))
    return _all_equal(pairs)


@check("The authors' raw measurements lead to Table 2's batch sizes")
def raw_plan(results: Results) -> tuple[bool, str]:
    """Compare the batch sizes solved with the line through TensorFlow's times."""
    pairs = _raw_pairs(results)
    evidence = ", ".join(f"{solved_raw} for {paper}" for solved_raw, paper in pairs)
    same = all(solved_raw == paper for solved_raw, paper in pairs)
    return same, f"{evidence}; at most {100 * raw_plan_off(results):.1f} % off"


def _raw_pairs(results: Results) -> list[tuple[int, int]]:
    solved_raw = raw_fits(results)["TensorFlow"]["table2"]
    paper = [row["small_batch"] for row in PAPER["table2"]["rows"]]
    return list(zip(solved_raw, paper, strict=True))


def raw_plan_off(results: Results) -> float:
    """Return how far batch sizes from the authors' raw measurements are off Table 2's, as a share.

    Raises:
        NotRun: The raw measurements are not at hand.
    """
    return max(abs(solved_raw / paper - 1) for solved_raw, paper in _raw_pairs(results))


TABLE2 = Exhibit(
    runs=lambda profile, chosen: [solved("table2"), *published_times(chosen)],
    table=table2,
    caption=caption(
        f"B_L = {PAPER['table2']['large_batch']}, {PAPER['cifar_samples']:,} samples, "
        f"{WORKERS} workers. Last column: a and b fitted to the authors' raw measurements in "
        "TensorFlow, which know nothing of the table.",
        facts,
    ),
    checks=(equations_table2, raw_plan),
)


def table6(results: Results) -> list[dict[str, Any]]:
    """Return batch sizes at every resolution, solved."""
    rows = []
    for role, name in PARTS.items():
        part = PAPER["table6"][name]
        sides = part["resolutions"]
        label = f"{role}-100" if role == CIFAR else role
        for n_small in range(WORKERS + 1):
            our_rows = [
                row
                for row in solved_rows(results, "table6")
                if row["n_small"] == n_small and row["resolution"] in sides
            ]
            paper = part["small_batches"][n_small - 1] if n_small else []
            given = part["small_samples"][n_small - 1] if n_small else part["baseline_samples"]
            shares = DASH
            if our_rows:
                small, large = our_rows[0]["small_samples"], our_rows[0]["large_samples"]
                shares = _two_shares(n_small, small or large, large)
            rows.append(
                {
                    "data": f"{label}, {', '.join(map(str, sides))} px",
                    "n_S": n_small,
                    "B_L": listed(part["large_batches"]),
                    "B_S, paper": listed(paper) if paper else DASH,
                    "B_S": listed([row["small_batch"] for row in our_rows]) if n_small else DASH,
                    "d_S, d_L, paper": _two_shares(n_small, given, part["large_samples"]),
                    "d_S, d_L": shares,
                }
            )
    return rows


def listed(values: Sequence[int]) -> str:
    """Return numbers as a list in words."""
    return ", ".join(f"{value:,}" for value in values)


def _two_shares(n_small: int, first: int, large: int) -> str:
    if n_small == 0:
        return f"–, {first:,}"
    return f"{first:,}, {large:,}" if n_small < WORKERS else f"{first:,}, –"


@check(
    "Equations 4 to 8 give the values of Table 6, with one b / a for each B_L that is chosen to "
    "give its four B_S"
)
def equations_table6(results: Results) -> tuple[bool, str]:
    """Compare every batch size and share."""
    ours = {(row["resolution"], row["n_small"]): row for row in solved_rows(results, "table6")}
    pairs: Pairs = {}
    for role, name in PARTS.items():
        part = PAPER["table6"][name]
        for index, side in enumerate(part["resolutions"]):
            for n_small in range(WORKERS + 1):
                if (side, n_small) not in ours:
                    raise NotRun("no records")
                paper = {"large_samples": part["large_samples"]}
                if n_small == 0:
                    paper = {"large_samples": part["baseline_samples"]}
                else:
                    paper["small_batch"] = part["small_batches"][n_small - 1][index]
                    paper["small_samples"] = part["small_samples"][n_small - 1]
                if n_small == WORKERS:
                    del paper["large_samples"]
                for key, value in paper.items():
                    quantity = f"{role}, {QUANTITIES[key]}"
                    pairs.setdefault(quantity, []).append((ours[side, n_small][key], value))
    return _all_equal(pairs)


TABLE6 = Exhibit(
    runs=lambda profile, chosen: [solved("table6")],
    table=table6,
    caption=caption(f"k = {PAPER['table6']['k']:g}, {WORKERS} workers.", facts),
    checks=(equations_table6,),
)
