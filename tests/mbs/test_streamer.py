import copy
import itertools
import random
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_losses import arguments, dice
from torch import nn

from repro import mbs
from repro.measure import MemoryMeter
from repro.measure.batches import bounds as splits

MINI = [1, 16, 65]
MICRO = [1, 3, 64]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def make_model(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    first, last = nn.Linear(6, 16), nn.Linear(16, 4)
    return nn.Sequential(first, nn.Tanh(), nn.Dropout(dropout), last, nn.Flatten()).to(dtype)


def make_batch(num_samples, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 6, generator=generator, dtype=dtype)
    return inputs, torch.randint(4, (num_samples,), generator=generator)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def reference(model, loss):
    """Gradients and value of `loss(model)` in plain PyTorch, on a copy."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    value = loss(plain)
    value.backward()
    return gradients(plain), value.detach()


def assert_equal_gradients(model, expected, relative):
    # relative to the size of the whole gradient: single entries can be sums that cancel
    got = torch.cat([g.flatten() for g in gradients(model)])
    want = torch.cat([g.flatten() for g in expected])
    assert (got - want).norm() <= relative * want.norm() and want.norm() > 0


def with_a_rest(num_samples, micro):
    """Sample ranges as in Algorithm 1."""
    return [(i, min(i + micro, num_samples)) for i in range(0, num_samples, micro)]


def weighted_loss(outputs, targets):
    labels, weights = targets
    return (F.cross_entropy(outputs, labels, reduction="none") * weights).sum() / weights.sum()


KINDS = ["plain", "float32", "no targets", "weights", "two_pass dice", "pieces", "pieces, ignored",
         "two_pass dice, float32", "two_pass, no targets"]  # fmt: skip


@pytest.mark.parametrize("micro", MICRO)
@pytest.mark.parametrize("mini", MINI)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_loss_are_the_full_batchs(kind, mini, micro):
    dtype = torch.float32 if "float32" in kind else torch.float64
    model, (x, y) = make_model(dtype), make_batch(mini, dtype)
    y[1::3] = -100 if "ignored" in kind else y[1::3]
    loss_fn, targets, weights = F.cross_entropy, y, None
    if "weights" in kind:
        w = torch.rand(mini, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.1
        loss_fn, targets, weights = weighted_loss, (y, w), w
    elif "dice" in kind:
        loss_fn, targets = dice, F.one_hot(y, 4).to(dtype)
    elif "no targets" in kind:
        loss_fn, targets = lambda outputs, *_: outputs.square().mean(), None
    expected, loss = reference(model, lambda m: loss_fn(m(x), targets))
    streamer = mbs.MicroBatchStreamer(model, loss_fn, micro, two_pass="two_pass" in kind)
    bounds = [(0, mini)]
    if "pieces" in kind:
        bounds = with_a_rest(mini, 10)
        result = streamer.backward((x[a:b], y[a:b]) for a, b in bounds)
    else:
        result = streamer.backward(x, targets, weights=weights)
    assert_equal_gradients(model, expected, TOLERANCE[dtype])
    torch.testing.assert_close(result.loss, loss, rtol=TOLERANCE[dtype], atol=0)
    assert not result.loss.requires_grad
    largest = splits(bounds[0][1], micro)[0][1]
    number = sum(len(splits(b - a, micro)) for a, b in bounds)
    assert (result.num_samples, result.num_micro_batches) == (mini, number)
    assert (result.micro_batch_size, result.retries) == (largest, 0)


def test_no_more_than_two_pieces_are_held():
    model, (x, y) = make_model(), make_batch(53)
    made, alive = [], []

    def read():
        for a, b in itertools.pairwise([0, *range(3, 54, 10)]):  # the largest are not the first
            piece = x[a:b].clone()
            made.append(weakref.ref(piece))
            alive.append(sum(reference() is not None for reference in made))
            yield piece, y[a:b]
            del piece

    options = {"generators": random.SystemRandom()}  # which has no state
    result = mbs.MicroBatchStreamer(model, F.cross_entropy, 10, **options).backward(read())
    assert len(made) == 6 and max(alive) <= 2
    assert (result.micro_batch_size, result.num_samples) == (10, 53)


@pytest.mark.parametrize("micro", MICRO)
@pytest.mark.parametrize("mini", MINI)
@pytest.mark.parametrize("normalization", ["paper", "none"])
def test_paper_and_none_are_equations_14_and_13(mini, micro, normalization):
    model, (x, y) = make_model(), make_batch(mini)
    bounds = (with_a_rest if normalization == "paper" else splits)(mini, micro)
    loss_of = lambda a, b: lambda m: F.cross_entropy(m(x[a:b]), y[a:b])  # noqa: E731
    parts = [reference(model, loss_of(a, b)) for a, b in bounds]
    factor = 1 / len(bounds) if normalization == "paper" else 1.0
    expected = [factor * sum(g) for g in zip(*(part[0] for part in parts), strict=True)]
    streamer = mbs.MicroBatchStreamer(model, F.cross_entropy, micro, normalization=normalization)
    result = streamer.backward(x, y)
    assert_equal_gradients(model, expected, 1e-12)
    expected_loss = factor * sum(part[1] for part in parts)
    torch.testing.assert_close(result.loss, expected_loss, rtol=1e-12, atol=0)


def test_frozen_thawed_tied_and_unused_parameters():
    class Loss(nn.Module):  # shares a parameter with the model and has one of its own
        def __init__(self, shared):
            super().__init__()
            self.shared = shared
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.unused = nn.Linear(2, 2)

        def forward(self, outputs, targets):
            return F.cross_entropy(outputs * self.scale, targets) + self.shared.square().sum()

    torch.manual_seed(0)
    first, second, last = (nn.Linear(6, n, bias=n == 4, dtype=torch.float64) for n in (6, 6, 4))
    second.weight = first.weight
    model, (x, y) = nn.Sequential(first, nn.Tanh(), second, last), make_batch(11)
    last.requires_grad_(False)
    loss_fn = Loss(first.weight)
    streamer = mbs.MicroBatchStreamer(model, loss_fn, 4)
    both = nn.ModuleList([model, loss_fn])
    for frozen in (True, False):
        last.requires_grad_(not frozen)  # after the streamer was made
        for pieces in (False, True):
            expected, _ = reference(both, lambda b: b[1](b[0](x), y))
            both.zero_grad()
            for again in (False, True):
                before = first.weight.grad
                streamer.backward(iter([(x, y)])) if pieces else streamer.backward(x, y)
                assert not again or first.weight.grad is before  # in place
            assert (last.weight.grad is None) == frozen and loss_fn.unused.weight.grad is None
            for p, g in zip(both.parameters(), expected, strict=True):
                if g is not None:
                    torch.testing.assert_close(p.grad, 2 * g, rtol=1e-12, atol=1e-14)


def test_a_sparse_gradient_and_a_dense_one_are_added():
    table, x, y = nn.Embedding(6, 4, sparse=True), torch.arange(6), torch.zeros(6).long()
    streamer = mbs.MicroBatchStreamer(table, F.cross_entropy, 2)
    dense = lambda o, t: F.cross_entropy(o, t) + table.weight.sum()  # noqa: E731
    for streamer.loss_fn in (F.cross_entropy, dense, F.cross_entropy):
        streamer.backward(x, y)
    (3 * F.cross_entropy(table(x), y) + table.weight.sum()).neg().backward()
    torch.testing.assert_close(table.weight.grad.to_dense(), torch.zeros(6, 4))


def test_the_callers_default_device_and_unusual_arrays():
    x, y = make_batch(12)
    labels = y.numpy().astype(">i4")[::-1]  # backwards, and of the other bytes
    model = make_model()

    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs, torch.from_numpy(targets.astype(int)))

    expected, _ = reference(model, lambda m: loss_fn(m(x), labels))
    with torch.device("meta"):  # such as of a GPU that has no room for the mini-batch
        mbs.MicroBatchStreamer(model, loss_fn, 5).backward(x, labels, weights=[1.0] * 12)
    assert_equal_gradients(model, expected, 1e-12)


def test_peak_memory_does_not_grow_with_the_mini_batch():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))
    x, y = torch.randn(32 * 16, 64), torch.randint(4, (32 * 16,))
    with MemoryMeter(resident=model) as streamed:
        mbs.MicroBatchStreamer(model, F.cross_entropy, 32).backward(x, y)
    with MemoryMeter(resident=model) as plain:  # beside the gradients that are there
        F.cross_entropy(model(x[:32]), y[:32]).backward()
    assert streamed.peak_bytes <= 1.02 * plain.peak_bytes


@pytest.mark.parametrize("two_pass", [False, True])
@pytest.mark.parametrize("way", ["option", "ambient"])
def test_autocast_to_bfloat16(way, two_pass):
    model, (x, y) = make_model(torch.float32), make_batch(20, torch.float32)
    plain = copy.deepcopy(model)
    seen, during_backward = [], []

    def loss_fn(outputs, targets):
        seen.append(outputs.dtype)
        outputs.register_hook(lambda _: during_backward.append(torch.is_autocast_enabled("cpu")))
        return F.cross_entropy(outputs.float(), targets)

    for a, b in splits(20, 6):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(plain(x[a:b]).float(), y[a:b])
        (loss * ((b - a) / 20)).backward()
    autocast = torch.bfloat16 if way == "option" else None
    options = {"autocast": autocast, "two_pass": two_pass, "check": "off"}
    streamer = mbs.MicroBatchStreamer(model, loss_fn, 6, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "ambient"):
        streamer.backward(x, y)
    assert set(seen) == {torch.bfloat16} and set(during_backward) == {False}
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    # two_pass rounds the outputs' gradient to bfloat16 after, not before, the division by 20
    assert_equal_gradients(model, gradients(plain), 2e-2 if two_pass else 1e-6)


def test_weights_that_a_step_has_changed_are_cast_anew():
    model, (x, y) = make_model(torch.float32), make_batch(20, torch.float32)
    streamer = mbs.MicroBatchStreamer(model, F.cross_entropy, 6)
    with torch.autocast("cpu", torch.bfloat16):
        streamer.backward(x, y)
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 2)
        model.zero_grad()
        streamer.backward(x, y)
    again = copy.deepcopy(model)
    again.zero_grad()
    mbs.MicroBatchStreamer(again, F.cross_entropy, 6, autocast=torch.bfloat16).backward(x, y)
    assert_equal_gradients(model, gradients(again), 1e-6)


@pytest.mark.parametrize("two_pass", [False, True])
def test_grad_scaler(two_pass):
    model, (x, y) = make_model(torch.float32), make_batch(20, torch.float32)
    expected, loss = reference(model, lambda m: F.cross_entropy(m(x), y))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = scaler.state_dict()
    streamer = mbs.MicroBatchStreamer(model, F.cross_entropy, 6, scaler=scaler, two_pass=two_pass)
    result = streamer.backward(x, y)
    assert scaler.state_dict() == state
    assert_equal_gradients(model, [1024 * g for g in expected], 1e-5)
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=0)
    scaler.unscale_(optimizer)
    assert_equal_gradients(model, expected, 1e-5)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("pieces", [False, True])
def test_a_grad_scaler_skips_what_overflows_and_nothing_else(pieces):
    model, x, y = nn.Conv2d(1, 3, 1), torch.randn(4, 1, 64, 64), torch.ones(4, 64, 64).long()
    scaler, before = torch.amp.GradScaler("cpu"), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamer = mbs.MicroBatchStreamer(
        model, nn.CrossEntropyLoss(), 1, autocast=torch.float16, scaler=scaler
    )
    for scale in (1.0, 1e6):
        optimizer.zero_grad()
        parts = [(scale * x[:2], y[:2]), (scale * x[2:], y[2:])]
        result = streamer.backward(*([iter(parts)] if pieces else [scale * x, y]))
        scaler.step(optimizer)
        scaler.update()
        if scale == 1:
            assert any((v != before[k]).any() for k, v in model.state_dict().items())
            before = copy.deepcopy(model.state_dict())
    assert not result.loss.isfinite() and scaler.get_scale() == 2**15
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_an_infinite_loss_with_finite_gradients_is_an_error_with_a_scaler_too():
    scaler = torch.amp.GradScaler("cpu")
    streamer = mbs.MicroBatchStreamer(nn.Linear(5, 1), nn.L1Loss(), 4, scaler=scaler)
    with pytest.raises(mbs.NonFiniteLossError):
        streamer.backward(torch.randn(8, 5), torch.full((8, 1), torch.inf))


def test_a_light_first_piece_lets_no_later_one_overflow():
    x, y = torch.randn(16, 5), torch.tensor([0] * 4 + [1, 2] * 6)
    model, scaler = nn.Linear(5, 3), torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1e-4, 1, 1]))
    streamer = mbs.MicroBatchStreamer(model, loss_fn, 2, autocast=torch.float16, scaler=scaler)
    streamer.backward(iter([(x[:4], y[:4]), (x[4:], y[4:])]))
    assert model.weight.grad.isfinite().all()


def test_many_sums_in_bfloat16_are_warned_of():
    x, y = torch.randn(130, 3).bfloat16(), torch.randn(130, 1).bfloat16()
    model = nn.Linear(3, 1).bfloat16()
    mbs.MicroBatchStreamer(model, nn.MSELoss(), 3).backward(x, y)
    with pytest.warns(RuntimeWarning, match="130 micro-batches are added up in bfloat16"):
        mbs.MicroBatchStreamer(model, nn.MSELoss(), 1).backward(x, y)


def test_two_passes_of_half_precision_need_not_agree_to_the_bit():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 64), nn.TransformerEncoder(layer, 3), nn.Linear(64, 5))
    model = model.bfloat16().eval()
    model.register_forward_hook(lambda *given: given[2].float())
    stream = mbs.MicroBatchStreamer(model, lambda o: o.softmax(2).square().mean(), 7, two_pass=True)
    stream.backward(torch.randint(50, (30, 11)))


def test_half_precision_losses_are_summed_without_overflow():
    model = nn.Linear(2, 1).to(torch.float16)
    x = torch.ones(8, 2, dtype=torch.float16)
    streamer = mbs.MicroBatchStreamer(model, lambda outputs: outputs.mean() * 0 + 100.0, 2)
    result = streamer.backward(x, weights=[500.0] * 8)  # 4 * 100,000 > 65,504
    assert result.loss.item() == 100.0


@pytest.mark.parametrize("change", ["head", "weight_norm", "thawed"])
@pytest.mark.parametrize("form", [7, "auto", "pieces"])
def test_layers_that_are_put_in_later(change, form):
    x, y = make_batch(28)
    model = make_model()
    model[0].requires_grad_(change != "thawed")
    streamer = mbs.MicroBatchStreamer(model, F.cross_entropy, 7 if form == "pieces" else form)

    def backward():
        streamer.backward(*arguments(str(form), x, y, 14))

    backward()
    if change == "head":
        model[3] = nn.Linear(16, 4).double()
    elif change == "weight_norm":
        nn.utils.parametrizations.weight_norm(model[0])
    model.requires_grad_(True)
    model.zero_grad()
    calls = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    expected, _ = reference(model, lambda plain: F.cross_entropy(plain(x), y))
    backward()
    assert_equal_gradients(model, expected, 1e-12)
    assert len(calls) == len(expected)


@pytest.mark.parametrize("size", [7, "auto"])
def test_lazy_layers_are_made_as_by_the_first_forward_pass(size):
    x, y = make_batch(28)
    gradients_of, seen = [], []
    for streamed in (False, True):
        norm, last = nn.LazyInstanceNorm1d(affine=True, track_running_stats=False), nn.LazyLinear(4)
        layers = nn.LazyLinear(8), nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), last
        model = nn.Sequential(*layers).double()
        torch.manual_seed(0)
        if streamed:
            model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
            mbs.MicroBatchStreamer(model, F.cross_entropy, size).backward(x, y)
            assert seen[0] == (2 if size == "auto" else 7)  # not the whole, which may not fit
        else:
            F.cross_entropy(model(x), y).backward()
        gradients_of.append(torch.cat([g.flatten() for g in gradients(model)]))
    torch.testing.assert_close(*gradients_of, rtol=1e-11, atol=1e-14)


def test_lazy_layers_of_pieces_and_frozen_models_are_refused():
    for model, batch, message in (
        (nn.LazyLinear(4).double(), [iter([make_batch(28)])], "call the model once on a few"),
        (make_model().requires_grad_(False), make_batch(28), "the model is frozen"),
    ):
        with pytest.raises(mbs.MicroBatchError, match=message):
            mbs.MicroBatchStreamer(model, F.cross_entropy, 7).backward(*batch)


def test_copies_judge_their_own_loss():
    x, y = make_batch(28)
    streamer = mbs.MicroBatchStreamer(make_model(), F.cross_entropy, 7)
    other = copy.deepcopy(streamer)
    other.loss_fn = lambda outputs, targets: F.cross_entropy(outputs, targets).sqrt()
    streamer.backward(x, y)
    with pytest.raises(mbs.LossCheckError):
        other.backward(x, y)
    with pytest.raises(TypeError, match=r"use copy\.deepcopy"):
        copy.copy(streamer)


def test_inputs_that_wait_for_a_gradient_are_refused():
    model, (x, y) = make_model(), make_batch(9)
    generator = nn.Linear(6, 6).double()
    streamer = mbs.MicroBatchStreamer(model, F.cross_entropy, 4)
    for given in (generator(x), (generator(x),), x.clone().requires_grad_()):
        for form in ((given, y), (iter([(given, y)]), None)):
            with pytest.raises(mbs.InputGradientError, match=r"nn.Sequential.*as \.detach\(\)"):
                streamer.backward(*form)
    streamer.backward(generator(x).detach(), y)
    streamer.loss_fn = F.mse_loss
    teacher = nn.Linear(6, 4).double()
    with pytest.raises(mbs.InputGradientError, match="a target of shape"):
        streamer.backward(x, teacher(x))
    # The loss of two passes is that of the whole mini-batch, with its graph.
    mbs.MicroBatchStreamer(model, F.mse_loss, 4, two_pass=True).backward(x, teacher(x))
    whole = torch.autograd.grad(F.mse_loss(model(x), teacher(x)), teacher.weight)[0]
    torch.testing.assert_close(teacher.weight.grad, whole)


def state_of(model):
    held = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    return held, [b.clone() for b in model.buffers()], torch.get_rng_state()


def assert_unchanged(model, state):
    before, buffers, rng = state
    for parameter, (gradient, values) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, values)
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def model_with_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    model[0].weight.grad = torch.randn_like(model[0].weight)
    return model


def nan_in_third(outputs, targets, calls=None):
    calls.append(None)
    loss = F.cross_entropy(outputs, targets)
    return loss * float("nan") if len(calls) == 3 else loss


BAD_LOSSES = [
    (lambda o, t: F.cross_entropy(o, t, reduction="none"), mbs.LossShapeError, r"shape \(4,\)"),
    (lambda o, t: 1.5, mbs.LossShapeError, r"returned 1\.5; it must return a scalar tensor"),
    (lambda o, t: o.sum() * float("inf"), mbs.NonFiniteLossError, "12 samples"),
    (None, mbs.NonFiniteLossError, "is nan; gradients and buffers are as before"),
]


@pytest.mark.parametrize(
    ("form", "loss_fn", "error", "message"),
    [
        (form, *bad)
        for form in ("whole", "pieces", "auto", "two_pass", "deferred")
        for bad in BAD_LOSSES
        if bad[0] is not None or form not in ("two_pass", "auto")  # these have no third loss
    ],
)
def test_a_bad_loss_leaves_everything_as_it_was(form, loss_fn, error, message):
    model = model_with_state()
    x, y = make_batch(12, torch.float32)
    streamer = mbs.MicroBatchStreamer(
        model,
        loss_fn or partial(nan_in_third, calls=[]),
        "auto" if form == "auto" else 4,
        two_pass=form == "two_pass",
        batchnorm="deferred" if form == "deferred" else "micro",
        check="off" if loss_fn is None else "first",  # that counts its calls
    )
    state = state_of(model)
    with pytest.raises(error) as caught:
        streamer.backward(*arguments(form, x, y, 8))
    if form not in ("two_pass", "auto"):
        caught.match(message)
    assert_unchanged(model, state)
    assert all(m.track_running_stats for m in model if isinstance(m, nn.BatchNorm1d))


def batch_cases():
    x, y = make_batch(6, torch.float32)
    # Other mini-batches that are refused: tests/measure/test_batches.py.
    yield (x[:0], y[:0]), None, mbs.EmptyBatchError, "no samples"
    told = "5 weights were given for 6 samples.*one weight per sample"
    yield (x, y), [1.0] * 5, mbs.MicroBatchError, told
    yield (x, y), [0.0] * 6, mbs.NonFiniteLossError, "whether any target counts"
    yield (x, y), [1.0, float("nan")], mbs.MicroBatchError, "1-D tensor of"
    yield (x, y), [2.0, *[1.0] * 4, -1.0], mbs.MicroBatchError, "none negative"
    yield (x, y), torch.ones(3, 2), mbs.MicroBatchError, r"shape \(3, 2\)"
    yield (x, y), ["a", "b"], mbs.MicroBatchError, "1-D tensor of"
    yield (iter([]), None), None, mbs.EmptyBatchError, "yielded no piece"
    yield (iter([(x, y)]), y), None, mbs.MicroBatchError, "do not pass targets or weights beside it"
    yield (iter([(x, y)]), None), [1.0] * 6, mbs.MicroBatchError, "has no weights"
    yield (iter([(x, y), x]), None), None, mbs.MicroBatchError, "yielded Tensor; each piece must be"
    yield (iter([(x, y, y)]), None), None, mbs.MicroBatchError, "yielded tuple; each piece must be"
    yield (iter([(x, y), (x, y[:2])]), None), None, mbs.BatchSizeMismatchError, "must be equal"


@pytest.mark.parametrize(("batch", "weights", "error", "message"), [*batch_cases()])
def test_a_bad_mini_batch_leaves_everything_as_it_was(batch, weights, error, message):
    model = model_with_state()
    state = state_of(model)
    with pytest.raises(error, match=message):
        mbs.MicroBatchStreamer(model, F.cross_entropy, 3).backward(*batch, weights=weights)
    assert_unchanged(model, state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": True}, "whole number of at least 1, or 'auto'"),
        ({"normalization": "mean"}, "choose among exact, paper, none"),
        ({"prefetch": 1.5}, "prefetch is 1.5"),
        ({"autocast": torch.float64}, "autocast is torch.float64; choose among"),
        ({"device": "meta"}, "move the model there first"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        mbs.MicroBatchStreamer(make_model(), F.cross_entropy, **options)


@pytest.mark.parametrize("two_pass", [False, True])
def test_weights_that_are_cached_keep_their_graph(two_pass):
    model, (x, y) = nn.utils.parametrizations.weight_norm(make_model()[0]), make_batch(10)
    expected, _ = reference(model, lambda plain: F.cross_entropy(plain(x), y))
    with nn.utils.parametrize.cached():
        mbs.MicroBatchStreamer(model, F.cross_entropy, 4, two_pass=two_pass).backward(x, y)
    assert_equal_gradients(model, expected, 1e-12)


def test_two_pass_needs_tensors_and_takes_no_weights():
    streamer = mbs.MicroBatchStreamer(make_model(), F.cross_entropy, 4, two_pass=True)
    x, y = make_batch(8)
    for refuses in (streamer, mbs.MicroBatchStreamer(make_model(), F.cross_entropy, "auto")):
        with pytest.raises(mbs.MicroBatchError, match="whole number as micro_batch_size"):
            refuses.backward(iter([(x, y)]))
    with pytest.raises(mbs.MicroBatchError, match="weigh its samples there"):
        streamer.backward(x, y, weights=[1.0] * 8)


@pytest.mark.parametrize(
    "convert",
    [
        lambda out, call: out.sum(),
        lambda out, call: out[:2],
        lambda out, call: object(),
        lambda out, call: (out, out if call == 0 else None),
        lambda out, call: (out, None) if call == 0 else (None, out),
        lambda out, call: (out, 1.0 + call),  # such as the number of what counts
    ],
)
def test_two_pass_needs_outputs_per_sample(convert):
    model, calls = nn.Linear(6, 4).double(), itertools.count()
    model.register_forward_hook(lambda module, inputs, out: convert(out, next(calls)))
    with pytest.raises(mbs.MicroBatchError, match="two_pass needs outputs that are tensors"):
        streamer = mbs.MicroBatchStreamer(model, F.cross_entropy, 4, two_pass=True, check="off")
        streamer.backward(*make_batch(8))
    assert model.weight.grad is None


@pytest.mark.parametrize("reads", [False, True])
def test_two_pass_keeps_from_the_loss_what_single_micro_batches_have(reads):
    model, (x, y) = make_model(), make_batch(8)
    plain = copy.deepcopy(model)

    def loss_fn(outputs, labels):
        extra = outputs[1].log_prob(torch.zeros(())).mean() if reads else 0.0
        return F.cross_entropy(outputs[0], labels).sqrt() + extra

    model.register_forward_hook(lambda _, given, out: (out, torch.distributions.Normal(out, 1.0)))
    streamer = mbs.MicroBatchStreamer(model, loss_fn, 4, two_pass=True)
    if reads:
        with pytest.raises(mbs.MicroBatchError, match="the loss reads log_prob of Normal"):
            streamer.backward(x, y)
        return
    streamer.backward(x, y)
    F.cross_entropy(plain(x), y).sqrt().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_timeline_on_a_cpu():
    model, (x, y) = make_model(), make_batch(10)
    streamer = mbs.MicroBatchStreamer(model, F.cross_entropy, 4, trace=True)
    for _ in range(2):  # the last mini-batch's only
        streamer.backward(x, y)
    spans = streamer.timeline()
    stages = [(kind, i) for i in range(3) for kind in ("copy", "compute")]
    assert [(s.kind, s.micro_batch) for s in spans] == stages
    times = [time for span in spans for time in (span.start_s, span.end_s)]
    assert times[0] >= 0 and times == sorted(times)
    with pytest.raises(ValueError, match="trace=True"):
        mbs.MicroBatchStreamer(model, F.cross_entropy, 4).timeline()
