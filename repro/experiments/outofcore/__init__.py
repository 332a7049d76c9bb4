"""Out-of-core training (Hayakawa and Narihira): experiments, artefacts and claims."""

from collections.abc import Mapping
from functools import partial

from repro.experiments.design import COMPUTING_PROFILES, Artefact, Experiment, Paper, Run
from repro.experiments.outofcore import claims, grids, runs, tables
from repro.experiments.outofcore.captions import caption


def _table1_runs(profile: str, chosen: Mapping[str, str]) -> list[Run]:
    return grids.table1(profile)


def _figure3_runs(profile: str, chosen: Mapping[str, str]) -> list[Run]:
    swapped = ("in_core", "schedule", "schedule_va")
    runs = [run for run in grids.table1(profile) if run.experiment != "reach"]
    return [run for run in runs if run.config.get("mode", "in_core") in swapped]


def _growth_runs(profile: str, chosen: Mapping[str, str]) -> list[Run]:
    return grids.figures4_5(profile)


_ARTEFACTS = (
    Artefact(
        name="table1",
        title="ResNet-50 beyond the device's memory",
        source="Table 1",
        runs=_table1_runs,
        table=tables.table1,
        figure=tables.table1_figure,
        caption=caption(
            "Images per second of forward pass, backward pass and update. Columns are the paper's "
            "batch sizes, in brackets over the largest in core; what is measured here has batch "
            "sizes of its own, in the same proportion."
        ),
        claims=claims.TABLE1,
    ),
    Artefact(
        name="figure3",
        title="Budget and actual memory",
        source="Figure 3",
        runs=_figure3_runs,
        table=tables.figure3_table,
        figure=tables.figure3,
        caption=caption(
            "The largest budget that a schedule can be given, what its tensors hold at most, and "
            "what the allocator takes for them, with torch's allocator and with chunks (VA)."
        ),
        claims=claims.FIGURE3,
    ),
    Artefact(
        name="figure4",
        title="Speed of DenseNet, Pix2PixHD and DeepLabv3+",
        source="Figure 4",
        runs=_growth_runs,
        table=partial(tables.growth_table, memory=False),
        figure=partial(tables.growth_figure, memory=False),
        caption=caption(
            'Images per second of forward pass, backward pass and update. "Largest" rows have the '
            "largest batch sizes that the simulated allocators serve, to 3 %."
        ),
        claims=claims.FIGURE4,
    ),
    Artefact(
        name="figure5",
        title="Memory of DenseNet, Pix2PixHD and DeepLabv3+",
        source="Figure 5",
        runs=_growth_runs,
        table=partial(tables.growth_table, memory=True),
        figure=partial(tables.growth_figure, memory=True),
        caption=caption(
            "The most that the allocator takes within an iteration; in core on a CPU, what tensors "
            "take. Budgets are as large as the limit allows, so that use lies just below it."
        ),
        claims=claims.FIGURE5,
    ),
)

PAPER = Paper(
    key="outofcore",
    title="Out-of-core",
    citation="Hayakawa, Narihira: Out-of-core training for extremely large-scale neural networks "
    "with adaptive window-based scheduling",
    notebook="04_outofcore",
    experiments={
        "simulated": Experiment("simulated", runs.simulated, runs.modules, measures=False),
        "reach": Experiment("reach", runs.reach, runs.modules, measures=False),
        "measured": Experiment("measured", runs.measured, runs.modules),
    },
    artefacts={artefact.name: artefact for artefact in _ARTEFACTS},
    datasets={profile: {} for profile in COMPUTING_PROFILES},
)
