"""What is foretold, beside what small networks take on a CPU."""

import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _disable_current_modes

from repro.advise import AdviceError, Speed, Workload, advise, checkpoint_blocks, predict, probe
from repro.advise.snippets import snippet
from repro.mbs import MicroBatchStreamer
from repro.measure import MemoryMeter
from repro.models import build
from repro.outofcore import BudgetTooSmall, OutOfCore, record

BATCH, MICRO, PLENTY = 12, 4, 1 << 40


class Transformer(nn.Module):
    """No convolution, no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        layers = (nn.TransformerEncoderLayer(16, 2, 64, 0.0, batch_first=True) for _ in range(4))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))).transpose(1, 2)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, 16, 16), torch.arange(3)


def masks() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, 16, 16), torch.ones(3, 1, 16, 16)


def tokens() -> tuple[Tensor, Tensor]:
    both = torch.randint(32, (3, 25))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def rows() -> tuple[Tensor, Tensor]:
    return torch.eye(3, 4), torch.arange(3)


def bank(outputs: Tensor, targets: Tensor) -> Tensor:
    """Similarities with the batch and with 32 others, as of contrastive losses with a memory."""
    kept = torch.ones(32, 4)
    return ce(torch.cat([outputs @ outputs.T, outputs @ kept.T], 1), targets)


def others(outputs: Tensor, targets: Tensor) -> Tensor:
    """Similarities with all other samples: a square without its diagonal."""
    n = len(targets)
    apart = (outputs @ outputs.T).flatten()[1:].view(n - 1, n + 1)[:, :-1]
    return ce(outputs, targets) + apart.exp().mean()


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of three quarters of the samples: of 2, 4, 6, 8 these are 1, 3, 4, 6."""
    return ce(outputs, targets, reduction="none").topk(int(0.75 * len(targets))).values.mean()


bce, ce = functional.binary_cross_entropy_with_logits, functional.cross_entropy
NETWORKS = {
    "ResNet": (partial(build, "resnet18", width=8, num_classes=10), images, ce),
    "DenseNet": (partial(build, "densenet40", growth=4), images, ce),
    "U-Net": (partial(build, "unet", width=4, depth=2), masks, bce),
    "transformer": (Transformer, tokens, ce),
    "similarities": (lambda: nn.Linear(4, 4), rows, lambda o, t: ce(o @ o.T, t)),
    "bank": (lambda: nn.Linear(4, 4), rows, bank),
    "others": (lambda: nn.Linear(4, 4), rows, others),
    "hardest": (lambda: nn.Linear(4, 4), rows, hardest),
    "neighbours": (lambda: nn.Linear(4, 4), rows, lambda o, t: ce(o, t) + o.diff(dim=0).norm()),
}


@cache
def workload(name: str) -> Workload:
    make, example, loss_fn = NETWORKS[name]
    return Workload.of(make(), example=example(), loss_fn=loss_fn)


def to_host(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return tensor.detach().clone()


def measured(name: str, method: str) -> int:
    """Return the peak of two steps on a CPU, without the mini-batch."""
    parts = workload(name).built(BATCH, "cpu", checkpointing=method == "checkpointing")
    parts.loss_fn = loss_fn = NETWORKS[name][2]
    passes = step = parts.step
    if method == "save_on_cpu":

        def passes() -> None:
            with torch.autograd.graph.saved_tensors_hooks(to_host, torch.clone):
                loss = parts.forward()
            loss.backward()

    elif method == "mbs":
        streamer = MicroBatchStreamer(parts.model, loss_fn, MICRO, check="off")
        passes = partial(streamer.backward, parts.inputs, parts.targets)
    elif method == "accumulation":

        def passes() -> None:
            pairs = zip(parts.inputs.split(MICRO), parts.targets.split(MICRO), strict=True)
            for some, wanted in pairs:
                (loss_fn(parts.model(some), wanted) / 3).backward()

    with MemoryMeter("cpu", resident=parts.model) as meter:
        for _ in range(2):
            parts.optimizer.zero_grad(set_to_none=True)
            passes()
            if passes is not step:
                parts.optimizer.step()
    return meter.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("ResNet", m) for m in ("undivided", "accumulation", "mbs", "checkpointing")),
        ("DenseNet", "undivided"),
        *(("U-Net", m) for m in ("undivided", "save_on_cpu")),
        *((name, "undivided") for name in ("similarities", "bank", "others", "neighbours")),
        *(("transformer", m) for m in ("mbs", "checkpointing", "save_on_cpu")),
    ],
)
def test_peaks_are_those_of_small_networks(name, method):
    peak = measured(name, method)
    told = predict(workload(name), method, BATCH, int(1.001 * peak), simulated=True)
    assert told.fits and told.peak_bytes == pytest.approx(peak, rel=1e-3)
    assert told.settings.get("micro_batch", MICRO) == MICRO


