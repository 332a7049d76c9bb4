"""The experiments of μ-cuDNN at the profile smoke on an accelerator."""

import pytest

from repro.experiments import arguments, load_paper, running
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
    divided = [str(r.metrics) for r in records if r.experiment == "network"]
    assert divided and all("torch:im2col" in metrics for metrics in divided)
