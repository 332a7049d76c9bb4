"""The device itself: what it computes, allocates, counts and draws."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.models import resnet20
from simulated_device.checking import checked, counted_blocks, deferred

MIB = 2**20


def train(device, make_optimizer, steps=3, layout=torch.contiguous_format, make=None):
    """Return losses and the state of a training on `device`, on the CPU."""
    torch.manual_seed(0)
    model = (make or resnet20)().to(device=device, memory_format=layout)
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        images = torch.randn(4, 3, 16, 16, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        images = images.to(device=device, memory_format=layout)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    tensors = [*model.state_dict().values(), *state, *(p.grad for p in model.parameters())]
    return [loss.item() for loss in losses], [t.detach().cpu() for t in tensors]


def mixed():
    """A net of what ResNets lack."""
    return nn.Sequential(
        nn.ConvTranspose2d(3, 6, 3), nn.GroupNorm(2, 6), nn.GELU(),
        nn.Conv2d(6, 6, 3, groups=3, padding_mode="reflect", padding=1), nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2.0, mode="bilinear"), nn.Flatten(2), nn.LayerNorm(18 * 18),
        nn.Flatten(), nn.Linear(6 * 18 * 18, 10),
    )  # fmt: skip


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_has_the_numbers_of_the_cpu(sim, optimizer, layout):
    expected_losses, expected = train("cpu", OPTIMIZERS[optimizer], layout=layout)
    with checked():
        losses, tensors = train(sim, OPTIMIZERS[optimizer], layout=layout)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("make", [resnet20, mixed])
def test_training_has_the_same_numbers_in_every_order_that_its_waits_allow(sim, make, seed):
    expected_losses, expected = train("cpu", OPTIMIZERS["sgd foreach"], 2, make=make)
    with deferred(seed):
        losses, tensors = train(sim, OPTIMIZERS["sgd foreach"], 2, make=make)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for one, other in zip(tensors, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_operators_of_many_kinds_agree_with_the_cpu(sim):
    x, y = torch.randn(6, 5), torch.randn(5, 4)
    index, mask = torch.tensor([4, 0, 2]), x > 0
    functions = {
        "view": lambda t, u, i, m: t.t()[1:, ::2].reshape(-1),
        "out": lambda t, u, i, m: torch.mm(t, u, out=t.new_empty(0)),
        "index": lambda t, u, i, m: t[i],
        "mask": lambda t, u, i, m: t[m],
        "put": lambda t, u, i, m: t.clone().index_put_((i,), t.new_ones(3, 5)),
        "where": lambda t, u, i, m: torch.where(m, t, -t).cumsum(1),
        "sort": lambda t, u, i, m: torch.sort(t, 0)[0] + torch.topk(t, 1)[0],
        "cat": lambda t, u, i, m: torch.cat([t, t.flip(0)]).std(0),
        "complex": lambda t, u, i, m: torch.view_as_real(torch.fft.fft(t).conj() * 1j),
        "double": lambda t, u, i, m: t.double().softmax(-1).float() @ u,
        "solve": lambda t, u, i, m: torch.linalg.pinv(t),
        "unfold": lambda t, u, i, m: t.unfold(1, 2, 1).amax(-1),
        "fill": lambda t, u, i, m: torch.full_like(t, 3).masked_fill_(m, 0.5),
        "range": lambda t, u, i, m: torch.arange(7, device=t.device).float().to(torch.float16),
        "nonzero": lambda t, u, i, m: m.nonzero(),
        "scalar": lambda t, u, i, m: t * torch.tensor(2.0) + t.new_tensor(1),
    }
    there = [t.to(sim) for t in (x, y, index, mask)]
    for name, function in functions.items():
        expected = function(x, y, index, mask)
        with checked():
            torch.testing.assert_close(function(*there).cpu(), expected, msg=name)
        with deferred():
            torch.testing.assert_close(function(*there).cpu(), expected, msg=f"{name}, deferred")


# ---- memory


def test_the_allocator_counts_what_it_holds(sim):
    kept = torch.empty(100, device=sim)
    assert torch.sim.memory_allocated() == 512
    assert torch.sim.memory_reserved() == 2 * MIB
    large = torch.empty(3 * MIB, dtype=torch.uint8, device=sim)
    assert torch.sim.memory_reserved() == 22 * MIB
    assert torch.accelerator.memory_allocated(sim) == 512 + 3 * MIB
    del large
    assert torch.sim.memory_allocated() == 512
    assert torch.sim.max_memory_allocated() == 512 + 3 * MIB
    assert torch.sim.memory_reserved() == 22 * MIB
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() == 512
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == 2 * MIB
    free, total = torch.sim.mem_get_info(sim)
    assert total - free == 2 * MIB
    assert torch.sim.memory_stats()["allocated_bytes.all.current"] == 512
    assert torch.sim.memory_allocated(1) == 0
    assert kept.isnan().all()  # fresh memory holds nothing, and freed memory what it held
    address = kept.fill_(3).data_ptr()
    del kept
    again = torch.empty(100, device=sim)
    assert again.data_ptr() == address and bool((again == 3).all())
    del again
    assert torch.sim.memory_allocated() == 0


def test_a_byte_limit_on_what_is_reserved(sim):
    before = torch.sim.memory_stats()["num_ooms"]
    torch.sim.set_per_process_memory_fraction(64 * MIB / (8 * 2**30), sim)
    kept = [torch.empty(20 * MIB, dtype=torch.uint8, device=sim) for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 5\.00 MiB"):
        torch.empty(5 * MIB, dtype=torch.uint8, device=sim)
    with pytest.raises(torch.OutOfMemoryError):  # within a kernel
        kept[0].view(torch.float32) + 1
    del kept[1:]
    torch.empty(30 * MIB, dtype=torch.uint8, device=sim)  # what is cached is given back first
    assert torch.sim.memory_stats()["num_ooms"] == before + 2
    assert torch.sim.memory_reserved() <= 64 * MIB
    with pytest.raises(ValueError, match="specified index"):  # as CUDA wants it
        torch.sim.set_per_process_memory_fraction(0.5, "sim")


# ---- random numbers and precision


def test_generators_repeat_in_any_order_of_execution(sim):
    def draw():
        x = torch.randn(8, device=sim)
        return torch.cat([x, F.dropout(x), torch.rand(3, device=sim), x.new_empty(2).uniform_()])

    torch.manual_seed(5)
    first, state = draw(), torch.sim.get_rng_state(sim)
    second = draw()
    assert not torch.equal(first, second)
    torch.sim.set_rng_state(state, sim)
    with deferred():
        assert torch.equal(draw(), second)
    torch.manual_seed(5)
    host = torch.get_rng_state()
    assert torch.equal(draw(), first)
    assert torch.equal(torch.get_rng_state(), host)  # the CPU's is another
    with torch.random.fork_rng([0], device_type="sim"):
        draw()
    assert torch.equal(draw(), second)
    one, other = (torch.Generator(device=sim).manual_seed(3) for _ in range(2))
    draws = [torch.randperm(9, device=sim, generator=each) for each in (one, other)]
    assert torch.equal(*draws)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(1, device=sim, generator=torch.Generator())


# ---- where the host waits


def test_every_place_where_the_host_waits_is_counted(sim):
    x, pinned, pageable = torch.ones(4, device=sim), torch.ones(4).pin_memory(), torch.ones(4)
    event = torch.sim.Event()
    waits = {
        "waited for the device": lambda: torch.sim.synchronize(),
        "waited for a stream": lambda: torch.sim.current_stream().synchronize(),
        "waited for an event": lambda: (event.record(), event.synchronize()),
        "copied from the device": lambda: x.cpu(),
        "copied to the device": lambda: x.copy_(pageable),
        "copied from pageable memory": lambda: x.copy_(pageable, non_blocking=True),
        "read the result of aten::_local_scalar_dense": lambda: x.sum().item(),
        "read the result of aten::nonzero": lambda: x.nonzero(),
        "counted a mask": lambda: x[x > 0],
        "read the result of aten::equal": lambda: torch.equal(x, x),
    }
    for what, wait in waits.items():
        with counted_blocks() as blocks:
            wait()
        assert blocks.counts() == {what: 1}
        assert f"{__file__}:" in blocks[0].line and "<lambda>" in blocks[0].line
    with counted_blocks() as blocks:  # and none of these
        event.synchronize()  # known to be complete
        event.query()
        x.copy_(pinned, non_blocking=True)
        pinned.copy_(x, non_blocking=True)
        torch.relu(x).sum()
        torch.sim.current_stream().wait_event(event)
        copy.deepcopy(x)
        x.record_stream(torch.sim.Stream())
    assert blocks == []
