"""One kernel under any workspace limit, and a network under any total, from measured candidates."""

from typing import TYPE_CHECKING

from repro.experiments.microconv.describing import whose
from repro.experiments.microconv.layers import draw_front
from repro.experiments.microconv.settings import (
    MIB,
    Entry,
    best_candidates,
    divide,
    front,
    kernels_of,
    label,
)
from repro.experiments.microconv.shared_workspace import draw_shares, share_out
from repro.experiments.query import Results
from repro.experiments.view import device_name, panel
from repro.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = {
    "forward": "forward",
    "backward_data": "data gradient",
    "backward_filter": "filter gradient",
}


def kernels(results: Results) -> dict[str, Entry]:
    """Return the measured kernels by name, such as ``conv2 forward, mini-batch 64``.

    Of several of a name the last one counts. Each has the device it was measured on.
    """
    return {
        f"{entry['layer']} {_KINDS[entry['kind']]}, mini-batch {entry['batch']}": {
            **entry,
            "device": device_name(record),
        }
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
    from repro.plots import sign

    figure = draw_front(entry, front(entry), limit_mib, chosen_point(entry, limit_mib))
    role = f"{label(entry)}, mini-batch {entry['batch']}"
    figure.suptitle(panel(role, data="SYNTHETIC inputs"), fontsize=11)
    sign(figure, f"Computed from times measured on {entry['device']}.")
    return figure


def network(results: Results) -> Record | None:
    """Return the measurement of all kernels of AlexNet, None where there is none."""
    return best_candidates(results, "AlexNet")


def totals_mib(record: Record) -> tuple[float, float]:
    """Return the least that all kernels together need, and the most that they can use."""
    ends = [limits_mib(entry) for entry in kernels_of(record)]
    return sum(least for least, _ in ends), sum(most for _, most in ends)


def describe_sharing(record: Record, total_mib: float) -> str:
    """Return in one line how long kernels take under WR and under WD with one total."""
    entries = kernels_of(record)
    each_mib = total_mib / len(entries)
    alone = [divide(entry, each_mib) for entry in entries]
    shared = share_out(entries, total_mib)
    fitting = [division for division in alone if division is not None]
    wr = f"{1e3 * sum(division.time_s for division in fitting):.1f} ms"
    if len(fitting) < len(alone):
        wr = f"{len(alone) - len(fitting)} of {len(alone)} kernels do not fit"
    wd = "does not fit"
    if shared is not None:
        wd = f"{1e3 * sum(division.time_s for division in shared):.1f} ms"
    return (
        f"{total_mib:.1f} MiB for {len(entries)} kernels: WR with {each_mib:.1f} MiB for each: "
        f"{wr}; WD: {wd}"
    )


def draw_sharing(record: Record, total_mib: float) -> "Figure":
    """Draw what each kernel takes under WR and under WD, on the same axis for all totals."""
    from repro.plots import sign

    entries = kernels_of(record)
    shared = share_out(entries, total_mib)
    largest = max(most for _, most in map(limits_mib, entries))
    figure = draw_shares(entries, total_mib / len(entries), total_mib, shared, 1.12 * largest)
    figure.suptitle(whose(record, "Caffe's AlexNet"), fontsize=11)
    sign(figure, f"Computed from times measured on {device_name(record)}.")
    return figure
