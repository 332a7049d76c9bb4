"""Network by network: the tables and figures on whole iterations, WR and WD."""

import pandas as pd
from matplotlib.figure import Figure

from repro.experiments.design import Results, reported
from repro.experiments.microconv import drawings, reading
from repro.experiments.microconv.grids import LIMITS_MIB, POLICIES, ROLES
from repro.experiments.microconv.reading import held_s, median, mib, ms, one, settings, times
from repro.records import Record
from repro.report import DASH

PAPER = reported("microconv")


def network_row(record: Record | None, baseline: Record | None) -> dict[str, str]:
    """Return what was measured of one tuned network, beside an undivided one."""
    if record is None:
        return dict.fromkeys(_NETWORK_COLUMNS, DASH)
    held, tuned = held_s(record), "tuned" in record.timings
    missing = reading.unfit(record)
    return dict(
        zip(
            _NETWORK_COLUMNS,
            (
                ms(held) if not missing else f"does not fit: {len(missing)} kernels",
                ms(reading.held_native_s(record)) if held else DASH,
                times(reading.speedup(baseline, record)),
                mib(reading.workspace_bytes(record)) if held else DASH,
                ms(median(record, "tuned")) if tuned else "all left to torch",
                ms(median(record, "plain")),
                times(reading.paired_ratio(record, "plain", "tuned") if tuned else None),
                str(len(record.timings["plain"]["samples_s"])),
            ),
            strict=True,
        )
    )


_NETWORK_COLUMNS = (
    "convolutions within the limit (ms)",
    "torch's own (ms)",
    "over undivided",
    "workspace in all (MiB)",
    "tune(): iteration (ms)",
    "untuned (ms)",
    "faster",
    "n",
)


def figure9_table(results: Results) -> pd.DataFrame:
    """Return AlexNet at three limits with three policies."""
    rows = []
    for setting in settings(results):
        for limit in LIMITS_MIB:
            runs = {
                policy: one(results, "network", limit_mib=limit, policy=policy, setting=setting)
                for policy in POLICIES
            }
            for policy, record in runs.items():
                paper = DASH
                if limit == 64 and policy == "all":
                    paper = times(PAPER["figure9"]["speedup_64"]["P100"][1])
                rows.append(
                    {"setting": setting, "limit (MiB)": limit, "policy": policy}
                    | {"paper, P100": paper}
                    | network_row(record, runs["undivided"])
                )
    return pd.DataFrame(rows)


def figure9(results: Results) -> Figure:
    """Draw Figure 9: each kernel's time within the limit, for every limit and policy."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    setting = next(iter(settings(results)), "fp32")
    for limit in LIMITS_MIB:
        runs = {
            policy: one(results, "network", limit_mib=limit, policy=policy, setting=setting)
            for policy in POLICIES
        }
        panels[f"limit {limit} MiB for each kernel"] = {
            policy: _by_layer(record) for policy, record in runs.items() if record is not None
        }
    return drawings.stacked(panels, "convolutions (ms)")


def _by_layer(record: Record) -> dict[str, float]:
    if held_s(record) is None:
        return {}
    layers: dict[str, float] = {}
    for row in record.metrics["kernels"]:
        layers[row["layer"]] = layers.get(row["layer"], 0.0) + 1e3 * row["time_s"]
    return layers


def wd_total(role: str, limit_mib: int) -> int:
    """Return the workspace of all kernels that WD has where WR has `limit_mib` for each."""
    kernels: int = PAPER["figure11"]["kernels"][role]
    return limit_mib * kernels


def pair(
    results: Results, role: str, limit_mib: int, policy: str
) -> tuple[Record | None, Record | None]:
    """Return the records of WR and WD with the same workspace in all."""
    shared = {"role": role, "policy": policy, "setting": "fp32"}
    wr = one(results, "network", mode="WR", limit_mib=limit_mib, **shared)
    wd = one(results, "network", mode="WD", limit_mib=wd_total(role, limit_mib), **shared)
    return wr, wd


def figure11_table(results: Results) -> pd.DataFrame:
    """Return WR beside WD with the same workspace in all."""
    rows = []
    for role in PAPER["figure11"]["kernels"]:
        for limit in (8, 16, 32, *LIMITS_MIB[1:]):
            # The paper sets WD with 16 MiB for each against undivided with 32.
            base, _ = pair(results, role, 32 if limit == 16 else limit, "undivided")
            for policy in POLICIES:
                wr, wd = pair(results, role, limit, policy)
                if wr is None and wd is None:
                    continue
                for mode, record in (("WR", wr), ("WD", wd)):
                    if record is None:
                        continue
                    row = network_row(record, base)
                    total = limit if mode == "WR" else wd_total(role, limit)
                    paper = DASH
                    if (role, limit, mode, policy) == ("AlexNet", 8, "WD", "all"):
                        paper = times(PAPER["figure11"]["alexnet_120"][1])
                    rows.append(
                        {
                            "network": role,
                            "mode": mode,
                            "limit (MiB)": f"{total:,} {'each' if mode == 'WR' else 'in all'}",
                            "policy": policy,
                            "paper, P100": paper,
                            **{name: row[name] for name in _NETWORK_COLUMNS[:4]},
                            "variables": record.metrics["variables"] or DASH,
                            "solved (ms)": ms(record.metrics["optimise_s"]),
                        }
                    )
    return pd.DataFrame(rows)


def figure11(results: Results) -> Figure:
    """Draw Figure 11 for AlexNet: WR and WD side by side, policy by policy."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for limit in LIMITS_MIB:
        bars: dict[str, dict[str, float]] = {}
        for policy in POLICIES:
            for mode, record in zip(("WR", "WD"), pair(results, "AlexNet", limit, policy),
                                    strict=True):  # fmt: skip
                if record is not None:
                    bars[f"{mode} {policy}"] = _by_layer(record)
        panels[f"{limit} MiB each, {wd_total('AlexNet', limit):,} MiB in all"] = bars
    return drawings.stacked(panels, "AlexNet's convolutions (ms)")


def table5(results: Results) -> pd.DataFrame:
    """Return Table V."""
    rows = []
    for role in ROLES:
        for setting in settings(results):
            runs = {
                policy: one(results, "network", role=role, policy=policy, setting=setting)
                for policy in POLICIES
            }
            for policy, record in runs.items():
                paper = PAPER["table5"][role]
                ratio = paper["undivided"] / paper[policy]
                rows.append(
                    {
                        "network": role,
                        "setting": setting,
                        "policy": policy,
                        "paper (ms)": f"{paper[policy]:.1f} ({ratio:.2f}×)",
                        **network_row(record, runs["undivided"]),
                    }
                )
    return pd.DataFrame(rows)
