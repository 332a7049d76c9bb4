"""Dual-batch learning and cyclic progressive learning (Lu et al.): experiments and artefacts."""

from repro.experiments.design import Artefact, Experiment, Paper, by_name
from repro.experiments.dualbatch.runs import ARTEFACTS, DATASETS, ENGINES

_HERE = "repro.experiments.dualbatch"
_CURVES = ("train_loss", "test_loss")

PAPER = Paper(
    key="dualbatch",
    title="Dual-batch learning",
    citation="Lu, Liu, Hong, Wu: Hybrid Dual-Batch and Cyclic Progressive Learning for Efficient "
    "Distributed Training",
    notebook="02_dualbatch",
    experiments=by_name(
        Experiment("solve", f"{_HERE}.measuring:solve", measures=False),
        Experiment("times", f"{_HERE}.measuring:times", timed=("fits", "shares")),
        Experiment("published", f"{_HERE}.measuring:published", measures=False),
        Experiment("memory", f"{_HERE}.measuring:memory"),
        # Simulated workers take virtual time; those of a cluster are timed.
        Experiment(
            "train",
            f"{_HERE}.training:train",
            measures=False,
            trains=True,
            measures_where=("engine", "ray"),
            planned=("plans", "commits", "staleness", "virtual_time_s"),
            early=_CURVES,
        ),
        Experiment("schemes", f"{_HERE}.measuring:schemes", measures=False),
        Experiment(
            "synchronise",
            f"{_HERE}.training:synchronise",
            measures=False,
            trains=True,
            planned=("worker", "pulled", "staleness", "commit_s", "virtual_time_s"),
            early=_CURVES,
        ),
        Experiment("flatness", f"{_HERE}.training:flatness", measures=False, trains=True),
        # A plan from measured times, by which it trains.
        Experiment(
            "own_plan",
            f"{_HERE}.workers:train_own_plan",
            trains=True,
            timed=(
                *("a", "b", "k_max", "plan", "plans", "staleness"),
                *("first_steps", "accuracy", "test_loss", "train_loss"),
            ),
            derive=f"{_HERE}.workers:planned_again",
        ),
        Experiment("wall", f"{_HERE}.workers:wall_times", timed=("solved", "devices")),
    ),
    artefacts=by_name(
        *(
            Artefact(name, row["source"], row["title"], f"{_HERE}.{row['question']}")
            for name, row in ARTEFACTS.items()
        )
    ),
    datasets=DATASETS,
    options={"engine": ENGINES},
)
