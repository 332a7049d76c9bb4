"""How much faster is a whole network within a limit? (Figures 9 and 11, Table V)

A limit for each kernel (WR), or one workspace that is shared out (WD). Where a limit excludes
nothing, dividing has nothing to gain, and claims that it gains are not judged.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from repro import plots
from repro.experiments.design import Chosen, Run
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, or_none
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import entries, gained, need, noted, told, unfit
from repro.experiments.microconv.runs import AMPLE, MODERATE, PAPER, SMALL, Cell, network_name
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.records import Record

# ResNet-50's limits for each kernel in Figure 11: WD, and WR undivided with twice as much.
RESNET_WD_MIB, RESNET_WR_MIB = PAPER["figure11"]["resnet50_each_mib"]
# The paper's comparisons: network, limit of each kernel of WR undivided, and WD's total, given
# for each kernel.
COMPARISONS = {
    "AlexNet, as much": ("AlexNet", SMALL, SMALL),
    "AlexNet, an eighth": ("AlexNet", MODERATE, SMALL),
    "ResNet-50, half": ("ResNet-50", RESNET_WR_MIB, RESNET_WD_MIB),
}


def table(
    results: Results,
    roles: Iterable[str],
    limits: Iterable[int],
    papers: Mapping[tuple[str, int, str], float],
    modes: Iterable[str] = ("WR",),
    caffe: bool = False,
    caffes: bool = True,
) -> Iterator[dict[str, Any]]:
    """The networks that ran within limits, by precision, limit, policy and mode.

    `papers` has the paper's speed-ups by network, limit and ``MODE POLICY``; `caffe` says whether
    the mini-batches are Figure 11's, `caffes` whether the paper's AlexNet is Caffe's.
    """
    cells = itertools.product(roles, runs.precisions_of(results), limits, runs.POLICIES, modes)
    for role, precision, limit, policy, mode in cells:
        cell = Cell(limit, policy, role, mode, precision, caffe)
        if not (record := or_none(need, results, cell)):
            continue
        against = RESNET_WR_MIB if limit == RESNET_WD_MIB else limit
        whole = replace(cell, each_mib=against, policy="undivided", mode="WR")
        undivided, kernels = or_none(need, results, whole), entries(record)
        gain, missing = None, unfit(record)
        if undivided not in (None, record):
            gain = or_none(gained, undivided, record)
        taken = None if missing else sum(row["time_s"] for row in kernels)
        yield {
            "network": network_name(record, caffes),
            "setting": precision,
            "limit": cell.told(results.profile) + (" in all" if mode == "WD" else " each"),
            "policy": f"{mode} {policy}",
            "paper": papers.get((role, limit, f"{mode} {policy}")),
            measured.UNDIVIDED: gain,
            measured.TORCH: or_none(measured.over_torch, record),
            "convolutions (ms)": f"{missing} do not fit" if missing else measured.ms(taken),
            "left to ours": f"{len(measured.left_to_ours(kernels))} of {len(kernels)}",
        }


def figure(table: Iterable[Mapping[str, Any]]) -> "plots.Figure":
    """Draw speed-ups over undivided and over torch's own by network and limit."""
    rows = list(table)
    networks = {row["network"] for row in rows}
    title = ["convolutions", *(networks if len(networks) == 1 else ())]
    heading = ["limit"] if len(title) > 1 else ["network", "limit"]
    axis = "speed-up of the convolutions; the paper's on P100"
    return measured.draw(rows, heading, "policy", axis, panel(", ".join(title)))


def _widest(results: Results) -> str:
    """The policy of the most micro-batch sizes that was run, for which the paper's numbers are."""
    return "all" if results.first("network", policy="all") else "powerOfTwo"


def figure9_runs(profile: str, chosen: Chosen) -> list[Run]:
    """AlexNet at three limits with three policies."""
    return [
        Cell(limit, policy, precision=precision).run(profile)
        for precision in runs.profile_of(profile)["precisions"]
        for limit in runs.LIMITS_MIB
        for policy in runs.policies(profile)
        if precision == "fp32" or policy != "all"
    ]


