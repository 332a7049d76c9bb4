"""θ-adaptive batch size (Lee et al.): its experiments and artefacts."""

from typing import Any

from repro.experiments.adaptive.runs import ARTEFACTS, PROFILES, TASKS
from repro.experiments.design import Artefact, Experiment, Paper, by_name

_HERE = "repro.experiments.adaptive"


def _training(name: str, function: str = "train", **options: Any) -> Experiment:
    entry = f"{_HERE}.experiments:{function}"
    return Experiment(name, entry, measures=False, trains=True, **options)


_SCHEDULE = f"{_HERE}.building:schedule"
PAPER = Paper(
    key="adaptive",
    title="θ-adaptive batch size",
    citation="Lee, Kang, Madireddy, Balaprakash, Agrawal, Choudhary, Archibald, Liao: Improving "
    "Scalability of Parallel CNN Training by Adjusting Mini-Batch Size at Run-Time",
    notebook="03_adaptive",
    experiments=by_name(
        *(_training(name, derive=_SCHEDULE) for name in ("train", "first_epochs", "variant")),
        _training("norms", "norms", planned=("sizes",)),
        Experiment("parallel", f"{_HERE}.worker:parallel", timed=("device", "messages")),
        Experiment("asleep", f"{_HERE}.overlap:asleep", timed=("ratios",)),
    ),
    artefacts=by_name(
        *(
            Artefact(name, row["source"], row["title"], f"{_HERE}.{row['module']}:{name.upper()}")
            for name, row in ARTEFACTS.items()
        )
    ),
    datasets={
        profile: {task: tuple(at[task]["data"]) for task in TASKS}
        for profile, at in PROFILES.items()
    },
    # What the paper leaves open: the rate of a last, shorter mini-batch of an epoch (Algorithm 1
    # knows the full one alone; one in proportion keeps equation 2's noise scale), and on which
    # part of an image PSNR is measured; see `building`.
    options={
        "last_batch": ("full_rate", "in_proportion"),
        "psnr": ("rgb", "rgb_shaved", "y_shaved"),
    },
)
