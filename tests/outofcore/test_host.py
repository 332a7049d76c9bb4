"""Where swapped-out variables lie, what that takes, and what happens when there is no more."""

import random
from dataclasses import replace

import pytest
import torch
from ooc_trainings import child
from torch import nn
from traces import chain

from repro import outofcore
from repro.measure import accelerator
from repro.measure.accelerator import HostMemoryError
from repro.outofcore import Function, Kind, OutOfCore, Trace, host_bytes, plan_swaps, planning
from repro.outofcore.host import IN, OUT, SLAB_BYTES, HostStore, aligned

MIB = 2**20


@pytest.mark.parametrize("where", ["memory", "file"])
def test_what_is_written_is_read_again_in_however_many_pieces(tmp_path, where):
    store = HostStore(path=tmp_path if where == "file" else None, slab_bytes=1024)
    rng, live, several = random.Random(0), {}, 0
    for number in range(300):
        if live and rng.random() < 0.5:
            place, value = live.pop(rng.choice(list(live)))
            back = torch.zeros_like(value)
            store.copy(IN, place, back.data_ptr())
            assert torch.equal(back, value)
            store.give_back(place)
        else:
            value = torch.randint(256, (rng.randint(1, 3000),), dtype=torch.uint8)
            place = store.take(value.numel())
            store.copy(OUT, place, value.data_ptr())
            live[number] = place, value
            several += len(place) > 1
    assert several > 50
    assert store.used_bytes == sum(aligned(value.numel()) for _, value in live.values())
    # Nothing is lost to holes: the store grew only where nothing was left.
    assert store.total_bytes == -(-store.peak_bytes // 1024) * 1024
    for place, _ in live.values():
        store.give_back(place)
    assert store._free.by_size == [(1024, slab, 0) for slab in range(store.total_bytes // 1024)]
    store.close()


def test_what_is_dropped_is_freed_only_after_its_copy():
    # Read after it was freed, it would end the process.
    assert (
        child("""
        import torch
        from repro.outofcore.host import HostStore, ThreadMover
        from repro.outofcore.residency import Residency
        store = HostStore("cpu", whole=True)
        held = Residency(1 << 40, torch.device("cpu"), store, ThreadMover(store, 2**30))
        tensors = [torch.zeros(2**24) for _ in range(3)]
        variables = [held.find(tensor) for tensor in tensors]
        for variable in variables:
            held.swap_out(variable)
        del tensors
        held.settle(variables[2])  # its copy has yet to begin, behind the others
        print(variables[2].peek())
    """)
        == "None"
    )


def test_host_memory_that_swapping_takes():
    """Forward and backward over activations, of one weight's product, with room for two of them."""
    functions = [Function("first", ("w",), ("a0",))]
    functions += [Function("forward", (f"a{i}",), (f"a{i + 1}",)) for i in range(5)]
    functions += [Function("backward", (f"a{i}",), (f"g{i}",)) for i in reversed(range(5))]
    trace = Trace(tuple(functions), {v: SLAB_BYTES for f in functions for v in f.variables})
    # After the forward functions w and a0 to a4 are alive; a5 has ended.
    assert host_bytes(trace, 2 * SLAB_BYTES) == 5 * SLAB_BYTES  # w, a0 to a3, and a4 as g4 comes
    assert host_bytes(trace, trace.peak_bytes) == 0
    # A weight that no function uses leaves as well, where not all fit.
    held = replace(trace, sizes={**trace.sizes, "held": SLAB_BYTES})
    assert host_bytes(held, 2 * SLAB_BYTES) == 6 * SLAB_BYTES
    assert host_bytes(held, held.peak_bytes) == 0
    # Demand paging, which runs the first iteration, takes more than the plan.
    trace = chain(4, SLAB_BYTES, 2 * SLAB_BYTES)
    assert plan_swaps(trace, 11 * SLAB_BYTES).host_bytes == 13 * SLAB_BYTES
    assert host_bytes(trace, 11 * SLAB_BYTES) == 14 * SLAB_BYTES


@pytest.mark.parametrize("share", [0.5, 0.65, 0.8])
def test_a_training_takes_no_more_host_memory_than_predicted(monkeypatch, share):
    """Neither its first iterations, by demand paging, nor the plans that it tries after them."""
    monkeypatch.setattr(planning, "SLAB_BYTES", 64)

    def training():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(6):
            layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images = torch.randn(16, 3, 24, 24)

        def step() -> None:
            optimizer.zero_grad()
            model(images).logsumexp(1).sum().backward()
            optimizer.step()

        return step, {"model": model, "optimizer": optimizer}

    trace = outofcore.record(training()[0], warmup=2)
    budget = int((1 - share) * trace.smallest_budget + share * trace.peak_bytes)
    step, given = training()
    with OutOfCore(budget, **given) as block:
        for _ in range(8):
            step()
    assert 0 < block.statistics.host_bytes <= host_bytes(trace, budget) < trace.peak_bytes


def test_a_weight_that_left_late_is_still_on_the_host_when_the_next_iteration_swaps():
    """Within three variables a is away at g, and w at k, where a has ended."""
    functions = [Function("f", ("w",), ("a",)), Function("g", ("w",), ("b", "c"))]
    functions += [Function("h", ("a",), ("d",)), Function("k", ("d",), ("e", "i"))]
    sizes = {name: 1 for function in functions for name in function.variables}
    plan = plan_swaps(Trace(tuple(functions), sizes), 3)
    away = [[v for kind, v in made if kind is Kind.RELEASE] for made in plan.before]
    assert away == [[], ["a"], [], ["w"]]
    assert plan.host_bytes == 2 * 64  # places are aligned


def swapped(device, reserved=None, n=6):
    """Make tensors of 1 MiB within a budget of two, and read all of them."""
    with OutOfCore(2 * MIB, device=device, host_bytes=reserved) as block:
        tensors = [torch.full((MIB // 4,), float(i), device=device) for i in range(n)]
        means = [tensor.sum().item() / (MIB // 4) for tensor in tensors]
        pinned_bytes = pinned(device)
    return means, pinned_bytes, block.statistics


def pinned(device) -> int:
    """Whole MiB that torch has pinned, in use or not; `.item()` pins some bytes of its own."""
    return accelerator.module(device).host_memory_stats()["allocated_bytes.current"] // MIB * MIB


@pytest.fixture
def limit(device):
    """Set the most that may be pinned."""
    if device.type == "cuda":
        pytest.skip("the host of a real device is not limited for a test")
    import simulated_device_native as native

    return native.set_pinned_limit_bytes


@pytest.mark.gpu
class TestPinned:
    def test_it_is_reserved_in_slabs_and_given_back(self, device):
        accelerator.empty_pinned_cache(device)
        before = pinned(device)
        for given, slabs in ((None, 1), (1, 1), (2 * SLAB_BYTES + 1, 3)):
            means, pinned_bytes, statistics = swapped(device, given)
            assert means == [0, 1, 2, 3, 4, 5] and pinned_bytes - before == slabs * SLAB_BYTES
            assert 4 * MIB <= statistics.host_bytes <= 6 * MIB and pinned(device) == before

    def test_it_is_given_back_too_where_the_device_cannot_take_all_of_it_back(self, device):
        accelerator.empty_pinned_cache(device)
        before, size = pinned(device), 64 * MIB
        with (
            pytest.raises(RuntimeError, match="out of memory"),
            accelerator.limited(device, 4 * size),
            OutOfCore(2 * size, device=device, host_bytes=6 * size),
        ):
            tensors = [torch.zeros(size // 4, device=device) for _ in range(6)]
            assert pinned(device) - before == 6 * size
        assert pinned(device) == before
        del tensors

    def test_more_than_the_host_has_is_refused_before_the_first_slab(self, device, monkeypatch):
        accelerator.empty_pinned_cache(device)
        before = pinned(device)
        monkeypatch.setattr(accelerator, "pinnable_bytes", lambda: 2 * SLAB_BYTES)
        store = HostStore(device)
        with pytest.raises(HostMemoryError, match=f"{3 * SLAB_BYTES:,} bytes to pin: 67,108,864"):
            store.reserve(2 * SLAB_BYTES + 1)
        assert store.total_bytes == 0 and pinned(device) == before
        store.close()
        HostStore("cpu").reserve(3 * SLAB_BYTES)  # which pins nothing

    def test_too_little_while_it_trains_loses_nothing(self, device, limit):
        limit(SLAB_BYTES)
        tensors = []
        with (
            pytest.raises(HostMemoryError, match="to pin"),
            OutOfCore(2 * SLAB_BYTES, device=device),
        ):
            for i in range(6):
                tensors.append(torch.full((SLAB_BYTES // 4,), float(i), device=device))
        assert [tensor[-1].item() for tensor in tensors] == list(range(len(tensors)))
        assert len(tensors) >= 2
