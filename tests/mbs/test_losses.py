"""Which losses are exact, what has to be given for the others, and that nothing else passes."""

import copy
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from outputs import ModelOutput
from torch import nn
from torch.utils.checkpoint import checkpoint

from repro import mbs
from repro.adaptive import DataParallel
from repro.mbs import LossCheckError, MicroBatchStreamer, MixedSamplesError, UnsupportedLossError
from repro.measure.batches import call_model

N = 65
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(N, 6, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(4, (N,), generator=GENERATOR)
VALUES = torch.randn(N, 4, generator=GENERATOR, dtype=torch.float64)
BITS = (VALUES > 0).double()
WEIGHT = torch.tensor([0.1, 1, 3, 10], dtype=torch.float64)
IGNORED = torch.where((torch.arange(N) % 3 == 0) | (torch.arange(N) > 39), -100, LABELS)
IGNORED[64] = 1  # a micro-batch has none but this, others have none at all


def make_model(*more, last=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, last), *more).double()


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error_of(loss_fn, targets, model=None, inputs=X, micro=16, **options):
    """Return the relative error of gradient and loss."""
    weights, model = options.pop("weights", None), model or make_model()
    plain = copy.deepcopy(model)
    loss = loss_fn(call_model(plain, inputs), *(() if targets is None else (targets,)))
    loss.backward()
    streamer = MicroBatchStreamer(model, loss_fn, micro, **options)
    result = streamer.backward(inputs, targets, weights=weights)
    difference = (gradient(model) - gradient(plain)).norm() / gradient(plain).norm()
    loss = loss.detach()
    return max(float(difference), float((result.loss - loss).abs() / loss.abs()))


def arguments(form, inputs, targets, at):
    """The mini-batch as `backward` takes it: whole, or as two pieces divided there."""
    if "pieces" not in form:
        return inputs, targets
    return (iter([(inputs[:at], targets[:at]), (inputs[at:], targets[at:])]),)


PIXELS = torch.randint(-1, 4, (N, 2, 3), generator=GENERATOR)
BYTES = LABELS.to(torch.uint8)
BYTES[:20] = 156  # -100 as uint8
KNOWN = {
    "cross entropy": (F.cross_entropy, LABELS),
    "module": (nn.CrossEntropyLoss(), LABELS),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "size_average": (partial(F.mse_loss, size_average=False), VALUES),
    "ignored": (nn.CrossEntropyLoss(), IGNORED),
    "ignored class": (partial(F.cross_entropy, ignore_index=1), LABELS),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), LABELS),
    "all": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), IGNORED),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), VALUES.softmax(1)),
    "mse": (F.mse_loss, VALUES),
    "mse sum": (nn.MSELoss(reduction="sum"), VALUES),
    "smooth l1": (nn.SmoothL1Loss(), VALUES),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), BITS),
    "element weights": (partial(F.binary_cross_entropy_with_logits, weight=WEIGHT), BITS),
    "multi margin": (nn.MultiMarginLoss(weight=WEIGHT), LABELS),
    "kl batchmean": (nn.KLDivLoss(reduction="batchmean"), VALUES.softmax(1)),
    "kl mean": (partial(F.kl_div, reduction="mean"), VALUES.softmax(1)),
    "pixels": (nn.NLLLoss(weight=WEIGHT, ignore_index=-1), PIXELS,
               make_model(nn.Unflatten(1, (4, 2, 3)), nn.LogSoftmax(1), last=4 * 6)),
    "bytes": (nn.CrossEntropyLoss(), BYTES, make_model(last=200)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", KNOWN)
def test_torchs_losses_are_exact_by_default(name):
    assert error_of(*KNOWN[name]) < 1e-12


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_loss_is_one_of_ones_own():
    loss_fn = torch.jit.script(nn.CrossEntropyLoss())
    assert error_of(loss_fn, LABELS) < 1e-12
    assert not loss_fn.eval().training  # after the check, too
    with pytest.raises(LossCheckError):
        error_of(torch.jit.script(nn.CrossEntropyLoss(reduction="sum")), LABELS)


# Of the micro-batches one has classes of weight 0 alone, which smoothing counts all the same.
SMOOTHED = nn.CrossEntropyLoss(weight=WEIGHT * (WEIGHT > 1), label_smoothing=0.1), LABELS.sort()[0]


@pytest.mark.parametrize(
    ("loss_fn", "targets", "options", "error"),
    [
        (partial(F.mse_loss, weight=VALUES.abs()), VALUES, {}, UnsupportedLossError),
        (nn.BCEWithLogitsLoss(weight=VALUES[:, :1].abs()), BITS, {}, UnsupportedLossError),
        (nn.BCEWithLogitsLoss(pos_weight=VALUES.abs()), BITS, {}, UnsupportedLossError),
        (nn.MSELoss(), VALUES[:, 0], {}, mbs.LossShapeError),
        (*SMOOTHED, {}, UnsupportedLossError),
        (nn.CrossEntropyLoss(reduction="none"), LABELS, {}, mbs.LossReductionError),
        (partial(F.mse_loss, reduction="none"), VALUES, {"two_pass": True}, mbs.LossReductionError),
        (nn.MSELoss(reduction="sum"), VALUES, {"normalization": "paper"}, UnsupportedLossError),
        (nn.MSELoss(reduction="sum"), VALUES, {"weights": [1.0] * N}, mbs.MicroBatchError),
        (F.cross_entropy, torch.full((N,), -100), {}, mbs.NonFiniteLossError),
    ],
)
def test_what_no_micro_batch_can_compute_is_refused(loss_fn, targets, options, error):
    model, weights = make_model(last=4), options.pop("weights", None)
    with pytest.raises(error):
        MicroBatchStreamer(model, loss_fn, 16, **options).backward(X, targets, weights=weights)
    assert all(p.grad is None for p in model.parameters())
    if loss_fn is SMOOTHED[0]:
        assert error_of(*SMOOTHED, two_pass=True) < 1e-12


def tokens(outputs, labels):
    return F.cross_entropy(outputs, labels)


def dice(outputs, masks):
    p = outputs.sigmoid()
    return 1 - 2 * (p * masks).sum() / (p.sum() + masks.sum())


def info_nce(outputs, others):
    similar = F.normalize(outputs) @ F.normalize(others).T / 0.1
    return F.cross_entropy(similar, torch.arange(len(outputs)))


class Root(nn.CrossEntropyLoss):
    """One of torch's losses with a forward of its own."""

    def forward(self, outputs, targets):
        return super().forward(outputs, targets).sqrt()


HOOKED = nn.CrossEntropyLoss()
HOOKED.register_forward_hook(lambda module, args, output: output.sqrt())
NO_MEANS = {
    "own forward": (Root(), LABELS),
    "hooked": (HOOKED, LABELS),
    "in place": (lambda o, t: F.cross_entropy(o.mul_(2).clamp_(max=0.5), t).sqrt(), LABELS),
    "sum": (lambda o, t: F.mse_loss(o, t, reduction="sum"), VALUES),
    "root": (lambda o, t: F.mse_loss(o, t).sqrt(), VALUES),
    "triplets in the batch": (lambda o, t: F.triplet_margin_loss(o, o.roll(1, 0), t), VALUES),
    "pairs": (info_nce, VALUES),
    "class weights": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHT.to(o.dtype)), LABELS),
    "ratio": (dice, BITS),
    "ignored": (tokens, IGNORED),
}


