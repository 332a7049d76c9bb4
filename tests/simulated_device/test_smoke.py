"""Every kind of run of the smoke profile, on the simulated device and under its race checker.

`make smoke DEVICE=sim` carries out all of them.
"""

import pytest

from repro.experiments import PAPERS, arguments, load_paper, running
from repro.records import RecordStore
from simulated_device.checking import checked

# Other processes have no simulated device, and it has no times through which a line could go.
ELSEWHERE = {("engine", "ray"), ("experiment", "parallel"), ("experiment", "times")}


def kind(run):
    """What chooses the code that a run executes."""
    names = ("mode", "strategy", "engine")
    chosen = [run.config.get(name) for name in names]
    return run.experiment, *chosen, run.config.get("micro_batch") is None


def one_of_each(paper):
    chosen = arguments.choose_datasets(paper, "smoke")
    runs = {}
    for run in arguments.plan(paper, paper.artefacts.values(), "smoke", chosen):
        here = {("engine", run.config.get("engine")), ("experiment", run.experiment)}
        if not here & ELSEWHERE:
            runs.setdefault(kind(run), run)
    return list(runs.values())


@pytest.mark.parametrize("name", PAPERS)
def test_runs_of_a_paper(sim, tmp_path, name):
    paper = load_paper(name)
    store = RecordStore(tmp_path)
    runs = one_of_each(paper)
    setting = running.Setting("smoke", str(sim))
    with checked():
        tally = running.execute(paper, runs, setting, store, lambda line: None)
    records = list(store.load(name))
    assert [record.error for record in records if record.status == "failed"] == []
    assert tally.done == len(runs) == len(records)
    assert {record.device["name"] for record in records} == {"Simulated Device"}
