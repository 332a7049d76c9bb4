"""What does a whole network gain under a limit for each of its kernels? (Figure 9, Table V)

Where a limit excludes nothing, dividing has nothing to gain, and claims that it gains are not
judged.
"""

import itertools
import math
from functools import partial
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
from repro.experiments.intervals import NotRun, exactly
from repro.experiments.judging import (
    QUARTER,
    Part,
    Verdict,
    certain,
    combine,
    direction,
    each,
    equivalence,
)
from repro.experiments.microconv.comparing import (
    gained,
    held_native_s,
    held_s,
    named,
    need,
    need_binding,
    speedup,
    unfit,
    whole_gain,
    workspace_bytes,
)
from repro.experiments.microconv.describing import scaled_marks, whose
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
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SMALL, MODERATE, AMPLE = LIMITS_MIB
CARDS = ("P100", "K80", "V100")  # the paper's
# On P100: speed-ups as [whole iteration, convolutions alone].
PAPER_64 = PAPER["figure9"]["speedup_64"]["P100"]


COLUMNS = (
    "convolutions within the limit (ms)",
    "torch's own (ms)",
    "over undivided",
    "workspace in all (MiB)",
)


def network_row(record: Record | None, baseline: Record | None) -> dict[str, str]:
    """Return what was measured of one network's kernels, beside an undivided one."""
    if record is None:
        return dict.fromkeys(COLUMNS, DASH)
    held = held_s(record)
    missing = unfit(record)
    cells = (
        ms(held) if not missing else f"does not fit: {len(missing)} kernels",
        ms(held_native_s(record)) if held else DASH,
        times(speedup(baseline, record)),
        mib(workspace_bytes(record)) if held else DASH,
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
            gap = None if policy == "undivided" else whole_gain(records["undivided"], record)
            bars.append(Bar(policy, policy, *layer_times(record), Dot.of(gap, papers)))
    return draw_layers(whose(ran, "Caffe's AlexNet"), panels, "undivided")


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


def _told(results: Results, limit_mib: int, divided: Record) -> str:
    limit = told_limit(results.profile, "AlexNet", "WR", limit_mib)
    return f"convolutions, {divided.config['policy']} over undivided within {limit}:"


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


def no_gain(paper: float) -> float:
    """Return the gain, as a share, that still counts as none: below a quarter of the paper's."""
    return float(paper**QUARTER - 1)


@claim(
    "moderate_faster",
    f"With a moderate workspace, {MODERATE} MiB for each kernel, dividing is faster",
    "Section IV-B1",
)
def moderate_faster(results: Results, expected: Expectation) -> Verdict:
    """Judge AlexNet's convolutions with the widest policy that ran over undivided."""
    undivided, divided = _alexnet(results, MODERATE, "undivided"), _divided(results, MODERATE)
    need_binding(undivided, [_roomier(results), divided])
    judge = partial(direction, paper=PAPER_64[1], sign=expected.sign)
    name = _told(results, MODERATE, divided)
    return combine([gained(undivided, divided).judged(name, judge)])


@claim(
    "small_no_gain",
    f"With {SMALL} MiB for each kernel, nothing is gained",
    "Section IV-B1",
)
def small_no_gain(results: Results, expected: Expectation) -> Verdict:
    """Judge whether dividing gains less than a quarter of what it does at the moderate limit."""
    undivided, divided = _scaled(results, SMALL)
    if unfit(undivided) and not unfit(divided):
        return combine([certain(f"only divided, {named(unfit(undivided))} fit", False)])
    judge = partial(equivalence, margin=no_gain(PAPER_64[1]), side=1)
    name = _told(results, SMALL, divided)
    return combine([gained(undivided, divided).judged(name, judge)])


@claim(
    "ample_no_gain",
    f"With {AMPLE} MiB for each kernel, nothing is gained",
    "Section IV-B1",
)
def ample_no_gain(results: Results, expected: Expectation) -> Verdict:
    """Judge whether dividing is as fast as undivided, within a quarter of the moderate gain."""
    undivided, divided = _scaled(results, AMPLE)
    judge = partial(equivalence, margin=no_gain(PAPER_64[1]))
    name = _told(results, AMPLE, divided)
    return combine([gained(undivided, divided).judged(name, judge)])


def _roomier(results: Results) -> Record | None:
    limit = limit_of(results.profile, "AlexNet", "WR", AMPLE)
    return results.first("network", setting="fp32", limit_mib=limit, policy="undivided")


def _moderate_for_ample(results: Results) -> tuple[Record, Record]:
    """Return undivided with ample workspace and divided with a moderate one, where that binds."""
    large, small = _alexnet(results, AMPLE, "undivided"), _divided(results, MODERATE)
    need_binding(_alexnet(results, MODERATE, "undivided"), [large, small])
    return large, small


@claim(
    "less_workspace",
    f"Divided at {MODERATE} MiB takes a fraction of undivided's workspace at {AMPLE} MiB",
    "Section IV-B1",
)
def less_workspace(results: Results, expected: Expectation) -> Verdict:
    """Judge the bytes of all kernels together."""
    large, small = _moderate_for_ample(results)
    if unfit(large) or unfit(small):
        raise NotRun(f"{named(unfit(large) + unfit(small))} fit not at all")
    paper = PAPER["figure9"]["all_64_gib"] / PAPER["figure9"]["undivided_512_gib"]
    share = max(1, workspace_bytes(small)) / max(1, workspace_bytes(large))
    gap = exactly(share, log=True)
    return combine([direction("workspace in all", gap, paper, sign=expected.sign)])


@claim(
    "memory_cost",
    f"Divided at {MODERATE} MiB is at most {PAPER['figure9']['overhead_percent']:.0f} % slower "
    f"than undivided at {AMPLE} MiB",
    "Section IV-B1",
)
def memory_cost(results: Results, expected: Expectation) -> Verdict:
    """Judge the time that the smaller workspace costs."""
    large, small = _moderate_for_ample(results)
    allowed = PAPER["figure9"]["overhead_percent"] / 100
    judge = partial(equivalence, margin=allowed, side=1)
    within, beside = (
        told_limit(results.profile, "AlexNet", "WR", limit) for limit in (MODERATE, AMPLE)
    )
    name = f"time of {small.config['policy']} within {within} over undivided within {beside}:"
    return combine([gained(small, large).judged(name, judge)])


@claim("power_of_two_as_good", "powerOfTwo is as good as all, where a limit binds", "Section IV-B1")
def power_of_two_as_good(results: Results, expected: Expectation) -> Verdict:
    """Judge the time of powerOfTwo over that of all; the margin is Table V's largest difference."""
    table = PAPER["table5"].values()
    margin = max(row["powerOfTwo"] / row["all"] for row in table) - 1
    roomier = _roomier(results)

    def judge(limit: str) -> Part:
        undivided, two, every = (_alexnet(results, int(limit), policy) for policy in POLICIES)
        need_binding(undivided, [roomier, two, every])
        judge_gap = partial(equivalence, margin=margin, side=1)
        return gained(two, every).judged(f"{limit} MiB:", judge_gap)

    parts = each(map(str, LIMITS_MIB), judge)
    bound = [part for part in parts if part[0] != "not run"]
    return combine(bound or parts)


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
        "AlexNet's convolutions, forward and backward, layer by layer, with a limit for each "
        "kernel (WR). Intervals come from what torch's own convolution scatters by.",
        scaled_marks,
    ),
    claims=(
        moderate_faster,
        small_no_gain,
        ample_no_gain,
        less_workspace,
        memory_cost,
        power_of_two_as_good,
    ),
    checks=(more_sizes_no_slower,),
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
            for policy, record in records.items():
                paper = PAPER["table5"][role]
                ratio = paper["undivided"] / paper[policy]
                rows.append(
                    {
                        "network": role,
                        "setting": setting,
                        "policy": policy,
                        "paper (ms)": f"{paper[policy]:.1f} ({ratio:.2f}×)",
                        **network_row(record, records["undivided"]),
                    }
                )
    return rows


