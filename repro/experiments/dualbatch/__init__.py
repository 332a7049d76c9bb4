"""Dual-batch learning and cyclic progressive learning (Lu et al.): the list of artefacts."""

from repro.experiments.design import Artefact, Experiment, Paper, by_name
from repro.experiments.dualbatch.settings import DATASETS, ENGINES

_HERE = "repro.experiments.dualbatch"

PAPER = Paper(
    key="dualbatch",
    title="Dual-batch learning",
    citation="Lu, Liu, Hong, Wu: Hybrid Dual-Batch and Cyclic Progressive Learning for Efficient "
    "Distributed Training",
    notebook="02_dualbatch",
    experiments=by_name(
        Experiment("solve", f"{_HERE}.experiments:solve", measures=False),
        Experiment("times", f"{_HERE}.experiments:times", timed=("fits", "shares")),
        Experiment("published", f"{_HERE}.experiments:published", measures=False),
        Experiment("memory", f"{_HERE}.experiments:memory"),
        # Simulated workers take virtual time; those of a cluster are timed.
        Experiment(
            "train",
            f"{_HERE}.experiments:train",
            measures=False,
            trains=True,
            measures_where=("engine", "ray"),
            planned=("plans", "commits", "staleness", "virtual_time_s"),
            early=("train_loss", "test_loss"),
        ),
        Experiment("schemes", f"{_HERE}.schemes:schemes", measures=False),
        Experiment(
            "synchronise",
            f"{_HERE}.synchronising:synchronise",
            measures=False,
            trains=True,
            planned=("worker", "pulled", "staleness", "commit_s", "virtual_time_s"),
            early=("train_loss", "test_loss"),
        ),
        Experiment("flatness", f"{_HERE}.minima:flatness", measures=False, trains=True),
        # A plan from measured times, by which it trains.
        Experiment(
            "own_plan",
            f"{_HERE}.own_plan:train_own_plan",
            trains=True,
            timed=(
                *("a", "b", "k_max", "plan", "plans", "staleness"),
                *("first_steps", "accuracy", "test_loss", "train_loss"),
            ),
            derive=f"{_HERE}.own_plan:planned_again",
        ),
        Experiment("wall", f"{_HERE}.own_plan:wall_times", timed=("solved", "devices")),
    ),
    artefacts=by_name(
        Artefact(
            "figure1", "Figure 1", "Sharp and flat minima, as measured", f"{_HERE}.flatness:FIGURE1"
        ),
        Artefact(
            "figure2",
            "Figure 2",
            "Parameter server and workers, as they ran",
            f"{_HERE}.synchronisation:FIGURE2",
        ),
        Artefact(
            "figure3", "Figure 3", "Time of a batch against its size", f"{_HERE}.times:FIGURE3"
        ),
        Artefact(
            "figure4",
            "Figure 4",
            "Time of an epoch against the batch size",
            f"{_HERE}.times:FIGURE4",
        ),
        Artefact("table1", "Table 1", "The three schemes", f"{_HERE}.comparison:TABLE1"),
        Artefact(
            "table2", "Table 2", "Batch sizes and shares of the data", f"{_HERE}.plans:TABLE2"
        ),
        Artefact(
            "table3", "Table 3, Figures 5 and 6", "Model-update factor", f"{_HERE}.accuracy:TABLE3"
        ),
        Artefact(
            "table4", "Table 4", "Predicted time of a worker's share", f"{_HERE}.shares:TABLE4"
        ),
        Artefact(
            "table5",
            "Table 5, Figures 7 to 10",
            "How many small-batch workers",
            f"{_HERE}.accuracy:TABLE5",
        ),
        Artefact(
            "table6", "Table 6", "Batch sizes at several resolutions", f"{_HERE}.plans:TABLE6"
        ),
        Artefact("table7", "Table 7", "Schedule on CIFAR-100", f"{_HERE}.hybrid:TABLE7"),
        Artefact(
            "table8",
            "Table 8, Figures 11 and 12",
            "Dual-batch learning against the hybrid scheme",
            f"{_HERE}.hybrid:TABLE8",
        ),
        Artefact("table9", "Table 9", "Schedule on ImageNet", f"{_HERE}.hybrid:TABLE9"),
        Artefact(
            "table10",
            "Table 10",
            "ImageNet: settings, trainings and times",
            f"{_HERE}.hybrid:TABLE10",
        ),
        Artefact(
            "figure13", "Figure 13", "Memory against the batch size", f"{_HERE}.memory:FIGURE13"
        ),
        Artefact(
            "synchronisation",
            "Synchronisation (sections 2.4 and 3.1)",
            "BSP, SSP and ASP by merge rule",
            f"{_HERE}.synchronisation:SYNCHRONISATION",
        ),
        Artefact(
            "flatness",
            "Flatness (sections 2.1 and 2.2)",
            "Gradients and minima by batch size",
            f"{_HERE}.flatness:FLATNESS",
        ),
        Artefact(
            "own_plan",
            "Own plan (sections 3.2 and 3.3)",
            "Plans solved from times measured here",
            f"{_HERE}.measured_plan:OWN_PLAN",
        ),
        Artefact(
            "engines",
            "Engines (not in the paper)",
            "Simulated and real workers",
            f"{_HERE}.synchronisation:ENGINES_TABLE",
        ),
        Artefact(
            "updates",
            "Equal updates (not in the paper)",
            "What mixing batch sizes gains over as many updates",
            f"{_HERE}.fairness:UPDATES",
        ),
        Artefact(
            "rates",
            "Rates (not in the paper)",
            "Accuracy by learning rate, for three mixes",
            f"{_HERE}.fairness:RATE_SEARCH",
        ),
        Artefact(
            "gains",
            "Gains (Tables 5 and 8)",
            "What dual batches gain, on one picture for a talk",
            f"{_HERE}.hybrid:GAINS",
        ),
    ),
    datasets=DATASETS,
    options={"engine": ENGINES},
)