def test_autocast_of_another_device_is_that_of_the_cpu():
    class Model(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.device = device
            self.layers = nn.Sequential(
                nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3), nn.Flatten(), nn.Linear(16, 3)
            )

        def forward(self, x):
            with torch.autocast(self.device, torch.bfloat16) if self.device else nullcontext():
                return self.layers(x)

    def peak(device):
        example = torch.rand(4, 3, 6, 6), torch.zeros(4, dtype=torch.long)
        loss_fn = lambda y, t: functional.cross_entropy(y.float(), t)  # noqa: E731
        advice = advise(Model(device), 64, 1 << 30, example=example, loss_fn=loss_fn, device="H100")
        return next(row.peak_bytes for row in advice.rows if row.method == "undivided")

    assert peak("cpu") == peak("cuda") < peak(None)


def test_a_size_that_grows_in_steps_is_taken_for_a_line():
    peak = measured("hardest", "undivided")
    told = predict(workload("hardest"), "undivided", BATCH, PLENTY, simulated=True)
    assert told.peak_bytes == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ResNet", "transformer"])
def test_what_fits_is_told_to_the_sample(name):
    """Also of what streams and recomputes, and for a mini-batch that counts."""
    own = workload(name)
    for method in ("undivided", "checkpointing", "save_on_cpu"):
        for simulated in (True, False):
            foretell = partial(predict, own, method, simulated=simulated, device="cuda")
            limit = foretell(BATCH, PLENTY).peak_bytes
            there, short = foretell(BATCH, limit), foretell(BATCH, limit - 1)
            assert there.fits and there.largest == BATCH
            assert not short.fits and short.largest == BATCH - 1
            assert not foretell(BATCH + 1, limit).fits
    roomy = predict(own, "mbs", 50, predict(own, "undivided", 9, PLENTY).peak_bytes)
    limit, size = roomy.peak_bytes, roomy.settings["micro_batch"]
    assert predict(own, "mbs", 50, limit).settings == {"micro_batch": size}
    assert predict(own, "mbs", 50, limit - 1).settings["micro_batch"] < size


def test_out_of_core_runs_at_the_budget_that_is_told_and_not_below():
    own = workload("transformer")
    needed = predict(own, "outofcore", BATCH, 1000, simulated=True)
    assert not needed.fits and needed.slowdown is None and "one operation alone" in needed.reason
    least = needed.peak_bytes
    told = predict(own, "outofcore", BATCH, least, simulated=True)
    assert told.fits and told.peak_bytes <= least and told.host_bytes > 0
    assert 1 <= told.bound <= told.slowdown
    for budget in (least, least - 1):
        parts = own.built(BATCH, "cpu")
        refuses = nullcontext() if budget == least else pytest.raises(BudgetTooSmall)
        kept = {"window_bytes": None, "exclude": (parts.inputs, parts.targets)}
        with refuses, OutOfCore(budget, device="cpu", **kept) as block:
            for _ in range(4):
                parts.step()
        assert block.statistics.peak_bytes <= budget


def test_on_a_real_cpu_swapping_to_its_own_memory_gains_nothing():
    own = workload("ResNet")
    undivided = predict(own, "undivided", 8, PLENTY).peak_bytes
    for method in ("outofcore", "mbs_in_outofcore"):
        there, short = (predict(own, method, 8, limit) for limit in (undivided, undivided - 1))
        assert there.fits and there.host_bytes == 0
        assert not short.fits and "nothing is gained" in short.reason
        assert short.peak_bytes >= undivided
    assert predict(own, "outofcore_file", 8, undivided - 1).fits