@pytest.mark.parametrize("form", ["whole", "pieces", "autocast"])
@pytest.mark.parametrize("name", NO_MEANS)
def test_what_is_no_mean_is_refused_and_exact_in_two_passes(name, form):
    loss_fn, targets = NO_MEANS[name]
    model, x, dtype = make_model(), X, None
    if form == "autocast":
        model, x, dtype = model.float(), X.float(), torch.bfloat16
        targets = targets.float() if targets.is_floating_point() else targets
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, rng = [p.grad for p in model.parameters()], torch.get_rng_state()
    streamer = MicroBatchStreamer(model, loss_fn, 16, autocast=dtype)
    with pytest.raises(LossCheckError, match=r"(?s)weights=.*normalization='none'.*two_pass=True"):
        streamer.backward(*arguments(form, x, targets, 40))
    for p, g in zip(model.parameters(), before, strict=True):
        assert p.grad is g and bool((g == 1).all())
    assert torch.equal(torch.get_rng_state(), rng)
    if form == "whole":
        assert error_of(loss_fn, targets, two_pass=True) < 1e-12
    if name == "ratio":  # the paper's normalisation is not checked
        MicroBatchStreamer(model, loss_fn, 16, normalization="paper").backward(x, targets)


MEANS = {
    "lambda": (lambda o, t: F.cross_entropy(o, t), LABELS),
    "triplets of samples": (lambda o, t: F.triplet_margin_loss(o, t, t.flip(1)), VALUES),
    "in place": (lambda o, t: F.cross_entropy(o.mul_(2).sub_(0.1), t), LABELS),
    "cancelling": (lambda o, t: (o * t).mean() - (o * t).mean().detach(), VALUES),
    "with a penalty": (lambda o, t: F.mse_loss(o, t) + 3.0, VALUES),
    "ctc": (
        lambda o, t: F.ctc_loss(
            o.view(-1, 2, 2).log_softmax(2).transpose(0, 1), t[:, None] % 1 + 1,
            torch.full((len(o),), 2), torch.full((len(o),), 1),
        ),
        LABELS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_means_over_samples_raise_no_alarm(name):
    assert error_of(*MEANS[name], check="always") < 1e-12


def test_a_loss_in_float32_of_a_model_in_float64_raises_no_alarm():
    x, values = X.repeat(40, 1), VALUES.repeat(40, 1)
    assert error_of(lambda o, t: (o.float() - t.float()).square().mean(), values, inputs=x) < 1e-6


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("layer", [nn.BatchNorm1d(16), nn.Dropout(0.5)])
def test_random_and_normalising_layers_raise_no_alarm(layer, dtype):
    gradients, buffers = [], []
    for loss_fn in (F.cross_entropy, lambda o, t: F.cross_entropy(o, t)):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 16), copy.deepcopy(layer), nn.Linear(16, 4))
        MicroBatchStreamer(model, loss_fn, 16, autocast=dtype).backward(X.float(), LABELS)
        gradients.append(gradient(model))
        buffers.append(list(model.buffers()))
    assert torch.equal(*gradients)  # the check leaves no trace
    torch.testing.assert_close(*buffers, rtol=0, atol=0)
    assert all(module.training for module in model.modules())


def test_a_loss_that_changes_its_kind_is_seen_by_always_alone():
    for check in ("first", "off", "always"):
        roots = []
        loss_fn = lambda o, t: F.mse_loss(o, t) ** (0.5 if roots else 1)  # noqa: B023, E731
        streamer = MicroBatchStreamer(make_model(), loss_fn, 16, check=check)
        streamer.backward(X, VALUES)
        roots.append(1)
        with pytest.raises(LossCheckError) if check == "always" else nullcontext():
            streamer.backward(X, VALUES)


RARE = torch.tensor([1.0, 1.0, 1.0, 30.0], dtype=torch.float64)