def figure9(results: Results) -> Iterator[dict[str, Any]]:
    """AlexNet at three limits with three policies."""
    best = "AlexNet", MODERATE, f"WR {_widest(results)}"
    papers = {best: PAPER["figure9"]["speedup_64"]["P100"][1]}
    return table(results, ["AlexNet"], runs.LIMITS_MIB, papers)


def _divided(results: Results, limit_mib: int) -> Record:
    """AlexNet divided, with all sizes as in the paper or else powers of two."""
    return need(results, Cell(limit_mib, "all"), Cell(limit_mib, "powerOfTwo"))


def divided_faster(results: Results, limit_mib: int) -> Cases:
    """The gain of dividing within a limit; to fit only divided is a gain, too.

    The moderate limit has to exclude an algorithm, the others to be no looser for a sample than the
    paper's.
    """
    undivided, divided = need(results, Cell(limit_mib)), _divided(results, limit_mib)
    config = undivided.config
    at_papers = config["limit_mib"] * Cell(limit_mib).paper_batch / config["batch"]
    if limit_mib == MODERATE:
        measured.need_binding(undivided, [or_none(need, results, Cell(AMPLE)), divided])
    elif at_papers > limit_mib:
        raise NotRun(
            f"no such limit was run: {limit_mib} MiB at a mini-batch of {config['batch']} are "
            f"{at_papers:,.0f} at the paper's"
        )
    if limit_mib == SMALL and unfit(undivided) and not unfit(divided):
        return {"AlexNet": Exact(False, f"only divided, {unfit(undivided)} fit")}
    label = f"{_told(results, divided, limit_mib)}:"
    gain = gained(undivided, divided).named(label)
    return {"AlexNet": noted(gain, measured.over_torch(divided), entries(undivided))}


def over_torch(results: Results) -> Estimate:
    """How fast AlexNet divided within 64 MiB is over torch's own convolutions without a limit."""
    return measured.over_torch(_divided(results, MODERATE))


def _told(results: Results, divided: Record, limit_mib: int) -> str:
    within = Cell(limit_mib).told(results.profile)
    return f"{network_name(divided, True)}, {divided.config['policy']} within {within}"


def memory_cost(results: Results) -> Cases:
    """The time that a moderate workspace costs, divided, over an ample one undivided."""
    large, small = need(results, Cell(AMPLE)), _divided(results, MODERATE)
    measured.need_binding(need(results, Cell(MODERATE)), [large, small])
    ample = Cell(AMPLE).told(results.profile)
    label = f"time of {_told(results, small, MODERATE)} over undivided within {ample}:"
    gain = gained(small, large).named(label)
    return {"AlexNet": noted(gain, measured.over_torch(small), entries(large))}


def power_of_two_as_good(results: Results) -> Cases:
    """The time of powerOfTwo over that of all, at each limit that binds."""

    def cost(limit: str) -> Estimate:
        undivided, two, every = (
            need(results, Cell(int(limit), policy)) for policy in runs.POLICIES
        )
        measured.need_binding(undivided, [or_none(need, results, Cell(AMPLE)), two, every])
        return gained(two, every).named(f"{limit} MiB, powerOfTwo over all:")

    found = cases(map(str, runs.LIMITS_MIB), cost)
    return {name: case for name, case in found.items() if isinstance(case, Estimate)} or found


FIGURE9 = runs.artefact(
    "figure9",
    plan=figure9_runs,
    rows=lambda results: told(figure9(results)),
    draw=lambda results: figure(figure9(results)),
    claims={
        "moderate_faster": partial(divided_faster, limit_mib=MODERATE),
        "small_no_gain": partial(divided_faster, limit_mib=SMALL),
        "ample_no_gain": partial(divided_faster, limit_mib=AMPLE),
        "memory_cost": memory_cost,
        "power_of_two_as_good": power_of_two_as_good,
    },
)


