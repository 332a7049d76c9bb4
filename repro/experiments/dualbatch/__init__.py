"""Dual-batch learning and cyclic progressive learning (Lu et al.): experiments and claims."""

from collections.abc import Mapping
from functools import partial

from repro.experiments.design import Artefact, Experiment, Paper, Run
from repro.experiments.dualbatch import claims, costs, figures, grids, runs, tables
from repro.experiments.dualbatch.captions import caption
from repro.experiments.dualbatch.grids import CIFAR, IMAGENET, WORKERS, K

Chosen = Mapping[str, str]


def _times_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.step_times(profile), *grids.published_times(chosen)]


def _solved_runs(profile: str, chosen: Chosen, table: str) -> list[Run]:
    return [grids.solved(table)]


def _table2_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.solved("table2"), *grids.published_times(chosen)]


def _table3_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [
        grids.table5_training(profile, chosen, K[1], n_small, factor)
        for n_small in range(1, WORKERS)
        for factor in tables.FACTORS
    ]


def _table4_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.step_times(profile)]


def _table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    baseline = grids.table5_training(profile, chosen, 1.0, 0)
    return [baseline] + [
        grids.table5_training(profile, chosen, k, n_small)
        for k in K
        for n_small in range(1, WORKERS + 1)
    ]


def _table8_runs(profile: str, chosen: Chosen) -> list[Run]:
    trainings = [
        grids.table8_training(profile, chosen, n_small, hybrid)
        for hybrid in (False, True)
        for n_small in range(WORKERS + 1)
    ]
    return [*trainings, grids.step_times(profile)]


def _table10_runs(profile: str, chosen: Chosen) -> list[Run]:
    runs = [grids.imagenet_times(profile)]
    if chosen.get(IMAGENET):
        runs += [
            grids.imagenet_training(profile, chosen, n_small, hybrid)
            for hybrid in (False, True)
            for n_small in range(WORKERS + 1)
        ]
    return runs


def _figure13_runs(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.memory(profile, role) for role in (CIFAR, IMAGENET)]


def _engine_runs(profile: str, chosen: Chosen) -> list[Run]:
    return grids.clusters(profile, chosen)


