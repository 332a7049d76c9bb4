"""What do unequal devices gain together, and what does an even split cost? (Figure 13)"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro.experiments.design import check
from repro.experiments.microconv.measured import ms, times
from repro.experiments.microconv.runs import PAPER, artefact, cluster, title_of
from repro.experiments.query import Results
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Split = dict[str, tuple[int, float]]  # by device: batch size and seconds
FIGURE = PAPER["figure13"]

# One fast device is the baseline, as one GK210 is in the paper, which adds another and a K20Xm.
ALL = "2 fast + slow"
COMBINATIONS = {
    "fast": ("fast",),
    "slow": ("slow",),
    "fast + slow": ("fast", "slow"),
    ALL: ("fast 1", "fast 2", "slow"),
}


def _shared_out(batch: int, seconds: Mapping[str, Mapping[int, float]]) -> Split:
    """The split of a batch whose slowest device is the fastest; idle devices are left out."""
    from repro.microconv import split_batch

    sizes = split_batch(batch, seconds)
    return {device: (size, seconds[device][size]) for device, size in sizes.items()}


def splits(results: Results) -> dict[str, tuple[Split, Split | None]]:
    """The best split of each combination of devices, and an even one, None where it is no size."""
    found = {}
    for record in results.ok("cluster")[:1]:
        measured = {
            device: {int(size): seconds for size, seconds in sizes.items()}
            for device, sizes in record.metrics["times"].items()
        }
        for name, devices in COMBINATIONS.items():
            seconds = {device: measured[device.partition(" ")[0]] for device in devices}
            share, rest = divmod(record.config["batch"], len(devices))
            even = None
            if not rest and all(share in sizes for sizes in seconds.values()):
                even = {device: (share, sizes[share]) for device, sizes in seconds.items()}
            found[name] = _shared_out(record.config["batch"], seconds), even
    return found


def slowest(split: Split) -> float:
    """Seconds of the slowest device."""
    return max(seconds for _, seconds in split.values())


def gains(results: Results) -> dict[str, float]:
    """The speed-up of each combination over the better device alone."""
    best = {name: slowest(split) for name, (split, _) in splits(results).items()}
    return {name: min(best["fast"], best["slow"]) / seconds for name, seconds in best.items()}


def published_splits() -> tuple[Split, Split]:
    """The best split of the paper's 750Ti and K20Xm by its own times, and the even one.

    The paper gives each GPU's time at half of the mini-batch; times are taken as proportional to
    the batch size from there, and batch sizes as multiples of 4 (section III-E; its splits are).
    """
    batch, half = FIGURE["batch"], FIGURE["batch"] // 2
    even = {device: (half, value / 1e3) for device, value in FIGURE["even_ms"].items()}
    seconds = {
        device: {size: size / half * second for size in range(4, batch + 1, 4)}
        for device, (_, second) in even.items()
    }
    return _shared_out(batch, seconds), even


def table(results: Results) -> list[dict[str, Any]]:
    """Mini-batches shared out among unequal devices, ours and then the paper's."""
    rows = []

    def add(devices: str, best: Split | None, even: Split | None, **cells: str) -> None:
        row = {"devices": devices, "batch sizes": _sizes(best or {}) or DASH, "paper": DASH}
        row |= dict.fromkeys(("kernels divided", "slowest (ms)", "over the best one"), DASH)
        row |= dict.fromkeys(("even split (ms)", "even is slower by"), DASH)
        if best:
            row["slowest (ms)"] = ms(slowest(best))
        if best and even:
            row["even split (ms)"] = ms(slowest(even))
            row["even is slower by"] = times(slowest(even) / slowest(best))
        rows.append(row | cells)

    for name, (best, even) in splits(results).items():
        metrics = results.need("cluster").metrics
        kinds = dict.fromkeys(device.partition(" ")[0] for device in best)
        cells = {
            "kernels divided": ", ".join(str(metrics["divided"][kind]) for kind in kinds),
            "over the best one": times(gains(results)[name]),
        }
        devices = ", ".join(metrics["devices"][kind] for kind in kinds)
        add(f"{name} ({devices})", best, even, **cells)
    split = ", ".join(f"{device}: {size}" for device, size in FIGURE["split_k80_k20"].items())
    gain = {"batch sizes": split, "paper": times(FIGURE["speedup_k80_k20"])}
    add("the paper's K80 (two GK210) + K20Xm", None, None, **gain)
    add("the paper's all its GPUs", None, None, paper=times(FIGURE["speedup_all"]))
    paper = f"even: {FIGURE['even_slowdown']}×"
    add("the paper's 750Ti + K20Xm, its times", *published_splits(), paper=paper)
    return rows


