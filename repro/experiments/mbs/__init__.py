"""Micro-Batch Streaming (Piao et al.): the list of artefacts."""

from repro.experiments.design import Artefact, Experiment, Paper, by_name
from repro.experiments.mbs.runs import DATASETS

_HERE = "repro.experiments.mbs"

PAPER = Paper(
    key="mbs",
    title="Micro-Batch Streaming",
    citation="Piao, Synn, Park, Kim: Micro Batch Streaming: Allowing the Training of DNN Models "
    "to Use a Large Batch Size in Memory Constrained Environments",
    notebook="01_mbs",
    experiments=by_name(
        # Trainings that run side by side have `timed` in their configuration, and time no epoch.
        Experiment(
            "train",
            f"{_HERE}.training:train",
            measures=False,
            measures_where=("timed", None),
            trains=True,
            planned=("steps_per_epoch", "limit_bytes"),
        ),
        Experiment("size", f"{_HERE}.measuring:size"),
        Experiment("step", f"{_HERE}.measuring:step"),
        Experiment(
            "overhead", f"{_HERE}.measuring:overhead", timed=("halved_percent", "doubled_percent")
        ),
        Experiment("epochs", f"{_HERE}.measuring:epochs"),
        # The size of JPEG files, and the system's cache, are no results.
        Experiment(
            "file_epochs", f"{_HERE}.measuring:file_epochs", timed=("file_bytes", "uncached")
        ),
        Experiment("timeline", f"{_HERE}.measuring:timeline", timed=("spans", "update")),
        Experiment("gradients", f"{_HERE}.training:gradients", measures=False),
        Experiment("normalised", f"{_HERE}.training:normalised", measures=False, trains=True),
        Experiment("twins", f"{_HERE}.training:paired_training", measures=False, trains=True),
        Experiment("foretell", f"{_HERE}.measuring:predicted_size", measures=False),
    ),
    artefacts=by_name(
        Artefact("table1", "Table 1", "Batch size and image size", f"{_HERE}.resolution:TABLE1"),
        Artefact(
            "table2",
            "Table 2",
            "Initial mini-batch and micro-batch sizes",
            f"{_HERE}.memory:TABLE2",
        ),
        Artefact("table3", "Table 3", "U-Net with and without MBS", f"{_HERE}.sameness:TABLE3"),
        Artefact(
            "table4",
            "Table 4",
            "Classification with mini-batches beyond memory",
            f"{_HERE}.tables_4_5:TABLE4",
        ),
        Artefact(
            "table5",
            "Table 5",
            "Segmentation with mini-batches beyond memory",
            f"{_HERE}.tables_4_5:TABLE5",
        ),
        Artefact(
            "files",
            "Section 4.3.3",
            "Epochs whose images are decoded from files",
            f"{_HERE}.streaming:FILES",
        ),
        Artefact(
            "normalisation",
            "Section 3.4, Algorithm 1",
            "Gradients and trainings with and without loss normalisation",
            f"{_HERE}.normalisation:NORMALISATION",
        ),
        Artefact(
            "figure2", "Figure 2", "What one mini-batch does when", f"{_HERE}.streaming:FIGURE2"
        ),
        Artefact(
            "figure3",
            "Figure 3",
            "Learning curves with and without MBS",
            f"{_HERE}.sameness:FIGURE3",
        ),
        Artefact(
            "batchnorm",
            "BatchNorm (not in the paper)",
            "One training without and with MBS, with BatchNorm and with GroupNorm in its place",
            f"{_HERE}.sameness:BATCHNORM",
        ),
    ),
    datasets=DATASETS,
    # Of Flowers-102 alone, under gpu and paper.
    options={"dataset.split": ("random", "official")},
)
