import pytest
import torch

from repro.measure.loss_parts import tolerance
from repro.measure.precision import rounds_to_tf32, without_tf32

MATMUL, CONV = torch.backends.cuda.matmul, torch.backends.cudnn.conv


@pytest.fixture(autouse=True)
def put_back():
    """Leave the settings as they were."""
    owners = (MATMUL, CONV, torch.backends.cudnn, torch.backends)
    before = [owner.fp32_precision for owner in owners]
    yield
    for owner, value in zip(reversed(owners), reversed(before), strict=True):
        owner.fp32_precision = value


def rounded():
    return [rounds_to_tf32("matmul"), rounds_to_tf32("conv")]


def test_the_nearest_setting_holds_and_is_put_back():
    MATMUL.fp32_precision = CONV.fp32_precision = "none"
    assert rounded() == [False, False]
    torch.backends.fp32_precision = "tf32"
    assert rounded() == [True, True]
    CONV.fp32_precision = "ieee"
    assert rounded() == [True, False]
    torch.backends.fp32_precision = "none"
    MATMUL.fp32_precision = CONV.fp32_precision = "tf32"
    with pytest.raises(KeyError), without_tf32():
        assert rounded() == [False, False]
        raise KeyError
    assert rounded() == [True, True]


@pytest.mark.parametrize("matmul", ["ieee", "tf32"])
@pytest.mark.parametrize("conv", ["ieee", "tf32"])
def test_checks_of_a_loss_allow_for_it_however_it_was_set(matmul, conv):
    MATMUL.fp32_precision, CONV.fp32_precision = matmul, conv
    given = [torch.float32], torch.device("cuda")
    assert (tolerance(*given) >= 1e-2) is ("tf32" in (matmul, conv))
    assert (tolerance(*given, multiplied_by=("matmul",)) >= 1e-2) is (matmul == "tf32")
