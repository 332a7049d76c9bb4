"""Out-of-core training (Hayakawa and Narihira): the list of artefacts."""

from repro.experiments.design import COMPUTING_PROFILES, Artefact, Experiment, Paper, by_name

_HERE = "repro.experiments.outofcore"

PAPER = Paper(
    key="outofcore",
    title="Out-of-core",
    citation="Hayakawa, Narihira: Out-of-core training for extremely large-scale neural networks "
    "with adaptive window-based scheduling",
    notebook="04_outofcore",
    experiments=by_name(
        Experiment("simulated", f"{_HERE}.experiments:simulated", version=2, measures=False),
        Experiment("reach", f"{_HERE}.experiments:reach", measures=False),
        Experiment("measured", f"{_HERE}.experiments:measured"),
        Experiment("link", f"{_HERE}.analysing:link", measures=False),
        Experiment("chunk_sizes", f"{_HERE}.analysing:chunk_sizes", measures=False),
        Experiment("physical", f"{_HERE}.physical:physical", measures=False),
        Experiment("packed", f"{_HERE}.packed:packed", measures=False),
        # Host memory differs by 512 bytes with the runs that the process made before.
        Experiment("by_schedule", f"{_HERE}.scheduling:by_schedule", timed=("host_bytes",)),
        Experiment("half", f"{_HERE}.experiments:simulated", version=2, measures=False),
        Experiment("half_reach", f"{_HERE}.experiments:reach", measures=False),
        Experiment("half_measured", f"{_HERE}.experiments:measured"),
    ),
    artefacts=by_name(
        Artefact(
            "table1", "Table 1", "ResNet-50 beyond the device's memory", f"{_HERE}.beyond:TABLE1"
        ),
        Artefact(
            "figure3", "Figure 3", "Budget and actual memory", f"{_HERE}.fragmentation:FIGURE3"
        ),
        Artefact(
            "figure4",
            "Figure 4",
            "Speed of DenseNet, Pix2PixHD and DeepLabv3+",
            f"{_HERE}.networks:FIGURE4",
        ),
        Artefact(
            "figure5",
            "Figure 5",
            "Memory of DenseNet, Pix2PixHD and DeepLabv3+",
            f"{_HERE}.fragmentation:FIGURE5",
        ),
        Artefact(
            "link",
            "Table 1, analysed",
            "Where the paper's figures come from",
            f"{_HERE}.rates:LINK",
        ),
        Artefact(
            "schedules", "Section 3", "Schedules, as they run", f"{_HERE}.schedules:SCHEDULES"
        ),
        Artefact("precision", "Table 1, in half", "Half precision", f"{_HERE}.precision:PRECISION"),
        Artefact("chunks", "Section 4", "The size of a chunk", f"{_HERE}.chunking:CHUNK_SIZES"),
    ),
    datasets={profile: {} for profile in COMPUTING_PROFILES},
)
