"""The files of examples, run by themselves and beside an ordinary training with whole mini-batches.

Each needs its library (``make recipes``), and is skipped without it; examples/torchrun.py has tests
of its own.
"""

import os
import re
import runpy
import subprocess
import sys

import pytest
import torch
from torch import nn

from repro import paths
from repro._torchvision import torchvision  # noqa: F401  (first: the libraries import it themselves)

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

LIBRARIES = {
    "plain_torch": [],
    "with_accelerate": ["accelerate"],
    "with_lightning": ["lightning"],
    # The last, without which the Trainer would take the folder tests/datasets for that library.
    "with_hf_trainer": ["transformers", "accelerate", "datasets.arrow_dataset"],
    "with_ray": ["ray"],
}
# A sum in parts is rounded otherwise; bfloat16 has 8 bits.
TOLERANCES = {"no": 1e-6, "bf16": 8e-4}


def path_of(name):
    for library in LIBRARIES[name]:
        pytest.importorskip(library)
    return str(paths.ROOT / "examples" / f"{name}.py")


def trained_whole(example, precision):
    model = example["make_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in example["make_loader"]():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return model


def assert_same(model, expected, start, tolerance):
    pairs = zip(expected.parameters(), start.parameters(), strict=True)
    moved = [(a - b).abs().max() for a, b in pairs]
    assert max(moved) > 20 * tolerance  # else anything would agree
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_stranger_can_run_it(name, tmp_path):
    variables = {"PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    command = [sys.executable, "-W", "ignore", path_of(name)]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, text=True,
                           capture_output=True, timeout=240)  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not list(tmp_path.iterdir())
    last = ended.stdout.splitlines()[-1]
    if name in ("with_accelerate", "with_lightning"):  # of 1.4 before training
        assert float(re.fullmatch(r"last loss ([\d.]+)", last)[1]) < 0.1
    else:
        assert float(re.fullmatch(r"largest difference .*: ([\d.e+-]+)", last)[1]) < 1e-6
        losses = [float(loss) for loss in re.findall(r" loss ([\d.]+)", ended.stdout)]
        assert losses == pytest.approx(losses[::-1], abs=2e-6)


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", ["with_accelerate", "with_lightning"])
def test_low_precision(name, precision):
    example = runpy.run_path(path_of(name))
    model, loader = example["make_model"](), example["make_loader"]()
    if name == "with_lightning":
        named = "bf16-mixed" if precision == "bf16" else "32-true"
        example["train"](model, loader, 1, precision=named)
    else:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        example["train"](example["Accelerator"](mixed_precision=precision), model, loader, 1)
    expected = trained_whole(example, precision)
    assert_same(model, expected, example["make_model"](), TOLERANCES[precision])
