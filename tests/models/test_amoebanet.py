import pytest
import torch
from torch import nn

from repro.models import amoebanet_d
from repro.models.amoebanet import NORMAL, REDUCTION, Cell, FactorizedReduction


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# The (L, D) of GPipe (arXiv:1811.06965), table 1; the counts are those of torchgpipe's
# documentation, "AmoebaNet-D (L, D) Memory Benchmark".
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "num_filters", "published"),
    [
        (18, 208, "81.5M"),
        (18, 416, "319.0M"),
        (18, 544, "542.7M"),
        (36, 544, "1.06B"),
        (72, 512, "1.84B"),
    ],
)
def test_parameter_counts_are_torchgpipes(num_layers, num_filters, published):
    with torch.device("meta"):
        parameters = count(amoebanet_d(1000, num_layers, num_filters))
    millions, billions = f"{parameters / 1e6:.1f}M", f"{parameters / 1e9:.2f}B"
    assert published == (millions if published.endswith("M") else billions)


@pytest.mark.parametrize(("num_filters", "millions"), [(208, 82), (416, 318), (544, 542)])
def test_parameter_counts_are_those_of_gpipe(num_filters, millions):
    # GPipe, table 1: within what its unknown stem may add, and the rounding of its two digits
    with torch.device("meta"):
        parameters = count(amoebanet_d(1000, 18, num_filters))
    assert parameters / 1e6 == pytest.approx(millions, rel=0.007)


def test_maps_halve_and_channels_double_at_each_reduction():
    model = amoebanet_d(num_layers=6, num_filters=16).eval()
    shapes = []
    for cell in model.cells:
        cell.register_forward_hook(lambda _, __, y: shapes.append(tuple(y.shape[1:])))
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
    # A cell returns 4 states (normal) or 3 (reduction) of its channels: 8, 16; 16; 32; 64.
    assert shapes == [
        (3 * 8, 16, 16),
        (3 * 16, 8, 8),
        *[(4 * 16, 8, 8)] * 2,
        (3 * 32, 4, 4),
        *[(4 * 32, 4, 4)] * 2,
        (3 * 64, 2, 2),
        *[(4 * 64, 2, 2)] * 2,
    ]


@pytest.mark.parametrize("size", [(32, 32), (1, 1), (37, 50), (33, 96)])
def test_any_image_size(size):
    model = amoebanet_d(num_classes=7, num_layers=3, num_filters=8, in_channels=1).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 1, *size)).shape == (2, 7)


def test_normal_cell_adds_what_its_genotype_says():
    torch.manual_seed(0)
    c = 4
    cell = Cell(NORMAL, 6, 5, c, stride=1, before_is_larger=False).double().eval()
    x = torch.randn(2, 6, 9, 8, dtype=torch.float64)
    before = torch.randn(2, 5, 9, 8, dtype=torch.float64)
    y = cell(x, before)

    # the pools and sums written out by hand
    s0, s1, op = cell.fit(x), cell.fit_before(before), cell.operations
    s2 = op[0](s1) + torch.max_pool2d(s1, 3, 1, 1)
    s3 = s1 + op[3](s0)
    s4 = op[4](s0) + op[5](s0)
    s5 = torch.max_pool2d(s2, 3, 1, 1) + s2
    average = nn.functional.avg_pool2d(s1, 3, 1, 1, count_include_pad=False)
    s6 = average + op[9](s5)
    torch.testing.assert_close(y, torch.cat((s0, s3, s4, s6), dim=1))


def test_reduction_cell_adds_what_its_genotype_says():
    torch.manual_seed(0)
    cell = Cell(REDUCTION, 6, 5, 4, stride=2, before_is_larger=True).double().eval()
    x = torch.randn(2, 6, 6, 8, dtype=torch.float64)
    before = torch.randn(2, 5, 12, 16, dtype=torch.float64)
    y = cell(x, before)

    s0, s1, op = cell.fit(x), cell.fit_before(before), cell.operations
    s2 = torch.max_pool2d(s0, 2, 2) + torch.max_pool2d(s0, 3, 2, 1)
    s3 = s2 + op[3](s1)
    s4 = op[4](s2) + torch.max_pool2d(s2, 3, 1, 1)
    s5 = s3 + torch.max_pool2d(s1, 2, 2)
    average = nn.functional.avg_pool2d(s2, 3, 1, 1, count_include_pad=False)
    s6 = average + op[9](s3)
    torch.testing.assert_close(y, torch.cat((s4, s5, s6), dim=1))


@pytest.mark.parametrize("size", [(6, 4), (5, 3)])
def test_factorized_reduction_sees_both_diagonals(size):
    reduction = FactorizedReduction(1, 2).double().eval()
    nn.init.ones_(reduction.even.weight)
    nn.init.ones_(reduction.odd.weight)
    reduction.norm.eps = 0.0
    x = torch.rand(1, 1, *size, dtype=torch.float64)
    y = reduction(x)
    assert torch.equal(y[0, 0], x[0, 0, ::2, ::2])
    odd = x[0, 0, 1::2, 1::2]
    assert torch.equal(y[0, 1, : odd.shape[0], : odd.shape[1]], odd)
    assert y[0, 1].sum() == odd.sum()  # zeros where there is no pixel


@pytest.mark.parametrize("num_layers", [0, -3, 1, 4, 5, 6.0])
def test_layers_that_do_not_make_three_groups(num_layers):
    with pytest.raises(ValueError, match=rf"num_layers is {num_layers}, .*pass num_layers="):
        amoebanet_d(num_layers=num_layers)


def test_filters_below_the_bottlenecks_need():
    with pytest.raises(ValueError, match=r"num_filters is 7, .* at least 8"):
        amoebanet_d(num_filters=7)
