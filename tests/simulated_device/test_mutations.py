"""The harness of mutation tests: what it plants, what it finds, and that it takes it back."""

import sys

import torch

from simulated_device.mutations import Omission, noticed

HERE = sys.modules[__name__]


def sum_beside(x: torch.Tensor) -> torch.Tensor:
    side = torch.Stream(x.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = x.sum()
    side.synchronize()
    return total.cpu()


def program():
    return sum_beside(torch.ones(1000, device="sim:0"))


WAIT = "side.wait_stream(torch.accelerator.current_stream())"


def test_how_an_omission_shows(sim):
    total, wait = torch.tensor(1000.0), Omission(HERE, WAIT, within="sum_beside")
    found = noticed(program, total, wait)
    assert found.how == "race" and "aten::sum" in found.told
    assert not noticed(program, total)  # taken back, and right
    other = Omission(HERE, "x.sum()", "x.sum() + 1", "sum_beside")
    assert noticed(program, total, other).how == "numbers"
    found = noticed(program, total, Omission(HERE, "total = x.sum()", within="sum_beside"))
    assert found.how == "error" and "NameError" in found.told
    assert str(other) == "test_mutations.sum_beside: x.sum() -> x.sum() + 1"
