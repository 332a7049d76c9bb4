"""What does a whole network gain under a limit for each of its kernels? (Figure 9, Table V)

Where a limit excludes nothing, dividing has nothing to gain, and claims that it gains are not
judged.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases
from repro.experiments.microconv.comparing import (
    beside_torch,
    gain_or_none,
    gained,
    held_native_s,
    held_s,
    left_to_ours,
    named,
    need,
    need_binding,
    over_torch,
    unfit,
    workspace_bytes,
)
from repro.experiments.microconv.describing import (
    CAFFES,
    network_name,
    scaled_marks,
    stands_in,
    whose,
)
from repro.experiments.microconv.settings import (
    LIMITS_MIB,
    PAPER,
    POLICIES,
    ROLES,
    kernels_of,
    limit_of,
    mib,
    ms,
    network,
    policies,
    settings,
    settings_of,
    stands_for_mib,
    table5_role,
    times,
    told_limit,
)
from repro.experiments.query import Results
from repro.experiments.view import caption
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SMALL, MODERATE, AMPLE = LIMITS_MIB
CARDS = ("P100", "K80", "V100")  # the paper's


COLUMNS = (
    "convolutions within the limit (ms)",
    "torch's own (ms)",
    "over undivided",
    "over torch's own",
    "left to ours",
    "workspace in all (MiB)",
)
# What that means for claims the setup says.
BESIDE = "Intervals: torch's own scatter. Left to ours: kernels of this package's algorithms alone."


def network_row(record: Record | None, baseline: Record | None) -> dict[str, str]:
    """Return what was measured of one network's kernels, beside an undivided one."""
    if record is None:
        return dict.fromkeys(COLUMNS, DASH)
    missing, gain = unfit(record), gain_or_none(baseline, record)
    cells = (
        f"does not fit: {len(missing)} kernels" if missing else ms(held_s(record)),
        DASH if missing else ms(held_native_s(record)),
        str(gain) if gain else DASH,
        DASH if missing else str(over_torch(record)),
        f"{left_to_ours(record)[0]} of {len(kernels_of(record))}",
        DASH if missing else mib(workspace_bytes(record)),
    )
    return dict(zip(COLUMNS, cells, strict=True))


def figure9_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return AlexNet at three limits with three policies."""
    return [
        network(profile, "AlexNet", "WR", limit, policy, setting)
        for setting in settings(profile)
        for limit in LIMITS_MIB
        for policy in policies(profile, "AlexNet")
        if setting == "fp32" or policy != "all"
    ]


def _by_policy(
    results: Results, role: str, limit_mib: int, setting: str
) -> dict[str, Record | None]:
    limit = limit_of(results.profile, role, "WR", limit_mib)
    config = {"role": role, "limit_mib": limit, "setting": setting}
    return {policy: results.first("network", policy=policy, **config) for policy in POLICIES}


def _widest(results: Results) -> str:
    """Return the policy with most sizes, beside which the paper's numbers of `all` are shown."""
    return policies(results.profile, "AlexNet")[-1]


def figure9_table(results: Results) -> list[dict[str, Any]]:
    """Return AlexNet at three limits with three policies."""
    rows = []
    for setting in settings_of(results):
        for limit in LIMITS_MIB:
            records = _by_policy(results, "AlexNet", limit, setting)
            for policy, record in records.items():
                shown = (limit, policy) == (MODERATE, _widest(results))
                published = PAPER["figure9"]["speedup_64"] if shown else {}
                paper = {
                    f"paper, {card}": times(published[card][1]) if card in published else DASH
                    for card in CARDS
                }
                iterations = [times(published[card][0]) for card in CARDS if card in published]
                paper["paper, iteration"] = ", ".join(iterations) or DASH
                rows.append(
                    {
                        "setting": setting,
                        "limit": told_limit(results.profile, "AlexNet", "WR", limit),
                        "policy": policy,
                    }
                    | paper
                    | network_row(record, records["undivided"])
                )
    return rows


