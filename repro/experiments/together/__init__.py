"""The five answers side by side, and together: a study of our own, run as a paper is."""

from repro.experiments.design import Artefact, Experiment, Paper, by_name
from repro.experiments.together.runs import ARTEFACTS, DATASETS

_HERE = "repro.experiments.together"

PAPER = Paper(
    key="together",
    title="Together",
    citation="No paper: the five methods side by side on one machine, and combined",
    notebook="06_together",
    experiments=by_name(
        # Measured times choose the window of swaps, and so its memory differs from run to run.
        Experiment("limit", f"{_HERE}.measuring:limit", timed=("host_bytes", "peak_bytes")),
        Experiment(
            "foretell",
            f"{_HERE}.measuring:predict_limit",
            timed=("slowdown", "bound", "fits", "peak_bytes"),
        ),
        Experiment("train", f"{_HERE}.training:train", measures=False, trains=True),
        Experiment("pace", f"{_HERE}.training:pace", timed=("fits",)),
    ),
    artefacts=by_name(
        *(
            Artefact(name, row["source"], row["title"], f"{_HERE}.{row['question']}")
            for name, row in ARTEFACTS.items()
        )
    ),
    datasets=DATASETS,
)
