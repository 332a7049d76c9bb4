"""What do unequal devices gain together, and what does an even split cost? (Figure 13)"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import (
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    check,
    claim,
)
from repro.experiments.judging import Verdict, combine, direction, exactly
from repro.experiments.microconv.settings import LIMITS_MIB, PAPER, cluster, facts, ms, times
from repro.report import DASH

if TYPE_CHECKING:
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
    batch, found = record.config["batch"], {}
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
        found[name] = best, even
    return found


def slowest(split: Split) -> float:
    """Return the seconds of the slowest device."""
    return max(seconds for _, seconds in split.values())


def _alone(found: Mapping[str, tuple[Split, Split | None]]) -> float:
    """Return the seconds of the better device alone."""
    return min(slowest(found[name][0]) for name in ("fast", "slow"))


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
    found = splits(results)
    metrics = results.need("cluster").metrics if found else {}
    described, divided = metrics.get("devices", {}), metrics.get("divided", {})
    rows: list[dict[str, Any]] = []
    for name, (best, even) in found.items():
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
                "over the best one": times(_alone(found) / slowest(best)),
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
    bars: list[tuple[str, Split]] = []
    for name, (best, even) in splits(results).items():
        bars.append((name, best))
        if even is not None and len(even) > 1:
            bars.append((f"{name},\neven", even))
    bars.append(("paper's times,\n750Ti + K20Xm", published_split()[0]))
    return _draw(bars)


def _draw(bars: Sequence[tuple[str, Split]]) -> "Figure":
    import seaborn as sns

    from repro import plots

    drawn, axes = plots.new_axes(1, 1, max(6.0, 1.6 * len(bars) + 2), 3.6)
    axis = axes[0, 0]
    devices = sorted({device for _, split in bars for device in split})
    colours = dict(zip(devices, sns.color_palette("colorblind", len(devices)), strict=True))
    for position, (_, split) in enumerate(bars):
        width = 0.8 / max(1, len(split))
        for number, (device, (batch, seconds)) in enumerate(split.items()):
            x = position + (number - (len(split) - 1) / 2) * width
            axis.bar(x, 1e3 * seconds, width * 0.9, color=colours[device], label=device)
            axis.text(x, 1e3 * seconds, str(batch), ha="center", va="bottom", fontsize=9)
        ends, longest = [position - 0.45, position + 0.45], 1e3 * slowest(split)
        axis.plot(ends, [longest] * 2, "--", color="#b3261e", label="slowest")
    axis.set_xticks(range(len(bars)), [name for name, _ in bars])
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.15)
    axis.set(ylabel="forward and backward pass (ms)", xlabel="numbers are batch sizes")
    plots.legend_below(drawn, 4)
    return drawn


@claim(
    "even_split",
    f"An even split makes a 750Ti and a K20Xm {FIGURE['even_slowdown']} times as slow as the "
    f"uneven one (as we put it: by the paper's two times, in proportion to the batch size)",
    "Section IV-C",
    kind="arithmetic",
)
def even_split(results: Results, expected: Expectation) -> Verdict:
    """Judge what the paper's own times and programme lead to."""
    best, even_s = published_split()
    gap = exactly(even_s / slowest(best), log=True)
    part = direction(f"{_sizes(best)}:", gap, FIGURE["even_slowdown"], sign=expected.sign)
    return combine([part])


@check(
    "Unequal devices together are no slower than the better one alone: the split is the best of "
    "all, and one device alone is among them"
)
def together_no_slower(results: Results) -> tuple[bool, str]:
    """Compare every combination with the better device alone."""
    results.need("cluster")
    found = splits(results)
    gains = {name: _alone(found) / slowest(found[name][0]) for name in ("fast + slow", ALL)}
    told = ", ".join(f"{name} {times(gain)}" for name, gain in gains.items())
    paper = f"the paper's two GK210 and a K20Xm {times(FIGURE['speedup_k80_k20'])}"
    return all(gain >= 1 for gain in gains.values()), f"{told} ({paper})"


@check("No even split is faster than the best one, which is the best of all")
def even_no_faster(results: Results) -> tuple[bool, str]:
    """Compare every even split that is measured with the best one."""
    results.need("cluster")
    slower = {
        name: slowest(even) / slowest(best)
        for name, (best, even) in splits(results).items()
        if even and len(even) > 1
    }
    told = ", ".join(f"{name}: even takes {times(ratio)}" for name, ratio in slower.items())
    return all(ratio >= 1 for ratio in slower.values()), told or "no even split is measured"


FIGURE13 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "The mini-batch shared out so that the slowest device finishes first. On each device the "
        f"network is tuned under WR with {LIMIT_MIB} MiB for each kernel (Table III). The cluster "
        "is SIMULATED: devices were timed one at a time, communication is left out as in the "
        "paper. The last row is not ours: it takes the paper's two published times, at a batch "
        f"of {FIGURE['batch'] // 2} each, as proportional to the batch size, in multiples of 4.",
        facts,
    ),
    claims=(even_split,),
    checks=(together_no_slower, even_no_faster),
)
