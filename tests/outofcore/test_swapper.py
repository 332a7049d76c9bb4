import io
import pickle
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from ooc_trainings import AMPLE, MIB, same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from repro.models import resnet20, unet
from repro.models.densenet import DenseNet
from repro.outofcore import BudgetTooSmall, OutOfCore, operations, record
from repro.outofcore.host import OUT, HostStore
from repro.outofcore.residency import Residency


class InPlaceAndViews(nn.Module):
    """Slices, strided views, in-place changes, an expanded tensor, dropout and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.hidden = nn.Linear(16 * 8 * 8, 32)
        self.last = nn.Linear(32, 10)
        self.mix = nn.Parameter(torch.randn(10, 10) * 0.1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        maps = F.relu_(self.norm(self.conv(x)))
        half = maps[:, ::2].clone()
        half.add_(maps[:, 1::2])
        half[:, :4].mul_(0.5)
        both = torch.cat([half, half.flip(2)], 1).transpose(2, 3).contiguous()
        hidden = F.dropout(self.hidden(F.max_pool2d(both, 2).view(x.size(0), -1)), 0.2)
        twice = self.last(hidden.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 32))
        return twice.view(x.size(0), 2, 10).sum(1) @ self.mix


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet20": resnet20,
    "densenet": lambda: DenseNet(13, 4, 10, 3),
    "unet": lambda: unet(width=4),
    "views": InPlaceAndViews,
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
}


class Training:
    """An ordinary loop over a small model, with places where a test does more."""

    block: OutOfCore

    def __init__(self, model: str = "resnet20", optimizer: str = "sgd") -> None:
        self.generator = torch.Generator().manual_seed(1)
        torch.manual_seed(0)
        self.model = MODELS[model]()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.seen: list[object] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(4, 3, 16, 16, generator=self.generator)
        return images, torch.randint(0, 10, (4,), generator=self.generator)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = self.model(images)
        return F.cross_entropy(out, labels) if out.ndim == 2 else out.square().mean()

    def loop(self, iterations: int, at=lambda training, i, where: None, batches=None) -> None:
        for i in range(iterations):
            images, labels = batches[i] if batches else self.batch()
            self.optimizer.zero_grad()
            loss = self.loss(images, labels)
            loss.backward()
            at(self, i, "backward")
            self.optimizer.step()
            self.seen.append(loss.item())
            at(self, i, "end")

    def state(self) -> list[torch.Tensor]:
        states = [t for s in self.optimizer.state_dict()["state"].values() for t in s.values()]
        grads = [p.grad for p in self.model.parameters()]
        return [*self.model.state_dict().values(), *states, *grads]


def run(budget: int | None, *at, model="resnet20", optimizer="sgd", n=5, **options) -> Training:
    training = Training(model, optimizer)
    with OutOfCore(budget, **options) if budget else nullcontext() as training.block:
        training.loop(n, *at)
    return training


def assert_same(ours: Training, plain: Training) -> None:
    assert ours.seen == plain.seen
    assert all(torch.equal(a, b) for a, b in zip(ours.state(), plain.state(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_training_is_bit_identical_at_every_budget(model):
    made = {"model": model, "optimizer": "adam"}
    plain, ample = run(None, **made), run(AMPLE, **made)
    assert_same(ample, plain)
    assert ample.block.statistics.bytes_in == ample.block.statistics.bytes_out == 0
    low, high = ample.block.trace.smallest_budget, ample.block.trace.peak_bytes
    assert low < high / 2
    for budget in (low, (low + high) // 2, high):
        ours = run(budget, **made)
        assert_same(ours, plain)
        assert ours.block.statistics.peak_bytes <= budget
        assert ours.block.statistics.replayed == 3  # not the first, nor the one after the state
        assert ours.block.plan.verify() <= budget
        if budget < high:
            assert ours.block.statistics.bytes_in > 0
    with pytest.raises(BudgetTooSmall, match="smallest feasible budget"):
        run(low // 2, **made)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["foreach", "fused"])
def test_operations_on_lists_run_in_parts(optimizer):
    # The optimizer alone touches 4 bytes × 270,000 parameters × 4 at once; a budget below that.
    budget = 2 * MIB
    assert run(AMPLE, optimizer=optimizer).block.trace.smallest_budget > budget
    ours = run(budget, optimizer=optimizer)
    assert_same(ours, run(None, optimizer=optimizer))
    assert ours.block.statistics.peak_bytes <= budget


def test_gradients_are_unscaled_in_parts():
    grads, found = [torch.full((1024,), float(i)) for i in range(8)], torch.zeros(1)
    with OutOfCore(20_000):
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(1) / 2)
    assert [grad.mean().item() for grad in grads] == [i / 2 for i in range(8)]


def test_making_room_does_not_sort_all_variables_each_time():
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(50)])
    seen = patch.object(Residency, "variables", autospec=True, side_effect=Residency.variables)
    with seen as looks, OutOfCore(budget_bytes=200_000, model=model) as block:
        model(torch.randn(64, 16)).sum().backward()
    assert block.statistics.on_demand > 40 and looks.call_count < 20


@pytest.mark.slow
def test_the_steady_state_moves_what_the_plan_says():
    low = run(AMPLE).block.trace.smallest_budget
    on_demand, moved = [], []

    def watch(training: Training, i: int, where: str) -> None:
        on_demand.append(block.statistics.on_demand)
        moved.append(block.statistics.bytes_in)

    with OutOfCore(2 * low) as block:
        Training().loop(8, watch)
    # At most the batch, which the loop lets go of late, is not as planned.
    assert on_demand[-1] - on_demand[-3] <= 2
    assert moved[-1] - moved[-3] == pytest.approx(block.plan.bytes_in, rel=0.03)
    assert block.statistics.plans <= 2


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, None])
def test_windows_and_where_swapped_out_tensors_lie(window, tmp_path):
    ours = run(2_000_000, window_bytes=window, swap_folder=tmp_path if window == 0 else None)
    assert_same(ours, run(None))
    assert ours.block.statistics.host_bytes > 0 and list(tmp_path.iterdir()) == []
    if isinstance(window, int):
        assert ours.block.plan.window_bytes == window


def clip(training: Training, i: int, where: str) -> None:
    if where == "backward" and i > 2:
        training.seen.append(nn.utils.clip_grad_norm_(training.model.parameters(), 1.0).item())


def evaluate(training: Training, i: int, where: str) -> None:
    if where == "end" and i in (3, 5):
        training.model.eval()
        with torch.no_grad():
            training.seen.append(training.model(training.batch()[0]).sum().item())
        training.model.train()


def changed_step(training: Training, i: int, where: str) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
    if where == "backward" and i >= 4:
        training.loss(*training.batch()).backward()


def save(training: Training, i: int, where: str) -> None:
    if where == "end" and i == 4:
        file = io.BytesIO()
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file)
        for values in (loaded["model"], *loaded["optimizer"]["state"].values()):
            training.seen += [v.double().sum().item() for v in values.values()]
        weight = next(training.model.parameters())
        training.seen.append(pickle.loads(pickle.dumps(weight)).sum().item())
        weight.detach().numpy()[0] += 1  # which no operation tells of
        training.seen.append(pickle.loads(pickle.dumps(weight)).sum().item())


def addresses(training: Training, i: int, where: str) -> None:
    weight = next(training.model.parameters())
    if where == "end" and i == 4:
        array = weight.detach().numpy()
        training.seen += [float(array.sum()), str(weight[0, 0]), f"{weight.sum():.4f}"]
        training.seen += weight.flatten().tolist()
        array[0] += 1  # behind everybody's back
    if where == "end" and i == 5:
        training.seen.append(weight.sum().item())


@pytest.mark.slow
@pytest.mark.parametrize("at", [clip, changed_step, evaluate, save, addresses])
def test_what_people_do_in_their_loops(at):
    plain, trace = run(None, at, n=8), run(AMPLE).block.trace
    for budget in (int(1.2 * trace.smallest_budget), (3 * trace.peak_bytes) // 4):
        ours = run(budget, at, n=8)
        assert_same(ours, plain)
        assert ours.block.statistics.peak_bytes <= budget
        assert ours.block.statistics.replayed >= 2
    if at is evaluate:
        assert ours.block.statistics.replayed == 6 and ours.block.statistics.off_order > 0
    if at is addresses:
        assert ours.block.statistics.locked_bytes == 3 * 16 * 9 * 4


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_full_disk_loses_nothing(monkeypatch, tmp_path, left):
    """Copies to the host fail from some point on; every value is still there afterwards."""
    copy, written = HostStore.copy, []

    def full(store: HostStore, direction: int, place, address: int) -> None:
        if direction == OUT:
            if len(written) >= left:
                raise OSError(28, "No space left on device")
            written.append(place)
        copy(store, direction, place, address)

    monkeypatch.setattr(HostStore, "copy", full)
    tensors: dict[int, torch.Tensor] = {}
    with OutOfCore(20_000, swap_folder=tmp_path):
        for i in range(12):
            try:
                tensors[i] = torch.full((1000,), float(i))
            except OSError as error:  # somebody goes on all the same
                assert "No space left" in str(error)
    assert 5 <= len(tensors) < 12
    for i, tensor in tensors.items():
        assert torch.equal(tensor, torch.full((1000,), float(i)))


def test_errors_of_operations_and_too_small_a_budget_lose_nothing():
    a = torch.ones(100, 100)
    with OutOfCore(100_000) as block, pytest.raises(RuntimeError, match="shapes cannot be mult"):
        a @ torch.ones(3, 3)
    assert block.statistics.peak_bytes <= 100_000
    with pytest.raises(BudgetTooSmall, match=r"aten\.mm") as caught, OutOfCore(100_000):
        a @ a.clone()
    assert caught.value.function == "function 1 (aten.mm)"
    assert caught.value.needed_bytes == 3 * 40_000 and a.sum() == 10_000


def test_steps_by_hand_and_two_optimizers():
    def make():
        makes, judges = nn.Linear(8, 64), nn.Linear(64, 1)
        first, second = (torch.optim.Adam(m.parameters()) for m in (makes, judges))

        def step() -> tuple[float, float]:
            noise = torch.randn(32, 8)
            first.zero_grad()
            loss = judges(makes(noise)).mean()
            loss.backward()
            first.step()
            second.zero_grad()
            other = judges(makes(noise).detach()).square().mean()
            other.backward()
            second.step()
            return loss.item(), other.item()

        return step, {"optimizer": (first, second)}

    assert same(20_000, make, 8).statistics.replayed >= 4
    x = torch.ones(16, 16)
    by_hand = same(20_000, lambda: lambda: (x * 2).sum().item()).statistics
    assert by_hand.iterations == 4 and by_hand.replayed >= 2


def test_what_is_left_alone():
    data, model = torch.randn(4000, 16), nn.Linear(16, 2)
    operations._said.discard("uncounted")
    told = pytest.warns(operations.OutOfCoreWarning, match="256000 bytes are used by slices")
    with told, OutOfCore(20_000) as block:
        for i in range(5):  # slices of a large tensor from outside
            model(data[i * 10 : i * 10 + 10]).sum().backward()
            block.step()
    assert block.statistics.peak_bytes <= 20_000
    assert block.statistics.uncounted_bytes == data.nbytes
    for excluded in ((data,), ()):
        refuses = nullcontext() if excluded else pytest.raises(BudgetTooSmall)
        with refuses, OutOfCore(20_000, exclude=excluded):
            model(data.index_select(0, torch.arange(10))).sum().backward()


@pytest.mark.slow
def test_a_compiled_model(monkeypatch):
    """torch.compile looks into no code of the block's, and values are those of the same model."""
    monkeypatch.setattr(operations, "_said", {"compile"})
    seen = []
    for budget in (None, 400_000):
        torch._dynamo.reset()
        training = Training("views")
        training.model.forward = torch.compile(training.model.forward, backend="eager")
        with OutOfCore(budget) if budget else nullcontext() as block:
            training.loop(4)
        seen.append(training.seen)
    assert seen[0] == seen[1]
    assert block.statistics.replayed == 2 and block.statistics.bytes_in > 0


