"""Micro-Batch Streaming (Piao et al.): experiments, artefacts and claims."""

from collections.abc import Mapping

from repro.experiments.design import Artefact, Experiment, Paper, Run
from repro.experiments.mbs import artefacts, claims, grids, runs
from repro.experiments.mbs.captions import caption
from repro.experiments.mbs.grids import CLASSIFIERS, ROLES

Chosen = Mapping[str, str]


def _table1_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [
        run
        for role in ("ResNet-50", "U-Net")
        for run in grids.resolution_grid(profile, role, chosen)
    ]


def _table2_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.sizing(profile, role, chosen) for role in ROLES]


def _table3_runs(profile: str, chosen: Chosen) -> list[Run]:
    return grids.initial_pair(profile, "U-Net", chosen)


def _table4_runs(profile: str, chosen: Chosen) -> list[Run]:
    trainings = [run for role in CLASSIFIERS for run in grids.pairs(profile, role, chosen)]
    return trainings + [grids.overhead(profile, role, chosen) for role in CLASSIFIERS]


def _table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    overhead = grids.overhead(profile, "U-Net", chosen)
    return [*grids.pairs(profile, "U-Net", chosen), overhead]


def _figure2_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.timeline(profile, chosen)]


def _figure3_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [run for role in CLASSIFIERS for run in grids.initial_pair(profile, role, chosen)]


_ARTEFACTS = (
    Artefact(
        name="table1",
        title="Batch size and image size",
        source="Table 1",
        runs=_table1_runs,
        table=artefacts.table1,
        figure=artefacts.figure1_bars,
        caption=caption("Best test accuracy or IoU without MBS, by mini-batch and image size."),
        claims=claims.TABLE1,
    ),
    Artefact(
        name="table2",
        title="Initial mini-batch and micro-batch sizes",
        source="Table 2",
        runs=_table2_runs,
        table=artefacts.table2,
        caption=caption(
            "The largest mini-batch that fits without MBS, found by trying powers of two and by "
            "the linear memory model; the micro-batch is half of it. That it is the paper's size "
            "follows from how the simulated limit is set; that the model finds it does not. "
            '"auto" is the streamer\'s own choice, with the error of the peak that it predicted.'
        ),
        claims=claims.TABLE2,
    ),
    Artefact(
        name="table3",
        title="U-Net with and without MBS",
        source="Table 3",
        runs=_table3_runs,
        table=artefacts.table3,
        caption=caption("Best test IoU at the initial mini-batch."),
        claims=claims.TABLE3,
    ),
    Artefact(
        name="table4",
        title="Classification with mini-batches beyond memory",
        source="Table 4",
        runs=_table4_runs,
        table=lambda results: artefacts.large_batches(results, "table4"),
        figure=lambda results: artefacts.large_batch_figure(results, "table4"),
        caption=caption("Best test accuracy and time of an epoch, without and with MBS."),
        claims=claims.large_batch_claims(CLASSIFIERS),
    ),
    Artefact(
        name="table5",
        title="Segmentation with mini-batches beyond memory",
        source="Table 5",
        runs=_table5_runs,
        table=lambda results: artefacts.large_batches(results, "table5"),
        figure=lambda results: artefacts.large_batch_figure(results, "table5"),
        caption=caption("Best test IoU and time of an epoch, without and with MBS."),
        claims=claims.large_batch_claims(["U-Net"]),
    ),
    Artefact(
        name="figure2",
        title="What one mini-batch does when",
        source="Figure 2",
        runs=_figure2_runs,
        table=artefacts.figure2_table,
        figure=artefacts.figure2,
        caption=caption("A measured timeline in place of the paper's drawing."),
        claims=claims.FIGURE2,
    ),
    Artefact(
        name="figure3",
        title="Learning curves with and without MBS",
        source="Figure 3",
        runs=_figure3_runs,
        table=artefacts.figure3_table,
        figure=artefacts.figure3,
        caption=caption(
            "At the initial mini-batch, mean over seeds with a band of one standard deviation. "
            "The paper's curves are not given as numbers; its maximum accuracies stand beside."
        ),
        claims=claims.FIGURE3,
    ),
)

PAPER = Paper(
    key="mbs",
    title="Micro-Batch Streaming",
    citation="Piao, Synn, Park, Kim: Micro Batch Streaming: Allowing the Training of DNN Models "
    "to Use a Large Batch Size in Memory Constrained Environments",
    notebook="01_mbs",
    experiments={
        name: Experiment(name, function, runs.modules)
        for name, function in {
            "train": runs.train,
            "size": runs.size,
            "overhead": runs.overhead,
            "timeline": runs.timeline,
        }.items()
    },
    artefacts={artefact.name: artefact for artefact in _ARTEFACTS},
    datasets=grids.DATASETS,
)
