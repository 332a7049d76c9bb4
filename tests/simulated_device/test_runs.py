"""Runs and their records on an accelerator that is not CUDA's."""

import pytest
import torch
from invented import toy_paper

from repro.experiments import arguments, doctor
from repro.experiments import run as running
from repro.experiments.design import Experiment, Outcome, Run, UsageError
from repro.records import RecordStore


def double(config, seed, data, device):
    return Outcome({"sum": float(torch.ones(4, device=device).mul(2).sum())})


def test_the_accelerator_is_taken_and_has_one_name(sim):
    assert (arguments.default_profile(), arguments.default_device()) == ("gpu", "sim")
    for device, name in {"sim": "sim:0", "sim:0": "sim:0", "sim:1": "sim:1", "cpu": "cpu"}.items():
        assert arguments.check_device(device) == name
    for device in ("sim:2", "cuda", "sim:", "tpu"):
        with pytest.raises(UsageError, match=r"allowed are 'cpu' and 'sim:0' to 'sim:1'$"):
            arguments.check_device(device)


def test_a_record_says_where_it_ran_and_stands_for_another_name(sim, tmp_path):
    toy = toy_paper(Experiment("double", f"{__name__}:double", True))
    store = RecordStore(tmp_path)
    for device, done in (("sim", 1), ("sim:0", 0), ("cpu", 1)):
        setting = running.Setting("smoke", device, seeds=(0,))
        tally = running.execute(toy, [Run("double", {"x": 1})], setting, store, print)
        assert (tally.done, tally.failed) == (done, 0)
    found = {record.device["type"]: record for record in store.load("toy")}
    assert found.keys() == {"sim", "cpu"} and found["sim"].metrics == {"sum": 8.0}
    assert found["sim"].device["slug"] == "simulated-device"
    assert "--device sim:0" in found["sim"].command


@pytest.mark.slow
def test_doctor_looks_at_any_accelerator(sim):
    found = doctor.examine("sim:0")
    assert [one for one in found["selftests"] if one["status"] != "ok"] == []
    assert found["device"]["free_bytes"] > 0
    assert found["problems"] == [] and not doctor.broken(found)
    assert {one["paper"] for one in found["largest"]} == set(doctor.LARGEST_GIB)
    assert "Simulated Device" in doctor.text(found)
