"""Several processes on one folder: each run is computed once, whatever becomes of the others."""

import errno
import fcntl
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from invented import toy_paper

from repro.experiments import run as running
from repro.experiments.design import Experiment, Outcome, Run
from repro.experiments.processes import NoLocksWarning, locked, undisturbed
from repro.records import RecordStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
ADD = Experiment("add", f"{__name__}:add", measures=False)
PAPER = toy_paper(ADD, replace(ADD, name="time", measures=True))
me, log, before = "", Path(), None  # of this process


def said(text):
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{me} {text.splitlines()[0]}\n")


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def add(config, seed, data, device):
    said(f"computes {config['x']}")
    until(before)
    return Outcome({"sum": config["x"]})


def worker(folder, name, condition, experiment="add"):
    """Fork a process that carries out six runs; each of them waits for a condition."""
    global me, log, before
    log = folder / "log"
    log.touch()
    if process := os.fork():
        return process
    me, before, code = name, condition, 1
    try:
        runs = [Run(experiment, {"x": x}, label=f"of {x}") for x in range(6)]
        setting = running.Setting("smoke", "cpu", seeds=(0,))
        running.execute(PAPER, runs, setting, RecordStore(folder), said)
        code = 0
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


def exit_codes(*processes):
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def computed(name):
    return [int(x) for x in re.findall(b"%s computes (.)" % name, log.read_bytes())]


def both():
    return computed(b"A") and computed(b"B")


def test_two_runs_at_once_compute_everything_once(tmp_path):
    assert exit_codes(worker(tmp_path, "A", both), worker(tmp_path, "B", both)) == [0, 0]
    assert both() and sorted(computed(b"A") + computed(b"B")) == list(range(6))
    assert [path.suffix for path in (tmp_path / "toy").iterdir()] == [".json"] * 6


def test_a_measurement_waits_until_nothing_else_runs_and_has_the_machine_alone(tmp_path):
    released = tmp_path / "released"
    a = worker(tmp_path, "A", released.exists)
    until(lambda: b"A computes 0" in log.read_bytes())
    b = worker(tmp_path, "B", lambda: True, "time")
    try:
        until(lambda: b"measure; 6 runs are left" in log.read_bytes())
        assert not computed(b"B")
    finally:
        released.touch()
    assert exit_codes(a, b) == [0, 0] and computed(b"A") == computed(b"B") == list(range(6))
    with undisturbed(tmp_path, True) as first, undisturbed(tmp_path, False) as second:
        assert (first, second) == (True, False)
    with undisturbed(tmp_path.parent, False):  # of another run; what is recorded need not wait
        assert exit_codes(worker(tmp_path, "C", lambda: True, "time")) == [0] and not computed(b"C")
    with undisturbed(tmp_path, False) as first, undisturbed(tmp_path, False) as second:
        assert first and second


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_what_a_dead_process_had_locked_is_taken_over(tmp_path, how, code):
    a = worker(tmp_path, "A", lambda: False)
    until(lambda: b"A computes 0" in log.read_bytes())
    b = worker(tmp_path, "B", lambda: True)
    until(lambda: b"measure; 1 runs are left" in log.read_bytes())
    os.kill(a, how)
    assert exit_codes(a, b) == [code, 0]
    assert computed(b"A") == [0] and computed(b"B") == [1, 2, 3, 4, 5, 0]
    assert [path.suffix for path in (tmp_path / "toy").iterdir()] == [".json"] * 6


def test_one_at_a_time_and_nothing_is_left(tmp_path):
    record = tmp_path / "train-key.json"
    (tmp_path / ".train-key.lock").write_text("of a process that was killed")
    with locked(record) as mine, locked(record) as again, locked(tmp_path / "x.json") as other:
        assert (mine, again, other) == (True, False, True)
    with pytest.raises(KeyError), locked(record) as mine:
        raise KeyError if mine else AssertionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("why", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_a_run_goes_on_and_says_so(tmp_path, monkeypatch, why):
    def none(*arguments):
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(fcntl, "flock", none)
    with (
        undisturbed(tmp_path, True) as free,
        pytest.warns(NoLocksWarning, match="may compute"),
        locked(tmp_path / "key.json") as mine,
    ):
        assert mine and free
    assert list(tmp_path.iterdir()) == []
