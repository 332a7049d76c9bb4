import pytest
import torch
import torch.nn.functional as F
from test_streamer import assert_unchanged, state_of
from torch import nn

from repro.mbs import MicroBatchSizeError, MicroBatchStreamer, NondeterministicModelError
from repro.mbs.sizing import AutoSizer
from repro.measure import BudgetExceededError, MemoryBudget, MemoryState

CPU = torch.device("cpu")


def make_model(batchnorm=True, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64) if batchnorm else nn.Identity(), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(64, 4),
    )  # fmt: skip


def make_batch(num_samples, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 16, generator=generator)
    return x, torch.randint(4, (num_samples,), generator=generator)


def tensors_of(model):
    return [*[p.grad for p in model.parameters() if p.grad is not None], *model.buffers()]


def fits(size, limit, num_samples, batchnorm):
    model = make_model(batchnorm)
    streamer = MicroBatchStreamer(model, F.cross_entropy, size, normalization="paper")
    batch = make_batch(num_samples)  # in host memory, outside the budget
    try:
        with MemoryBudget(limit, resident=model):
            streamer.backward(*batch)
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("limit", [40_000, 77_777])
@pytest.mark.parametrize("batchnorm", [False, True])
def test_auto_chooses_the_largest_size_that_fits(limit, batchnorm):
    num_samples = 400
    model, batch = make_model(batchnorm), make_batch(num_samples)
    # The paper's split has micro-batches of the full size, and a rest.
    streamer = MicroBatchStreamer(model, F.cross_entropy, "auto", normalization="paper")
    with MemoryBudget(limit, resident=model) as budget:
        result = streamer.backward(*batch)
        assert budget.peak_bytes <= limit
    size = result.micro_batch_size
    assert 1 < size < num_samples // 2 and result.retries == 0
    assert fits(size, limit, num_samples, batchnorm)
    assert not fits(size + 1, limit, num_samples, batchnorm)

    sizing = streamer.sizing
    assert sizing is not None and sizing.micro_batch_size == size
    assert sizing.limit_bytes == limit and sizing.observed_bytes == budget.peak_bytes
    assert sizing.model is not None and sizing.predicted_bytes == sizing.model.predict(size)
    assert abs(sizing.prediction_error) < 0.001


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 100])
def test_everything_fits_without_a_budget(num_samples):
    model = make_model(batchnorm=num_samples > 1)  # BatchNorm cannot train on one value
    streamer = MicroBatchStreamer(model, F.cross_entropy, "auto")
    assert streamer.sizing is None
    for number in (num_samples, 128):  # a small first mini-batch does not hold back the next
        assert streamer.backward(*make_batch(number)).micro_batch_size == number


FORMS = {"whole": {}, "two_pass": {"two_pass": True}, "deferred": {"batchnorm": "deferred"}}


