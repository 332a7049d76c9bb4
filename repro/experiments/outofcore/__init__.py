"""Out-of-core training (Hayakawa and Narihira): its experiments and artefacts."""

from repro.experiments.design import COMPUTING_PROFILES, Artefact, Experiment, Paper, by_name
from repro.experiments.outofcore.runs import ARTEFACTS

_HERE = "repro.experiments.outofcore"
_SIMULATING, _MEASURING = f"{_HERE}.simulating", f"{_HERE}.measuring"

PAPER = Paper(
    key="outofcore",
    title="Out-of-core",
    citation="Hayakawa, Narihira: Out-of-core training for extremely large-scale neural networks "
    "with adaptive window-based scheduling",
    notebook="04_outofcore",
    experiments=by_name(
        Experiment("simulated", f"{_SIMULATING}:simulated", version=2, measures=False),
        Experiment("reach", f"{_SIMULATING}:reach", measures=False),
        Experiment("measured", f"{_MEASURING}:measured"),
        Experiment("link", f"{_SIMULATING}:link", measures=False),
        Experiment("chunk_sizes", f"{_SIMULATING}:chunk_sizes", measures=False),
        Experiment("physical", f"{_SIMULATING}:physical", measures=False),
        Experiment("packed", f"{_SIMULATING}:packed", measures=False),
        # Host memory differs by 512 bytes with the runs that the process made before.
        Experiment("by_schedule", f"{_MEASURING}:by_schedule", timed=("host_bytes",)),
        Experiment("half", f"{_SIMULATING}:simulated", version=2, measures=False),
        Experiment("half_reach", f"{_SIMULATING}:reach", measures=False),
        Experiment("half_measured", f"{_MEASURING}:measured"),
    ),
    artefacts=by_name(
        *(
            Artefact(name, row["source"], row["title"], f"{_HERE}.{row['question']}")
            for name, row in ARTEFACTS.items()
        )
    ),
    datasets={profile: {} for profile in COMPUTING_PROFILES},
)
