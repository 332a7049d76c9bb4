"""Runs and their records on an accelerator that is not CUDA's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repro.experiments import arguments, doctor
from repro.experiments import run as running
from repro.experiments.design import PROFILES, Experiment, Outcome, Paper, Run, UsageError
from repro.records import RecordStore, local_store


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
    toy = Paper(
        "toy", "Toy", "Nobody", "09_toy",
        {"double": Experiment("double", f"{__name__}:double", True)},
        {}, {profile: {} for profile in PROFILES},
    )  # fmt: skip
    store = RecordStore(tmp_path)
    for device, done in (("sim", 1), ("sim:0", 0), ("cpu", 1)):
        setting = running.Setting("smoke", device, seeds=(0,))
        tally = running.execute(toy, [Run("double", {"x": 1})], setting, store, print)
        assert (tally.done, tally.failed) == (done, 0)
    found = {record.device["type"]: record for record in store.load("toy")}
    assert found.keys() == {"sim", "cpu"} and found["sim"].metrics == {"sum": 8.0}
    assert found["sim"].device["slug"] == "simulated-device"
    assert "--device sim:0" in found["sim"].command


THERE = """
import simulated_device

def enter():
    simulated_device.load()
    from simulated_device.checking import present

    global kept
    kept = present()
    kept.__enter__()
"""


@pytest.mark.thorough
def test_the_list_for_some_minutes_is_worked_through(sim, tmp_path, results_folder):
    """By processes of their own, which torch's own way to load a device gives it to."""
    (tmp_path / "there.py").write_text(THERE)
    (tmp_path / "there-0.dist-info").mkdir()
    (tmp_path / "there-0.dist-info" / "METADATA").write_text("Name: there\nVersion: 0\n")
    entry = "[torch.backends]\nsim = there:enter\n"
    (tmp_path / "there-0.dist-info" / "entry_points.txt").write_text(entry)
    pieces, out = tmp_path / "list.toml", tmp_path / "out"
    pieces.write_text(
        'piece = [{ name = "d", artefact = "adaptive/figure10", seconds = 5, at_once = 2, '
        'seeds = "2", data = ["digits"], only = { strategy = ["best"] } }, '
        '{ name = "b", artefact = "outofcore/table1", seconds = 5, experiments = ["measured"], '
        'only = { mode = ["in_core", "schedule_va"], batch = [16] } }]'
    )
    out.mkdir()
    (out / "doctor.json").write_text("{}")  # so that it is not asked
    tests = str(Path(__file__).parents[1])
    subprocess.run(
        [
            *(sys.executable, "-m", "repro", "gpu", "--pieces", str(pieces), "--profile", "smoke"),
            *("--device", "sim", "--minutes", "5", "--out", str(out)),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([tests, str(tmp_path)])},
        check=True,
    )
    records = [r for p in ("adaptive", "outofcore") for r in local_store("smoke").read(p)[0]]
    assert [record.device["slug"] for record in records] == ["simulated-device"] * 4
    assert {record.status for record in records} == {"ok"}


@pytest.mark.thorough
def test_doctor_looks_at_any_accelerator(sim, monkeypatch):
    monkeypatch.setattr(doctor, "_COPIED_BYTES", 2**20)
    found = doctor.examine("sim:0")
    assert [one for one in found["selftests"] if one["status"] != "ok"] == []
    assert {link["copy"].split()[0] for link in found["links"]} == {"pinned", "pageable"}
    assert len(found["links"]) == 4 and found["device"]["free_bytes"] > 0
    assert found["problems"] == [] and not doctor.broken(found)
    assert {one["paper"] for one in found["largest"]} == set(doctor.LARGEST_GIB)
    assert "Simulated Device" in doctor.text(found)