def test_within_a_block_micro_batches_are_planned_as_one_iteration():
    own = workload("ResNet")
    limit = predict(own, "undivided", 4, PLENTY).peak_bytes
    told = predict(own, "mbs_in_outofcore", 200, limit, simulated=True)
    micro = told.settings["micro_batch"]
    assert told.fits and 1 < micro < 200 and told.host_bytes > 0
    assert told.peak_bytes <= limit
    alone = predict(own, "mbs_in_outofcore", micro, PLENTY)
    assert alone.host_bytes == 0 and alone.settings["micro_batch"] == micro
    # So many passes, one update, sums of gradients, and copies.
    assert told.seconds / alone.seconds > 0.7 * 200 / micro


def fixed_speed(**few: float) -> Speed:
    own, phases = Speed.of("cpu"), {"forward": 2.0, "backward": 4.0, "update": 1.0} | few
    measured = {2: phases, 8: {"forward": 8.0, "backward": 16.0, "update": 1.0}}
    return Speed(own.device, "made up", own.link, seen_s=0.0, measured=measured)


def test_seconds_are_those_that_were_measured():
    """Between and beyond measured sizes on lines; the update is whatever the batch."""
    own, speed = workload("ResNet"), fixed_speed()
    tight = predict(own, "undivided", 10, PLENTY).peak_bytes

    def told(method: str, batch: int, speed: Speed = speed, **options: Any) -> Any:
        memory = tight if batch == 32 and method != "undivided" else PLENTY
        return predict(own, method, batch, memory, speed, **options)

    for batch, seconds in ((2, 7), (8, 25), (5, 16), (32, 97)):
        assert told("undivided", batch).seconds == pytest.approx(seconds)
        assert told("undivided", batch).slowdown == 1
    divided = told("accumulation", 32)
    assert divided.settings["micro_batch"] < 10
    assert divided.seconds == pytest.approx(3 * 32 + 1, rel=1e-2)
    assert told("mbs", 32, fixed_speed(forward=6.0, backward=12.0)).slowdown > 1.1
    recomputed = told("checkpointing", 8)
    assert 25 + 4 < recomputed.seconds <= 25 + 8 + 1e-6  # at most the forward pass once more
    plenty = told("outofcore", 8)
    assert plenty.seconds == pytest.approx(25) and "nothing has to be swapped" in plenty.reason
    # A micro-batch of MBS takes what was measured of it; a device hides the host's time.
    speed = replace(speed, streamed_s=(3.0, 1.0), deferred_s=(3.0, 2.0))
    for method, each in (("mbs", 1), ("mbs_deferred", 2)):
        streamed = told(method, 32, speed)
        count = -(-32 // streamed.settings["micro_batch"])
        assert streamed.seconds == pytest.approx(3 * 32 + 1 + 3 + (count - 1) * each)
    assert told("mbs", 32, speed, device="cuda").seconds == pytest.approx(divided.seconds, rel=1e-2)


@pytest.mark.slow
def test_blocks_are_the_outermost_classes_that_come_again():
    resnet = build("resnet18", width=4)
    with pytest.raises(AdviceError, match="no module of Nothing: choose of"):
        checkpoint_blocks(resnet, ["Nothing"])
    names = [name for name, _ in resnet.named_parameters()]
    checkpoint_blocks(resnet, "ResidualBlock")
    assert [name for name, _ in resnet.named_parameters()] == names


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "faster"}, "choose undivided"),
        ({"batch": 0}, "batch is 0"),
        ({"memory_bytes": 0.5}, "memory_bytes is 0.5"),
        (3, "give a model, or its name"),
        ("resnet1", "is not known: choose one of"),
        (nn.LazyLinear(3), "lazy"),
        (nn.Linear(3, 3), "does not make class scores of images"),
    ],
)
def test_refused(given, told, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)  # to caplog
    with pytest.raises(AdviceError, match=told):
        if isinstance(given, dict):
            asked = {"method": "undivided", "batch": 4, "memory_bytes": 10, **given}
            predict(workload("transformer"), **asked)
        else:
            Workload.of(given)
    assert not caplog.records  # torch's own, with a traceback


