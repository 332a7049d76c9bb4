"""``examples/torchrun.py``: two processes train as one does, and after a kill as without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repro import paths
from repro.adaptive import load_checkpoint

pytestmark = pytest.mark.slow
EXAMPLE = paths.ROOT / "examples" / "torchrun.py"
TORCHRUN = f"{sys.executable} -m torch.distributed.run"
OPTIONS = "--epochs 9 --checkpoint run.pt"
LINE = re.compile(r"epoch (\d+): batch (\d+), rate (\S+), cost (\S+), θ \S+, K (\d+|not found yet)")
# The example, whose first process is killed after the third checkpoint, unless it was restarted.
KILLED = """
import os, runpy, signal, sys
import joined
import repro.adaptive

save, saved = repro.adaptive.save_checkpoint, []

def save_and_die(path, state):
    save(path, state)
    saved.append(path)
    if len(saved) == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print("listening:", *joined.listening(), *joined.listening(os.getppid()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

repro.adaptive.save_checkpoint = save_and_die
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run(command: str, folder: Path) -> str:
    """Run a shell command in a folder; return what it printed."""
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (paths.ROOT, paths.ROOT / "tests")))
    ended = subprocess.run(command, shell=True, cwd=folder, env=os.environ | variables, text=True,
                           capture_output=True, timeout=240)  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the lines of an uninterrupted training in two processes, and its last checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    said = run(f"{TORCHRUN} --standalone --nproc-per-node 2 {EXAMPLE} {OPTIONS}", folder)
    return LINE.findall(said), load_checkpoint(folder / "run.pt")


def test_two_processes_train_as_one(whole, tmp_path):
    lines, _ = whole
    alone = LINE.findall(run(f"{sys.executable} {EXAMPLE} {OPTIONS}", tmp_path))
    assert [int(epoch) for epoch, *_ in lines] == list(range(1, 10))
    assert int(lines[-1][1]) >= 2 * int(lines[0][1])  # the batch grew
    for ours, its in zip(lines, alone, strict=True):
        assert (ours[:3], ours[4]) == (its[:3], its[4])  # epoch, batch, rate and K
        assert float(ours[3]) == pytest.approx(float(its[3]), rel=0.01, abs=2e-4)


def test_after_a_kill_torchrun_starts_it_again_and_it_ends_as_if_never_interrupted(whole, tmp_path):
    """By the last command of docs/torchrun.md, which keeps a job on loopback."""
    (tmp_path / "killed.py").write_text(KILLED, encoding="utf-8")
    page = (paths.ROOT / "docs" / "torchrun.md").read_text(encoding="utf-8")
    command = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[-1].strip()
    command = command.replace(" torchrun ", f" {TORCHRUN} ")
    command = command.replace("examples/torchrun.py", f"killed.py {EXAMPLE}")
    said = run(f"{command} --epochs 9", tmp_path)
    assert [int(epoch) for epoch, *_ in LINE.findall(said)] == [1, 2, *range(4, 10)]
    assert said.count("2 processes, connected by gloo\n") == 2  # and after the restart
    (addresses,) = re.findall(r"listening: (.+)", said)
    assert set(addresses.split()) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    saved = load_checkpoint(tmp_path / "run.pt")
    found, wanted = saved.pop("controller"), whole[1]["controller"]
    assert found["state"] == wanted["state"]
    for part, state in (saved | {"start": found["start"]}).items():
        same = whole[1].get(part, wanted["start"])
        torch.testing.assert_close(state, same, rtol=0, atol=0)
