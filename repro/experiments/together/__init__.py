"""The five answers side by side, and together: a study of our own, run as a paper is."""

from repro.experiments.design import Artefact, Experiment, Paper, by_name
from repro.experiments.together.settings import DATASETS

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
            f"{_HERE}.foretelling:foretell",
            timed=("slowdown", "bound", "fits", "peak_bytes"),
        ),
        Experiment("train", f"{_HERE}.learning:train", measures=False, trains=True),
        Experiment("pace", f"{_HERE}.learning:pace", timed=("fits",)),
    ),
    artefacts=by_name(
        Artefact("limit", "Part 1", "Under one memory limit", f"{_HERE}.limit:UNDER_LIMIT"),
        Artefact("advice", "Part 1", "What advise predicts of it", f"{_HERE}.advice:ADVICE"),
        Artefact("accuracy", "Part 2", "Towards one accuracy", f"{_HERE}.accuracy:ACCURACY"),
        Artefact("decision", "Part 3", "Which of the five, and when", f"{_HERE}.decision:DECISION"),
    ),
    datasets=DATASETS,
)