def rare_class(seed):
    """Return labels with two of the last class, in a mini-batch of 65, at random places."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (N,), generator=generator)
    labels[torch.randperm(N, generator=generator)[:2]] = 3
    return labels


def masked(outputs, targets):
    values, mask = targets
    return ((outputs - values).square() * mask).sum() / mask.sum()


def hard(outputs, labels):
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return losses.topk(max(1, len(losses) // 4)).values.mean()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("micro", [2, 8, 33])
def test_no_draw_of_samples_hides_a_wrong_loss(micro, dtype):
    for seed in range(3):
        labels = rare_class(seed)
        mask = (labels < 3).double()[:, None].expand(N, 4)
        for loss_fn, targets in (
            (lambda o, t: F.cross_entropy(o, t, weight=RARE.to(o.dtype)), labels),
            (masked, (VALUES, mask)),
            (hard, labels),
            (lambda o, t: F.mse_loss(o, t).sqrt(), VALUES),
            (lambda o, t: F.cross_entropy(o, t) + 0.02 * o.var(0, correction=0).sum(), labels),
        ):
            with pytest.raises(LossCheckError):
                error_of(loss_fn, targets, micro=micro, autocast=dtype)


def test_micro_batches_of_equal_weight_hide_no_wrong_loss():
    loss_fn = lambda o, t: F.cross_entropy(o, t, weight=RARE)  # noqa: E731
    with pytest.raises(LossCheckError):  # each micro-batch has 16 of either class
        MicroBatchStreamer(make_model(), loss_fn, 32).backward(X[:64], torch.arange(64) % 2 + 2)


def test_values_that_labels_had_not_before_are_checked():
    lacking = torch.where(LABELS == 1, 2, LABELS)  # 1 comes later, between the others
    for first, later, options in (
        (LABELS % 3, rare_class(0), {"weight": RARE}),
        (lacking, LABELS, {"weight": torch.tensor([1.0, 9.0, 1.0, 1.0]).double()}),
        (LABELS, torch.where(LABELS == 1, 255, LABELS), {"ignore_index": 255}),
    ):
        loss_fn = lambda o, t: F.cross_entropy(o, t, **options)  # noqa: B023, E731
        streamer = MicroBatchStreamer(make_model(), loss_fn, 16)
        streamer.backward(X, first)
        for _ in range(2):  # not only once
            with pytest.raises(LossCheckError):
                streamer.backward(X, later)


def test_values_that_large_targets_had_not_before_are_checked():
    model = nn.Conv2d(3, 4, 1)
    loss_fn = lambda o, t: F.cross_entropy(o, t, ignore_index=2)  # noqa: E731
    streamer, x = MicroBatchStreamer(model, loss_fn, 4), torch.rand(8, 3, 100, 100)
    labels = torch.randint(2, (8, 100, 100), generator=torch.Generator().manual_seed(0)) * 3
    streamer.backward(x, labels)
    labels[:3, :50] = 2
    with pytest.raises(LossCheckError):
        streamer.backward(x, labels)


def squares(outputs, targets):
    """A mean over elements that are not -1."""
    return F.mse_loss(outputs[targets != -1], targets[targets != -1])


@pytest.mark.parametrize("ignored", [-100, 0, 9, -1.0])
def test_the_first_samples_that_weigh_unlike_are_checked(ignored):
    """At first each ignores its last element, as of shifted labels."""
    real = isinstance(ignored, float)
    targets = VALUES.abs() if real else LABELS[:, None].repeat(1, 4) + (ignored == 0)
    targets[:, 3] = ignored
    unlike = (torch.arange(N) % 5 == 0)[:, None] & (torch.arange(4) > 0)
    loss_fn = lambda o, t: F.cross_entropy(  # noqa: E731
        o.unflatten(1, (-1, 1)).expand(-1, -1, 4), t, ignore_index=ignored
    )
    model = make_model(last=4 if real else 10)
    streamer = MicroBatchStreamer(model, squares if real else loss_fn, 16)
    streamer.backward(X, targets)
    for _ in range(2):
        with pytest.raises(LossCheckError):
            streamer.backward(X, torch.where(unlike, ignored, targets))


def test_the_first_unlike_weights_are_checked():
    def loss_fn(outputs, targets):
        each = F.cross_entropy(outputs, targets["labels"], reduction="none")
        return (targets["weights"] * each).sum() / targets["weights"].sum()

    streamer = MicroBatchStreamer(make_model(), loss_fn, 16)
    streamer.backward(X, {"labels": LABELS, "weights": torch.full((N,), 0.5)})
    with pytest.raises(LossCheckError):
        streamer.backward(X, {"labels": LABELS, "weights": torch.linspace(0.1, 2, N)})


@pytest.mark.parametrize("first", [(1,) * 8, (1, 2, 1, 2, 2, 3, 2, 1)])  # of boxes in each image
def test_a_mean_over_boxes_is_refused_once_samples_have_unequally_many(first):
    def loss_fn(outputs, boxes):
        of = torch.tensor([n for n, own in enumerate(boxes) for _ in own["labels"]])
        return F.cross_entropy(outputs[of], torch.cat([own["labels"] for own in boxes]))

    streamer, size = MicroBatchStreamer(make_model(), loss_fn, 4), SimpleNamespace(shape=(48, 64))
    with pytest.raises(LossCheckError):
        for counts in (first, (1, 1, 1, 1, 1, 2, 1, 1)):
            boxes = [{"labels": torch.ones(n).long(), "size": size} for n in counts]
            streamer.backward(X[:8], boxes)


@pytest.mark.parametrize("width", [1, 2000])
def test_the_first_zero_of_a_mask_among_the_inputs_is_checked(width):
    inner = make_model()

    class Masked(nn.Module):
        def forward(self, x, mask):
            return {"loss": (inner(x).square().sum(1) * mask[:, 0]).sum() / mask[:, 0].sum()}

    streamer = MicroBatchStreamer(Masked(), outputs_loss, 16)
    streamer.backward({"x": X, "mask": torch.ones(N, width).long()})
    with pytest.raises(LossCheckError):
        mask = (torch.arange(N) > 9).long()[:, None].repeat(1, width)
        streamer.backward({"x": X, "mask": mask})


def test_a_micro_batch_without_weight_is_checked_when_the_first_comes():
    def loss_fn(outputs, found):  # divided by what was found, but never by 0
        each = F.binary_cross_entropy_with_logits(outputs[:, 0], found, reduction="none")
        return each.sum() / found.sum().clamp(min=1)

    streamer, everywhere = MicroBatchStreamer(make_model(), loss_fn, 16), torch.arange(N) % 4 == 0
    streamer.backward(X, everywhere.double(), weights=everywhere)
    few = (torch.arange(N) < 3).double()
    with pytest.raises(LossCheckError):
        streamer.backward(X, few, weights=few)
    assert error_of(lambda o, t: (o[:, 0] * t).sum() / t.sum(), few, weights=few) < 1e-12


def test_the_loss_is_read_at_each_mini_batch():
    loss_fn, model = nn.CrossEntropyLoss(), make_model()
    streamer = MicroBatchStreamer(model, loss_fn, 16)
    for name, value in (("weight", WEIGHT), ("weight", WEIGHT.flip(0)), ("ignore_index", 1),
                        ("reduction", "sum")):  # fmt: skip
        setattr(loss_fn, name, value)
        plain = copy.deepcopy(model)
        for one in (model, plain):
            one.zero_grad()
        streamer.backward(X, LABELS)
        loss_fn(plain(X), LABELS).backward()
        assert (gradient(model) - gradient(plain)).norm() < 1e-12 * gradient(plain).norm()
    streamer.loss_fn = lambda o, t: F.cross_entropy(o, t, reduction="sum")
    with pytest.raises(LossCheckError):
        streamer.backward(X, LABELS)


@pytest.mark.parametrize("kind", ["parameter", "head", "in the model"])
@pytest.mark.parametrize("form", [16, "auto", "pieces", "two_pass"])
def test_tensors_that_neither_model_nor_loss_has_are_trained_exactly(kind, form):
    torch.manual_seed(2)
    leaf = torch.randn((6, 4) if kind == "head" else (), dtype=torch.float64, requires_grad=True)
    leaf.grad = torch.ones_like(leaf)
    model = make_model(last=6 if kind == "head" else 4)
    if kind == "in the model":
        model.register_forward_hook(lambda module, _, outputs: outputs * leaf)

    def loss_fn(outputs, targets):
        if kind == "parameter":  # task weights, a temperature
            return F.cross_entropy(outputs, targets) * (-leaf).exp() + leaf
        return F.cross_entropy(outputs @ leaf if kind == "head" else outputs, targets)

    size = form if form in (16, "auto") else 16
    streamer = MicroBatchStreamer(model, loss_fn, size, two_pass=form == "two_pass")
    streamer.backward(*arguments(str(form), X, LABELS, 40))
    whole = torch.autograd.grad(loss_fn(model(X), LABELS), leaf)[0]
    assert torch.allclose(leaf.grad - 1, whole, rtol=1e-11)
    before = leaf.grad.clone()
    with pytest.raises(mbs.NonFiniteLossError):
        streamer.backward(X * torch.nan, LABELS)
    assert torch.equal(leaf.grad, before)


class Scaling(nn.Module):
    """Keeps the mean loss in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def loss(self, outputs, targets):
        loss = F.cross_entropy(outputs, targets)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


