"""What optimising takes, and the heterogeneous cluster."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from repro.experiments.design import Results, reported
from repro.experiments.microconv import drawings
from repro.experiments.microconv.reading import median, ms, one, times
from repro.microconv import split_batch
from repro.report import DASH

PAPER = reported("microconv")
Split = dict[str, tuple[int, float]]  # by device: batch size and seconds


def optimisation_table(results: Results) -> pd.DataFrame:
    """Return the seconds that a first tuning of AlexNet takes, and the solver's."""
    paper = PAPER["optimisation"]
    published = {"powerOfTwo": f"{paper['power_of_two_s']} s", "all": f"{paper['all_s']} s"}
    rows = []
    for policy, text in published.items():
        record = one(results, "candidates", policy=policy)
        metrics = record.metrics if record else {}
        optimise = metrics.get("optimise_s")
        rows.append(
            {
                "what": f"AlexNet, policy {policy}: measure and divide",
                "paper": text,
                "ours": f"{metrics['benchmark_s'] + optimise:,.2f} s" if metrics else DASH,
                "of which dividing (ms)": ms(optimise),
                "times measured": metrics.get("measured", DASH),
            }
        )
    record = one(results, "solver")
    published = {"562": f"{paper['resnet50'][1]} ms", "2500": f"{paper['resnet152_ms']} ms"}
    for name, timing in (record.timings if record else {}).items():
        variables = name.removeprefix("WD, ").partition(" ")[0]
        rows.append(
            {
                "what": f"{name} (made-up fronts)" if name.startswith("WD") else name,
                "paper": published.get(variables, DASH),
                "ours": f"{1e3 * median(record, name):,.1f} ms" if record else DASH,
                "of which dividing (ms)": DASH,
                "times measured": len(timing["samples_s"]),
            }
        )
    return pd.DataFrame(rows)


def device_times(results: Results) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Return seconds by device and batch size, and what the devices are."""
    record = one(results, "cluster")
    if record is None:
        return {}, {}
    measured = {
        device: {int(size): seconds for size, seconds in sizes.items()}
        for device, sizes in record.metrics["times"].items()
    }
    return measured, record.metrics["devices"]


# One fast device is the baseline, as one GK210 is in the paper, which adds another and a K20Xm.
COMBINATIONS = {
    "fast": ("fast",),
    "slow": ("slow",),
    "fast + slow": ("fast", "slow"),
    "2 fast + slow": ("fast 1", "fast 2", "slow"),
}


def splits(
    measured: Mapping[str, Mapping[int, float]], batch: int
) -> dict[str, tuple[Split, Split | None]]:
    """Return, by combination, the best split and an even one, None where it is no size."""
    found = {}
    for name, devices in COMBINATIONS.items():
        times_of = {device: dict(measured[device.partition(" ")[0]]) for device in devices}
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


def published_split() -> tuple[Split, float]:
    """Return the split of the paper's 750Ti and K20Xm by its own times, and the even one's time.

    The paper gives each GPU's time at half of the mini-batch; times are taken as proportional to
    the batch size from there, and batch sizes as multiples of 4 (section III-E; its splits are).
    """
    paper = PAPER["figure13"]
    batch, half = paper["batch"], paper["batch"] // 2
    seconds = {
        device: {size: value * size / half / 1e3 for size in range(4, batch + 1, 4)}
        for device, value in paper["even_ms"].items()
    }
    best = split_batch(batch, seconds)
    split = {device: (size, seconds[device][size]) for device, size in best.items()}
    return split, max(paper["even_ms"].values()) / 1e3


def figure13_table(results: Results) -> pd.DataFrame:
    """Return how mini-batches are shared out among unequal devices."""
    measured, described = device_times(results)
    paper = PAPER["figure13"]
    rows: list[dict[str, Any]] = []
    if measured:
        record = one(results, "cluster")
        assert record is not None
        combinations = splits(measured, record.config["batch"])
        base = min(slowest(combinations[name][0]) for name in ("fast", "slow"))
        published = {"2 fast + slow": times(paper["speedup_k80_k20"])}
        for name, (best, even) in combinations.items():
            devices = ", ".join(dict.fromkeys(described[d.partition(" ")[0]] for d in best))
            rows.append(
                {
                    "devices": f"{name} ({devices})",
                    "batch sizes": _sizes(best),
                    "slowest (ms)": ms(slowest(best)),
                    "over the best one": times(base / slowest(best)),
                    "paper": published.get(name, DASH),
                    "even split (ms)": ms(slowest(even) if even else None),
                    "even is slower by": times(slowest(even) / slowest(best) if even else None),
                }
            )
    best, even_s = published_split()
    rows.append(
        {
            "devices": "the paper's 750Ti + K20Xm, its times",
            "batch sizes": _sizes(best),
            "slowest (ms)": ms(slowest(best)),
            "over the best one": DASH,
            "paper": f"even: {paper['even_slowdown']}×",
            "even split (ms)": ms(even_s),
            "even is slower by": times(even_s / slowest(best)),
        }
    )
    return pd.DataFrame(rows)


def _sizes(split: Split) -> str:
    return ", ".join(f"{device}: {size}" for device, (size, _) in split.items())


def figure13(results: Results) -> Figure:
    """Draw Figure 13, and the paper's own pair of GPUs beside it."""
    measured, _ = device_times(results)
    bars = []
    if measured:
        record = one(results, "cluster")
        assert record is not None
        for name, (best, even) in splits(measured, record.config["batch"]).items():
            bars.append((name, _milliseconds(best)))
            if even is not None and len(even) > 1:
                bars.append((f"{name},\neven", _milliseconds(even)))
    best, _ = published_split()
    bars.append(("paper's times,\n750Ti + K20Xm", _milliseconds(best)))
    return drawings.cluster(bars)


def _milliseconds(split: Split) -> dict[str, tuple[int, float]]:
    return {device: (size, 1e3 * seconds) for device, (size, seconds) in split.items()}
