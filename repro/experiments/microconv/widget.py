"""One kernel under any workspace limit, and a network under any total, from measured candidates."""

from collections.abc import Callable
from functools import partial

from matplotlib.figure import Figure

from repro import plots
from repro.experiments.explorer import Control, Explorer
from repro.experiments.microconv.layers import draw_front, draw_shares, share_out
from repro.experiments.microconv.measured import Entry, alexnet, divide, entries, front, label
from repro.experiments.microconv.runs import KINDS, MIB
from repro.experiments.query import Results, device_name
from repro.experiments.view import panel
from repro.records import Record

SOURCE = "Computed from times measured on {}, SYNTHETIC inputs."
_KINDS = dict(zip(KINDS, ("forward", "data gradient", "filter gradient"), strict=True))


def explorers(results: Callable[[str], Results]) -> list[Explorer]:
    """Return two widgets, of one kernel and of a network; each only where it has records."""
    measured = {  # of several of a name the last one counts
        f"{entry['layer']} {_KINDS[entry['kind']]}, mini-batch {entry['batch']}": (record, entry)
        for record in results("figure6").ok("candidates")
        for entry in entries(record)
    }
    percents = {f"{percent} %": percent for percent in range(0, 101, 2)}
    share = Control("limit, from the least to the most useful", percents, "50 %", 11)
    made = []
    if measured:
        first = next((n for n in measured if n.startswith("conv2 forward")), next(iter(measured)))
        names = Control("kernel", {name: name for name in measured}, first, 3, listed=True)

        def of_kernel(kernel: str, percent: int) -> tuple[str, Figure]:
            return explore_kernel(*measured[kernel], percent)

        made.append(Explorer("microconv", {"kernel": names, "percent": share}, of_kernel))
    if (whole := alexnet(results("figure12"))) is not None:
        of_network = partial(explore_network, whole)
        made.append(Explorer("sharing", {"percent": share}, of_network, height=610))
    return made


def limits_mib(entry: Entry) -> tuple[float, float]:
    """The workspace of the smallest and of the largest point of a kernel's front."""
    points = front(entry)
    return points[0].workspace_bytes / MIB, points[-1].workspace_bytes / MIB


def explore_kernel(record: Record, entry: Entry, percent: int) -> tuple[str, Figure]:
    """The effect of a limit on a kernel in one line, and its front with the division chosen."""
    least, most = limits_mib(entry)
    limit_mib = least + (most - least) * percent / 100
    title = panel(f"{label(entry)}, mini-batch {entry['batch']}")
    figure = draw_front(entry, front(entry), title, limit_mib)
    plots.sign(figure, SOURCE.format(device_name(record)))
    return describe(entry, limit_mib), figure


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


def explore_network(record: Record, percent: int) -> tuple[str, Figure]:
    """The time of a network's kernels under WR and WD with one total, and each one's workspace."""
    own = entries(record)
    least, most = (sum(ends) for ends in zip(*map(limits_mib, own), strict=True))
    total_mib = least + (most - least) * percent / 100
    each_mib = total_mib / len(own)
    fitting = [division for entry in own if (division := divide(entry, each_mib))]
    shared = [division for _, division in share_out(record, total_mib)]
    wr, wd = (f"{1e3 * sum(d.time_s for d in ways):.1f} ms" for ways in (fitting, shared))
    if len(fitting) < len(own):
        wr = f"{len(own) - len(fitting)} of {len(own)} kernels do not fit"
    told = f"{total_mib:.1f} MiB for {len(own)} kernels: WR with {each_mib:.1f} MiB for each"
    figure = draw_shares(record, each_mib, total_mib)
    plots.sign(figure, SOURCE.format(device_name(record)))
    return f"{told}: {wr}; WD: {wd if shared else 'does not fit'}", figure
