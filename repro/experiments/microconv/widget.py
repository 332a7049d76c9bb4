"""One kernel under any workspace limit, and a network under any total, from measured candidates."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from repro.experiments.explorer import Control, Explorer
from repro.experiments.microconv.layers import draw_front, draw_shares, share_out
from repro.experiments.microconv.measured import Entry, alexnet, divide, entries, front, label
from repro.experiments.microconv.runs import MIB, title_of
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
    """The measured kernels by name, such as ``conv2 forward, mini-batch 64``.

    Of several of a name the last one counts. Each has the device it was measured on.
    """
    return {
        f"{entry['layer']} {_KINDS[entry['kind']]}, mini-batch {entry['batch']}": {
            **entry,
            "device": device_name(record),
        }
        for record in results.ok("candidates")
        for entry in entries(record)
    }


def explorers(results: Callable[[str], Results]) -> list[Explorer]:
    """Return two widgets, of one kernel and of a network; each only where it has records."""
    measured, whole = kernels(results("figure6")), alexnet(results("figure12"))
    percents = {f"{percent} %": percent for percent in range(0, 101, 2)}
    share = Control("limit, from the least to the most useful", percents, "50 %", 11)

    def of_kernel(kernel: str, percent: int) -> "tuple[str, Figure]":
        least, most = limits_mib(measured[kernel])
        limit_mib = least + (most - least) * percent / 100
        return describe(measured[kernel], limit_mib), draw(measured[kernel], limit_mib)

    made = []
    if measured:
        first = next((n for n in measured if n.startswith("conv2 forward")), next(iter(measured)))
        names = Control("kernel", {name: name for name in measured}, first, 3, listed=True)
        made.append(Explorer("microconv", {"kernel": names, "percent": share}, of_kernel))
    if whole is not None:
        least, most = (sum(ends) for ends in zip(*map(limits_mib, entries(whole)), strict=True))

        def of_network(percent: int, record: Record = whole) -> "tuple[str, Figure]":
            total_mib = least + (most - least) * percent / 100
            return describe_sharing(record, total_mib), draw_sharing(record, total_mib)

        made.append(Explorer("sharing", {"percent": share}, of_network, height=610))
    return made


def limits_mib(entry: Entry) -> tuple[float, float]:
    """The workspace of the smallest and of the largest point of a kernel's front."""
    points = front(entry)
    return points[0].workspace_bytes / MIB, points[-1].workspace_bytes / MIB


def describe(entry: Entry, limit_mib: float) -> str:
    """In one line the effect of a limit on a kernel."""
    division = divide(entry, limit_mib)
    if division is None:
        least = limits_mib(entry)[0]
        return f"{limit_mib:.2f} MiB: nothing fits; the smallest division needs {least:.2f} MiB"
    against = "no undivided algorithm fits"
    if undivided := divide(entry, limit_mib, "undivided"):
        against = f"{undivided.time_s / division.time_s:.2f}× over {undivided}"
    return (
        f"{limit_mib:.2f} MiB: {division}, {1e3 * division.time_s:.1f} ms with "
        f"{division.workspace_bytes / MIB:.1f} MiB; {against}; torch's own "
        f"{1e3 * entry['native_s']:.1f} ms with {entry['native_bytes'] / MIB:.1f} MiB"
    )


def draw(entry: Entry, limit_mib: float) -> "Figure":
    """Draw a kernel's front, the limit, and the division that is chosen."""
    figure = draw_front(entry, front(entry), limit_mib)
    return _signed(figure, panel(f"{label(entry)}, mini-batch {entry['batch']}"), entry["device"])


def _signed(figure: "Figure", title: str, device: str) -> "Figure":
    from repro.plots import sign

    figure.suptitle(title, fontsize=11)
    sign(figure, f"Computed from times measured on {device}, SYNTHETIC inputs.")
    return figure


def describe_sharing(record: Record, total_mib: float) -> str:
    """In one line how long kernels take under WR and under WD with one total."""
    own = entries(record)
    each_mib = total_mib / len(own)
    fitting = [division for entry in own if (division := divide(entry, each_mib))]
    shared = share_out(own, total_mib)
    wr, wd = (f"{1e3 * sum(d.time_s for d in ways):.1f} ms" for ways in (fitting, shared))
    if len(fitting) < len(own):
        wr = f"{len(own) - len(fitting)} of {len(own)} kernels do not fit"
    told = f"{total_mib:.1f} MiB for {len(own)} kernels: WR with {each_mib:.1f} MiB for each"
    return f"{told}: {wr}; WD: {wd if shared else 'does not fit'}"


def draw_sharing(record: Record, total_mib: float) -> "Figure":
    """Draw the workspace of each kernel under WR and under WD, on one axis for all totals."""
    own = entries(record)
    largest = max(limits_mib(entry)[1] for entry in own)
    figure = draw_shares(own, total_mib / len(own), total_mib, 1.12 * largest)
    return _signed(figure, title_of(record), device_name(record))
