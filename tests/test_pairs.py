"""Every ordered pair of the five methods: it works, it is refused, or it means nothing."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from repro import paths
from repro.adaptive import DataParallel, FixedBatch, ScheduledBatch, ThetaController, set_lr
from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, Share, Stage, train_dual_batch
from repro.mbs import MicroBatchError, MicroBatchStreamer
from repro.measure import TimeModel
from repro.microconv import NotTunableError, TunedConv2d, tune
from repro.outofcore import OutOfCore

METHODS = {
    "mbs": "Micro-Batch Streaming",
    "dualbatch": "dual-batch learning",
    "adaptive": "θ-adaptive batch size",
    "outofcore": "out-of-core training",
    "microconv": "tuned convolutions",
}
SAMPLES, BATCH, MICRO, BUDGET = 48, 16, 6, 80_000
LOSS = functional.cross_entropy
NOTHING = contextlib.nullcontext()


class Norm:
    """Whether networks normalise by their batch, as most do."""

    used = False


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6) if Norm.used else nn.Identity(),
        nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


_generator = torch.Generator().manual_seed(1)
IMAGES = torch.randn(SAMPLES, 2, 8, 8, generator=_generator)
LABELS = torch.randint(3, (SAMPLES,), generator=_generator)


def mini_batches(size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(IMAGES.split(size), LABELS.split(size), strict=True)


def tuned(model: nn.Module | None = None) -> nn.Module:
    """Return a network whose convolutions run by an algorithm that torch would not take."""
    model = model or network()
    tune(model, IMAGES[:BATCH], algorithms=["torch:im2col"], policy="undivided", strict=False,
         min_gain=-float("inf"), cache=None)  # fmt: skip
    assert any(isinstance(part, TunedConv2d) for part in model.modules())
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def cost(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = torch.stack([LOSS(model(some), wanted) for some, wanted in mini_batches()]).mean()
    model.train()
    return float(loss)


Passes = Callable[[Tensor, Tensor], Any]
Way = Callable[[nn.Module], Passes]


def ordinary(model: nn.Module) -> Passes:
    return lambda inputs, targets: LOSS(model(inputs), targets).backward()


def streamed(model: nn.Module) -> Passes:
    return MicroBatchStreamer(model, LOSS, MICRO).backward


def by_hand(model: nn.Module) -> Passes:
    """Return what MBS stands for: micro-batches one after another, with BatchNorm of each."""

    def passes(inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        count = -(-len(inputs) // MICRO)  # of sizes that differ by one sample at most
        parts = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for some, wanted in parts:
            loss = LOSS(model(some), wanted) * (len(some) / len(inputs))
            loss.backward()
            total += loss.detach()
        return total

    return passes


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(model: nn.Module, passes: Way = ordinary, block: Any = NOTHING) -> dict[str, Tensor]:
    """Train for two epochs in a loop of one's own, within a block or none."""
    optimizer, compute = optimizer_of(model), passes(model)
    with block:
        for inputs, targets in [*mini_batches()] * 2:
            optimizer.zero_grad()
            compute(inputs, targets)
            optimizer.step()
    return weights(model)


def controlled(model: nn.Module, passes: Way = ordinary, block: Any = NOTHING) -> dict[str, Tensor]:
    """Train for as long as a controller that grows the batch says."""
    optimizer, compute = optimizer_of(model), passes(model)
    controller, sizes = ThetaController(8, 16, 0.1, interval=1), set()
    with block:
        step = controller.observe(cost(model), model.parameters())
        while step.epoch <= 3:
            sizes.add(step.batch_size)
            set_lr(optimizer, step.lr)
            for inputs, targets in mini_batches(step.batch_size):
                optimizer.zero_grad()
                compute(inputs, targets)
                optimizer.step()
            step = controller.observe(cost(model), model.parameters())
    assert len(sizes) > 1  # it grew
    return weights(model)


def parallel(model: nn.Module, block: Any = NOTHING) -> dict[str, Tensor]:
    trainer = DataParallel(model, LOSS, optimizer_of(model), micro_batch=MICRO)
    with block:
        for inputs, targets in mini_batches():
            trainer.step(inputs, targets)
        trainer.finish()
    return weights(model)


PLAN = DualBatchPlan.solve(TimeModel(1e-3, 1e-2), 1.1, 1, 1, BATCH, SAMPLES)


def dual(make: Callable[[], nn.Module] = network, lr: float = 0.1, **given: Any) -> Any:
    schedule = CyclicProgressiveSchedule([Stage(given.pop("epochs", 2), lr)])
    data, plan = given.pop("data", (IMAGES, LABELS)), given.pop("plan", PLAN)
    return train_dual_batch(make, data, plan, schedule, **given).state


