"""Micro-batch convolution tuning, μ-cuDNN (Oyama et al.): experiments, artefacts and claims."""

from collections.abc import Mapping

from repro.experiments.design import COMPUTING_PROFILES, Artefact, Experiment, Paper, Run
from repro.experiments.microconv import claims, costs, grids, layers, networks, runs
from repro.experiments.microconv.captions import caption
from repro.experiments.microconv.deepbench import NETWORK_TYPES

Chosen = Mapping[str, str]


def _alexnet_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.candidates(profile, "AlexNet", grids.policies(profile, "AlexNet")[-1])]


def _conv2_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.conv2(profile)]


def _figure6_runs(profile: str, chosen: Chosen) -> list[Run]:
    return _conv2_runs(profile, chosen) + _alexnet_runs(profile, chosen)


def _figure8_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [
        grids.deepbench(profile, network_type, setting)
        for setting in grids.settings(profile)
        for network_type in NETWORK_TYPES
    ]


def _figure9_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [
        grids.network(profile, "AlexNet", "WR", limit, policy, setting)
        for setting in grids.settings(profile)
        for limit in grids.LIMITS_MIB
        for policy in grids.policies(profile, "AlexNet")
    ]


def _figure11_runs(profile: str, chosen: Chosen) -> list[Run]:
    alexnet = [
        grids.network(profile, "AlexNet", mode, limit, policy)
        for limit in grids.LIMITS_MIB
        for policy in grids.policies(profile, "AlexNet")
        for mode in grids.MODES
        # WD with more than it can use, or between the two ends, says little: spared.
        if mode == "WR"
        or profile == "paper"
        or (limit, policy) in ((8, "undivided"), (8, "all"), (64, "all"))
    ]
    # The paper: 2,544 MiB in all (16 for each) against undivided with 5,088 (32 for each).
    pairs = [("WR", 8, "undivided"), ("WR", 8, "powerOfTwo"), ("WD", 8, "powerOfTwo"),
             ("WR", 32, "undivided"), ("WD", 16, "powerOfTwo")]  # fmt: skip
    resnet = [
        grids.network(profile, "ResNet-50", mode, limit, policy) for mode, limit, policy in pairs
    ]
    return alexnet + resnet


def _figure13_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.cluster(profile)]


def _table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [
        grids.network(profile, role, "WR", 64, policy, setting)
        for role in grids.ROLES
        for setting in grids.settings(profile)
        for policy in grids.policies(profile, role)
    ]


def _optimisation_runs(profile: str, chosen: Chosen) -> list[Run]:
    policies = dict.fromkeys(("powerOfTwo", grids.policies(profile, "AlexNet")[-1]))
    alexnet = [grids.candidates(profile, "AlexNet", policy) for policy in policies]
    return [*alexnet, grids.solver(profile)]


