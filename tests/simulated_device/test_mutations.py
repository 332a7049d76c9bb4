"""The harness of mutation tests: what it plants, what it finds, and that it takes it back."""

import sys
from contextlib import contextmanager

import pytest
import torch

from simulated_device.mutations import Omission, noticed, planted

HERE = sys.modules[__name__]


def sum_beside(x: torch.Tensor) -> torch.Tensor:
    side = torch.Stream(x.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = x.sum()
    side.synchronize()
    return total.cpu()


class Counter:
    @property
    def value(self) -> int:
        return 1 + 2

    @staticmethod
    def twice() -> int:
        return 2 * 2

    @contextmanager
    def held(self):
        yield 3 + 4


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


def test_what_is_decorated(sim):
    counter = Counter()
    five, six = (
        Omission(HERE, "1 + 2", "5", "Counter.value"),
        Omission(HERE, "2 * 2", "6", "Counter.twice"),
    )
    with planted(five), planted(six):
        assert (counter.value, Counter.twice()) == (5, 6)
    with planted(Omission(HERE, "3 + 4", "8", "Counter.held")), counter.held() as value:
        assert value == 8
    assert (counter.value, Counter.twice()) == (3, 4)


@pytest.mark.parametrize("old", ["no such text", "side"])
def test_a_text_must_be_in_one_place(old):
    with pytest.raises(ValueError, match=r"places of functions: give a text that is in one"):
        noticed(program, None, Omission(HERE, old))