def test_the_module_of_a_method_is_one_of_the_losss():
    scaling = Scaling()
    with pytest.warns(RuntimeWarning, match="a forward pass changes mean of Scaling"):
        MicroBatchStreamer(make_model(), scaling.loss, N // 2 + 1).backward(X, LABELS)
    mean, model = 1.0, make_model()
    for part in (slice(0, 33), slice(33, N)):
        mean = 0.9 * mean + 0.1 * F.cross_entropy(model(X[part]), LABELS[part])
    torch.testing.assert_close(scaling.mean, mean.detach())


class Queue(nn.Module):
    """A loss that compares outputs with those of earlier mini-batches, as far as there are any."""

    def __init__(self):
        super().__init__()
        self.filled = 0
        self.register_buffer("rows", torch.zeros(3 * N, 4, dtype=torch.float64))

    def forward(self, outputs, targets):
        kept = self.rows[: self.filled].clone()
        self.rows[self.filled : self.filled + len(outputs)] = outputs.detach()
        self.filled += len(outputs)
        return F.cross_entropy(outputs, targets) + (outputs @ kept.T).exp().sum(1).log1p().mean()


def test_a_check_leaves_the_attributes_of_a_loss_as_they_were():
    whole, parts = Queue(), Queue()
    model, streamed = make_model(), make_model()
    streamer = MicroBatchStreamer(streamed, parts, 16, two_pass=True)
    for _ in range(2):
        model.zero_grad()
        streamed.zero_grad()
        whole(model(X), LABELS).backward()
        streamer.backward(X, LABELS)
        assert parts.filled == whole.filled
        assert torch.allclose(gradient(streamed), gradient(model), rtol=1e-11)


class Attacked(nn.Linear):
    """Moves its inputs up the gradient of a loss of its own."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        super().forward(x).square().sum().backward()
        self.zero_grad()
        return super().forward(x.detach() + 0.1 * x.grad.sign())


class Greedy(nn.Linear):
    """Learns by a loss of its own, too."""

    def forward(self, x):
        y = super().forward(x)
        with torch.enable_grad():
            super().forward(x).square().mean().backward()
        return y


@pytest.mark.parametrize("kind", [Attacked, Greedy])
@pytest.mark.parametrize("form", ["whole", "pieces", "two_pass"])
def test_a_forward_pass_that_changes_gradients_is_refused(kind, form):
    model = kind(X.shape[1], 4).double()
    streamer = MicroBatchStreamer(model, nn.CrossEntropyLoss(), 16, two_pass=form == "two_pass")
    with pytest.raises(mbs.MicroBatchError, match=r"changes gradients.*autograd\.grad"):
        streamer.backward(*arguments(form, X, LABELS, 16))
    assert all(parameter.grad is None for parameter in model.parameters())
    MicroBatchStreamer(model, nn.CrossEntropyLoss(), "auto").backward(X, LABELS)  # undivided
    parallel = DataParallel(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), micro_batch=16
    )
    with pytest.raises(ValueError, match=r"changes gradients of the model"):
        parallel.step(X, LABELS)


class Trimmed(nn.Linear):
    """Returns as many positions as the longest sample has."""

    def forward(self, x, lengths):
        return super().forward(x[:, : int(lengths.max())])


def test_losses_of_outputs_that_are_as_long_as_the_longest_sample():
    def loss(by_token, outputs, lengths):
        kept = torch.arange(outputs.shape[1]) < lengths[:, None]
        each = (outputs[..., 0].square() * kept).sum(1)
        return each.sum() / kept.sum() if by_token else (each / lengths).mean()

    x, lengths = X[:, None].repeat(1, 5, 1), torch.arange(N) // 13 + 1
    for by_token in (False, True):
        torch.manual_seed(0)
        model, own = Trimmed(6, 2).double(), partial(loss, by_token)
        with pytest.raises(LossCheckError) if by_token else nullcontext():
            MicroBatchStreamer(model, own, 16).backward((x, lengths), lengths)


def test_terms_that_the_outputs_do_not_show():
    for batch, options in ((True, {}), (False, {}), (False, {"two_pass": True})):
        model = make_model()

        def keep(module, _, outputs, batch=batch):  # a term of the batch, or of its samples
            module.term = outputs.var(0).mean() if batch else outputs.square().mean()

        model.register_forward_hook(keep)
        loss = lambda o, t: F.cross_entropy(o, t) + model.term  # noqa: B023, E731
        with pytest.raises(LossCheckError) if batch or options else nullcontext():
            MicroBatchStreamer(model, loss, 16, **options).backward(X, LABELS)
    # Two passes need no graph of their own forward pass for a penalty, or for slopes.
    model = make_model()

    def loss(outputs, targets):
        x = torch.ones(1, 6, dtype=torch.float64, requires_grad=True)
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].norm()
        return F.cross_entropy(outputs, targets) + model[0].weight.square().sum() + slope

    result = MicroBatchStreamer(model, loss, 16, two_pass=True).backward(X, LABELS)
    torch.testing.assert_close(result.loss, loss(model(X), LABELS).detach())


def test_a_model_may_return_the_number_of_its_samples():
    model = make_model()
    model.register_forward_hook(lambda module, inputs, outputs: (outputs, len(outputs)))
    for root in (False, True):
        loss = lambda o, t: ((o[0] - t).square().sum() / o[1]) ** (0.5 if root else 1)  # noqa: B023, E731
        with pytest.raises(LossCheckError) if root else nullcontext():
            assert error_of(loss, VALUES, model) < 1e-12


class Views(nn.Module):
    """Joins two views of the samples: an output has all first views before all second ones."""

    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def forward(self, one, other):
        return self.layers(torch.cat([one, other]))


def test_views_of_samples_that_a_model_joins():
    distances = lambda z: torch.stack([*z.chunk(2)]).diff(dim=0).square()  # noqa: E731
    loss = lambda z: distances(z).sum(2).mean()  # noqa: E731
    assert error_of(loss, None, Views(), inputs=(X, X + VALUES[:, :1])) < 1e-12
    with pytest.raises(LossCheckError, match="no mean"):
        error_of(lambda z: loss(z).sqrt(), None, Views(), inputs=(X, X + VALUES[:, :1]))


def test_rows_whose_gradients_cannot_be_compared_are_not_passed():
    """Values agree, as the last layer is fresh; and parameters of half precision are left out."""
    labels = torch.where(torch.arange(4) < LABELS[:, None] + 1, 1, -100)
    model = nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (4, 3)), nn.Flatten(0, 1)).bfloat16()
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    loss = lambda o, t: F.cross_entropy(o, t.flatten())  # noqa: E731
    with pytest.warns(RuntimeWarning, match="could not check that the loss"):
        MicroBatchStreamer(model, loss, 16).backward(X.bfloat16(), labels)


def test_a_graph_that_micro_batches_share_is_explained():
    features = nn.Linear(4, 4, dtype=torch.float64)(VALUES[:4]).tanh()
    with pytest.raises(RuntimeError, match="second time") as caught:
        error_of(lambda o, t: F.cross_entropy(o @ features, t), LABELS, check="off")
    assert "before this part" in str(caught.value.__notes__)


def test_a_loss_that_is_constant_without_some_samples():
    some = torch.zeros(N, dtype=torch.long)
    some[:20] = 1

    def found(outputs, targets):
        kept = targets > 0
        return outputs[kept].square().sum() if kept.any() else torch.tensor(0.0)

    assert error_of(found, some, normalization="none") < 1e-12
    streamer = MicroBatchStreamer(make_model(), found, 16, normalization="none")
    with pytest.raises(mbs.MicroBatchError, match="depends on nothing that requires a gradient"):
        streamer.backward(X, torch.zeros_like(some))


# Micro-batches of the user's own, of graphs that differ in their numbers of nodes

SIZES = [3, 19, 4, 12, 7, 20]
NODES = torch.arange(N).split(SIZES)
GRAPHS = {
    "mse": (nn.MSELoss(), VALUES, None),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), LABELS, None),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), VALUES.softmax(1), None),
    "sum": (nn.L1Loss(reduction="sum"), VALUES, None),
    "your own, counted": (lambda o, t: (o - t).square().mean(), VALUES, [22, 16, 27]),
    "your own": (lambda o, t: (o - t).square().mean(), VALUES, None),
    "miscounted": (nn.MSELoss(), VALUES, [2, 2, 2]),
    "two passes": (dice, BITS, None),
}


def parts_of_graphs(targets, batch, most):
    nodes = batch[0].nodes
    parts = [nodes[i : i + most] for i in range(0, len(nodes), most)]
    return [(X[torch.cat(p)], targets[torch.cat(p)], len(p)) for p in parts]


@pytest.mark.parametrize("name", GRAPHS)
def test_samples_of_unequal_size(name):
    loss_fn, targets, weights = GRAPHS[name]
    nodes = torch.arange(N).split(1) if name == "two passes" else NODES  # it takes rows alone
    model, plain = make_model(), make_model()
    loss_fn(plain(X), targets).backward()
    options = {"split": partial(parts_of_graphs, targets), "two_pass": name == "two passes"}
    streamer = MicroBatchStreamer(model, loss_fn, 2, **options)
    refused = name in ("your own", "miscounted")
    with pytest.raises(LossCheckError) if refused else nullcontext():
        streamer.backward(SimpleNamespace(nodes=nodes), weights=weights)
    error = None if refused else (gradient(model) - gradient(plain)).norm()
    assert refused or error < 1e-12 * gradient(plain).norm()


def test_a_mini_batch_of_a_form_of_its_own_needs_a_function_that_splits():
    with pytest.raises(mbs.UnsplittableBatchError, match=r"inputs is a SimpleNamespace.*split="):
        streamer = MicroBatchStreamer(make_model(), F.mse_loss, 16)
        streamer.backward(SimpleNamespace(nodes=NODES), VALUES)
    split = partial(parts_of_graphs, VALUES)
    with pytest.raises(ValueError, match="nothing for shared"):
        MicroBatchStreamer(make_model(), F.mse_loss, 16, split=split, shared=["x"])
    split = lambda batch, most: [batch] if batch[1] is not None else next(iter(()))  # noqa: E731
    with pytest.raises(RuntimeError, match="StopIteration"):  # which ends no mini-batch
        streamer = MicroBatchStreamer(make_model(), F.mse_loss, N, split=split)
        streamer.backward(iter([(X, VALUES), (X, None)]))


@pytest.mark.parametrize(
    "bounds",
    [
        lambda most: range(0, N // 8 * 8, 8),  # drops the rest
        lambda most: range(0, N, max(1, min(most, N) - 2)),  # overlaps
    ],
)
def test_a_split_that_drops_or_repeats_samples_is_refused(bounds):
    def split(batch, most):
        return [tuple(part[i : i + min(most, 8)] for part in batch) for i in bounds(most)]

    streamer = MicroBatchStreamer(make_model(), nn.CrossEntropyLoss(), 8, split=split)
    with pytest.raises(mbs.UnsplittableBatchError, match="each sample has to be in one of them"):
        streamer.backward(X, LABELS)


NUMBERED = torch.cat([torch.arange(2 * N)[:, None] % 64, torch.randn(2 * N, 4)], 1).double()


@pytest.mark.parametrize("rows", [N, 2 * N])  # as many as there are samples, or others
@pytest.mark.parametrize("two_pass", [False, True])
def test_targets_that_number_the_samples_of_their_part(rows, two_pass):
    """As boxes that name their image do, here from 1 on where the loss numbers from 0."""

    def loss_fn(outputs, boxes):
        every = F.smooth_l1_loss(outputs[boxes[:, 0].long()], boxes[:, 1:], reduction="none")
        return every.mean() if two_pass else every.sum() / len(outputs)

    def split(batch, most):
        x, boxes = batch
        for start in range(0, len(x), most):
            own = boxes[(boxes[:, 0] > start) & (boxes[:, 0] <= start + most)].clone()
            own[:, 0] -= start + 1
            yield x[start : start + most], own, len(x[start : start + most])

    options = {"split": lambda *given: [*split(*given)], "two_pass": two_pass}
    first = torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)
    streamer = MicroBatchStreamer(model := make_model(), loss_fn, 16, **options)
    streamer.backward(X, NUMBERED[:rows] + first)
    loss_fn((plain := make_model())(X), NUMBERED[:rows]).backward()
    torch.testing.assert_close(gradient(model), gradient(plain))


def test_a_model_that_mixes_samples_is_found_in_parts_of_split():
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    def split(batch, most):
        return [*zip(*(part.split(most) for part in batch), strict=True)]

    streamer = MicroBatchStreamer(Centred(6, 4).double(), F.cross_entropy, 16, split=split)
    with pytest.raises(MixedSamplesError):
        streamer.backward(X, LABELS)
    options = {"split": split, "normalization": "paper"}  # of which nothing is checked
    MicroBatchStreamer(Centred(6, 4).double(), F.cross_entropy, 16, **options).backward(X, LABELS)


class LanguageModel(nn.Module):
    """Embeds tokens, predicts the next ones, and computes the mean loss of those that count."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 20)
        self.double()

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits = self.head(self.dropout(self.embedding(input_ids)).cumsum(1).tanh())
        pair = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if num_items_in_batch is None:
            return ModelOutput(F.cross_entropy(*pair), logits)
        return ModelOutput(F.cross_entropy(*pair, reduction="sum") / num_items_in_batch, logits)


TOKENS = torch.randint(20, (N, 9), generator=GENERATOR)
PADDED = torch.where(torch.arange(9) < 2 + torch.arange(N)[:, None] % 7, TOKENS, -100)


def outputs_loss(outputs):
    return outputs["loss"]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("normalization", ["exact", "none"])
def test_a_loss_of_tokens_inside_the_model_is_refused(normalization, dropout):
    model = LanguageModel(dropout)
    streamer = MicroBatchStreamer(model, outputs_loss, 16, normalization=normalization)
    inputs = {"input_ids": TOKENS, "labels": PADDED}
    if normalization == "exact":  # equal lengths: the mean over tokens is one over samples
        streamer.backward({"input_ids": TOKENS, "labels": TOKENS})
    with pytest.raises(LossCheckError, match=r"num_items_in_batch .*token_counts\(labels\)"):
        streamer.backward(inputs)


class Classifier(nn.Linear):
    """Computes its loss, weighed by classes."""

    def forward(self, x, labels):
        return F.cross_entropy(super().forward(x), labels, weight=self.of_class)


@pytest.mark.parametrize("weight", [0.0, 5.0])
@pytest.mark.parametrize("number", [8, 16, 32])
def test_a_loss_inside_the_model_that_weighs_any_class_is_refused(number, weight):
    generator = torch.Generator().manual_seed(0)
    for one in range(10):
        labels = torch.cat([torch.arange(10), torch.randint(10, (54,), generator=generator)])
        labels = labels[torch.randperm(64, generator=generator)]
        model = Classifier(6, 10)
        model.of_class = torch.where(torch.arange(10) == one, weight, 1.0)
        with pytest.raises(LossCheckError):
            streamer = MicroBatchStreamer(model, lambda loss: loss, number)
            streamer.backward({"x": torch.randn(64, 6, generator=generator), "labels": labels})


class DropPath(nn.Module):
    """Leaves out samples at random while training; no class of torch's."""

    def forward(self, x):
        return x * (torch.rand(len(x), 1, 1) < 0.7) if self.training else x


class LossAlone(LanguageModel):
    """Returns its loss alone; its head is zero, as often at first: all tokens cost the same."""

    def __init__(self, layer=None):
        super().__init__()
        self.dropout = layer or nn.Identity()
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, input_ids, labels):
        loss, logits = super().forward(input_ids, labels).values()
        return loss, logits.detach()


