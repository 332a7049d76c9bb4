"""What do unequal devices gain together, and what does an even split cost? (Figure 13)"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.microconv.describing import marks, whose
from repro.experiments.microconv.settings import LIMITS_MIB, PAPER, cluster, ms, times
from repro.experiments.query import Results
from repro.experiments.view import caption
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Split = dict[str, tuple[int, float]]  # by device: batch size and seconds
FIGURE = PAPER["figure13"]
LIMIT_MIB = LIMITS_MIB[1]

# One fast device is the baseline, as one GK210 is in the paper, which adds another and a K20Xm.
COMBINATIONS = {
    "fast": ("fast",),
    "slow": ("slow",),
    "fast + slow": ("fast", "slow"),
    "2 fast + slow": ("fast 1", "fast 2", "slow"),
}
ALL = "2 fast + slow"


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the times of a network on each device."""
    return [cluster(profile)]


def splits(results: Results) -> dict[str, tuple[Split, Split | None]]:
    """Return, by combination, the best split and an even one, None where it is no size.

    Empty where nothing was measured.
    """
    from repro.microconv import split_batch

    record = results.first("cluster")
    if record is None:
        return {}
    measured = {
        device: {int(size): seconds for size, seconds in sizes.items()}
        for device, sizes in record.metrics["times"].items()
    }
    batch = record.config["batch"]
    shared: dict[str, tuple[Split, Split | None]] = {}
    for name, devices in COMBINATIONS.items():
        times_of = {device: measured[device.partition(" ")[0]] for device in devices}
        best = {
            device: (size, times_of[device][size])
            for device, size in split_batch(batch, times_of).items()
        }
        share = batch // len(devices)
        even = None
        if share * len(devices) == batch and all(share in t for t in times_of.values()):
            even = {device: (share, times_of[device][share]) for device in devices}
        shared[name] = best, even
    return shared


def slowest(split: Split) -> float:
    """Return the seconds of the slowest device."""
    return max(seconds for _, seconds in split.values())


def _alone(shared: Mapping[str, tuple[Split, Split | None]]) -> float:
    """Return the seconds of the better device alone."""
    return min(slowest(shared[name][0]) for name in ("fast", "slow"))


def published_split() -> tuple[Split, float]:
    """Return the split of the paper's 750Ti and K20Xm by its own times, and the even one's time.

    The paper gives each GPU's time at half of the mini-batch; times are taken as proportional to
    the batch size from there, and batch sizes as multiples of 4 (section III-E; its splits are).
    """
    from repro.microconv import split_batch

    batch, half = FIGURE["batch"], FIGURE["batch"] // 2
    seconds = {
        device: {size: value * size / half / 1e3 for size in range(4, batch + 1, 4)}
        for device, value in FIGURE["even_ms"].items()
    }
    best = split_batch(batch, seconds)
    split = {device: (size, seconds[device][size]) for device, size in best.items()}
    return split, max(FIGURE["even_ms"].values()) / 1e3


def table(results: Results) -> list[dict[str, Any]]:
    """Return how mini-batches are shared out among unequal devices."""
    shared = splits(results)
    metrics = results.need("cluster").metrics if shared else {}
    described, divided = metrics.get("devices", {}), metrics.get("divided", {})
    rows: list[dict[str, Any]] = []
    for name, (best, even) in shared.items():
        devices = ", ".join(dict.fromkeys(described[d.partition(" ")[0]] for d in best))
        rows.append(
            {
                "devices": f"{name} ({devices})",
                "batch sizes": _sizes(best),
                "kernels divided": ", ".join(
                    str(n)
                    for n in dict.fromkeys(divided.get(d.partition(" ")[0]) for d in best)
                    if n is not None
                )
                or DASH,
                "slowest (ms)": ms(slowest(best)),
                "over the best one": times(_alone(shared) / slowest(best)),
                "paper": DASH,
                "even split (ms)": ms(slowest(even) if even else None),
                "even is slower by": times(slowest(even) / slowest(best) if even else None),
            }
        )
    for devices, split, gain in (
        ("K80 (two GK210) + K20Xm", FIGURE["split_k80_k20"], FIGURE["speedup_k80_k20"]),
        ("all its GPUs", {}, FIGURE["speedup_all"]),
    ):
        sizes = ", ".join(f"{device}: {size}" for device, size in split.items())
        row = dict.fromkeys(
            (
                "kernels divided",
                "slowest (ms)",
                "over the best one",
                "even split (ms)",
                "even is slower by",
            ),
            DASH,
        )
        row |= {"devices": f"the paper's {devices}", "batch sizes": sizes or DASH}
        rows.append(row | {"paper": times(gain)})
    best, even_s = published_split()
    rows.append(
        {
            "devices": "the paper's 750Ti + K20Xm, its times",
            "batch sizes": _sizes(best),
            "kernels divided": DASH,
            "slowest (ms)": ms(slowest(best)),
            "over the best one": DASH,
            "paper": f"even: {FIGURE['even_slowdown']}×",
            "even split (ms)": ms(even_s),
            "even is slower by": times(even_s / slowest(best)),
        }
    )
    return rows


def _sizes(split: Split) -> str:
    return ", ".join(f"{device}: {size}" for device, (size, _) in split.items())


