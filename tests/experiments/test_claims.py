"""Several processes on one folder: each run is computed once, whatever becomes of the others."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.experiments import claims
from repro.experiments.design import UsageError

# Forks workers that carry out one plan on one folder; Python with torch is started once for all.
SCRIPT = '''
import contextlib, json, os, signal, sys, time
from pathlib import Path

import torch

from repro.experiments import running
from repro.experiments.design import PROFILES, Experiment, Outcome, Paper, Run, by_name
from repro.records import RecordStore

sys.modules["claiming"] = sys.modules["__main__"]
folder = Path(sys.argv[1])
paper = Paper("toy", "Toy", "Nobody", "09_toy", by_name(Experiment("add", "claiming:add")), {},
              dict.fromkeys(PROFILES, {}))
runs = [Run("add", {"x": x}, label=f"of {x}") for x in range(6)]
me, place, first = "parent", folder, None


def said(text):
    with (place / "log").open("a", encoding="utf-8") as file:
        file.write(f"{me} {text.splitlines()[0]}\\n")


def log():
    path = place / "log"
    return [] if not path.exists() else path.read_text(encoding="utf-8").splitlines()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, log()
        time.sleep(0.005)


def add(config, seed, data, device):
    said(f"computes {config['x']}")
    if first is not None:
        first()
    if config["x"] == 3 and me == "before":
        raise ValueError("x is 3")
    return Outcome({"sum": config["x"]})


def worker(name, begin=None, **options):
    """Start a process that carries out the plan, and return its number."""
    global me, first
    process = os.fork()
    if process:
        return process
    me, first = name, begin
    code = 1
    try:
        setting = running.Setting("smoke", "cpu", seeds=(0,), **options)
        tally = running.execute(paper, runs, setting, RecordStore(place / "store"), said)
        said(f"ends {json.dumps(vars(tally))}")
        code = 0
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


def left():
    return sorted(p.name for p in (place / "store").rglob("*") if p.is_file())


def scenario(name, function):
    global place
    place = folder / name
    place.mkdir()
    codes = function()
    print(json.dumps([name, codes, log(), left()]), flush=True)


def wait(*processes):
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def both():
    """Neither goes on before both compute something."""
    seen = {line.split()[0] for line in log() if " computes " in line}
    return {"A", "B"} <= seen


def together():
    return wait(worker("A", lambda: until(both)), worker("B", lambda: until(both)))


def again():
    codes = wait(worker("before"))
    codes += wait(*(worker(n, retry_failed=True) for n in "AB"))
    return codes + wait(worker("after"))


def killed(how):
    def forever():
        until(lambda: False)

    a = worker("A", forever)
    until(lambda: "A computes 0" in log())
    b = worker("B")
    until(lambda: any("B toy: waiting for 1 runs" in line for line in log()))
    said(f"{a} is A")
    os.kill(a, how)
    return wait(a, b)


scenario("together", together)
scenario("again", again)
scenario("killed", lambda: killed(signal.SIGKILL))
scenario("interrupted", lambda: killed(signal.SIGINT))
'''


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory) -> dict[str, tuple[list[int], list[str], list[str]]]:
    """Of each scenario the exit codes, what was said, and the files that are left."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("claims"))],
        capture_output=True, text=True, timeout=120, encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (codes, log, left) for name, codes, log, left in lines}


def computed(log: list[str], *workers: str) -> list[int]:
    return sorted(
        int(line.split()[-1])
        for line in log
        if line.split()[1] == "computes" and line.split()[0] in workers
    )


def tally(log: list[str], worker: str) -> dict[str, int]:
    (line,) = (line for line in log if line.startswith(f"{worker} ends "))
    return json.loads(line.removeprefix(f"{worker} ends "))


@pytest.mark.thorough
def test_two_runs_at_once_compute_everything_once(scenarios):
    codes, log, left = scenarios["together"]
    assert codes == [0, 0]
    assert computed(log, "A", "B") == list(range(6))
    assert computed(log, "A") and computed(log, "B")  # in fact at once
    a, b = tally(log, "A"), tally(log, "B")
    assert a["done"] == len(computed(log, "A")) and b["done"] == len(computed(log, "B"))
    for one in (a, b):
        assert one["done"] + one["elsewhere"] + one["stood"] == 6
    assert len(left) == 6 and all(name.endswith(".json") for name in left)


