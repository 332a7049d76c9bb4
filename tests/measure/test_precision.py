from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from repro.adaptive import loss_check
from repro.mbs import checking
from repro.measure.precision import rounds_to_tf32, without_tf32

MATMUL, CONV = torch.backends.cuda.matmul, torch.backends.cudnn.conv
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def put_back():
    """Leave the settings as they were."""
    owners = (MATMUL, CONV, torch.backends.cudnn, torch.backends)
    before = [owner.fp32_precision for owner in owners]
    yield
    for owner, value in zip(reversed(owners), reversed(before), strict=True):
        owner.fp32_precision = value


def test_the_nearest_setting_holds():
    MATMUL.fp32_precision = CONV.fp32_precision = "none"
    assert not rounds_to_tf32("matmul") and not rounds_to_tf32("conv")
    torch.backends.fp32_precision = "tf32"
    assert rounds_to_tf32("matmul") and rounds_to_tf32("conv")
    CONV.fp32_precision = "ieee"
    assert rounds_to_tf32("matmul") and not rounds_to_tf32("conv")
    torch.backends.fp32_precision = "none"
    MATMUL.fp32_precision = "tf32"
    assert rounds_to_tf32("matmul")


@pytest.mark.parametrize("matmul", ["ieee", "tf32"])
@pytest.mark.parametrize("conv", ["ieee", "tf32"])
def test_checks_of_a_loss_allow_for_it_however_it_was_set(matmul, conv):
    MATMUL.fp32_precision, CONV.fp32_precision = matmul, conv
    model = nn.Linear(2, 2)
    outputs = [torch.ones(2)]
    checker = SimpleNamespace(_device=CUDA, _module=model, _autocast=None)
    assert (checking.SelfCheck._tolerance(checker, outputs) >= 1e-2) is ("tf32" in (matmul, conv))
    allowed = loss_check._tolerance(model, outputs, CUDA, nullcontext)
    assert (allowed >= 1e-2) is (matmul == "tf32")


@pytest.mark.parametrize("error", [False, True])
def test_without_tf32_and_put_back(error):
    MATMUL.fp32_precision, CONV.fp32_precision = "tf32", "tf32"
    with pytest.raises(KeyError) if error else nullcontext(), without_tf32():
        assert not rounds_to_tf32("matmul") and not rounds_to_tf32("conv")
        if error:
            raise KeyError
    assert rounds_to_tf32("matmul") and rounds_to_tf32("conv")


def test_nothing_reads_the_setting_that_may_raise():
    root = Path(__file__).parents[2]
    files = [path for part in ("repro", "benchmarks") for path in (root / part).rglob("*.py")]
    reading = [path for path in files if "allow_tf32" in path.read_text(encoding="utf-8")]
    assert [path.name for path in reading] == ["precision.py"]  # which says why
