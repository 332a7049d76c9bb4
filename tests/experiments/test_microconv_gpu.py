"""The experiments of μ-cuDNN at the profile smoke on an accelerator."""

import pytest

from repro.experiments import arguments, load_paper
from repro.experiments import run as running
from repro.records import RecordStore

pytestmark = pytest.mark.gpu


def test_each_experiment_runs_on_an_accelerator(device, tmp_path):
    paper, store = load_paper("microconv"), RecordStore(tmp_path)
    chosen = arguments.choose_datasets(paper, "smoke")
    runs = arguments.plan(paper, paper.artefacts.values(), "smoke", chosen)
    # One of each, but for the solver, which no device has to do with.
    first = {(r.experiment, r.config.get("mode")): r for r in reversed(runs)}
    first = [run for (name, _), run in first.items() if name != "solver"]
    assert len(first) == 7
    setting = running.Setting("smoke", str(device))
    tally = running.execute(paper, first, setting, store, report=lambda line: None)
    assert (tally.done, tally.failed) == (7, 0), [r.error for r in store.load("microconv")]
    records = store.load("microconv")
    assert {record.device["type"] for record in records} == {device.type}
    networks = [record for record in records if record.experiment == "network"]
    assert networks
    for record in networks:  # which algorithm is fastest is the device's affair
        divided = [row for row in record.metrics["kernels"] if "parts" in row]
        assert divided
        for row in divided:
            assert sum(size for size, _ in row["parts"]) == row["batch"]
            assert {name for _, name in row["parts"]} <= {*record.config["algorithms"]}
            assert row["workspace_bytes"] <= record.config["limit_mib"] * 2**20