def figure9(results: Results) -> "Figure":
    """Draw each layer's time within the limit for every limit and policy, and speed-ups beside."""
    from repro.experiments.microconv.drawing import Bar, Dot, draw_layers

    panels: dict[str, list[Bar]] = {}
    setting = next(iter(settings_of(results)), "fp32")
    ran: Record | None = None
    for limit in LIMITS_MIB:
        records = _by_policy(results, "AlexNet", limit, setting)
        told = told_limit(results.profile, "AlexNet", "WR", limit)
        bars = panels[f"limit {told} for each kernel"] = []
        for policy, record in records.items():
            if record is None:
                continue
            ran = ran or record
            shown = (limit, policy) == (MODERATE, _widest(results))
            published = PAPER["figure9"]["speedup_64"] if shown else {}
            papers = {card: published[card][1] for card in CARDS if card in published}
            gap = None if policy == "undivided" else gain_or_none(records["undivided"], record)
            bars.append(Bar(policy, policy, *layer_times(record), Dot.of(gap, papers)))
    return draw_layers(whose(ran, CAFFES), panels, "undivided")


def layer_times(record: Record) -> tuple[dict[str, float], float]:
    """Return by layer its time over torch's own for all layers, and the time of all in ms.

    Torch's own were timed in turns with them: two runs compare by these ratios, and not by their
    milliseconds. Empty and 0 where not all kernels fit.
    """
    total_s = held_s(record)
    if total_s is None:
        return {}, 0.0
    native_s = held_native_s(record)
    layers: dict[str, float] = {}
    for row in kernels_of(record):
        layers[row["layer"]] = layers.get(row["layer"], 0.0) + row["time_s"] / native_s
    return layers, 1e3 * total_s


def _alexnet(results: Results, limit_mib: int, *wanted: str) -> Record:
    return need(results, "AlexNet", "WR", limit_mib, *wanted)


def _divided(results: Results, limit_mib: int) -> Record:
    """Return AlexNet with all sizes as in the paper, or powers of two where all was not run."""
    return _alexnet(results, limit_mib, "all", "powerOfTwo")


def _named(results: Results, divided: Record, *limits_mib: int) -> str:
    """Return what was timed, for the evidence: over undivided, with that one's limit last."""
    within, *beside = (told_limit(results.profile, "AlexNet", "WR", limit) for limit in limits_mib)
    over = f" over undivided within {beside[0]}" if beside else ""
    return f"{network_name(divided, True)}, {divided.config['policy']} within {within}{over}:"


def _one(estimate: "Callable[[str], Estimate | Exact]") -> Cases:
    """Return the only case of a claim on the paper's AlexNet."""
    return cases(["AlexNet"], estimate)


def _scaled(results: Results, limit_mib: int) -> tuple[Record, Record]:
    """Return AlexNet undivided and divided, under a limit no looser than the paper's.

    Raises:
        NotRun: It stands for more at the paper's mini-batch.
    """
    undivided, divided = _alexnet(results, limit_mib, "undivided"), _divided(results, limit_mib)
    stands = stands_for_mib(undivided, undivided.config["limit_mib"])
    if stands > limit_mib:
        raise NotRun(
            f"no such limit was run: {limit_mib} MiB at a mini-batch of "
            f"{undivided.config['batch']} stand for {stands:,.0f} at the paper's"
        )
    return undivided, divided


def _over_undivided(results: Results, undivided: Record, divided: Record, limit: int) -> Estimate:
    gain = replace(gained(undivided, divided), label=_named(results, divided, limit))
    return beside_torch(gain, undivided, divided)


def moderate_faster(results: Results) -> Cases:
    """AlexNet's convolutions with the widest policy that ran over undivided."""
    undivided, divided = _alexnet(results, MODERATE, "undivided"), _divided(results, MODERATE)
    need_binding(undivided, [_roomier(results), divided])
    return _one(lambda _: _over_undivided(results, undivided, divided, MODERATE))


def small_no_gain(results: Results) -> Cases:
    """What dividing gains within the small limit; what fits divided only is a gain."""
    undivided, divided = _scaled(results, SMALL)
    if unfit(undivided) and not unfit(divided):
        return {"AlexNet": Exact(False, f"only divided, {named(unfit(undivided))} fit")}
    return _one(lambda _: _over_undivided(results, undivided, divided, SMALL))


def ample_no_gain(results: Results) -> Cases:
    """What dividing gains within the ample limit."""
    undivided, divided = _scaled(results, AMPLE)
    return _one(lambda _: _over_undivided(results, undivided, divided, AMPLE))


def _roomier(results: Results) -> Record | None:
    limit = limit_of(results.profile, "AlexNet", "WR", AMPLE)
    return results.first("network", setting="fp32", limit_mib=limit, policy="undivided")


def _moderate_for_ample(results: Results) -> tuple[Record, Record]:
    """Return undivided with ample workspace and divided with a moderate one, where that binds."""
    large, small = _alexnet(results, AMPLE, "undivided"), _divided(results, MODERATE)
    need_binding(_alexnet(results, MODERATE, "undivided"), [large, small])
    return large, small


