"""Does a line through a few batches foretell the largest batch that fits? (Figure 13)"""

from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Expectation, Results, Run, claim
from repro.experiments.dualbatch.settings import (
    CIFAR,
    MIB,
    PAPER,
    PARTS,
    config_of,
    facts,
    measured,
)
from repro.experiments.dualbatch.settings import memory as measurement
from repro.experiments.dualbatch.times import Series, draw_fits
from repro.experiments.judging import (
    NotRun,
    Part,
    Verdict,
    certain,
    combine,
    each,
    equivalence,
    exactly,
)
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
    found = []
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
        found.append(row)
    return found


def figure(results: Results) -> "Figure":
    """Draw measured and predicted memory."""
    panels: dict[str, Series] = {}
    for role in PARTS:
        metrics = measured(results, "memory", role)
        if not metrics:
            continue
        sizes = [*metrics["batch_sizes"], *(n for n, _ in metrics["beyond"])]
        peaks = [*metrics["peaks"], *(peak for _, peak in metrics["beyond"])]
        line = [metrics["fixed_bytes"] + n * metrics["bytes_per_sample"] for n in sizes]
        side = config_of(results, "memory", role)["resolution"]
        panels[f"{role}, {side} px"] = (sizes, peaks, line)
    names = ("measured", "line fitted to the eight smallest")
    return draw_fits(panels, "peak memory (MiB)", names, unit=1 / MIB)


@claim(
    "largest_batch",
    "The largest batch size that fits is predicted to "
    + " and ".join(f"{error:g} % ({role})" for role, error in ERRORS.items()),
    "Section 5.3",
)
def largest_batch(results: Results, expected: Expectation) -> Verdict:
    """Judge the predicted size against the one found by trying, which does not vary."""

    def judge(role: str) -> Part:
        metrics = measured(results, "memory", role)
        if not metrics:
            raise NotRun("no records")
        error = error_percent(metrics)
        told = f"{metrics['predicted_max']:,} predicted, {metrics['measured_max']:,} measured"
        if error is None:
            return certain(f"{role}: {told}", False)
        return equivalence(f"{role}: {told},", exactly(error, unit="%", digits=1), ERRORS[role])

    return combine(each(ERRORS, judge))


FIGURE13 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "M(B) = p + B a, fitted to the eight smallest batch sizes, and the largest batch size "
        "under a limit: predicted, and found by trying. On a CPU memory is the sum of the live "
        "tensors, nearly a line by construction; on a GPU it is what the allocator gives out.",
        facts,
    ),
    claims=(largest_batch,),
)
