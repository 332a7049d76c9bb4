"""Batches as pytrees, and their way to an accelerator."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.mbs import MicroBatchStreamer
from repro.mbs.batches import Reader
from repro.mbs.staging import Stager

pytestmark = pytest.mark.gpu


def pair(device, memory="pageable"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4)).double()
    x, y = torch.randn(70, 64).double(), torch.randint(4, (70,))
    if memory == "pinned":
        x, y = x.pin_memory(), y.pin_memory()
    elif memory == "device":
        x, y = x.to(device), y.to(device)
    elif memory == "transposed":
        x = x.t().contiguous().t()
    return model.to(device), x, y


def sleep(device):
    """Let the device wait for milliseconds, in which the host stages ahead."""
    torch.get_device_module(device)._sleep(5_000_000)


def relative_error(got, want):
    got, want = (torch.cat([g.flatten() for g in gradients]) for gradients in (got, want))
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("memory", ["pageable", "pinned", "device", "transposed"])
@pytest.mark.parametrize(("micro", "prefetch"), [(3, 3), (16, 1), (64, 0)])
@pytest.mark.parametrize("two_pass", [False, True])
def test_streaming_equals_the_full_batch(device, memory, micro, prefetch, two_pass):
    model, x, y = pair(device, memory)
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    expected = torch.autograd.grad(loss, list(model.parameters()))
    options = {"prefetch": prefetch, "two_pass": two_pass, "device": device.type}
    streamer = MicroBatchStreamer(model, F.cross_entropy, micro, **options)
    for _ in range(2):  # with a ring to make, and with the ring made
        model.zero_grad()
        streamer.backward(x, y)
        assert relative_error([p.grad for p in model.parameters()], expected) < 1e-12


class WithInput(nn.Linear):
    """Returns its input as well, in the memory of the ring."""

    def forward(self, x):
        return super().forward(x), x


def test_inputs_among_the_outputs_outlive_the_ring(device):
    torch.manual_seed(0)
    model, x = WithInput(8, 8).double().to(device), torch.randn(70, 8).double()
    loss_fn = lambda outputs: F.mse_loss(*outputs).sqrt()  # noqa: E731
    expected = torch.autograd.grad(loss_fn(model(x.to(device))), list(model.parameters()))
    options = {"prefetch": 1, "two_pass": True, "device": device.type}
    MicroBatchStreamer(model, loss_fn, 16, **options).backward(x)
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-12


@pytest.mark.parametrize("memory", ["pageable", "pinned"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_ring_is_not_overwritten_while_it_is_read(device, memory, prefetch):
    stager = Stager(device, prefetch, trace=False)
    data = torch.arange(40 * 1024 * 256, dtype=torch.float32).view(40, 1024, 256)
    # The ring's buffers grow, are larger than what they hold, and come to hold another type.
    for size, dtype in ((1, data.dtype), (2, data.dtype), (1, torch.float64), (3, torch.int64)):
        given = data.to(dtype)
        given = given.pin_memory() if memory == "pinned" else given
        seen = []
        for part in stager.stream(given[i : i + size] for i in range(0, len(data), size)):
            sleep(device)
            seen.append(part.clone())
        assert seen[0].dtype == dtype and torch.equal(torch.cat(seen).cpu(), given)


def test_the_callers_pinned_memory_may_be_written_at_once(device):
    stager = Stager(device, 3, trace=False)
    data, seen = torch.ones(12, 1 << 20).pin_memory(), []
    for part in stager.stream(data[i : i + 1] for i in range(12)):
        sleep(device)
        seen.append(part.sum())
    data.zero_()
    assert torch.stack(seen).tolist() == [float(1 << 20)] * 12


def test_channels_last_and_numbers_arrive_as_they_were(device):
    images = torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last)
    number = torch.tensor(3.0)
    stager = Stager(device, 2, trace=False)  # the same buffers for all
    for source in (images, images.pin_memory(), images.contiguous(), images):
        parts = ((source[j : j + 2], number) for j in (0, 2, 4))
        for i, (part, same) in enumerate(stager.stream(parts)):
            assert part.stride() == source.stride()
            assert torch.equal(part.cpu(), images[2 * i : 2 * i + 2])
            assert same.device == device and same.item() == 3.0


def test_packed_sequences_arrive(device):
    sequences = [torch.full((1 + i % 3, 5), float(i)) for i in range(7)]
    packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    parts = Reader().read(packed, None, None).plan(3).parts()
    for part, _ in Stager(device, 2, trace=False).stream(parts):
        assert part.data.device == device
        for sequence in nn.utils.rnn.unpack_sequence(part.to("cpu")):
            assert torch.equal(sequence, sequences.pop(0))
    assert not sequences


@pytest.mark.parametrize("memory", ["pageable", "pinned", "device"])
def test_the_loop_never_waits_for_the_device(device, no_waits, memory):
    model, x, y = pair(device, memory)
    streamer = MicroBatchStreamer(model, F.cross_entropy, 16)
    streamer.backward(x, y)  # allocates the ring and the pinned staging buffers
    plan = Reader().read(x, y, None).plan(16)
    with no_waits():
        streamer._accumulate(plan, 70.0)


@pytest.mark.cuda_only("the simulated device has no times")
def test_copies_overlap_computation(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3))
    model.to(device)
    x = torch.randn(256, 3, 128, 128).pin_memory()
    streamer = MicroBatchStreamer(model, lambda out: out.square().mean(), 32, trace=True)
    for _ in range(3):
        model.zero_grad()
        streamer.backward(x)
    spans = streamer.timeline()
    copies = [s for s in spans if s.kind == "copy"]
    computations = [s for s in spans if s.kind == "compute"]
    assert len(copies) == len(computations) == 8
    for copy, computation in zip(copies, computations, strict=True):
        assert copy.start_s <= copy.end_s <= computation.start_s + 1e-5 < computation.end_s
    for later, earlier in zip(copies[1:], computations[:-1], strict=True):
        assert later.start_s < earlier.end_s  # begun while the one before was computed


def test_dropout_on_the_device_repeats_in_two_passes(device):
    model, x, y = pair(device)
    model = nn.Sequential(model, nn.Dropout(0.5))
    torch.manual_seed(3)
    outputs = torch.cat([model(x[i : i + 14].to(device)) for i in range(0, 70, 14)])
    expected = torch.autograd.grad(F.cross_entropy(outputs, y.to(device)), list(model.parameters()))
    after = torch.get_device_module(device).get_rng_state()
    torch.manual_seed(3)
    MicroBatchStreamer(model, F.cross_entropy, 16, two_pass=True).backward(x, y)
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-12
    assert torch.equal(torch.get_device_module(device).get_rng_state(), after)


def test_buffers_of_a_size_that_ran_out_are_freed(device):
    model, x, y = pair(device)

    def loss_fn(outputs, targets):
        if len(outputs) > 12:
            raise torch.OutOfMemoryError("planted")
        return F.cross_entropy(outputs, targets)

    streamer = MicroBatchStreamer(model, loss_fn, "auto", check="off")
    # A size that the probes did not see, as when something else has taken the memory since.
    streamer._retries.sizer.probe(70, lambda size: (0, size, size))
    result = streamer.backward(x, y)
    assert result.retries == 3 and result.micro_batch_size <= 12
    buffers = [pair for slot in streamer._stager._slots for pair in slot.buffers.values()]
    assert buffers and max(len(target) for _, target in buffers) <= 12
