"""Micro-batch convolution tuning, μ-cuDNN (Oyama et al.): the list of artefacts."""

from repro.experiments.design import COMPUTING_PROFILES, Artefact, Experiment, Paper, by_name

_HERE = "repro.experiments.microconv"

_DIVIDED = (
    *("parts", "workspace_bytes", "own", "variables", "divided", "needed", "untied"),
    *("allocated_bytes", "seen_bytes", "taken_bytes", "total_bytes", "wanted_bytes"),
    *("gradient_error", "own_gradient_error", "loss_error"),
)

PAPER = Paper(
    key="microconv",
    title="μ-cuDNN",
    citation="Oyama, Ben-Nun, Hoefler, Matsuoka: Accelerating Deep Learning Frameworks with "
    "Micro-batches",
    notebook="05_microconv",
    experiments=by_name(
        # Divisions follow from times, and so do the bytes of workspace that they take.
        Experiment(
            "candidates",
            f"{_HERE}.experiments:candidates",
            timed=("candidates", "measured", *_DIVIDED),
            derive=f"{_HERE}.measured:divided_again",
        ),
        Experiment("network", f"{_HERE}.experiments:network", shares=True, timed=_DIVIDED),
        Experiment("iterations", f"{_HERE}.iterating:iterations", timed=_DIVIDED),
        Experiment("deepbench", f"{_HERE}.experiments:bench_layers", timed=_DIVIDED),
        Experiment("cluster", f"{_HERE}.experiments:cluster", timed=("times", *_DIVIDED)),
        Experiment("solver", f"{_HERE}.experiments:solver"),
        Experiment("programme", f"{_HERE}.experiments:programme", timed=_DIVIDED),
    ),
    artefacts=by_name(
        Artefact(
            "figure1",
            "Figure 1",
            "Workspace and time of AlexNet's layers",
            f"{_HERE}.layers:FIGURE1",
        ),
        Artefact("figure6", "Figure 6", "The Pareto front of conv2", f"{_HERE}.layers:FIGURE6"),
        Artefact("figure8", "Figure 8", "DeepBench's layers", f"{_HERE}.benchmark:FIGURE8"),
        Artefact(
            "figure9",
            "Figure 9",
            "AlexNet at three limits with three policies",
            f"{_HERE}.networks:FIGURE9",
        ),
        Artefact("figure10", "Figure 10", "conv2's micro-batches", f"{_HERE}.layers:FIGURE10"),
        Artefact("figure11", "Figure 11", "WR against WD", f"{_HERE}.networks:FIGURE11"),
        Artefact("figure12", "Figure 12", "What WD gives to whom", f"{_HERE}.sharing:FIGURE12"),
        Artefact("figure13", "Figure 13", "A heterogeneous cluster", f"{_HERE}.devices:FIGURE13"),
        Artefact(
            "table5", "Table V", "AlexNet, ResNet-50 and DenseNet-40", f"{_HERE}.networks:TABLE5"
        ),
        Artefact(
            "iterations",
            "Sections IV-B1 to IV-B3",
            "Whole iterations under limits that bind",
            f"{_HERE}.iterations:ITERATIONS",
        ),
        Artefact(
            "tables",
            "Tables I to IV and VI",
            "Configurations, machines, settings and layers",
            f"{_HERE}.conditions:TABLES",
        ),
        Artefact(
            "optimisation",
            "Sections IV-B1 and IV-B2",
            "What optimising takes",
            f"{_HERE}.optimisation:OPTIMISATION",
        ),
    ),
    datasets={profile: {} for profile in COMPUTING_PROFILES},
)