def memory_cost(results: Results) -> Cases:
    """The time that the smaller workspace costs."""
    large, small = _moderate_for_ample(results)
    label = _named(results, small, MODERATE, AMPLE)
    cost = replace(gained(small, large), label=f"time of {label}")
    return _one(lambda _: beside_torch(cost, large, small))


def power_of_two_as_good(results: Results) -> Cases:
    """The time of powerOfTwo over that of all, at each limit that binds."""
    roomier = _roomier(results)

    def cost(limit: str) -> Estimate:
        undivided, two, every = (_alexnet(results, int(limit), policy) for policy in POLICIES)
        need_binding(undivided, [roomier, two, every])
        return replace(gained(two, every), label=f"{limit} MiB, powerOfTwo over all:")

    found = cases(map(str, LIMITS_MIB), cost)
    return {name: case for name, case in found.items() if isinstance(case, Estimate)} or found


@check(
    f"Divided within {MODERATE} MiB for each kernel, AlexNet takes less workspace in all than "
    f"undivided within {AMPLE} MiB"
)
def less_workspace(results: Results) -> tuple[bool, str]:
    """Compare the bytes of all kernels together."""
    large, small = _moderate_for_ample(results)
    if unfit(large) or unfit(small):
        raise NotRun(f"{named(unfit(large) + unfit(small))} fit not at all")
    paper = PAPER["figure9"]["all_64_gib"] / PAPER["figure9"]["undivided_512_gib"]
    share = workspace_bytes(small) / max(1, workspace_bytes(large))
    return share < 1, f"{times(share)} (paper {times(paper)})"


@check(
    "With more micro-batch sizes to choose from, no division is planned that is slower: by the "
    "times of the parts, all takes at most powerOfTwo's, and that at most undivided's"
)
def more_sizes_no_slower(results: Results) -> tuple[bool, str]:
    """Compare the planned times of the kernels that fit with both of two policies."""
    plans = []
    for setting in settings_of(results):
        for limit in LIMITS_MIB:
            records = _by_policy(results, "AlexNet", limit, setting)
            for fewer, more in itertools.pairwise(POLICIES):
                plans += [
                    (a["predicted_s"], b.get("predicted_s", math.inf))
                    for a, b in zip(
                        kernels_of(records[fewer]), kernels_of(records[more]), strict=False
                    )
                    if "predicted_s" in a
                ]
    if not plans:
        raise NotRun("no records")
    slower = sum(b > a * (1 + 1e-9) for a, b in plans)
    return not slower, f"{slower} of {len(plans)} kernels are planned slower"


FIGURE9 = Exhibit(
    long=True,
    runs=figure9_runs,
    table=figure9_table,
    figure=figure9,
    caption=caption(
        f"AlexNet's convolutions by layer, a limit for each kernel (WR). {BESIDE}",
        scaled_marks,
    ),
    claims={
        "moderate_faster": moderate_faster,
        "small_no_gain": small_no_gain,
        "ample_no_gain": ample_no_gain,
        "memory_cost": memory_cost,
        "power_of_two_as_good": power_of_two_as_good,
    },
    checks=(more_sizes_no_slower, less_workspace),
)


def table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return all three networks at 64 MiB for each kernel."""
    return [
        network(profile, name, "WR", MODERATE, policy)
        for name in (table5_role(profile, role) for role in ROLES)
        for policy in policies(profile, name)
    ]


def table5(results: Results) -> list[dict[str, Any]]:
    """Return the time of each network by policy."""
    rows = []
    for role in ROLES:
        for setting in settings_of(results):
            name = table5_role(results.profile, role)
            records = _by_policy(results, name, MODERATE, setting)
            ran = next(filter(None, records.values()), None)
            shown = network_name(ran) if ran and stands_in(ran) else role
            for policy, record in records.items():
                paper = PAPER["table5"][role]
                ratio = paper["undivided"] / paper[policy]
                rows.append(
                    {
                        "network": shown,
                        "setting": setting,
                        "policy": policy,
                        "paper (ms)": f"{paper[policy]:.1f} ({ratio:.2f}×)",
                        **network_row(record, records["undivided"]),
                    }
                )
    return rows


TABLE5 = Exhibit(
    long=True,
    runs=table5_runs,
    table=table5,
    caption=caption(
        f"Convolutions within the paper's {MODERATE} MiB for each kernel; its times are of "
        f"iterations. {BESIDE}",
        partial(scaled_marks, caffes=False),
    ),
)