_ARTEFACTS = (
    Artefact(
        name="figure3",
        title="Time of a batch against its size",
        source="Figure 3",
        runs=_times_runs,
        table=costs.times_table,
        figure=figures.figure3,
        caption=caption(
            "t = a x + b, fitted by least squares. Errors are of an epoch by equation 2: here at "
            "every batch size timed, in the raw data at those of Table 4."
        ),
        claims=claims.FIGURE3,
    ),
    Artefact(
        name="figure4",
        title="Time of an epoch against the batch size",
        source="Figure 4",
        runs=_times_runs,
        table=costs.times_table,
        figure=figures.figure4,
        caption=caption("Epochs measured, and predicted by equation 2 from the fitted a and b."),
        claims=claims.FIGURE4,
    ),
    Artefact(
        name="table2",
        title="Batch sizes and shares of the data",
        source="Table 2",
        runs=_table2_runs,
        table=tables.table2,
        caption=caption(
            "B_L = 500, 50,000 samples, four workers. The last column solves with a and b fitted "
            "to the authors' raw measurements in TensorFlow, where they are at hand, and so knows "
            "nothing of the table."
        ),
        claims=claims.TABLE2,
    ),
    Artefact(
        name="table3",
        title="Model-update factor",
        source="Table 3, Figures 5 and 6",
        runs=_table3_runs,
        table=tables.table3,
        figure=figures.figures5_6,
        caption=caption(
            "Final test loss and accuracy at k = 1.1, mean ± standard deviation over seeds (lines "
            "at the curves' ends); differences in points with Welch's 95 % interval."
        ),
        claims=claims.TABLE3,
    ),
    Artefact(
        name="table4",
        title="Predicted time of a worker's share",
        source="Table 4",
        runs=_table4_runs,
        table=costs.table4,
        caption=caption(
            "Shares of plans that are solved with the times fitted here. Predictions are a d + b "
            "⌈d / x⌉: the last batch is as short as it is. Equation 2 takes it for a whole one, "
            "equation 3 for none; their errors stand beside. The errors of the paper are as it "
            "prints them, though its predictions follow from neither equation."
        ),
        claims=claims.TABLE4,
    ),
    Artefact(
        name="table5",
        title="How many small-batch workers",
        source="Table 5, Figures 7 to 10",
        runs=_table5_runs,
        table=tables.table5,
        figure=figures.figures7_10,
        caption=caption(
            "Final test loss and accuracy, mean ± standard deviation over seeds (lines at the "
            "curves' ends); gains over the baseline, four large-batch workers with warm-up, in "
            "points with Welch's 95 % "
            "interval."
        ),
        claims=claims.TABLE5,
    ),
    Artefact(
        name="table6",
        title="Batch sizes at several resolutions",
        source="Table 6",
        runs=partial(_solved_runs, table="table6"),
        table=tables.table6,
        caption=caption("k = 1.05, four workers."),
        claims=claims.TABLE6,
    ),
    Artefact(
        name="table7",
        title="Schedule on CIFAR-100",
        source="Table 7",
        runs=partial(_solved_runs, table="table7"),
        table=partial(tables.schedule_table, table="table7"),
        caption=caption("What the schedule yields, epoch by epoch, joined; n_S = 1."),
        claims=claims.TABLE7,
    ),
    Artefact(
        name="table8",
        title="Dual-batch learning against the hybrid scheme",
        source="Table 8, Figures 11 and 12",
        runs=_table8_runs,
        table=tables.table8,
        figure=figures.figures11_12,
        caption=caption(
            "Final test loss and accuracy, mean ± standard deviation over seeds (lines at the "
            "curves' ends); gains over dual-batch learning with n_S = 0, in points with Welch's "
            "95 % interval. Hybrid with "
            "n_S = 0 is cyclic progressive learning alone. Savings of time are over dual-batch "
            "learning, as the paper's: at k = 1.05 its 10.1 % are 5.6 % over the baseline."
        ),
        claims=claims.TABLE8,
    ),
    Artefact(
        name="table9",
        title="Schedule on ImageNet",
        source="Table 9",
        runs=partial(_solved_runs, table="table9"),
        table=partial(tables.schedule_table, table="table9"),
        caption=caption("What the schedule yields, epoch by epoch, joined; n_S = 1."),
        claims=claims.TABLE9,
    ),
    Artefact(
        name="table10",
        title="ImageNet: settings and times",
        source="Table 10",
        runs=_table10_runs,
        table=tables.table10_trainings,
        caption=caption(
            "ImageNet's settings beside the time model measured here at the three resolutions, at "
            "scale. Trained under the profile paper alone."
        ),
        claims=claims.TABLE10,
    ),
    Artefact(
        name="figure13",
        title="Memory against the batch size",
        source="Figure 13",
        runs=_figure13_runs,
        table=costs.figure13_table,
        figure=figures.figure13,
        caption=caption(
            "M(B) = p + B a, fitted to the eight smallest batch sizes, and the largest batch size "
            "under a limit: predicted, and found by trying. On a CPU memory is the sum of the live "
            "tensors, nearly a line by construction; on a GPU it is what the allocator gives out."
        ),
        claims=claims.FIGURE13,
    ),
    Artefact(
        name="engines",
        title="Simulated and real workers",
        source="Engines (not in the paper)",
        runs=_engine_runs,
        table=tables.engines,
        caption=caption(
            "One training with one small-batch and one large-batch worker, by the engine with a "
            "virtual clock and by real processes on Ray, which commit in whatever order they end. "
            "The last column trains again in the same order, on the local engine."
        ),
        claims=claims.ENGINES,
    ),
)

PAPER = Paper(
    key="dualbatch",
    title="Dual-batch learning",
    citation="Lu, Liu, Hong, Wu: Hybrid Dual-Batch and Cyclic Progressive Learning for Efficient "
    "Distributed Training",
    notebook="02_dualbatch",
    experiments={
        "solve": Experiment("solve", runs.solve, runs.modules, measures=False),
        "times": Experiment("times", runs.times, runs.modules),
        "published": Experiment("published", runs.published, runs.modules, measures=False),
        "memory": Experiment("memory", runs.memory, runs.modules),
        "train": Experiment("train", runs.train, runs.modules),
    },
    artefacts={artefact.name: artefact for artefact in _ARTEFACTS},
    datasets=grids.DATASETS,
)
