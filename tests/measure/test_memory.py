import gc
import random
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from repro import measure
from repro.measure import MemoryBudget, MemoryMeter, accelerator, is_out_of_memory, memory_state

KIB, MIB = 1024, 2**20


def block(kib, device="cpu"):
    return torch.empty(kib * KIB, dtype=torch.uint8, device=device)


def test_meter_counts_what_is_alive_views_once_and_remembers_the_peak():
    host = torch.ones(64, KIB)
    with MemoryMeter() as meter:
        a, b = block(8), block(4)
        assert meter.live_bytes == 12 * KIB
        half, again = a[: len(a) // 2], a.view(2, -1).t().add_(1).detach()
        del a, half
        assert meter.live_bytes == 12 * KIB  # the last view keeps the storage
        del again, b
        assert (meter.live_bytes, meter.start_bytes, meter.peak_bytes) == (0, 0, 12 * KIB)
        view = host[:16]  # of the mini-batch in host memory, which is not counted
        assert meter.live_bytes == 0
        doubled = view * 2
        assert meter.live_bytes == doubled.nbytes
    more = block(64)
    assert (meter.peak_bytes, meter.live_bytes) == (doubled.nbytes, 0)  # it stops with its block
    with meter:  # and can be used again
        assert meter.peak_bytes == 0
        del more, doubled


def test_meter_counts_touched_parameters_activations_and_gradients():
    model, inputs = nn.Linear(64, 32, bias=False), torch.ones(8, 64)
    with MemoryMeter() as meter:
        output = model(inputs)
        assert meter.live_bytes == model.weight.nbytes + output.nbytes
        output.sum().backward()
        assert meter.live_bytes == 2 * model.weight.nbytes + output.nbytes


def test_resident_tensors_count_from_the_start_and_once():
    model = nn.BatchNorm1d(16)
    model(torch.randn(4, 16)).sum().backward()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    for resident in (model, [*tensors, tensors[0]]):
        with MemoryMeter(resident=resident) as meter:
            assert meter.start_bytes == meter.live_bytes == sum(t.nbytes for t in tensors)


def test_what_was_resident_is_freed_with_the_meter():
    gc.disable()
    try:
        for kind in (MemoryMeter, partial(MemoryBudget, MIB)):
            model = nn.Linear(2, 2)
            known = weakref.ref(model)
            with kind(resident=model) as meter:
                model(torch.ones(1, 2))
            assert meter.live_bytes == 0
            del model, meter
            assert known() is None  # no cycle holds it
    finally:
        gc.enable()


def test_the_parts_of_sparse_tensors_count():
    outside = torch.eye(64).to_sparse()
    with MemoryMeter() as meter:
        made = [outside.detach(), outside * 2]  # a share of the host's, and its own
        assert meter.live_bytes == 64 * (2 * 8 + 4)
        made[1].add_(outside)  # it gets other parts, twice as long
        assert meter.live_bytes == 128 * (2 * 8 + 4)
        made.clear()
        assert meter.live_bytes == 0


def test_an_operation_that_conjugates_within_is_right():
    matrix = torch.randn(5, 5, dtype=torch.complex64)
    expected = torch.linalg.pinv(matrix)
    with MemoryMeter():
        assert torch.equal(torch.linalg.pinv(matrix), expected)


def test_nested_meters_each_see_what_happens_inside_them():
    with MemoryMeter() as outer:
        block(8)
        with MemoryMeter() as inner:
            b = block(4)
        c = block(2)
        assert outer.live_bytes == 6 * KIB
        del b, c
        with pytest.raises(RuntimeError, match="in force already"), outer:
            pass
    assert (outer.peak_bytes, inner.peak_bytes) == (8 * KIB, 4 * KIB)


def test_budget_admits_the_limit_refuses_one_byte_more_and_releases_it():
    with MemoryBudget(8 * KIB) as budget:
        block(8)
        with pytest.raises(torch.OutOfMemoryError, match="8,193 bytes") as caught:
            torch.empty(8 * KIB + 1, dtype=torch.uint8)
        assert is_out_of_memory(caught.value) and budget.peak_bytes == 8 * KIB
        assert not caught.value.__suppress_context__  # an error that was being handled is shown
        a = block(6)  # while the error, with its traceback, is still at hand
        with pytest.raises(measure.BudgetExceededError):
            block(4)
        b = block(2)
        assert budget.live_bytes == 8 * KIB
        del a, b
    weight = nn.Parameter(torch.ones(KIB))
    with MemoryBudget(17 * KIB):
        loss = (weight * 2).square().sum()
        with pytest.raises(measure.BudgetExceededError):  # through the backward pass
            loss.backward()
    assert weight.grad is None


def test_tightest_of_nested_budgets_rules_and_what_does_not_fit_leaves_none():
    with MemoryBudget(16 * KIB), MemoryBudget(8 * KIB):
        state = memory_state()
        assert (state.limit_bytes, state.live_bytes, state.simulated) == (8 * KIB, 0, True)
        with pytest.raises(measure.BudgetExceededError):
            block(9)
        a = block(3)
        assert memory_state().free_bytes == 5 * KIB
        del a
    resident = [block(2)]
    freed = weakref.ref(resident[0])
    with pytest.raises(measure.BudgetExceededError), MemoryBudget(KIB, resident=resident):
        pass
    del resident
    gc.collect()
    assert freed() is None
    assert not memory_state().simulated and memory_state().free_bytes > KIB
    for limit in (0, True, 1.5, float("inf"), "1GB", None):
        with pytest.raises(ValueError, match=r"limit_bytes is .*at least 1"):
            MemoryBudget(limit)


def test_is_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    for message, expected in (
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may", True),
        ("CUDA error: out of memory", True),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ):
        assert is_out_of_memory(RuntimeError(message)) is expected
        assert not is_out_of_memory(ValueError(message))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.gpu
def test_meters_and_budgets_of_an_accelerator(device):
    with MemoryMeter(device.type) as outer:
        block(64 * KIB, device)
        with MemoryMeter(device) as inner:
            block(16 * KIB, device)
    block(128 * KIB, device)
    assert outer.device == device and inner.peak_bytes - inner.start_bytes == 16 * MIB
    assert outer.peak_bytes - outer.start_bytes == 64 * MIB <= outer.peak_reserved_bytes
    assert 16 * MIB <= inner.peak_reserved_bytes - inner.start_bytes < 64 * MIB
    before = accelerator.limit_bytes(device)
    limit = accelerator.memory_reserved(device) + 256 * MIB
    with MemoryBudget(limit, device):
        assert memory_state(device).limit_bytes <= limit
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * limit, dtype=torch.uint8, device=device)
    assert accelerator.limit_bytes(device) == before
    assert memory_state(device).limit_bytes > limit