def _sizes(split: Split) -> str:
    return ", ".join(f"{device}: {size}" for device, (size, _) in split.items())


def figure(results: Results) -> "Figure":
    """The time of every device by combination, and the paper's own pair of GPUs beside."""
    from repro import plots
    from repro.experiments.microconv.drawing import draw_bars

    ours: dict[str, Split] = {}
    for name, (best, even) in splits(results).items():
        ours |= {name: best}
        ours |= {f"{name}, even": even} if even and len(even) > 1 else {}
    papers = dict(zip(("uneven", "even"), published_splits(), strict=True))
    figure, axes = plots.new_axes(1, 2, 10.5, 4.2)
    axes[0, 0].get_gridspec().set_width_ratios([max(1, len(ours)), 2])
    for axis, bars in zip(axes[0], (ours, papers), strict=True):
        labels = [f"{k}\n{' + '.join(str(n) for n, _ in s.values())}" for k, s in bars.items()]
        taken = [{device: 1e3 * t for device, (_, t) in split.items()} for split in bars.values()]
        draw_bars(axis, pd.DataFrame(taken, labels), plots.PALETTE[1:], fontsize=8)
    record = results.first("cluster")
    title = title_of(record, "ResNet-18").replace(", mini-batch", "\nmini-batch")
    axes[0, 0].set_title(f"{title}, SIMULATED", fontsize=10)
    axes[0, 1].set_title("paper: ResNet-18, scaled from its two times", fontsize=9)
    axes[0, 0].set_ylabel("forward and backward pass (ms)")
    plots.legend_below(figure, 5)
    return figure


@check(
    "By the paper's two times, in proportion to the batch size, an even split of a 750Ti and a "
    f"K20Xm takes {FIGURE['even_slowdown']} times as long as the best one, within 5 %"
)
def even_split(results: Results) -> tuple[bool, str]:
    """Compare what the paper's own times and programme lead to; needs no records."""
    best, even = published_splits()
    slowdown = slowest(even) / slowest(best)
    near = abs(slowdown / FIGURE["even_slowdown"] - 1) <= 0.05
    return near, f"{times(slowdown)} ({_sizes(best)})"


@check(
    "Unequal devices together are no slower than the better one alone: the split is the best of "
    "all, and one device alone is among them"
)
def together_no_slower(results: Results) -> tuple[bool, str]:
    """Compare every combination with the better device alone."""
    results.need("cluster")
    found = {name: gains(results)[name] for name in ("fast + slow", ALL)}
    evidence = ", ".join(f"{name} {times(gain)}" for name, gain in found.items())
    paper = f"the paper's two GK210 and a K20Xm {times(FIGURE['speedup_k80_k20'])}"
    return all(gain >= 1 for gain in found.values()), f"{evidence} ({paper})"


@check("No even split is faster than the best one, which is the best of all")
def even_no_faster(results: Results) -> tuple[bool, str]:
    """Compare every even split that is measured with the best one."""
    results.need("cluster")
    pairs = {name: pair for name, pair in splits(results).items() if pair[1] and len(pair[1]) > 1}
    slower = {name: slowest(even or {}) / slowest(best) for name, (best, even) in pairs.items()}
    evidence = ", ".join(f"{name}: even takes {times(ratio)}" for name, ratio in slower.items())
    return all(ratio >= 1 for ratio in slower.values()), evidence or "no even split is measured"


FIGURE13 = artefact(
    "figure13",
    plan=lambda profile, chosen: [cluster(profile)],
    rows=table,
    draw=figure,
    checks=(together_no_slower, even_no_faster, even_split),
)
