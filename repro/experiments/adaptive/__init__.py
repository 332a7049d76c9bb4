"""θ-adaptive batch size (Lee et al.): the list of artefacts."""

from repro.experiments.adaptive.settings import CHOICES, DATASETS
from repro.experiments.design import Artefact, Experiment, Paper, by_name

_HERE = "repro.experiments.adaptive"

PAPER = Paper(
    key="adaptive",
    title="θ-adaptive batch size",
    citation="Lee, Kang, Madireddy, Balaprakash, Agrawal, Choudhary, Archibald, Liao: Improving "
    "Scalability of Parallel CNN Training by Adjusting Mini-Batch Size at Run-Time",
    notebook="03_adaptive",
    experiments=by_name(
        Experiment(
            "train",
            f"{_HERE}.experiments:train",
            measures=False,
            trains=True,
            derive=f"{_HERE}.building:schedule",
        ),
        Experiment(
            "first_epochs",
            f"{_HERE}.experiments:train",
            measures=False,
            trains=True,
            derive=f"{_HERE}.building:schedule",
        ),
        Experiment(
            "variant",
            f"{_HERE}.variants:train",
            measures=False,
            trains=True,
            derive=f"{_HERE}.building:schedule",
        ),
        Experiment(
            "norms", f"{_HERE}.experiments:norms", measures=False, trains=True, planned=("sizes",)
        ),
        Experiment("parallel", f"{_HERE}.worker:parallel", timed=("device", "messages")),
        Experiment("asleep", f"{_HERE}.overlap:asleep", timed=("ratios",)),
    ),
    artefacts=by_name(
        Artefact(
            "figure1", "Figure 1", "Learning curves by batch size", f"{_HERE}.batches:FIGURE1"
        ),
        Artefact("figure2", "Figure 2", "Cost and θ by batch size", f"{_HERE}.batches:FIGURE2"),
        Artefact("figure3", "Figure 3", "θ after the decay of the rate", f"{_HERE}.decay:FIGURE3"),
        Artefact("stable", "Section III-D", "Maximum stable batch size", f"{_HERE}.stable:STABLE"),
        Artefact(
            "figure4",
            "Table I, Figure 4",
            "Super-resolution: four strategies",
            f"{_HERE}.strategies:FIGURE4",
        ),
        Artefact(
            "figure5",
            "Table II, Figure 5",
            "Phantom restoration: four strategies",
            f"{_HERE}.strategies:FIGURE5",
        ),
        Artefact("figure6", "Figure 6", "θ of EDSR by batch size", f"{_HERE}.peaks:FIGURE6"),
        Artefact(
            "figure7", "Figure 7", "Strong scaling of EDSR on DIV2K", f"{_HERE}.scaling:FIGURE7"
        ),
        Artefact(
            "figure8", "Figure 8", "Strong scaling of EDSR on Phantom", f"{_HERE}.scaling:FIGURE8"
        ),
        Artefact(
            "figure9",
            "Figure 9, section IV-B",
            "Where the time of a step goes",
            f"{_HERE}.breakdown:FIGURE9",
        ),
        Artefact(
            "breakdown",
            "Figure 9",
            "Where the time goes on many nodes",
            f"{_HERE}.breakdown:BREAKDOWN",
        ),
        Artefact(
            "overlap",
            "Section IV-B",
            "How much of the averaging hides under computation",
            f"{_HERE}.overlap:OVERLAP",
        ),
        Artefact(
            "figure10",
            "Table III, Figure 10",
            "CIFAR-10: loss and accuracy of four strategies",
            f"{_HERE}.strategies:FIGURE10",
        ),
        Artefact("lars", "Section V", "θ-adaptive with LARS and LAMB", f"{_HERE}.layers:LARS"),
        Artefact(
            "figure11",
            "Figure 11",
            "Strong scaling of ResNet-20 on CIFAR-10",
            f"{_HERE}.scaling:FIGURE11",
        ),
    ),
    datasets=DATASETS,
    options={key: tuple(choices) for key, choices in CHOICES.items()},
)