def test_a_failure_is_tried_again_by_one_of_them(scenarios):
    codes, log, _ = scenarios["again"]
    assert codes == [0, 0, 0, 0]
    assert computed(log, "before") == list(range(6)) and tally(log, "before")["failed"] == 1
    assert computed(log, "A", "B") == [3]
    assert tally(log, "after") == tally(log, "after") | {"done": 0, "stood": 6, "failed_before": 0}


@pytest.mark.parametrize(("how", "code"), [("killed", -9), ("interrupted", 130)])
def test_what_a_dead_process_had_claimed_is_taken_over(scenarios, how, code):
    codes, log, left = scenarios[how]
    assert codes == [code, 0]
    assert computed(log, "A") == [0] and computed(log, "B") == list(range(6))
    # It computed all else before it waited, and said for whom.
    (number,) = (line.split()[1] for line in log if line.endswith("is A"))
    (waits,) = (k for k, line in enumerate(log) if "waiting for 1 runs" in line)
    assert f"computed by process {number} on " in log[waits]
    assert computed(log[:waits], "B") == [1, 2, 3, 4, 5]
    assert len(left) == 6 and all(name.endswith(".json") for name in left)


class TestClaims:
    @pytest.fixture
    def record(self, tmp_path) -> Path:
        return tmp_path / "mbs" / "train-key.json"

    @pytest.fixture(autouse=True)
    def folder(self, record):
        record.parent.mkdir()

    def test_one_at_a_time_and_nothing_is_left(self, record):
        with claims.claimed(record) as mine:
            assert mine
            assert claims.holder(record).startswith(f"process {os.getpid()} on ")
            with claims.claimed(record) as again, claims.claimed(record.with_name("x.json")) as x:
                assert (again, x) == (False, True)
            claims.sweep(record.parents[1])  # takes none from whoever holds it
            with claims.claimed(record) as again:
                assert not again
        assert list(record.parent.iterdir()) == []
        with pytest.raises(KeyError), claims.claimed(record):
            raise KeyError
        assert list(record.parent.iterdir()) == []
        with claims.claimed(record) as mine:
            assert mine

    def test_what_a_dead_process_left_is_swept_and_taken(self, record):
        left = record.with_name(".train-key.claim")
        left.write_text("process 1 on a host that is off\n", encoding="utf-8")
        with claims.claimed(record) as mine:
            assert mine
        assert not left.exists()
        left.write_bytes(b"\xff")
        assert claims.holder(record) == "another process"
        claims.sweep(record.parents[1])
        assert not left.exists()

    def test_a_file_that_was_removed_meanwhile_is_no_claim(self, record, monkeypatch):
        # Its holder removes it between our opening and our locking it.
        lock, path = fcntl.lockf, record.with_name(".train-key.claim")
        locked = []

        def late(file, how):
            if not locked:
                path.unlink()
            locked.append(file)
            lock(file, how)

        monkeypatch.setattr(fcntl, "lockf", late)
        with claims.claimed(record) as mine:
            assert mine and path.exists() and len(locked) == 2

    @pytest.mark.parametrize("thing", ["fifo", "folder", "link"])
    def test_what_is_in_the_way_is_named(self, record, thing):
        path = record.with_name(".train-key.claim")
        make = {"fifo": os.mkfifo, "folder": Path.mkdir, "link": lambda p: p.symlink_to("x")}
        make[thing](path)
        with (
            pytest.raises(UsageError, match=r"train-key\.claim.*remove what is in the way"),
            claims.claimed(record),
        ):
            raise AssertionError
        claims.sweep(record.parents[1])  # and stops nothing else
        assert os.path.lexists(path)

    def test_without_locks_a_run_goes_on_and_says_so(self, record, monkeypatch):
        def none(*arguments):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "lockf", none)
        with (
            pytest.warns(claims.NoLocksWarning, match="may compute the same"),
            claims.claimed(record) as mine,
        ):
            assert mine
        assert list(record.parent.iterdir()) == []