def block(budget: int = BUDGET) -> OutOfCore:
    return OutOfCore(budget, device="cpu", window_bytes=None)


def same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    before = network().state_dict()
    assert any((before[name] - value).abs().max() > 1e-3 for name, value in state.items())


# ---- what works: outer, then inner


def mbs_outofcore() -> None:
    """A block in each forward pass ends with it: right, and nothing is saved.

    The micro-batches are slices of a mini-batch, of which the block says that it does not count.
    """
    warnings.filterwarnings("ignore", "tensors of .* are used by slices alone")
    blocks = []

    class Within(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            blocks.append(block())
            with blocks[-1]:
                return super().forward(inputs)

    same(trained(Within(*network()), streamed), trained(network(), by_hand))
    # Of what a micro-batch saves for its backward pass, none is away when that begins.
    assert blocks and all(one.statistics.bytes_out <= one.statistics.bytes_in for one in blocks)


def dualbatch_mbs() -> None:
    def passes(model: nn.Module, loss_fn: Any) -> Any:
        streamer = MicroBatchStreamer(model, loss_fn, MICRO)
        return lambda inputs, targets: streamer.backward(inputs, targets).loss

    same(dual(passes_fn=passes), dual(passes_fn=lambda model, _: by_hand(model)))


def dualbatch_outofcore() -> None:
    moved = []

    def passes(model: nn.Module, loss_fn: Any) -> Any:
        def compute(inputs: Tensor, targets: Tensor) -> Tensor:
            with block() as within:
                loss = loss_fn(model(inputs), targets)
                loss.backward()
            moved.append(within.statistics.bytes_out)
            return loss.detach()

        return compute

    same(dual(passes_fn=passes), dual())
    assert max(moved) > 0


def adaptive_dualbatch() -> None:
    """The controller's epochs are trainings of one epoch, each from the weights of the last."""

    def epoch_from(model: nn.Module, size: int, lr: float, seed: int) -> None:
        def again(state: dict[str, Tensor]) -> nn.Module:
            fresh = network()
            fresh.load_state_dict(state)
            return fresh

        plan = DualBatchPlan.solve(TimeModel(1e-3, 1e-2), 1.1, 1, 1, size, SAMPLES)
        make = partial(again, weights(model))
        model.load_state_dict(dual(make, lr, plan=plan, epochs=1, seed=seed))

    model, settings = network(), []
    controller = ScheduledBatch(8, 16, 0.1, every=1)
    step = controller.observe(cost(model), model.parameters())
    while step.epoch <= 3:
        settings.append((step.batch_size, step.lr, step.epoch))
        epoch_from(model, *settings[-1])
        step = controller.observe(cost(model), model.parameters())
    assert len({size for size, _, _ in settings}) > 1
    alone = network()
    for setting in settings:
        epoch_from(alone, *setting)
    same(weights(model), weights(alone))


def adaptive_outofcore() -> None:
    """A block around each mini-batch's passes, and around those of DataParallel's step."""
    moved = []

    def within(model: nn.Module) -> Passes:
        def compute(inputs: Tensor, targets: Tensor) -> None:
            with block() as one:
                LOSS(model(inputs), targets).backward()
            moved.append(one.statistics.bytes_out)

        return compute

    same(controlled(network(), within), controlled(network()))
    assert max(moved) > 0


def adaptive_microconv() -> None:
    same(controlled(tuned()), controlled(network()))
    same(parallel(tuned()), parallel(network()))


def outofcore_adaptive() -> None:
    inside(lambda within: controlled(network(), block=within), controlled(network()))
    same(parallel(network(), block()), parallel(network()))


# ---- what is refused


def dualbatch_adaptive() -> None:
    """The plan says how large batches are, and the schedule the rate: nothing inside changes it."""
    controller = ThetaController(4, 8, 0.1)

    def data(share: Share) -> Iterator[tuple[Tensor, Tensor]]:
        for index in share.indices.split(controller.initial_batch):
            yield IMAGES[index], LABELS[index]

    with pytest.raises(ValueError, match="goes around the training: a plan for each"):
        dual(data=data)


def microconv_outofcore() -> None:
    """Tuning within a block would measure what the block takes."""
    before = network()
    with block(), pytest.raises(NotTunableError, match=r"Call tune\(\) before, outside of OutOf"):
        tuned(before)
    assert not any(isinstance(part, TunedConv2d) for part in before.modules())


# ---- what means nothing: an error says what goes into which


def mbs_dualbatch() -> None:
    with pytest.raises(MicroBatchError, match="stream inside θ-adaptive or dual-batch"):
        MicroBatchStreamer(train_dual_batch, LOSS, MICRO)


def mbs_adaptive() -> None:
    model = network()
    parallel = DataParallel(model, LOSS, optimizer_of(model))
    for inner in (parallel, FixedBatch(8, 0.1), ThetaController(8, 16, 0.1)):
        with pytest.raises(MicroBatchError, match="stream inside θ-adaptive or dual-batch"):
            MicroBatchStreamer(inner, LOSS, MICRO)
    # The other way round the micro-batches are DataParallel's own.
    with pytest.raises(ValueError, match="and micro_batch= to compute a mini-batch in parts"):
        DataParallel(MicroBatchStreamer(model, LOSS, MICRO), LOSS, optimizer_of(model))


def not_tuned(inner: Any) -> None:
    with pytest.raises(NotTunableError, match="tune the model first, and give that to whatever"):
        tune(inner, IMAGES[:BATCH], cache=None)


def microconv_adaptive() -> None:
    model = network()
    not_tuned(ThetaController(8, 16, 0.1))
    not_tuned(DataParallel(model, LOSS, optimizer_of(model)))


def inside(run: Callable[[OutOfCore], dict[str, Tensor]], expected: dict[str, Tensor],
           budget: int = BUDGET) -> None:  # fmt: skip
    """A training within a block has the weights of one without, and something was away."""
    within = block(budget)
    same(run(within), expected)
    assert within.statistics.bytes_out > 0


def dual_within(within: OutOfCore) -> dict[str, Tensor]:
    with within:
        return dual()


WORKS: dict[str, Callable[[], None]] = {
    "mbs outofcore": mbs_outofcore,
    "mbs microconv": lambda: same(trained(tuned(), streamed), trained(network(), by_hand)),
    "dualbatch mbs": dualbatch_mbs,
    "dualbatch outofcore": dualbatch_outofcore,
    "dualbatch microconv": lambda: same(dual(tuned), dual()),
    "adaptive mbs": lambda: same(controlled(network(), streamed), controlled(network(), by_hand)),
    "adaptive dualbatch": adaptive_dualbatch,
    "adaptive outofcore": adaptive_outofcore,
    "adaptive microconv": adaptive_microconv,
    "outofcore mbs": lambda: inside(  # of a micro-batch there is less
        partial(trained, network(), streamed), trained(network(), by_hand), BUDGET // 2
    ),
    "outofcore dualbatch": lambda: inside(dual_within, dual()),
    "outofcore adaptive": outofcore_adaptive,
    "outofcore microconv": lambda: inside(partial(trained, tuned(), ordinary), trained(network())),
}
REFUSED = {"dualbatch adaptive": dualbatch_adaptive, "microconv outofcore": microconv_outofcore}
MEANINGLESS = {
    "mbs dualbatch": mbs_dualbatch,
    "mbs adaptive": mbs_adaptive,
    "microconv mbs": lambda: not_tuned(MicroBatchStreamer(network(), LOSS, MICRO)),
    "microconv dualbatch": lambda: not_tuned(train_dual_batch),
    "microconv adaptive": microconv_adaptive,
}
PAIRS = {
    tuple(pair.split()): (outcome, check)
    for outcome, checks in (("works", WORKS), ("refused", REFUSED), ("meaningless", MEANINGLESS))
    for pair, check in checks.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True], ids=["", "BatchNorm"])
@pytest.mark.filterwarnings("ignore:tensors of .* bytes are used by slices")
@pytest.mark.parametrize("pair", PAIRS, ids="_".join)
def test_pair(pair, norm, monkeypatch):
    monkeypatch.setattr(Norm, "used", norm)
    PAIRS[pair][1]()


def test_the_table_says_what_the_tests_found():
    """One row for each ordered pair, with the outcome that its test stands for."""
    page = paths.ROOT / "docs" / "combining.md"
    if not page.exists():
        pytest.skip("not a checkout")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| \*\*(\w+)\*\* \|", page.read_text("utf-8"), re.M)
    names = {title: key for key, title in METHODS.items()}
    stated = {(names[outer], names[inner]): outcome for outer, inner, outcome in rows}
    pairs = {(outer, inner) for outer in METHODS for inner in METHODS if outer != inner}
    assert stated == {pair: outcome for pair, (outcome, _) in PAIRS.items()}
    assert stated.keys() == pairs and len(rows) == len(pairs)
