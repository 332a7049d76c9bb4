"""Runs carried out by processes side by side, and a function in a process of its own."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from invented import toy_paper

from repro.experiments import UsageError
from repro.experiments import run as running
from repro.experiments.arguments import ending
from repro.experiments.design import Experiment, Outcome, Run
from repro.experiments.processes import Workers, in_a_process
from repro.experiments.run import Setting
from repro.records import RecordStore

PAPER = toy_paper(
    Experiment("learn", f"{__name__}:where", measures=False, measures_where=("real", 1)),
    Experiment("time", f"{__name__}:where"),
)


def where(config, seed, data, device) -> Outcome:
    worker = multiprocessing.parent_process() is not None
    if config.get("kill") == seed and worker:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("refuse") == seed and worker:
        raise UsageError("no cluster is here")
    if config.get("wait"):
        time.sleep(config["wait"])
    return Outcome({"process": os.getpid(), "threads": torch.get_num_threads()})


def execute(store: RecordStore, **config) -> tuple[running.Tally, list[str]]:
    runs = [Run("time", config), Run("learn", {**config, "real": 1})]
    runs += [Run("learn", config), Run("learn", {**config, "x": 1})]
    said: list[str] = []
    with Workers(2) as workers:
        setting = Setting("smoke", "cpu", seeds=(0, 1))
        tally = running.execute(PAPER, runs, setting, store, said.append, workers)
    return tally, said


@pytest.mark.slow
def test_under_long_each_measurement_has_a_process_of_its_own(store):
    runs = [Run("time", {}), Run("time", {"kill": 2, "x": 1})]
    said: list[str] = []
    setting = Setting("long", "cpu", seeds=(0, 1, 2))
    tally = running.execute(PAPER, runs, setting, store, said.append)
    assert tally == replace(running.Tally(), done=6)
    records, _ = store.read("toy")
    processes = [record.metrics["process"] for record in records]
    assert len(set(processes)) == 6
    # One was killed, and its run computed here.
    assert processes.count(os.getpid()) == 1
    assert sum("it is computed by this process" in line for line in said) == 1


def test_under_long_what_shares_its_measurements_stays_in_one_process(store):
    paper = toy_paper(replace(PAPER.experiments["time"], shares=True))
    setting, runs = Setting("long", "cpu", seeds=(0, 1)), [Run("time", {})]
    running.execute(paper, runs, setting, store, lambda line: None)
    assert [record.metrics["process"] for record in store.load("toy")] == [os.getpid()] * 2


def test_nothing_is_begun_after_the_time(store):
    runs = [Run("learn", {"x": x}) for x in (0, 1)]

    def execute_until(until: float | None) -> running.Tally:
        setting = Setting("smoke", "cpu", seeds=(0,), until=until)
        return running.execute(PAPER, runs, setting, store, lambda line: None)

    tally = execute_until(time.monotonic() - 1)
    assert tally == replace(running.Tally(), left=2)
    assert "2 left: the same command goes on" in str(tally)
    assert ending(2.5) - time.monotonic() == pytest.approx(2.5 * 3600, abs=5)
    assert execute_until(ending(2.5)) == replace(running.Tally(), done=2)
    assert execute_until(ending(None)) == replace(running.Tally(), stood=2)


def test_no_run_begins_that_would_end_late_by_what_is_expected_or_by_the_longest(monkeypatch):
    monkeypatch.setattr(running.time, "monotonic", lambda: 100.0)
    timed = Setting("smoke", "cpu", until=110.0, expected_s=5.0)
    assert [timed.has_time(longest_s) for longest_s in (0.0, 9.0, 11.0)] == [True, True, False]
    assert not replace(timed, expected_s=11.0).has_time()
    assert replace(timed, expected_s=0.0).has_time(11.0)  # --hours: nothing begins later


@pytest.mark.slow
def test_processes_are_handed_nothing_more_once_it_is_time(tmp_path):
    asked: list[int] = []

    def goes_on(item: int) -> bool:
        asked.append(item)
        return item < 3

    with Workers(2) as workers:
        done = [item for item, _ in workers.map(abs, range(6), goes_on)]
    assert sorted(done) == [0, 1, 2] and asked == [0, 1, 2, 3]


@pytest.mark.slow
def test_measurements_wait_until_the_processes_have_ended(store):
    tally, said = execute(store, wait=0.2)
    assert tally == replace(running.Tally(), done=8) and len(said) == 8
    records = store.load("toy")
    learnt = [r for r in records if r.experiment == "learn" and not r.config.get("real")]
    timed = [r for r in records if r not in learnt]
    assert {r.metrics["process"] for r in timed} == {os.getpid()}
    assert len({r.metrics["process"] for r in learnt}) == 2  # and neither is this one
    assert os.getpid() not in {r.metrics["process"] for r in learnt}
    assert {r.metrics["threads"] for r in learnt} == {1}
    assert max(r.finished for r in learnt) <= min(r.started for r in timed)
    again, _ = execute(store, wait=0.2)
    assert again == replace(running.Tally(), stood=8)


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_computed_here(store):
    tally, said = execute(store, kill=1)
    # A record that the other process wrote before it was ended with this one stands.
    assert tally.done + tally.stood == 8 and not tally.failed
    assert any("was killed" in line and "computed by this process" in line for line in said)
    assert len(store.load("toy")) == 8 and not list(store.folder.rglob(".*.lock"))


@pytest.mark.slow
def test_what_is_no_result_ends_all(tmp_path):
    with pytest.raises(UsageError, match="no cluster is here"):
        execute(RecordStore(tmp_path), refuse=0)
    assert not any(r.experiment == "time" for r in RecordStore(tmp_path).load("toy"))


SCRIPT = """
import os, sys, time
from repro.experiments.processes import Workers, in_a_process

def work(item):
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with Workers(2) as workers:
        list(workers.map(work, [0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_one_that_started_it(tmp_path, how):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    parent = subprocess.Popen([sys.executable, path], **quiet)
    child = int(parent.stdout.readline())
    parent.send_signal(how)
    assert parent.wait(30) != 0
    end = time.monotonic() + 30
    while time.monotonic() < end and alive(child):
        time.sleep(0.05)
    assert not alive(child)
    parent.stdout.close()


def alive(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
        return text.rpartition(")")[2].split()[0] != "Z"  # dead, and nobody has asked
    except FileNotFoundError:
        return False


def test_arguments_and_variables_go_there_and_the_result_comes_back():
    assert in_a_process("os:getenv", ["REPRO_TOLD"], {"REPRO_TOLD": "ü"}) == "ü"
    assert in_a_process("builtins:sorted", [[3, 1, 2]]) == [1, 2, 3]
    assert in_a_process("os:getpid", []) != os.getpid()


def test_what_fails_there_is_told_without_frames(tmp_path, monkeypatch):
    crash = "import sys\n\ndef now():\n    sys.exit('CUDA error\\n' + 99 * 'frame #1: a.so\\n')\n"
    (tmp_path / "crashing.py").write_text(crash)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"^the process of crashing:now failed: CUDA error$"):
        in_a_process("crashing:now", [])