def first(outputs):
    return outputs[0]


@pytest.mark.parametrize("layer", [None, nn.Dropout(), DropPath()])
def test_a_loss_alone_is_checked_by_the_gradient_by_parameters(layer):
    streamer = MicroBatchStreamer(LossAlone(layer), first, 16)
    streamer.backward({"input_ids": TOKENS, "labels": TOKENS})  # no alarm
    with pytest.raises(LossCheckError, match="another gradient by the parameters"):
        streamer.backward({"input_ids": TOKENS, "labels": PADDED})


class Reentrant(nn.Linear):
    """Has no gradient by parameters that torch.autograd.grad could compute."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def test_a_loss_alone_behind_a_reentrant_checkpoint_is_compared_by_value():
    model = LossAlone(Reentrant(8, 8).double())
    nn.init.normal_(model.head.weight)
    streamer = MicroBatchStreamer(model, first, 16)
    streamer.backward({"input_ids": TOKENS, "labels": TOKENS})  # no warning
    with pytest.raises(LossCheckError, match=r"together \S+\. It is no mean"):
        streamer.backward({"input_ids": TOKENS, "labels": PADDED})


def test_sparse_gradients_raise_no_alarm():
    model = LossAlone()
    model.embedding.sparse = True
    MicroBatchStreamer(model, first, 16).backward({"input_ids": TOKENS, "labels": TOKENS})


def test_tokens_are_counted():
    inputs = {"input_ids": TOKENS, "labels": PADDED}

    def language_error(inputs, **options):
        return error_of(outputs_loss, None, LanguageModel(), inputs, **options)

    number = (PADDED[:, 1:] != -100).sum()
    for given in (number, int(number)):
        assert language_error({**inputs, "num_items_in_batch": given}, normalization="none") < 1e-12
    assert language_error(inputs, weights=mbs.token_counts(PADDED, shift=True)) < 1e-12
    with pytest.raises(LossCheckError):
        language_error(inputs, weights=mbs.token_counts(PADDED))
    assert mbs.token_counts(BYTES[:, None]).sum() == N
    assert mbs.token_counts(PADDED).tolist() == [float((row >= 0).sum()) for row in PADDED]


class Attending(nn.Module):
    """Looks samples up in a table that all of them share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4).double()

    def forward(self, x, table):
        quantized = (x @ table.T).softmax(1) @ table
        return self.linear(quantized)