@pytest.mark.parametrize(
    ("decide", "told"),
    [
        (lambda x: x * (2 if x.sum() > 0 else 1), r"x\.sum\(\) > 0"),
        (lambda x: x[x[:, 0] > 0], r"x\[x\[:, 0\] > 0\]"),
        (lambda x: x * float(x.max()), r"float\(x\.max\(\)\)"),
    ],
)
def test_a_step_that_depends_on_values_is_refused_with_its_line(decide, told):
    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return decide(super().forward(x))

    example = torch.randn(2, 4), torch.arange(2)
    own = Workload.of(Deciding(4, 4), example=example)
    with pytest.raises(AdviceError, match=rf"test_predicting\.py:\d+, `.*{told}") as refused:
        predict(own, "undivided", 4, PLENTY)
    assert "must not depend on values" in str(refused.value)
    triplets = lambda o, t: ce(o, t) + (o[:, None, None] * o[:, None] * o).sum()  # noqa: E731
    cubes = Workload.of(nn.Linear(4, 4), example=example, loss_fn=triplets)
    with pytest.raises(AdviceError, match="grows faster than the square of the batch size"):
        predict(cubes, "undivided", 4, PLENTY)
    unequal = Workload.of(nn.Linear(4, 4), example=(torch.randn(3, 4), example[1]))
    with pytest.raises(AdviceError, match=r"^the example's tensors have \[2, 3\] samples"):
        predict(unequal, "undivided", 4, PLENTY)


