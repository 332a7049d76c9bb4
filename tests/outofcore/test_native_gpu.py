"""The native allocator on a CUDA device: by the driver, and inside torch.

torch keeps the allocator that a process begins with: each installation has a process of its own.
"""

import random
import subprocess
import sys
from textwrap import dedent

import pytest
import torch

from repro.outofcore.allocator import ChunkedAllocator
from repro.outofcore.native import ChunkedMemory

pytestmark = [pytest.mark.gpu, pytest.mark.cuda_only("it maps memory by CUDA's driver")]

MIB = 2**20


def run(code: str) -> str:
    """Run code in a new process, and return what it prints."""
    code = f"import torch\nfrom repro.outofcore.native import install\nMIB = 2**20\n{dedent(code)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Bytes:
    """Device memory that is not torch's."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
            "strides": None,
        }  # fmt: skip


def view(address: int, nbytes: int) -> torch.Tensor:
    return torch.as_tensor(Bytes(address, nbytes), device="cuda")


class TestDriver:
    def test_counters_are_the_simulators_and_values_survive_the_remapping_of_others(self):
        stream = torch.cuda.current_stream().cuda_stream
        rng, live = random.Random(0), []
        simulated = ChunkedAllocator(2 * MIB, 512 * MIB)
        with ChunkedMemory("cuda", 2 * MIB, 512 * MIB) as memory:
            for number in range(2_000):
                if live and (len(live) == 20 or rng.random() < 0.5):
                    name, address, nbytes = live.pop(rng.randrange(len(live)))
                    assert bool((view(address, nbytes) == name % 251).all())
                    simulated.free(name)
                    memory.free(address, stream)
                    torch.cuda.synchronize()
                else:
                    nbytes = rng.randint(1, 20 * MIB)
                    simulated.malloc(number, nbytes)
                    live.append((number, memory.malloc(nbytes, stream), nbytes))
                    view(*live[-1][1:]).fill_(number % 251)
                counters = memory.counters()
                for name in ("requested_bytes", "reserved_bytes", "allocated_bytes", "maps"):
                    assert getattr(counters, name) == getattr(simulated, name), name
            assert counters.unmaps > 0 and counters.failures == 0
            memory.trim()
            counters = memory.counters()
            assert counters.reserved_bytes == counters.allocated_bytes == counters.physical_bytes

    def test_work_that_the_device_has_yet_to_do_keeps_its_mapping(self):
        stream, other = torch.cuda.current_stream().cuda_stream, torch.cuda.Stream().cuda_stream
        with ChunkedMemory("cuda", 2 * MIB) as memory:
            old = memory.malloc(8 * MIB, stream)
            source = torch.full((8 * MIB,), 3, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            view(old, 8 * MIB).copy_(source)
            memory.free(old, stream)
            new = memory.malloc(4 * MIB, stream)
            assert memory.counters().retired_ranges == 1
            assert memory.counters().chunks_created == 4
            assert bool((view(new, 4 * MIB) == 3).all())  # through the other address
            memory.malloc(2 * MIB, stream)
            assert memory.counters().retired_ranges == 0
            torch.cuda._sleep(200_000_000)
            memory.free(new, stream)
            assert memory.malloc(4 * MIB, other) != new  # another stream has other chunks
            torch.cuda.synchronize()
            assert memory.malloc(4 * MIB, other) == new


class TestTorch:
    # Without swapping the batch size changes, and with it what chunks are put together.
    @pytest.mark.parametrize("schedule", [None, "window", "paper"])
    def test_training_is_the_same_bit_for_bit(self, monkeypatch, schedule):
        code = """
            from contextlib import nullcontext
            from repro.outofcore import OutOfCore
            {install}
            torch.manual_seed(0)
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.deterministic = True
            net = torch.nn.Sequential(
                torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
                torch.nn.Conv2d(16, 16, 3), torch.nn.Flatten(), torch.nn.Linear(16 * 28 * 28, 10),
            ).cuda()
            optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
            with {block}:
                for step in range(20):
                    x = torch.randn(16 + 8 * (step % {sizes}), 3, 32, 32, device="cuda")
                    loss = net(x).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    print(loss.item().hex())
            torch.cuda.empty_cache()
        """
        counted = """
            counters = installed.counters()
            assert counters.failures == 0 and counters.mallocs > 100
            assert counters.reserved_bytes == counters.allocated_bytes > 0
        """
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        given = {"block": "nullcontext()", "sizes": 1 if schedule else 3}
        plain = run(code.format(install="", **given))
        if schedule:
            given["block"] = f"OutOfCore(7 * MIB // 2, None, 'cuda', schedule='{schedule}')"
        assert plain == run(code.format(install="installed = install(2 * MIB)", **given) + counted)

    def test_out_of_memory_is_an_error_that_can_be_caught(self):
        run("""
            installed = install(2 * MIB, 64 * MIB)
            held = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
            try:
                torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                assert "out of memory" in str(error), error
            else:
                raise SystemExit("it fitted")
            assert int(torch.ones(MIB, device="cuda").sum()) == MIB
            assert installed.counters().failures == 1
            try:
                install()
            except ValueError as error:
                assert "already" in str(error)
            else:
                raise SystemExit("twice")
        """)
