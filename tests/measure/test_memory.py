import random

import pytest
import torch
from torch import nn

from repro.measure import (
    BudgetExceededError,
    LinearMemoryModel,
    MemoryBudget,
    MemoryMeter,
    accelerator,
    is_out_of_memory,
    least_limit,
    memory_state,
)

KIB = 1024


def floats(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB // 4)


def test_meter_counts_what_is_alive_and_remembers_the_peak():
    with MemoryMeter() as meter:
        a = floats(8)
        b = floats(4)
        assert meter.live_bytes == 12 * KIB
        del a
        assert meter.live_bytes == 4 * KIB
        c = floats(2)
        assert meter.live_bytes == 6 * KIB
        del b, c
        assert meter.live_bytes == 0
    assert (meter.start_bytes, meter.peak_bytes) == (0, 12 * KIB)


def test_meter_counts_views_and_results_in_place_once():
    with MemoryMeter() as meter:
        a = floats(8)
        half = a[: len(a) // 2]
        again = a.view(2, -1).t().add_(1).detach()
        assert meter.live_bytes == 8 * KIB
        del a, half
        assert meter.live_bytes == 8 * KIB  # the last view keeps the storage
        del again
        assert meter.live_bytes == 0


def test_meter_leaves_out_the_host_mini_batch_but_counts_what_is_made_of_it():
    host = torch.ones(64, KIB)
    with MemoryMeter() as meter:
        view = host[:16]
        assert meter.live_bytes == 0
        doubled = view * 2
        assert meter.live_bytes == doubled.nbytes


def test_meter_counts_touched_parameters_activations_and_gradients():
    model = nn.Linear(64, 32, bias=False)
    inputs = torch.ones(8, 64)
    with MemoryMeter() as meter:
        output = model(inputs)
        assert meter.live_bytes == model.weight.nbytes + output.nbytes
        output.sum().backward()
        assert model.weight.grad is not None
        assert meter.live_bytes == 2 * model.weight.nbytes + output.nbytes


def test_resident_tensors_count_from_the_start_and_once():
    model = nn.BatchNorm1d(16)
    model(torch.randn(4, 16)).sum().backward()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    with MemoryMeter(resident=model) as meter:
        assert meter.start_bytes == meter.live_bytes == sum(t.nbytes for t in tensors)
    with MemoryMeter(resident=[*tensors, tensors[0]]) as meter:
        assert meter.start_bytes == sum(t.nbytes for t in tensors)


def test_nested_meters_each_see_what_happens_inside_them():
    with MemoryMeter() as outer:
        a = floats(8)
        del a
        with MemoryMeter() as inner:
            b = floats(4)
        c = floats(2)
        assert outer.live_bytes == 6 * KIB
        del b, c
    assert (outer.peak_bytes, inner.peak_bytes) == (8 * KIB, 4 * KIB)


def test_a_meter_stops_at_the_end_of_its_block_and_can_be_used_again():
    meter = MemoryMeter()
    with meter:
        kept = floats(4)
    more = floats(64)
    assert (meter.peak_bytes, meter.live_bytes) == (4 * KIB, 0)
    with meter:
        assert meter.peak_bytes == 0
        del kept, more


def test_budget_admits_the_limit_and_refuses_one_byte_more():
    with MemoryBudget(8 * KIB) as budget:
        a = torch.empty(8 * KIB, dtype=torch.uint8)
        del a
        with pytest.raises(torch.OutOfMemoryError, match="8,193 bytes") as caught:
            torch.empty(8 * KIB + 1, dtype=torch.uint8)
        assert is_out_of_memory(caught.value)
    assert budget.peak_bytes == 8 * KIB


def test_a_refused_allocation_is_released():
    with MemoryBudget(8 * KIB) as budget:
        a = floats(6)
        with pytest.raises(BudgetExceededError):
            floats(4)
        assert budget.live_bytes == 6 * KIB
        b = floats(2)
        assert budget.live_bytes == 8 * KIB
        del a, b


def test_budget_error_keeps_its_type_through_the_backward_pass():
    weight = nn.Parameter(torch.ones(KIB))
    with MemoryBudget(17 * KIB):
        loss = (weight * 2).square().sum()
        with pytest.raises(BudgetExceededError):
            loss.backward()
    assert weight.grad is None


def test_tightest_of_nested_budgets_rules():
    with MemoryBudget(16 * KIB), MemoryBudget(8 * KIB) as inner:
        state = memory_state()
        assert (state.limit_bytes, state.live_bytes, state.simulated) == (8 * KIB, 0, True)
        with pytest.raises(BudgetExceededError):
            floats(9)
        a = floats(3)
        assert memory_state().free_bytes == inner.limit_bytes - 3 * KIB
        del a
    assert not memory_state().simulated


def test_resident_that_does_not_fit_is_refused_and_nothing_stays_active():
    with pytest.raises(BudgetExceededError), MemoryBudget(KIB, resident=[floats(2)]):
        pass
    assert not memory_state().simulated
    assert memory_state().free_bytes > KIB


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, float("nan"), float("inf"), "1GB", None])
def test_bad_limits_are_refused(limit):
    with pytest.raises(ValueError, match=r"limit_bytes is .*at least 1"):
        MemoryBudget(limit)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_is_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_cpu_allocators_own_error_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(("fixed", "per_sample"), [(1000, 7), (0, 3), (12_345_678, 987_651)])