class Masked(nn.Module):
    """Asks for values of its mask, as language models do to leave out one that masks nothing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.head = how, nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor, mask: Tensor, count: Tensor, scale: Tensor) -> Tensor:
        x, places = self.embed(tokens) * scale, torch.arange(tokens.shape[1])
        needless = {
            "count": lambda: count < mask.max(),
            "all": lambda: mask.all(),
            "any": lambda: not (mask[:, places] == 0).any(),
            "places": lambda: torch.equal(mask.cumsum(-1)[0] - 1, places),
            "lengths": lambda: mask.sum(1).min().item() == mask.shape[1],
            "parts": lambda: mask.split(24, 1)[0].bool().all().item(),
        }
        return self.head(x if needless[self.how]() else x.where(mask[..., None] > 0, 0)).mT


@pytest.mark.parametrize("how", ["count", "all", "any", "places", "lengths", "parts"])
@pytest.mark.parametrize("masked", [0, 1])
def test_conditions_on_masks_hold_as_in_the_example(how, masked):
    inputs, targets = tokens()
    mask = torch.ones_like(inputs)
    mask[:, -1] -= masked
    given = {"tokens": inputs, "mask": mask}
    given |= {"count": torch.tensor(masked), "scale": torch.tensor(0.5)}  # stay as they are
    own = Workload.of(Masked(how), example=(given, targets))
    assert ("aten.where" in {f.name for f in own.plain.small.functions}) == masked
    assert own.plain.bytes_of(own.plain.inputs, 8) == 8 * 3 * inputs[0].nbytes
    assert own.plain.alive(8).min() >= 8 * 3 * inputs[0].nbytes


class Listed(nn.Linear):
    """Holds a tensor where no module has it."""

    held = (torch.full((3,), 2.0),)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.held[0]


def test_tensors_that_the_model_does_not_have():
    """Losses and models may use them, but neither train nor change them."""
    weight, norm = torch.ones(3), nn.BatchNorm1d(3, affine=False)
    example = torch.eye(3), torch.arange(3)
    losses = partial(ce, weight=weight), lambda o, t: ce(o, t, weight)
    for loss in losses:
        own = Workload.of(Listed(3, 3), example=example, loss_fn=loss)
        assert predict(own, "mbs", BATCH, PLENTY).fits
    head = nn.Linear(3, 3)
    for loss in (lambda o, t: ce(norm(o), t), lambda o, t: ce(head(o), t)):
        with pytest.raises(AdviceError, match="trains or changes tensors that the model does not"):
            predict(Workload.of(Listed(3, 3), example=example, loss_fn=loss), "mbs", 4, PLENTY)
    assert norm.num_batches_tracked == 0 and head.weight.grad is None
    head(torch.ones(3)).sum().backward()
    for model in (head, Listed(3, 3)):  # of the model itself, not of its copy, and of another
        own = Workload.of(
            model, example=example, optimizer=lambda _: torch.optim.SGD(head.parameters())
        )
        with pytest.raises(AdviceError, match="other parameters than those that it was given"):
            predict(own, "mbs", 4, PLENTY)
    assert head.weight.grad is not None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(64, 32)
        self.cell = nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True)
        self.spare = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(tokens))[0]).transpose(1, 2)


def test_recurrent_networks_and_layers_that_no_step_uses():
    torch.manual_seed(0)
    example = tuple(part[:, :16] for part in tokens())
    own = replace(Workload.of(Recurrent(), example=example, optimizer="adam"), batch=BATCH)
    told, parts = predict(own, "undivided", BATCH, PLENTY), own.built(BATCH, "cpu")
    with OutOfCore(PLENTY, model=parts.model, optimizer=parts.optimizer) as block:
        for _ in range(3):
            parts.step()
    assert told.peak_bytes == block.statistics.peak_bytes
    spare = sum(t.nbytes for t in parts.model.spare.state_dict().values())
    assert spare < predict(own, "undivided", 1, PLENTY).peak_bytes
    tight = predict(own, "outofcore", BATCH, told.peak_bytes // 2, simulated=True)
    assert tight.fits and tight.host_bytes > spare


class Padded(nn.Module):
    """Pads a batch to a multiple of 8 samples, or computes it in parts of 8."""

    def __init__(self, in_parts):
        super().__init__()
        self.net, self.in_parts = nn.Sequential(nn.Linear(32, 64), nn.ReLU()), in_parts

    def forward(self, x):
        if self.in_parts:
            return torch.cat([self.net(part) for part in x.split(8)])
        return self.net(functional.pad(x, (0, 0, 0, -len(x) % 8)))[: len(x)]


def test_a_model_that_pads_its_batch():
    example = torch.randn(8, 32), torch.randint(5, (8,))
    for limit in (2**20, 2**24):
        told = advise(Padded(False), 1001, limit, example=example, probe_seconds=0)
        parts = told.workload.built(1001, "cpu")
        parts.step()
        with MemoryMeter("cpu", resident=(parts.model, parts.inputs, parts.targets)) as meter:
            for _ in range(2):
                parts.step()
        assert told["undivided"].peak_bytes == pytest.approx(meter.peak_bytes, rel=0.01)
        assert told["undivided"].fits == (meter.peak_bytes <= limit)
    with pytest.raises(AdviceError, match="2 and 1001 samples run different operations"):
        advise(Padded(True), 1001, 2**24, example=example)


class Asking(nn.Linear):
    """Takes tensors without content for an export, as transformers does, and makes a mask then."""

    by_values = False

    def forward(self, x):
        asked = sys.modules["transformers.utils.import_utils"].is_fake_tensor(x)
        if not asked and (not self.by_values or x.sum() > 0):
            return super().forward(x)
        return super().forward(x) * torch.ones(len(x), 1000).cos()[:, :1]


def test_what_transformers_does_without_content_alone_is_not_predicted(monkeypatch):
    hf = SimpleNamespace(is_fake_tensor=lambda x: isinstance(x, FakeTensor))
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", hf)
    model = Asking(32, 5)
    given = {"example": (torch.randn(8, 32), torch.randint(5, (8,))), "probe_seconds": 0}
    peak = advise(model, 64, 2**24, **given)["undivided"].peak_bytes
    plain = nn.Linear(32, 5)
    assert peak == advise(plain, 64, 2**24, **given)["undivided"].peak_bytes
    model.by_values = True  # the step as it was exported is better than none
    assert advise(model, 64, 2**24, **given)["undivided"].peak_bytes > peak + 64 * 1000 * 4


class Several(nn.Conv2d):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = super().forward(x).mean((2, 3))
        return {"out": scores, "aux": 2 * scores}


@pytest.mark.slow
def test_models_of_several_outputs_and_such_as_compute_when_they_are_made():
    own = Workload.of(Several(3, 5, 3), image=8, loss_fn=nn.CrossEntropyLoss(torch.ones(5)))
    parts = own.built(2, "cpu")
    wanted = sum(ce(output, parts.targets) for output in parts.model(parts.inputs).values())
    assert parts.forward() == wanted and predict(own, "mbs", 9, PLENTY).fits
    assert Workload.of("torchvision/regnet_y_400mf", image=32).samples(2)[0].shape == (2, 3, 32, 32)


def test_optimizers_update_lists_on_accelerators():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    lists = partial(torch.optim.Adam, foreach=True)

    def told(optimizer: Any, device: str) -> int:
        own = Workload.of(model, example=(torch.randn(2, 32), torch.arange(2)), optimizer=optimizer)
        return predict(own, "undivided", 4, PLENTY, device=device).peak_bytes

    assert told("adam", "cuda") == told(lists, "cpu") > told("adam", "cpu")


def test_sparse_gradients_are_refused():
    for device in ("cpu", "cuda"):
        rows = torch.arange(3)
        own = Workload.of(nn.Embedding(3, 4, sparse=True), example=(rows, rows), optimizer="sgd")
        with pytest.raises(AdviceError, match="sparse"):
            predict(own, "undivided", 4, PLENTY, device=device)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_models_are_refused():
    with pytest.raises(AdviceError, match="scripted"):
        Workload.of(torch.jit.script(nn.Linear(3, 3)))


@pytest.mark.parametrize("form", [Tensor.to_sparse, lambda eye: TwoTensor(eye, eye.clone())])
def test_sparse_and_wrapping_buffers_are_refused(form):
    model = nn.Linear(4, 4)
    model.register_buffer("adjacency", form(torch.eye(4)))
    own = Workload.of(model, example=(torch.ones(4, 4), torch.arange(4)))
    with pytest.raises(AdviceError, match=r"the model has a T.* of layout"):
        predict(own, "undivided", 4, PLENTY)


class Last(nn.Linear):
    """Reads the last step of each sample, a slice, alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, -1])