def _table5_role(profile: str, role: str) -> str:
    """The name under which Table V's network runs: its AlexNet is not that of the figures."""
    letter = role == "AlexNet" and profile in runs.TO_THE_LETTER
    return runs.TABLE5_ALEXNET if letter else role


def table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    """All three networks at 64 MiB for each kernel."""
    return [
        Cell(MODERATE, policy, role).run(profile)
        for role in (_table5_role(profile, role) for role in runs.ROLES)
        for policy in runs.policies(profile, role)
    ]


def table5(results: Results) -> list[dict[str, Any]]:
    """Three networks at 64 MiB for each kernel; the paper's speed-ups are of iterations."""
    papers = {
        (_table5_role(results.profile, role), MODERATE, f"WR {policy}"): row["undivided"] / time
        for role, row in PAPER["table5"].items()
        for policy, time in row.items()
    }
    roles = dict.fromkeys(role for role, *_ in papers)
    return told(table(results, roles, [MODERATE], papers, caffes=False))


TABLE5 = runs.artefact("table5", plan=table5_runs, rows=table5)


def figure11_runs(profile: str, chosen: Chosen) -> list[Run]:
    """AlexNet and ResNet-50 under WR, and under WD with the same workspace in all."""
    widest = runs.policies(profile)[-1]
    alexnet = [
        Cell(limit, policy, mode=mode).run(profile)
        for limit in runs.LIMITS_MIB
        for policy in runs.policies(profile)
        for mode in runs.MODES
        # WD with more than it can use, or between the two ends, says little: spared.
        if mode == "WR"
        or profile == "paper"
        or (limit, policy) in ((SMALL, "undivided"), (SMALL, widest), (MODERATE, widest))
    ]
    resnet50 = (
        (SMALL, "undivided", "WR"),
        (SMALL, "powerOfTwo", "WR"),
        (SMALL, "powerOfTwo", "WD"),
        (RESNET_WR_MIB, "undivided", "WR"),
        (RESNET_WD_MIB, "powerOfTwo", "WD"),
    )
    return alexnet + [
        Cell(limit, policy, "ResNet-50", mode, caffe=True).run(profile)
        for limit, policy, mode in resnet50
    ]


def figure11(results: Results) -> Iterator[dict[str, Any]]:
    """AlexNet and ResNet-50 under WR, and under WD with the same workspace in all."""
    best = "AlexNet", SMALL, f"WD {_widest(results)}"
    papers = {best: PAPER["figure11"]["alexnet_120"][1]}
    limits = (SMALL, RESNET_WD_MIB, RESNET_WR_MIB, MODERATE, AMPLE)
    return table(results, PAPER["figure11"]["kernels"], limits, papers, runs.MODES, caffe=True)


def wd_faster(results: Results) -> Cases:
    """How much faster WD is than WR undivided, with as much workspace in all or with less."""

    def faster(name: str) -> Estimate:
        role, each_mib, wd_each_mib = COMPARISONS[name]
        apart = Cell(each_mib, role=role, caffe=True)
        shared = Cell(wd_each_mib, "all", role, "WD", caffe=True)
        undivided = need(results, apart)
        wd = need(results, shared, replace(shared, policy="powerOfTwo"))
        same = {"role": role, "mode": "WR", "setting": "fp32", "policy": "undivided"}
        limit = undivided.config["limit_mib"]
        more = [r for r in results.ok("network", **same) if r.config["limit_mib"] > limit]
        measured.need_binding(undivided, [*more, wd])
        total, apiece = (cell.told(results.profile) for cell in (shared, apart))
        label = f"{network_name(wd, True)}, {total} in all over {apiece} for each:"
        gain = gained(undivided, wd).named(label)
        return noted(gain, measured.over_torch(wd), entries(undivided))

    return cases(COMPARISONS, faster)


FIGURE11 = runs.artefact(
    "figure11",
    plan=figure11_runs,
    rows=lambda results: told(figure11(results)),
    draw=lambda results: figure(row for row in figure11(results) if "AlexNet" in row["network"]),
    claims={"wd_faster": wd_faster},
)