@claim("all_gain", f"All three networks gain at {MODERATE} MiB", "Table V")
def all_gain(results: Results, expected: Expectation) -> Verdict:
    """Judge the networks' convolutions with powerOfTwo; the paper's times are of iterations."""

    def judge(role: str) -> Part:
        network = table5_role(results.profile, role)
        undivided, divided = (
            need(results, network, "WR", MODERATE, policy) for policy in ("undivided", "powerOfTwo")
        )
        need_binding(undivided, [divided])
        published = PAPER["table5"][role]
        paper = published["undivided"] / published["powerOfTwo"]
        judge_gap = partial(direction, paper=paper, sign=expected.sign)
        told = told_limit(results.profile, role, "WR", MODERATE)
        name = f"{role}'s convolutions within {told}:"
        word, evidence = gained(undivided, divided).judged(name, judge_gap)
        return word, f"{evidence}; the paper's is of an iteration"

    return combine(each(ROLES, judge))


TABLE5 = Exhibit(
    long=True,
    runs=table5_runs,
    table=table5,
    caption=caption(
        f"The convolutions, forward and backward, within the paper's {MODERATE} MiB for each "
        "kernel. Its times are of whole iterations.",
        partial(scaled_marks, caffes=False),
    ),
    claims=(all_gain,),
)