@pytest.mark.parametrize("form", FORMS)
def test_probes_leave_no_trace(form):
    x, y = make_batch(24)
    torch.manual_seed(3)
    models = [make_model(dropout=0.5) for _ in range(2)]
    for model in models:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    states, timelines = [], []
    for model, size in zip(models, (24, "auto"), strict=True):
        torch.manual_seed(4)
        streamer = MicroBatchStreamer(model, F.cross_entropy, size, trace=True, **FORMS[form])
        streamer.backward(x, y)
        states.append((tensors_of(model), torch.get_rng_state()))
        timelines.append(len(streamer.timeline()))
    for a, b in zip(states[0][0], states[1][0], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(states[0][1], states[1][1]) and timelines[0] == timelines[1]


class Fragile(nn.Module):
    """Passes its input on, and runs out of memory at one call of its forward or backward."""

    def __init__(self):
        super().__init__()
        self.countdown = {"forward": 0, "backward": 0}

    def tick(self, direction):
        self.countdown[direction] -= 1
        if self.countdown[direction] == 0:
            raise torch.OutOfMemoryError("injected")

    def forward(self, x):
        if torch.is_grad_enabled():
            self.tick("forward")
        out = x * 1.0
        if out.requires_grad:
            out.register_hook(lambda gradient: self.tick("backward"))
        return out


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("form", [*FORMS, "scaler"])
def test_a_failed_try_is_undone_and_the_retry_is_undisturbed(form, direction):
    broken, plain = make_model(dropout=0.5), make_model(dropout=0.5)
    model = nn.Sequential(broken[:3], fragile := Fragile(), broken[3:])
    options = FORMS.get(form, {})
    scalers = [torch.amp.GradScaler("cpu") if form == "scaler" else None for _ in range(2)]
    streamer = MicroBatchStreamer(model, F.cross_entropy, "auto", scaler=scalers[0], **options)
    reference = MicroBatchStreamer(plain, F.cross_entropy, 8, scaler=scalers[1], **options)
    x, y = make_batch(32)

    def run(streamer):
        torch.manual_seed(7)
        return streamer.backward(x, y), torch.get_rng_state()

    limit = 85_000  # chooses about 16: two micro-batches
    with MemoryBudget(limit, resident=model):
        run(streamer)  # probes
        assert streamer.sizing.micro_batch_size >= 16
    for m in (model, plain):
        new = make_model().state_dict().values()
        m.load_state_dict(dict(zip(m.state_dict(), new, strict=True)))
        for p in m.parameters():
            p.grad = torch.ones_like(p) if direction == "backward" else None
    before = scalers[0].state_dict() if scalers[0] else None
    streamer._retries.sizer._cap = 16  # 16 + 16: fails in the second
    fragile.countdown[direction] = 2
    result, rng = run(streamer)
    assert (result.retries, result.num_samples) == (1, 32)
    assert before is None or scalers[0].state_dict() == before
    assert (result.micro_batch_size, result.num_micro_batches) == (8, 4)
    expected, expected_rng = run(reference)
    assert torch.equal(result.loss, expected.loss) and torch.equal(rng, expected_rng)
    for a, b in zip(tensors_of(model), tensors_of(plain), strict=True):
        assert torch.equal(a, b)


def test_size_shrinks_and_grows_back_with_the_memory():
    model = make_model()
    streamer = MicroBatchStreamer(model, F.cross_entropy, "auto")
    x, y = make_batch(400)

    def size():
        model.zero_grad()
        return streamer.backward(x, y).micro_batch_size

    with MemoryBudget(120_000, resident=model):
        first = size()
        taken = torch.empty(30_000, dtype=torch.uint8)  # as another tensor of the program
        small = size()
        assert small < first
        del taken
        assert size() == first
    with MemoryBudget(70_000, resident=model):
        tight = size()
        assert tight < small
    with MemoryBudget(240_000, resident=model):
        assert size() > first


def test_where_not_even_one_sample_fits():
    model = make_model(batchnorm=False, dropout=0.5)
    x, y = make_batch(16)
    state, resident = state_of(model), sum(p.nbytes for p in model.parameters())
    with MemoryBudget(resident + 500, resident=model), pytest.raises(torch.OutOfMemoryError):
        MicroBatchStreamer(model, F.cross_entropy, "auto").backward(x, y)
    assert_unchanged(model, state)


def test_a_fixed_size_that_does_not_fit_is_an_error_without_a_trace():
    model = make_model()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    resident = sum(t.nbytes for t in [*model.parameters(), *tensors_of(model)])
    state, batch = state_of(model), make_batch(128)
    for extra in [0, 200, 400, *range(600, 40_000, 1_500)]:  # runs out in all sorts of places
        budget = MemoryBudget(resident + extra, resident=model)
        with budget, pytest.raises(BudgetExceededError):
            MicroBatchStreamer(model, F.cross_entropy, 64).backward(*batch)
        assert_unchanged(model, state)


def test_another_error_is_not_retried():
    model, calls = make_model(), []

    def loss_fn(outputs, targets):
        calls.append(len(outputs))
        raise RuntimeError("size mismatch")

    with pytest.raises(MicroBatchSizeError, match="RuntimeError: size mismatch"):
        MicroBatchStreamer(model, loss_fn, "auto").backward(*make_batch(32))
    assert len(calls) == 1


class InPlace(nn.Module):
    """Normalises its inputs, or shifts its indices, in place."""

    def __init__(self, indices=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.EmbeddingBag(40, 4) if indices else nn.Linear(16, 4)

    def forward(self, x):
        return self.layer(x.sub_(1) if x.dtype == torch.long else x.sub_(0.5).div_(0.25))


@pytest.mark.parametrize("indices", [False, True])
def test_inputs_that_the_model_changes_in_place(indices):
    x, y = make_batch(24)
    x = torch.randint(1, 3, (24, 5)) if indices else x
    models = [InPlace(indices) for _ in range(2)]
    F.cross_entropy(models[0](x.clone()), y).backward()
    MicroBatchStreamer(models[1], F.cross_entropy, "auto").backward(x.clone(), y)
    for a, b in zip(*(tensors_of(model) for model in models), strict=True):
        torch.testing.assert_close(a, b)
    # Not where memory runs out in the middle: the inputs of before are gone.
    streamer = MicroBatchStreamer(models[1], F.cross_entropy, "auto")
    streamer.backward(x.clone(), y)
    fragile = Fragile()
    fragile.countdown["forward"] = 1
    models[1].layer.register_forward_hook(lambda *_: fragile.tick("forward"))
    with pytest.raises(NondeterministicModelError, match="has changed its inputs in place"):
        streamer.backward(x.clone(), y)


def simulated(capacity, fixed=100, per_sample=10, unused=0):
    """Return `measure` for a memory of `capacity` bytes, some of them held and unused."""

    def measure(size):
        if fixed + per_sample * size + unused > capacity:
            raise torch.OutOfMemoryError("simulated")
        live = fixed + per_sample * size
        return 0, live, live + unused

    return measure


@pytest.mark.parametrize("capacity", [110, 119, 120, 139, 140, 180, 500, 1049])
def test_sizer_against_brute_force(capacity):
    with MemoryBudget(capacity):
        sizer = AutoSizer(CPU)
        sizer.probe(64, simulated(capacity))
        size = sizer.size_for(64)
        largest = max(b for b in range(1, 65) if 100 + 10 * b <= capacity)
        probed = [s for s, _ in sizer.sizing.probes]
        if len(probed) >= 2:
            assert size == largest
        else:  # no line through one point: that size, and doubled after a while
            assert size == max(probed) <= largest < 2 * max(2, size)


def test_sizer_compares_what_is_held_with_the_limit():
    with MemoryBudget(1100):
        sizer = AutoSizer(CPU)
        sizer.probe(200, simulated(1100, unused=200))
        assert sizer.size_for(200) == (1100 - 200 - 100) // 10
        assert sizer.sizing.limit_bytes == 900


def test_sizer_leaves_headroom_of_real_memory_alone(monkeypatch):
    state = MemoryState(live_bytes=0, limit_bytes=1000, simulated=False)
    monkeypatch.setattr("repro.mbs.sizing.memory_state", lambda device: state)
    sizer = AutoSizer(CPU)
    sizer.probe(200, simulated(1000))
    assert sizer.size_for(200) == (950 - 100) // 10  # a twentieth stays free


def test_sizer_where_a_probe_needs_more_than_the_line_predicts():
    """The largest size that was tried counts, however much the line allows."""
    with MemoryBudget(10_000):
        sizer = AutoSizer(CPU)

        def measure(size):  # a workspace that begins at 16 samples
            return simulated(10_000, fixed=100 if size < 16 else 20_000)(size)

        sizer.probe(64, measure)
        assert [size for size, _ in sizer.sizing.probes] == [2, 4, 8]
        assert sizer.size_for(64) == sizer.sizing.micro_batch_size == 8
        assert not sizer.needs_probe(64)
        for _ in range(32):
            sizer.succeeded()
        assert sizer.size_for(64) == 16


def test_sizer_halves_then_doubles_after_a_while():
    with MemoryBudget(10_000):
        sizer = AutoSizer(CPU)
        sizer.probe(64, simulated(10_000))
        assert sizer.size_for(64) == 64
        sizer.failed(64)
        assert sizer.size_for(64) == 32
        sizer.failed(32)
        sizes = []
        for _ in range(100):  # 32 is too much, although the model says otherwise
            size = sizer.size_for(64)
            sizes.append(size)
            if size > 16:
                sizer.failed(size)
            else:
                sizer.succeeded()
    assert [i for i, size in enumerate(sizes) if size > 16] == [32, 65, 98]
    assert set(sizes) == {16, 32}
