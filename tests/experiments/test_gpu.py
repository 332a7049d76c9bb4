"""The list of what a GPU computes that is at hand for minutes, and how it is worked through."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from commands import command_line

from repro.experiments import gpu
from repro.experiments.design import UsageError
from repro.experiments.microconv.experiments import kept_times
from repro.experiments.run import Setting
from repro.microconv import BenchmarkCache
from repro.records import RecordError, RecordStore, local_store

OWN = {"only": {"strategy": ["best"]}, "seeds": "2", "at_once": 2, "data": ("digits",)}
TRAIN = gpu.Piece("d", "adaptive/figure10", 5, **OWN)
MEASURE = gpu.Piece("b", "outofcore/table1", 5, ["measured"], {"mode": ["in_core"]})
SMOKE = Setting("smoke", "cpu")
GOOD = "[[piece]]\nname = 'a'\n"


@pytest.fixture(autouse=True)
def no_piece_is_ended_for_a_slow_machine(monkeypatch):
    monkeypatch.setattr(gpu, "_GENEROUS", 1000.0)


@pytest.fixture
def folder(tmp_path, results_folder, monkeypatch):
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    out.mkdir()
    (out / gpu.DOCTOR).write_text("{}")  # so that it is not asked again
    return out


def archived(folder):
    with tarfile.open(folder / gpu.ARCHIVE) as archive:
        return sorted(archive.getnames())


def test_every_piece_of_the_list_names_runs_that_end_within_six_minutes():
    planned = gpu.plan(gpu.read(gpu.LIST), "gpu", None, None)
    for one in planned:
        assert one.runs, one.piece
        assert 0 < one.piece.seconds < 360, one.piece
        datasets = {run.config["dataset"]["name"] for run in one.runs if run.config.get("dataset")}
        assert datasets <= set(one.piece.data), one.piece
        assert not one.measured or one.piece.at_once == 1, one.piece
        assert one.row()["missing"] <= one.row()["runs"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[piece]]\nname = 1", "is no list of pieces"),
        ("[[piece]]\nname = 'a'\nartefact = 'mbs'\nseconds = 1\nsecnods = 2", "secnods"),
        ("piece = []", "has no piece"),
        (f"{GOOD}artefact = 'mbs'\nseconds = 1", "has no piece mbs/tabel4; give"),
        (f"{GOOD}artefact = 3\nseconds = 1", "is no list of pieces"),
        (f"{GOOD}artefact = 'mbs/tabel4'\nseconds = 1", "piece a: .*did you mean mbs/table4"),
        (f"{GOOD}artefact = 'mbs'\nseconds = 1\nexperiments = ['no']", "piece a: .*no exp.* no;"),
        (f"{GOOD}artefact = 'mbs'\nseconds = 1\nat_once = 0", "piece a: at_once is 0"),
        (f"{GOOD}artefact = 'mbs'\nseconds = -1", "piece a: .* seconds -1"),
    ],
)
def test_what_is_no_list_is_refused(tmp_path, text, said):
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        gpu.read(tmp_path / "list.toml", ["mbs/tabel4", "a"] if "tabel4; give" in said else [])


def test_a_wrong_commit_is_refused_before_any_piece(folder, monkeypatch):
    monkeypatch.setenv("REPRO_COMMIT", "1234567-dirty")
    with pytest.raises(RecordError, match="REPRO_COMMIT"):
        gpu.compute([MEASURE], SMOKE, 1, folder, print)


def test_records_are_archived_without_times_that_cannot_be_read(folder, make_record):
    store = local_store("smoke")
    (folder.parent / "cache").mkdir()
    (folder.parent / "cache" / "kernel-experiments.sqlite").touch()  # no table yet
    with gpu._archiving(store, folder):
        path = store.write(make_record())
    assert archived(folder) == [str(path.relative_to(store.folder.parent))]
    with gpu._archiving(store, folder):  # times without a new record
        kept_times().unlink(missing_ok=True)
        BenchmarkCache(kept_times()).store_times("kernel", 8, {"torch:native": [0.5]})
    assert kept_times().name in archived(folder)


@pytest.mark.slow
def test_what_is_missing_is_computed_once_and_archived(folder):
    lines = []
    BenchmarkCache(kept_times()).store_times("kernel", 8, {"torch:native": [0.5]})
    assert gpu.compute([TRAIN, MEASURE], SMOKE, 500, folder, lines.append)
    assert [line.partition(" ")[0] for line in lines] == ["d", "b"], lines
    assert "2 computed" in lines[0] and "0 failed" in lines[0]
    names = archived(folder)
    assert len(names) == 5 and all(name.startswith("smoke/") for name in names[1:])
    with tarfile.open(folder / gpu.ARCHIVE) as archive:
        archive.extract(names[0], folder, filter="data")
    assert BenchmarkCache(folder / names[0]).times("kernel", 8) == {"torch:native": [0.5]}
    assert (folder / gpu.LOG).read_text().count(": ok (") == 3
    gpu.compute([TRAIN, MEASURE], SMOKE, 500, folder, lines.append)
    assert lines[2:] == ["nothing is missing: all runs have a record"]
    assert archived(folder) == names
    more = dataclasses.replace(TRAIN, seeds="3")  # of which two have records
    (planned,) = gpu.plan([more], "smoke", "cpu", None)
    assert [run.seeds for run in planned.left] == [(2,)] and planned.row()["missing"] == 1


@pytest.mark.slow
def test_of_another_device_measurements_alone_are_missing(results_folder, monkeypatch):
    store = RecordStore(results_folder / "reference" / "another" / "smoke")
    gpu_lines: list[str] = []
    gpu.compute([TRAIN, MEASURE], SMOKE, 500, results_folder / "out", gpu_lines.append)
    for paper in ("adaptive", "outofcore"):
        for record in local_store("smoke").read(paper)[0]:
            store.write(dataclasses.replace(record, device=record.device | {"name": "another"}))
            local_store("smoke").path(paper, record.experiment, record.key).unlink()
    # What another device has begun comes last.
    training, measurement = gpu.plan([MEASURE, TRAIN], "smoke", "cpu", None)
    assert not training.left and len(measurement.left) == len(measurement.runs) == 2
    assert not any(one.left for one in gpu.plan([TRAIN, MEASURE], "smoke", None, None))


def test_nothing_begins_that_would_not_end_or_has_no_data(folder):
    lines, slow = [], dataclasses.replace(TRAIN, seconds=3000)
    gpu.compute([slow], SMOKE, 1, folder, lines.append)
    assert lines == [f"{slow}: no time for it"] and not (folder / gpu.ARCHIVE).exists()
    with pytest.raises(UsageError, match="--minutes is 0"):
        gpu.compute([TRAIN], SMOKE, 0, folder, lines.append)
    lacking = dataclasses.replace(TRAIN, data=("cifar10",))
    gpu.compute([lacking], Setting("quick", "cpu"), 1, folder, lines.append)
    assert lines[1:] == [f"{lacking}: left out, for cifar10 is not here"]


@pytest.mark.parametrize("code", [0, 1])
def test_a_doctor_whose_self_tests_fail_ends_it_with_an_error(folder, monkeypatch, code):
    (folder / gpu.DOCTOR).unlink()
    monkeypatch.setattr(gpu.sys, "executable", ("true", "false")[code])
    said = []
    assert gpu.compute([TRAIN], SMOKE, 0.02, folder, said.append) is (code == 0)
    assert ("FAILED (1)" in said[0]) is (code == 1) and "no time for it" in said[-1]


def test_a_piece_that_fails_goes_on_with_the_next_run_and_the_next_is_tried(folder, monkeypatch):
    lines, given = [], []
    ended = iter([None, None, None, ("some computed", True)])
    monkeypatch.setattr(gpu, "_watched", lambda work, *_: given.append(work[-1]) or next(ended))
    assert not gpu.compute([MEASURE, MEASURE], SMOKE, 500, folder, lines.append)
    assert [line.partition(": ")[2][:7] for line in lines] == ["a run t"] * 3 + ["some co"]
    first, *again, other = given
    assert again == [[*first[1:], first[0]]] * 2 and other == first and len(first) > 1


def holds_all(tell):
    tell("a run has ended")
    re.match("(a+)+$", "a" * 40 + "b")  # for hours, in which no other thread runs


def dies(tell, started):
    started.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    os._exit(1)


def works(tell):
    for _ in range(4):
        time.sleep(0.5)
        tell("a run has ended")
    return "well", True


def test_a_process_is_ended_where_it_hangs_with_all_that_it_started(tmp_path):
    end = time.monotonic() + 60
    assert gpu._watched((works,), 10, end) == ("well", True)
    assert gpu._watched((holds_all,), 10, time.monotonic() + 3) is None
    assert gpu._watched((dies, tmp_path / "started"), 30, end) is None and time.monotonic() < end
    child = pathlib.Path("/proc") / (tmp_path / "started").read_text() / "stat"
    until = time.monotonic() + 10
    while child.exists() and " Z " not in child.read_text() and time.monotonic() < until:
        time.sleep(0.1)
    assert time.monotonic() < until


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_middle_it_goes_on_where_it_was(folder, results_folder, tmp_path, how):
    pieces = tmp_path / "list.toml"
    piece = "[[piece]]\nname = 'd'\nartefact = 'adaptive/figure10'\nseconds = 2\nseeds = '4'\n"
    pieces.write_text(f"{piece}data = ['digits']\n")
    command = [
        *(sys.executable, "-m", "repro", "gpu", "--minutes", "5", "--out", str(folder)),
        *("--pieces", str(pieces), "--profile", "smoke", "--device", "cpu"),
    ]
    process = subprocess.Popen(command)
    store, until = local_store("smoke"), time.monotonic() + 120
    while len(store.read("adaptive")[0]) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(how)
    process.wait()
    some = len(store.read("adaptive")[0])
    assert 3 <= some < 28
    if how == signal.SIGTERM:
        assert process.returncode == 128 + how and len(archived(folder)) == some
    subprocess.run(command, check=True)
    assert len(store.read("adaptive")[0]) == len(archived(folder)) == 28
    records = [json.loads(path.read_text()) for path in store.folder.glob("*/*.json")]
    assert {record["status"] for record in records} == {"ok"}


def test_without_an_accelerator_a_cpu_has_to_be_asked_for(folder, monkeypatch, capsys):
    monkeypatch.setattr("repro.measure.accelerator.present", lambda: None)
    run = command_line(monkeypatch, capsys)
    code, _, err = run("gpu", "--minutes", "5", "--out", str(folder))
    assert code == 2 and "no accelerator is present; give --device cpu" in err