def test_linear_model_of_exact_points_is_exact(fixed, per_sample):
    sizes = [2, 4, 8, 11]
    model = LinearMemoryModel.fit(sizes, [fixed + per_sample * b for b in sizes])
    assert (model.fixed_bytes, model.bytes_per_sample) == (fixed, per_sample)
    for limit in [fixed, *(fixed + per_sample * b + d for b in range(1, 40) for d in (-1, 0, 1))]:
        fitting = [b for b in range(100) if fixed + per_sample * b <= limit]
        assert model.largest_batch(limit) == max(fitting)
        assert model.predict(max(fitting)) <= limit < model.predict(max(fitting) + 1)


def test_linear_model_is_the_least_squares_line():
    sizes, peaks = [1, 2, 4, 8], [110, 190, 430, 790]
    model = LinearMemoryModel.fit(sizes, peaks)

    def squares(fixed: float, slope: float) -> float:
        return sum((fixed + slope * b - m) ** 2 for b, m in zip(sizes, peaks, strict=True))

    best = squares(model.fixed_bytes, model.bytes_per_sample)
    for shift in (-1.0, 1.0):
        assert squares(model.fixed_bytes + shift, model.bytes_per_sample) > best
        assert squares(model.fixed_bytes, model.bytes_per_sample + shift) > best


def test_linear_model_in_the_limits():
    flat = LinearMemoryModel.fit([1, 2], [100, 90])  # noise: memory does not shrink
    assert (flat.fixed_bytes, flat.bytes_per_sample) == (95, 0)
    assert flat.largest_batch(94) == 0
    assert flat.largest_batch(95) > 10**9
    assert LinearMemoryModel(100, 10).largest_batch(99) == 0
    assert LinearMemoryModel(100, 10).largest_batch(109) == 0


@pytest.mark.parametrize(("sizes", "peaks"), [([4], [1]), ([4, 4], [1, 2]), ([1, 2], [1])])
def test_linear_model_needs_two_sizes(sizes, peaks):
    with pytest.raises(ValueError, match="two or more distinct batch sizes"):
        LinearMemoryModel.fit(sizes, peaks)


@pytest.mark.gpu
def test_meters_of_an_accelerator_nest_and_stop(device):
    mib = 2**20
    with MemoryMeter(device.type) as outer:
        a = torch.empty(64 * mib, dtype=torch.uint8, device=device)
        del a
        with MemoryMeter(device) as inner:
            b = torch.empty(16 * mib, dtype=torch.uint8, device=device)
            del b
    c = torch.empty(128 * mib, dtype=torch.uint8, device=device)
    del c
    assert outer.device == device
    assert inner.peak_bytes - inner.start_bytes == 16 * mib
    assert outer.peak_bytes - outer.start_bytes == 64 * mib
    assert 16 * mib <= inner.peak_reserved_bytes - inner.start_bytes < 64 * mib
    assert outer.peak_reserved_bytes >= 64 * mib


@pytest.mark.gpu
def test_a_peak_that_is_held_fits_as_a_limit_where_the_live_bytes_do_not(device):
    def fill():
        first = [torch.empty(3 * 2**19, dtype=torch.uint8, device=device) for _ in range(40)]
        second = torch.empty(40 * 2**20, dtype=torch.uint8, device=device)
        del first, second

    with MemoryMeter(device) as meter:
        fill()
    assert meter.peak_bytes < meter.peak_reserved_bytes
    with MemoryBudget(meter.peak_reserved_bytes, device) as budget:
        fill()
    assert budget.peak_reserved_bytes == meter.peak_reserved_bytes
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(meter.peak_bytes, device):
        fill()


@pytest.mark.gpu
def test_a_budget_of_an_accelerator_refuses_and_gives_the_limit_back(device):
    before = accelerator.limit_bytes(device)
    limit = accelerator.memory_reserved(device) + 256 * 2**20
    with MemoryBudget(limit, device):
        assert memory_state(device).limit_bytes <= limit
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * limit, dtype=torch.uint8, device=device)
    assert accelerator.limit_bytes(device) == before
    assert memory_state(device).limit_bytes > limit


@pytest.mark.parametrize("total", [8 * 2**30, 85_028_896_768, 84_987_740_160, 150_121_545_728])
def test_a_limit_of_an_accelerator_is_met_to_the_byte(monkeypatch, total):
    """By the arithmetic of torch's allocator: it keeps the whole bytes of fraction × total."""

    class Device:
        allowed = total

        @classmethod
        def set_per_process_memory_fraction(cls, fraction, device):
            assert 0 <= fraction <= 1
            cls.allowed = int(fraction * total)

        @classmethod
        def get_per_process_memory_fraction(cls, device):
            return cls.allowed / total

    monkeypatch.setattr(accelerator, "module", lambda device: Device)
    monkeypatch.setattr(accelerator, "total_bytes", lambda device: total)
    monkeypatch.setattr(accelerator, "empty_cache", lambda device: None)
    rng = random.Random(0)
    for limit in [1, total - 1, total, *(rng.randint(1, total) for _ in range(5000))]:
        with accelerator.limited("cuda:0", limit):
            assert accelerator.limit_bytes("cuda:0") == Device.allowed == limit
            with accelerator.limited("cuda:0", max(1, limit - 1)):
                assert Device.allowed == max(1, limit - 1)
            assert Device.allowed == limit
        assert Device.allowed == total


def test_the_least_limit_has_room_for_the_workspaces_of_cublas():
    assert least_limit("cpu") == 1
    # Its two handles take 32 MiB each on Hopper; what remains is torch's, as elsewhere.
    assert least_limit("cuda") - 2 * 32 * 2**20 >= least_limit("xpu") == 64 * 2**20
