"""`repro.measure.accelerator` on the simulated device and on the CPU."""

import pytest
import torch

from repro.measure import MemoryBudget, accelerator, memory_state
from simulated_device.checking import checked, present

MIB = 2**20


def pipeline(device: torch.device, wait: bool = True) -> tuple[float, float]:
    """Compute on a side stream what the current one uses; return it, and the time it took."""
    current, side = accelerator.current_stream(device), accelerator.new_stream(device)
    first, last = (accelerator.new_event(device, timing=True) for _ in range(2))
    x = torch.ones(100, device=device)
    first.record()
    side.wait_stream(current)
    with accelerator.use_stream(side):
        x.mul_(3)
        accelerator.record_stream(x, side)
    done = accelerator.new_event(device)
    done.record(side)
    if wait:
        current.wait_event(done)
    y = x + 1
    last.record()
    last.synchronize()
    return float(y.sum()), first.elapsed_time(last)


def test_one_path_serves_the_cpu_and_a_device(sim):
    for device in (torch.device("cpu"), sim, torch.device("sim", 1)):
        with checked(), accelerator.on(device):
            total, milliseconds = pipeline(device)
        assert total == 400 and 0 <= milliseconds < 60e3
    with checked(raises=False) as found:
        pipeline(sim, wait=False)
    assert found.count


def test_a_limit_holds_for_what_is_reserved_and_is_put_back(sim):
    total = accelerator.total_bytes(sim)
    kept = torch.empty(MIB, dtype=torch.uint8, device=sim)
    torch.empty(100 * MIB, dtype=torch.uint8, device=sim)  # cached, and given back at the limit
    with accelerator.limited("sim", 64 * MIB):
        with accelerator.limited(sim, 100 * MIB):  # a lower one stands
            assert accelerator.limit_bytes(sim) == 64 * MIB
        accelerator.reset_peak_memory(sim)
        with pytest.raises(torch.OutOfMemoryError):
            [torch.empty(11 * MIB, dtype=torch.uint8, device=sim) for _ in range(6)]
        assert accelerator.max_memory_reserved(sim) <= 64 * MIB
        assert accelerator.max_memory_allocated(sim) <= accelerator.max_memory_reserved(sim)
    assert accelerator.limit_bytes(sim) == total == accelerator.free_and_total_bytes(sim)[1]
    torch.empty(200 * MIB, dtype=torch.uint8, device=sim)
    accelerator.empty_cache(sim)
    assert accelerator.memory_reserved(sim) == 2 * MIB
    assert accelerator.memory_allocated(sim) == kept.nbytes
    accelerator.set_limit(sim, 8 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(11 * MIB, dtype=torch.uint8, device=sim)
    accelerator.set_limit(sim, total)
    with pytest.raises(ValueError, match="0 bytes"), accelerator.limited(sim, 0):
        pass


@pytest.mark.parametrize("fails", ["reset_peak_memory", "max_memory_allocated"])
def test_a_budget_that_fails_to_begin_or_end_takes_its_limit_along(sim, fails, monkeypatch):
    def fail(device):
        raise RuntimeError("the device fails")

    monkeypatch.setattr(accelerator, fails, fail)
    budget = MemoryBudget(64 * MIB, sim)
    with pytest.raises(RuntimeError, match="the device fails"), budget:
        pass
    assert accelerator.limit_bytes(sim) == accelerator.total_bytes(sim)
    assert memory_state(sim).limit_bytes > 64 * MIB


def test_host_memory_has_an_error_of_its_own():
    with present(pinned_limit_bytes=8 * MIB):
        buffer = accelerator.empty_pinned((5, MIB), "sim", torch.uint8)
        assert buffer.is_pinned() and buffer.shape == (5, MIB)
        assert accelerator.pinned_bytes(buffer.nbytes) == 8 * MIB
        with pytest.raises(accelerator.HostMemoryError, match=r"3,145,728 bytes.*4,194,304"):
            accelerator.empty_pinned(3 * MIB, "sim", torch.uint8)
        del buffer
        with pytest.raises(accelerator.HostMemoryError):  # torch keeps it
            accelerator.empty_pinned(3 * MIB, "sim", torch.uint8)
        if not hasattr(torch.accelerator, "empty_host_cache"):
            return  # torch 2.11 empties CUDA's alone
        accelerator.empty_pinned_cache("sim")
        images = accelerator.empty_pinned((2, 3, 4, 5), "sim:0", layout=torch.channels_last)
        assert images.is_contiguous(memory_format=torch.channels_last)
    assert not accelerator.empty_pinned(3, "cpu").is_pinned()
    taken = {0: 0, 1: 1, 2: 2, 3: 4, 4096: 4096, 4097: 8192}  # powers of two
    assert {nbytes: accelerator.pinned_bytes(nbytes) for nbytes in taken} == taken
