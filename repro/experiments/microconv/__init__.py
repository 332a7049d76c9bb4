"""Micro-batch convolution tuning, μ-cuDNN (Oyama et al.): the list of artefacts."""

from repro.experiments.design import COMPUTING_PROFILES, Artefact, Experiment, Paper, by_name

_HERE = "repro.experiments.microconv"

# Divisions follow from times, and so do the bytes of workspace that they take.
_DIVIDED = (
    *("parts", "workspace_bytes", "own", "variables", "divided", "needed", "untied"),
    *("allocated_bytes", "seen_bytes", "taken_bytes", "total_bytes", "wanted_bytes"),
    *("gradient_error", "own_gradient_error", "loss_error"),
)
_EXPERIMENTS = (
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
)
_ARTEFACTS = (
    ("figure1", "Figure 1", "Workspace and time of AlexNet's layers", "layers:FIGURE1"),
    ("figure6", "Figure 6", "The Pareto front of conv2", "layers:FIGURE6"),
    ("figure8", "Figure 8", "DeepBench's layers", "benchmark:FIGURE8"),
    ("figure9", "Figure 9", "AlexNet at three limits with three policies", "networks:FIGURE9"),
    ("figure10", "Figure 10", "conv2's micro-batches", "layers:FIGURE10"),
    ("figure11", "Figure 11", "WR against WD", "networks:FIGURE11"),
    ("figure12", "Figure 12", "What WD gives to whom", "sharing:FIGURE12"),
    ("figure13", "Figure 13", "A heterogeneous cluster", "devices:FIGURE13"),
    ("table5", "Table V", "AlexNet, ResNet-50 and DenseNet-40", "networks:TABLE5"),
    (
        "iterations",
        "Sections IV-B1 to IV-B3",
        "Whole iterations under limits that bind",
        "iterations:ITERATIONS",
    ),
    (
        "tables",
        "Tables I to IV and VI",
        "Configurations, machines, settings and layers",
        "conditions:TABLES",
    ),
    (
        "optimisation",
        "Sections IV-B1 and IV-B2",
        "What optimising takes",
        "optimisation:OPTIMISATION",
    ),
)

PAPER = Paper(
    key="microconv",
    title="μ-cuDNN",
    citation="Oyama, Ben-Nun, Hoefler, Matsuoka: Accelerating Deep Learning Frameworks with "
    "Micro-batches",
    notebook="05_microconv",
    experiments=by_name(*_EXPERIMENTS),
    artefacts={
        name: Artefact(name, source, title, f"{_HERE}.{question}")
        for name, source, title, question in _ARTEFACTS
    },
    datasets={profile: {} for profile in COMPUTING_PROFILES},
)