def test_a_batch_counts_whole_where_slices_are_read():
    model, x, y = Last(64, 2), torch.randn(256, 50, 64), torch.randint(2, (256,))
    own = Workload.of(model, example=(x[:2], y[:2]), optimizer="sgd")
    parts = own.built(256, "cpu")
    with MemoryMeter("cpu", resident=(parts.model, parts.inputs, parts.targets)) as meter:
        parts.step()
        parts.step()
    told = predict(own, "undivided", 256, PLENTY).peak_bytes
    assert told == pytest.approx(meter.peak_bytes, rel=1e-3) and told > x.nbytes


class Branches(nn.Module):
    """Branches of one tensor, whose gradients autograd adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 64), nn.Linear(64, 3)
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        return self.head(sum(branch(h) for branch in self.branches))


def test_gradients_are_added_in_place_on_an_accelerator():
    model, x, y = Branches(), torch.randn(512, 4), torch.randint(3, (512,))
    own = Workload.of(model, example=(x[:2], y[:2]), optimizer="sgd")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        ce(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    real = record(step, warmup=2, model=model, optimizer=optimizer).peak_bytes
    told, on_cpu = (
        predict(own, "undivided", 512, PLENTY, device=device).peak_bytes
        for device in ("cuda", "cpu")
    )
    assert told == real < on_cpu  # where a meter looks on


def test_accumulation_takes_parts_alike_but_for_one_sample():
    example = torch.randn(2, 8), torch.arange(2)
    told = predict(Workload.of(nn.Linear(8, 2), example=example), "accumulation", 10, PLENTY)
    sizes: list[int] = []
    model = nn.Linear(8, 2)
    model.register_forward_hook(lambda _, given, out: sizes.append(len(given[0])))
    optimizer, loader = torch.optim.SGD(model.parameters()), [(torch.randn(10, 8), torch.ones(10))]
    names = {"model": model, "optimizer": optimizer, "loader": loader, "device": "cpu"}
    loss_fn = lambda o, t: (o.sum(1) - t).square().mean()  # noqa: E731
    exec(snippet(replace(told, settings={"micro_batch": 3})), names | {"loss_fn": loss_fn})
    assert sizes == [3, 3, 2, 2]


def test_an_accelerators_budget_leaves_room_for_kernels():
    own = workload("ResNet")
    limit = predict(own, "undivided", 8, PLENTY).peak_bytes
    here, there = (predict(own, "outofcore", 16, limit, device=d) for d in ("cpu", "cuda"))
    assert here.settings["budget_bytes"] == limit
    assert there.settings["budget_bytes"] == int(0.8 * limit)
    batches = there.largest, there.largest + 1
    fits = [predict(own, "outofcore", batch, limit, device="cuda") for batch in batches]
    assert fits[0].fits and not fits[1].fits


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_mbs_refuses_does_not_fit_by_it():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 1))
    for shape, fits in (((2, 1), True), ((2,), False)):  # each sample against every other
        example = torch.randn(2, 3, 2, 2), torch.rand(shape)
        own = Workload.of(model, example=example, loss_fn=nn.MSELoss())
        speed = probe(own, "cpu", 4, PLENTY, 60.0)
        for method in ("mbs", "mbs_deferred", "mbs_in_outofcore"):
            told = predict(own, method, 4, PLENTY, speed)
            assert told.fits is fits and ("MBS refuses it" in told.reason) is not fits
            assert (snippet(told) == "") is not fits