def figure(results: Results) -> "Figure":
    """Draw the time of every device by combination, and the paper's own pair of GPUs beside."""
    from repro import plots

    record = results.first("cluster")
    described = record.metrics["devices"] if record else {}
    ours: dict[str, Split] = {}
    for name, (best, even) in splits(results).items():
        idle = [device for device in COMBINATIONS[name] if device not in best]
        ours[name + f",\n{' and '.join(idle)} idle" * bool(idle)] = best
        if even is not None and len(even) > 1:
            ours[f"{name},\neven"] = even
    best, even_s = published_split()
    half = FIGURE["batch"] // 2
    even = {device: (half, value / 1e3) for device, value in FIGURE["even_ms"].items()}
    assert slowest(even) == even_s
    drawn, axes = plots.new_axes(1, 2, 10.5, 4.2)
    axes[0, 0].get_gridspec().set_width_ratios([max(1, len(ours)), 2])
    _draw(axes[0, 0], ours, {name: f"{name}: {what}" for name, what in described.items()})
    _draw(axes[0, 1], {"uneven": best, "even": even})
    title = whose(record, "ResNet-18").replace(", mini-batch", "\nmini-batch")
    axes[0, 0].set_title(f"{title}, SIMULATED", fontsize=10)
    axes[0, 1].set_title("paper: ResNet-18,\nscaled from its two times", fontsize=10)
    axes[0, 0].set_ylabel("forward and backward pass (ms)")
    for axis in axes[0]:
        axis.set_xlabel("in bars: share of the mini-batch")
    plots.legend_below(drawn, 5)
    return drawn


def _draw(axis: "Axes", bars: Mapping[str, Split], ours: Mapping[str, str] | None = None) -> None:
    """Draw devices side by side for each split, their shares in the bars, the slowest's time.

    Args:
        axis: Of a panel.
        bars: By split.
        ours: Names for the legend; None for the paper's, which are drawn hollow.
    """
    from repro import plots
    from repro.experiments.microconv.drawing import ink_on

    for position, split in enumerate(bars.values()):
        width = 0.84 / max(1, len(split))
        for number, (device, (batch, seconds)) in enumerate(split.items()):
            x = position + (number - (len(split) - 1) / 2) * width
            colour = plots.WITHOUT if device.startswith(("slow", "GTX")) else plots.OURS
            style: dict[str, Any] = {"color": colour, "edgecolor": "white"}
            name = device.partition(" ")[0]  # the second of two fast ones is as the first
            name = (ours or {}).get(name, name)
            if ours is None:
                style = {"facecolor": "none", "edgecolor": colour, "linestyle": "--", "lw": 1.6}
                name = f"paper: {device}"
            axis.bar(x, 1e3 * seconds, width * 0.92, label=name, **style)
            ink = plots.INK if ours is None else ink_on(colour)
            text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "color": ink}
            axis.text(x, 5e2 * seconds, str(batch), **text)
        ends, longest = [position - 0.46, position + 0.46], 1e3 * slowest(split)
        axis.plot(ends, [longest] * 2, ":", color=plots.INK, label="slowest: what counts")
        above: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{longest:,.0f} ms", (position, longest), fontsize=8, **above)
    axis.set_xticks(range(len(bars)), list(bars), fontsize=9)
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.12)
    axis.set_ylim(bottom=0)


@check(
    "By the paper's two times, in proportion to the batch size, an even split of a 750Ti and a "
    f"K20Xm takes {FIGURE['even_slowdown']} times as long as the best one, within 5 %"
)
def even_split(results: Results) -> tuple[bool, str]:
    """Compare what the paper's own times and programme lead to; needs no records."""
    best, even_s = published_split()
    slowdown = even_s / slowest(best)
    near = abs(slowdown / FIGURE["even_slowdown"] - 1) <= 0.05
    return near, f"{times(slowdown)} ({_sizes(best)})"


@check(
    "Unequal devices together are no slower than the better one alone: the split is the best of "
    "all, and one device alone is among them"
)
def together_no_slower(results: Results) -> tuple[bool, str]:
    """Compare every combination with the better device alone."""
    results.need("cluster")
    shared = splits(results)
    gains = {name: _alone(shared) / slowest(shared[name][0]) for name in ("fast + slow", ALL)}
    evidence = ", ".join(f"{name} {times(gain)}" for name, gain in gains.items())
    paper = f"the paper's two GK210 and a K20Xm {times(FIGURE['speedup_k80_k20'])}"
    return all(gain >= 1 for gain in gains.values()), f"{evidence} ({paper})"


@check("No even split is faster than the best one, which is the best of all")
def even_no_faster(results: Results) -> tuple[bool, str]:
    """Compare every even split that is measured with the best one."""
    results.need("cluster")
    slower = {
        name: slowest(even) / slowest(best)
        for name, (best, even) in splits(results).items()
        if even and len(even) > 1
    }
    evidence = ", ".join(f"{name}: even takes {times(ratio)}" for name, ratio in slower.items())
    return all(ratio >= 1 for ratio in slower.values()), evidence or "no even split is measured"


FIGURE13 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "A mini-batch shared out so that the slowest device finishes first. SIMULATED: devices are "
        "timed one at a time, without communication. The paper's two times are scaled by the batch "
        "size.",
        marks,
    ),
    checks=(together_no_slower, even_no_faster, even_split),
)