@pytest.mark.gpu
def test_a_peak_that_is_held_fits_as_a_limit_where_the_live_bytes_do_not(device):
    def fill():
        first = [block(3 * KIB // 2, device) for _ in range(40)]
        second = block(40 * KIB, device)
        del first, second

    with MemoryMeter(device) as meter:
        fill()
    assert meter.peak_bytes < meter.peak_reserved_bytes
    with MemoryBudget(meter.peak_reserved_bytes, device) as budget:
        fill()
    assert budget.peak_reserved_bytes == meter.peak_reserved_bytes
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(meter.peak_bytes, device):
        fill()


@pytest.mark.parametrize("total", [85_028_896_768, 150_121_545_728])
def test_a_limit_of_an_accelerator_is_met_to_the_byte(monkeypatch, total):
    """By the arithmetic of torch's allocator: it keeps the whole bytes of fraction × total."""

    class Device:
        allowed = total

        def set_per_process_memory_fraction(self, fraction, device):
            assert 0 <= fraction <= 1
            self.allowed = int(fraction * total)

        def get_per_process_memory_fraction(self, device):
            return self.allowed / total

    card = Device()
    monkeypatch.setattr(accelerator, "module", lambda device: card)
    monkeypatch.setattr(accelerator, "total_bytes", lambda device: total)
    monkeypatch.setattr(accelerator, "empty_cache", lambda device: None)
    rng = random.Random(0)
    for limit in [1, total - 1, total, *(rng.randint(1, total) for _ in range(500))]:
        with accelerator.limited("cuda:0", limit):
            assert accelerator.limit_bytes("cuda:0") == card.allowed == limit
            with accelerator.limited("cuda:0", max(1, limit - 1)):
                assert card.allowed == max(1, limit - 1)
            assert card.allowed == limit
        assert card.allowed == total
    assert measure.least_limit("cpu") == 1
    # cuBLAS's two handles take 32 MiB each on Hopper; what remains is torch's, as elsewhere.
    assert measure.least_limit("cuda") - 2 * 32 * MIB >= measure.least_limit("xpu") == 64 * MIB
