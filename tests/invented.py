"""An invented record, and an invented paper, for tests that need any."""

from typing import Any

from repro.experiments.design import PROFILES, Experiment, Paper
from repro.records import Record

CPU = {"type": "cpu", "name": "a CPU", "slug": "cpu-2-cores", "threads": 1, "memory_bytes": 2**33}
DIGITS = {
    "name": "digits", "fingerprint": "0" * 16,
    "provenance": "Handwritten digits inside scikit-learn.", "kind": "real",
}  # fmt: skip


def make_record(experiment: str = "train", **changes: Any) -> Record:
    """Return a record as a run on a CPU would leave it, with `changes`."""
    values: dict[str, Any] = {
        "key": f"{abs(hash(str(changes))):024x}"[:24], "paper": "mbs", "experiment": experiment,
        "version": 1, "config": {}, "seed": 0, "status": "ok", "metrics": {}, "timings": {},
        "peak_bytes": None, "dataset": DIGITS, "device": CPU,
        "versions": {"python": "3.11", "torch": "2.13"}, "commit": None, "dirty": None,
        "started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:00:01+00:00",
        "command": "python -m repro run mbs",
    }  # fmt: skip
    return Record(**values | changes)


def toy_paper(*experiments: Experiment, **changes: Any) -> Paper:
    """Return a paper of some experiments without artefacts or data, but for `changes`."""
    named = {experiment.name: experiment for experiment in experiments}
    given = {"artefacts": {}, "datasets": {profile: {} for profile in PROFILES}} | changes
    return Paper("toy", "Toy", "Nobody", "09_toy", named, **given)
