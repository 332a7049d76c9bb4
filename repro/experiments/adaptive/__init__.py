"""θ-adaptive batch size (Lee et al.): the list of artefacts."""

from typing import Any

from repro.experiments.adaptive.runs import PROFILES, TASKS
from repro.experiments.design import Artefact, Experiment, Paper, by_name

_HERE = "repro.experiments.adaptive"


def _training(name: str, function: str = "train", **options: Any) -> Experiment:
    entry = f"{_HERE}.experiments:{function}"
    return Experiment(name, entry, measures=False, trains=True, **options)


def _artefact(name: str, source: str, title: str, question: str) -> Artefact:
    return Artefact(name, source, title, f"{_HERE}.{question}:{name.upper()}")


PAPER = Paper(
    key="adaptive",
    title="θ-adaptive batch size",
    citation="Lee, Kang, Madireddy, Balaprakash, Agrawal, Choudhary, Archibald, Liao: Improving "
    "Scalability of Parallel CNN Training by Adjusting Mini-Batch Size at Run-Time",
    notebook="03_adaptive",
    experiments=by_name(
        *(
            _training(name, derive=f"{_HERE}.building:schedule")
            for name in ("train", "first_epochs", "variant")
        ),
        _training("norms", "norms", planned=("sizes",)),
        Experiment("parallel", f"{_HERE}.worker:parallel", timed=("device", "messages")),
        Experiment("asleep", f"{_HERE}.overlap:asleep", timed=("ratios",)),
    ),
    artefacts=by_name(
        _artefact("figure1", "Figure 1", "Learning curves by batch size", "batch_sizes"),
        _artefact("figure2", "Figure 2", "Cost and θ by batch size", "batch_sizes"),
        _artefact("figure3", "Figure 3", "θ after the decay of the rate", "strategies"),
        _artefact("stable", "Section III-D", "Maximum stable batch size", "stable_batch"),
        _artefact(
            "figure4", "Table I, Figure 4", "Super-resolution: four strategies", "strategies"
        ),
        _artefact(
            "figure5", "Table II, Figure 5", "Phantom restoration: four strategies", "strategies"
        ),
        _artefact("figure6", "Figure 6", "θ of EDSR by batch size", "batch_sizes"),
        _artefact("figure7", "Figure 7", "Strong scaling of EDSR on DIV2K", "scaling"),
        _artefact("figure8", "Figure 8", "Strong scaling of EDSR on Phantom", "scaling"),
        _artefact("figure9", "Figure 9, section IV-B", "Where the time of a step goes", "steps"),
        _artefact("breakdown", "Figure 9", "Where the time goes on many nodes", "steps"),
        _artefact(
            "overlap",
            "Section IV-B",
            "How much of the averaging hides under computation",
            "overlap",
        ),
        _artefact(
            "figure10",
            "Table III, Figure 10",
            "CIFAR-10: loss and accuracy of four strategies",
            "strategies",
        ),
        _artefact("lars", "Section V", "θ-adaptive with LARS and LAMB", "layers"),
        _artefact("figure11", "Figure 11", "Strong scaling of ResNet-20 on CIFAR-10", "scaling"),
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
