"""What torch's losses divide by, and whether losses of parts add up, against torch on the whole."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.measure.loss_parts import compare, evaluate, known_loss

GENERATOR = torch.Generator().manual_seed(0)
OUTPUTS = torch.randn(12, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.arange(12) % 4
VALUES = torch.randn(12, 4, generator=GENERATOR, dtype=torch.float64)
ENDS = [(0, 3), (3, 4), (4, 12)]


def test_other_losses_are_not_known():
    hooked = nn.CrossEntropyLoss()
    assert not known_loss(hooked).hooked
    hooked.register_forward_hook(lambda *_: None)
    assert known_loss(hooked).hooked
    compiled = torch.compile(nn.NLLLoss(), backend="eager")
    assert known_loss(compiled) == known_loss(nn.NLLLoss())
    compiled.register_forward_hook(lambda *_: None)
    assert known_loss(compiled).hooked
    own = nn.MSELoss()
    own.forward = F.l1_loss
    for loss in (own, lambda o, t: o.sum(), partial(F.mse_loss, OUTPUTS), F.softmax,
                 partial(F.mse_loss, target=VALUES)):  # fmt: skip
        assert known_loss(loss) is None
    for loss in (nn.CrossEntropyLoss, partial(nn.CrossEntropyLoss, label_smoothing=0.1)):
        with pytest.raises(TypeError, match="the class CrossEntropyLoss; give an object"):
            known_loss(loss)
    if hasattr(nn, "LinearCrossEntropyLoss"):  # torch 2.13
        assert known_loss(nn.LinearCrossEntropyLoss(4, 2)) is None


def compared(loss_fn, factors=None, outputs=OUTPUTS):
    whole = evaluate(lambda o: loss_fn(o, VALUES), outputs)
    parts = [evaluate(lambda o, t=VALUES[a:b]: loss_fn(o, t), outputs[a:b]) for a, b in ENDS]
    return compare(whole, parts, factors or [(b - a) / 12 for a, b in ENDS])


def test_losses_of_parts_against_the_whole():
    together, *fair = compared(lambda o, t: (o.mul_(2) - t).square().mean())  # in place, of a copy
    assert max(fair) < 1e-12
    assert together == pytest.approx(float((2 * OUTPUTS - VALUES).square().mean()))
    together, value, _ = compared(lambda o, t: (o - t).square().mean().sqrt())
    expected = sum((b - a) / 12 * (OUTPUTS - VALUES)[a:b].square().mean().sqrt() for a, b in ENDS)
    assert together == pytest.approx(float(expected)) and value > 1e-3
    # Values agree by chance, gradients do not.
    _, *zero = compared(lambda o, t: (o * t.sign()).sum() / (t > 0).sum(), outputs=OUTPUTS * 0)
    assert zero[0] == 0 and zero[1] > 0.01
    # A part that does not count may be 0 / 0, any other may not.
    ratio = lambda o, t: (o * (t > 9)).sum() / (t > 9).sum()  # noqa: E731
    assert compared(ratio, [0.0, 0.0, 0.0])[0] == 0
    assert compared(lambda o, t: o.mean() if len(o) > 1 else o.sum() / 0)[1] == float("inf")