TABLE = torch.randn(N, 6, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("two_pass", [False, True])
@pytest.mark.parametrize("micro", [1, 16])
def test_a_shared_tensor_that_is_as_long_by_chance_is_found(micro, two_pass):
    inputs, options = {"x": X, "table": TABLE}, {"two_pass": two_pass}
    with pytest.raises(MixedSamplesError, match="shared="):
        MicroBatchStreamer(Attending(), F.cross_entropy, micro, **options).backward(inputs, LABELS)
    for shared in (["table"], "table", [TABLE]):
        given = F.cross_entropy, LABELS, Attending(), inputs, micro
        assert error_of(*given, shared=shared, **options) < 1e-12


@pytest.mark.parametrize("micro", [1, 5])
def test_an_output_that_is_as_long_as_a_micro_batch_by_chance_is_not_joined(micro):
    """The losses of five experts, or a loss of one element."""
    inner = make_model()

    class Experts(nn.Module):
        def forward(self, x):
            used = x[:, :micro].softmax(1) if micro > 1 else x[:, :1]
            return inner(x), used.mean(0) * inner(x).mean().square()

    loss_fn = lambda outputs, t: F.cross_entropy(outputs[0], t) + outputs[1].mean()  # noqa: E731
    with pytest.raises(LossCheckError):
        MicroBatchStreamer(Experts(), loss_fn, micro).backward(X, LABELS)
    for _ in range(2):
        with pytest.raises(mbs.MicroBatchError, match=r"two_pass needs outputs with a row for"):
            MicroBatchStreamer(Experts(), loss_fn, micro, two_pass=True).backward(X, LABELS)


def test_batchnorm_without_running_statistics_hides_no_tensor_that_was_divided():
    norm, model = nn.BatchNorm1d(4, track_running_stats=False).double(), Attending()
    model.linear = nn.Sequential(model.linear, norm)
    with pytest.raises(MixedSamplesError):
        MicroBatchStreamer(model, F.cross_entropy, 16).backward((X, TABLE), LABELS)
    assert norm.running_mean is None
    mixed = nn.Sequential(nn.Embedding(9, 6, dtype=torch.bfloat16), nn.Flatten(), nn.BatchNorm1d(6))
    mixed[2].running_mean = mixed[2].running_var = None
    mixed[1].register_forward_hook(lambda _, inputs, outputs: outputs.float())
    for layers, inputs in ((model.linear, X), (mixed, torch.arange(N) % 9)):
        MicroBatchStreamer(layers, F.cross_entropy, 16).backward(inputs, LABELS)  # no warning


class Pairs(nn.Module):
    """Compares samples with each other, or with a codebook."""

    def __init__(self):
        super().__init__()
        self.one, self.other = make_model(), make_model()

    def forward(self, a, b):
        return self.one(a) @ self.other(b).T


TIME_FIRST = nn.GRU(6, 4).double()
TIME_FIRST.register_forward_hook(lambda module, _, outputs: outputs[0])
SEQUENCES = torch.randn(8, 8, 6, generator=GENERATOR, dtype=torch.float64)
MIXED = {
    "pairs": (Pairs(), lambda o: F.cross_entropy(o, torch.arange(len(o))), (X, TABLE), None),
    "codebook": (Pairs(), lambda o: o.amin(1).mean(), (X, TABLE), None),
    "time first": (TIME_FIRST, nn.MSELoss(), SEQUENCES, torch.zeros(8, 8, 4).double()),
    "closed over": (make_model(), lambda o: F.mse_loss(o, VALUES), X, None),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("name", MIXED)
def test_what_belongs_to_the_whole_is_found(name, micro):
    model, loss_fn, inputs, targets = MIXED[name]
    with pytest.raises((MixedSamplesError, LossCheckError, RuntimeError), match=r"shared=|targets"):
        MicroBatchStreamer(model, loss_fn, micro).backward(inputs, targets)
    if name == "pairs":
        with pytest.raises(MixedSamplesError, match="return embeddings"):
            MicroBatchStreamer(model, loss_fn, micro, two_pass=True).backward(inputs, targets)


class Falling(nn.Module):
    """Needs numbers that fall, as `pack_padded_sequence` does."""

    def __init__(self, own=True, at_most=N):
        super().__init__()
        self.layers, self.own, self.at_most = make_model(), own, at_most

    def forward(self, inputs, falling):
        if len(inputs) > self.at_most or bool((falling.diff() > 0).any()):
            raise ValueError("too many, or they rise")
        return self.layers(inputs) * (falling[:, None] if self.own else falling.mean())


def test_samples_in_an_order_that_the_model_needs():
    inputs = X, torch.rand(N, generator=GENERATOR, dtype=torch.float64).sort(descending=True)[0]
    assert error_of(nn.CrossEntropyLoss(), LABELS, Falling(), inputs) < 1e-12
    for model, told in ((Falling(own=False), "other samples"), (Falling(at_most=8), "at once")):
        with pytest.raises(MixedSamplesError, match=told):
            MicroBatchStreamer(model, nn.CrossEntropyLoss(), 8).backward(inputs, LABELS)


@pytest.mark.parametrize("form", ["random", "single samples"])
def test_what_cannot_be_checked_is_said_once(form):
    if form == "random":
        model = LanguageModel()  # with noise in evaluation, too
        model.embedding.register_forward_hook(lambda module, _, h: h + torch.randn_like(h))
        streamer = MicroBatchStreamer(model, outputs_loss, 16)
        run = partial(streamer.backward, {"input_ids": TOKENS, "labels": TOKENS})
    else:
        streamer = MicroBatchStreamer(make_model(), tokens, 16)

        def run():
            streamer.backward(iter([(X[i : i + 1], LABELS[i : i + 1]) for i in range(3)]))

    with pytest.warns(RuntimeWarning, match="could not check") as caught:
        run()
    assert len(caught) == 1
    run()


def test_a_check_warns_of_no_shapes():
    """A hook's features are the last micro-batch's when the check computes the first loss anew."""
    model, kept = make_model(), []
    model[0].register_forward_hook(lambda _module, _inputs, features: kept.append(features))
    streamer = MicroBatchStreamer(model, lambda o, t: F.mse_loss(kept[-1][:, :4], t), 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        streamer.backward(X, VALUES)
    assert not caught


@pytest.mark.parametrize("inputs", [{"x": X}, [X, LABELS]])
def test_how_a_model_is_called_is_explained(inputs):
    with pytest.raises(TypeError) as error:
        MicroBatchStreamer(make_model(), outputs_loss, 16).backward(inputs)
    assert "positional arguments, a mapping as keyword" in error.value.__notes__[0]