_ARTEFACTS = (
    Artefact(
        name="figure1",
        title="Workspace and time of AlexNet's layers",
        source="Figure 1",
        runs=_alexnet_runs,
        table=layers.figure1_table,
        figure=layers.figure1,
        caption=caption(
            "The best undivided algorithms at each limit; medians, summed over forward and "
            "backward passes."
        ),
        claims=claims.FIGURE1,
    ),
    Artefact(
        name="figure6",
        title="The Pareto front of conv2",
        source="Figure 6",
        runs=_figure6_runs,
        table=layers.figure6_table,
        figure=layers.figure6,
        caption=caption(
            "Every desirable division of AlexNet's second convolution, forward; times are sums of "
            "medians measured part by part."
        ),
        claims=claims.FIGURE6,
    ),
    Artefact(
        name="figure8",
        title="DeepBench's layers",
        source="Figure 8",
        runs=_figure8_runs,
        table=layers.figure8_table,
        figure=layers.figure8,
        caption=caption(
            "Speed-up of the best division (powerOfTwo) at 64 MiB, forward, by kernel size. Over "
            "undivided: over the fastest undivided algorithm within the limit."
        ),
        claims=claims.FIGURE8,
    ),
    Artefact(
        name="figure9",
        title="AlexNet at three limits with three policies",
        source="Figure 9",
        runs=_figure9_runs,
        table=networks.figure9_table,
        figure=networks.figure9,
        caption=caption("Forward and backward pass.", tuned=True),
        claims=claims.FIGURE9,
    ),
    Artefact(
        name="figure10",
        title="conv2's micro-batches",
        source="Figure 10",
        runs=_conv2_runs,
        table=layers.figure10_table,
        figure=layers.figure10,
        caption=caption(
            "The divisions of AlexNet's second convolution, forward, run as a whole in turns with "
            "torch's own; the bars show their parts as measured one by one."
        ),
        claims=claims.FIGURE10,
    ),
    Artefact(
        name="figure11",
        title="WR against WD",
        source="Figure 11",
        runs=_figure11_runs,
        table=networks.figure11_table,
        figure=networks.figure11,
        caption=caption(
            "A limit for each kernel (WR) beside one workspace in all (WD): the paper's, 15 and "
            "159 times the limit. There are 14 and 158 kernels here, since the first layer's data "
            "gradient is not needed: WD has 7 % and 0.6 % more in all. Over undivided: over WR "
            "undivided at the same limit for each kernel, but for ResNet-50's 2,544 MiB (16 for "
            "each), which the paper sets against WR undivided with 32 for each.",
            tuned=True,
        ),
        claims=claims.FIGURE11,
    ),
    Artefact(
        name="figure12",
        title="What WD gives to whom",
        source="Figure 12",
        runs=_alexnet_runs,
        table=layers.figure12_table,
        figure=layers.figure12,
        caption=caption(
            "AlexNet's kernels: forward (F), data (BD) and filter gradient (BF). Times are sums of "
            "medians measured part by part."
        ),
        claims=claims.FIGURE12,
    ),
    Artefact(
        name="figure13",
        title="A heterogeneous cluster",
        source="Figure 13",
        runs=_figure13_runs,
        table=costs.figure13_table,
        figure=costs.figure13,
        caption=caption(
            "The mini-batch shared out so that the slowest device finishes first. The cluster is "
            "SIMULATED: devices were timed one at a time, communication is left out as in the "
            "paper. The last row is not ours: it takes the paper's two published times, at a batch "
            "of 16 each, as proportional to the batch size, in multiples of 4.",
            held=False,
        ),
        claims=claims.FIGURE13,
    ),
    Artefact(
        name="table5",
        title="AlexNet, ResNet-50 and DenseNet-40",
        source="Table V",
        runs=_table5_runs,
        table=networks.table5,
        caption=caption("Forward and backward pass at 64 MiB for each kernel.", tuned=True),
        claims=claims.TABLE5,
    ),
    Artefact(
        name="optimisation",
        title="What optimising takes",
        source="Sections IV-B1 and IV-B2",
        runs=_optimisation_runs,
        table=costs.optimisation_table,
        caption=caption(
            "Measuring starts from an empty cache. The solver's programmes are SYNTHETIC: 562 "
            "variables as the paper's ResNet-50, and 2,500 with the 465 kernels of a ResNet-152, "
            "of which the paper gives the time only.",
            held=False,
        ),
        claims=claims.OPTIMISATION,
    ),
)

PAPER = Paper(
    key="microconv",
    title="μ-cuDNN",
    citation="Oyama, Ben-Nun, Hoefler, Matsuoka: Accelerating Deep Learning Frameworks with "
    "Micro-batches",
    notebook="05_microconv",
    experiments={
        name: Experiment(name, function, runs.modules)
        for name, function in {
            "candidates": runs.candidates,
            "network": runs.network,
            "deepbench": runs.bench_layers,
            "cluster": runs.cluster,
            "solver": runs.solver,
        }.items()
    },
    artefacts={artefact.name: artefact for artefact in _ARTEFACTS},
    datasets={profile: {} for profile in COMPUTING_PROFILES},
)
