"""One kernel under any workspace limit, from its measured candidates."""

from typing import TYPE_CHECKING

from repro.experiments.design import Results
from repro.experiments.microconv.layers import draw_front
from repro.experiments.microconv.settings import MIB, Entry, divide, front, kernels_of, label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def kernels(results: Results) -> dict[str, Entry]:
    """Return the measured kernels by name, such as ``conv2 F, N = 64``; later records win."""
    return {
        f"{label(entry)}, N = {entry['batch']}": entry
        for record in results.ok("candidates")
        for entry in kernels_of(record)
    }


def limits_mib(entry: Entry) -> tuple[float, float]:
    """Return the workspace of the smallest and of the largest point of a kernel's front."""
    points = front(entry)
    return points[0].workspace_bytes / MIB, points[-1].workspace_bytes / MIB


def chosen_point(entry: Entry, limit_mib: float) -> int | None:
    """Return the number of the front's point that WR chooses, from 0; None where nothing fits."""
    fitting = [
        number
        for number, division in enumerate(front(entry))
        if division.workspace_bytes <= limit_mib * MIB
    ]
    return fitting[-1] if fitting else None


def describe(entry: Entry, limit_mib: float) -> str:
    """Return in one line what a limit does to a kernel."""
    number = chosen_point(entry, limit_mib)
    if number is None:
        least = limits_mib(entry)[0]
        return f"{limit_mib:.2f} MiB: nothing fits; the smallest division needs {least:.2f} MiB"
    division = front(entry)[number]
    undivided = divide(entry, limit_mib, "undivided")
    against = "no undivided algorithm fits"
    if undivided is not None:
        against = f"{undivided.time_s / division.time_s:.2f}× over {undivided}"
    return (
        f"{limit_mib:.2f} MiB: {division}, {1e3 * division.time_s:.1f} ms with "
        f"{division.workspace_bytes / MIB:.1f} MiB; {against}; torch's own "
        f"{1e3 * entry['native_s']:.1f} ms with {entry['native_bytes'] / MIB:.1f} MiB"
    )


def draw(entry: Entry, limit_mib: float) -> "Figure":
    """Draw a kernel's front, the limit, and the division that is chosen."""
    return draw_front(entry, front(entry), limit_mib, chosen_point(entry, limit_mib))