class TestRecord:
    def step(self, network: str = "small") -> Callable[[], None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())
        batch: tuple[int, ...] = (4,)
        if network != "small":
            model, batch = unet(width=4, depth=2), (3, 16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images = torch.randn(6, *batch)

        def step() -> None:
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()

        return step

    def test_kinds_sizes_and_lifetimes(self):
        trace = record(self.step(), warmup=2)
        parameters, total = 4 * (4 * 8 + 8 + 8), Counter()
        for name, kind in trace.kinds.items():
            total[kind] += trace.sizes[name]
        assert total["parameter"] == total["gradient"] == parameters
        assert total["optimizer state"] == parameters
        assert total["buffer"] == 4 * (8 + 8) + 8 + 4 * 6 * 4  # statistics, count, the one batch
        names = [function.name for function in trace.functions]
        assert {"aten.mm", "aten.native_batch_norm", "aten.add_"} <= set(names)
        (norm,) = [f for f in trace.functions if f.name == "aten.native_batch_norm"]
        written = {name for name in norm.outputs if name in norm.inputs}
        assert [trace.kinds[name] for name in sorted(written)] == ["buffer", "buffer"]
        # Gradients end in the next iteration, all before one is there: they are set to None.
        gradients = [name for name, kind in trace.kinds.items() if kind == "gradient"]
        assert len(gradients) == 3
        assert all(trace.lifetimes[name][1] >= len(names) for name in gradients)
        assert min(trace.live_bytes) < min(trace.live_bytes[trace.accesses[gradients[0]][0] :])

    @pytest.mark.slow
    @pytest.mark.parametrize("network", ["small", "unet"])
    def test_without_computing(self, network):
        computed = record(self.step(network), warmup=2, device="cpu")
        with FakeTensorMode():
            assert record(self.step(network), warmup=2, device="meta") == computed

    def test_errors(self):
        step = self.step()
        for given, message in (
            ((step, {"warmup": -1}), "warmup is -1"),
            ((step, {"warmup": 1.5}), "give whole iterations"),
            ((step, {"device": "foo"}), "choose cpu or an accelerator"),
            ((step, {"device": "meta"}), r"ran in the step on the device meta.*FakeTensorMode"),
            ((lambda: None, {}), "no operation ran"),
            ((3, {}), "give a function"),
        ):
            with pytest.raises(ValueError, match=message):
                record(given[0], **given[1])
        with FakeTensorMode(), pytest.raises(ValueError, match=r'device cpu.* give device="meta"'):
            record(self.step())


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "values", "allowed"),
        [
            ("budget_bytes", (0, -1, 1.5, True, "1 GiB"), "whole bytes above 0"),
            ("model", (nn.Linear, None, [torch.ones(1)]), "one Module or several"),
            ("optimizer", (torch.optim.SGD,), "one Optimizer or several"),
            ("exclude", ([1],), "one Tensor or several"),
            ("exclude", ([torch.eye(2).to_sparse()],), r"such as its values\(\)"),
            ("device", ("foo", "meta"), "choose cpu or an accelerator"),
            ("swap_folder", (5, ""), "a folder, on a CPU, or None"),
            ("swap_folder", ("/proc", "/no/such/folder"), "a writable folder"),
            ("window_bytes", (-1, "large"), 'whole bytes, "auto" or None'),
            ("link_bytes_per_s", ("fast", 0, -1.0), "bytes/s above 0, on a CPU, or None"),
            ("host_bytes", (0.5, -1), "whole bytes or None"),
            ("schedule", ("best",), "auto, window, .* or a function"),
        ],
    )
    def test_what_is_of_another_kind(self, name, values, allowed):
        for value in values:
            options = {"budget_bytes": 1} | {name: value}
            with pytest.raises(ValueError, match=allowed), OutOfCore(**options):
                pass

    def test_what_is_done_inside_and_outside(self):
        with pytest.raises(RuntimeError, match="inside the block"):
            OutOfCore(1000).step()
        with OutOfCore(1000) as block:
            with pytest.raises(RuntimeError, match="entered already"):
                block.__enter__()
            with pytest.raises(RuntimeError, match=r"another .* of cpu .* leave it"):
                OutOfCore(1000).__enter__()
            with ThreadPoolExecutor(1) as pool:
                error = pool.submit(lambda: OutOfCore(1000).__enter__()).exception()
            assert "without a block of its own" in str(error)
        with pytest.raises(RuntimeError) as caught, OutOfCore(1000):
            raise RuntimeError("The tensor has elements, but its data is not allocated yet.")
        assert "name it in exclude=" in caught.value.__notes__[0]
