"""What runs beside a training or does more than compute ends right, or in a named error."""

import ctypes
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import to_dlpack

from repro.outofcore import BudgetTooSmall, OutOfCore, record
from repro.outofcore.operations import OutOfCoreWarning, _said

KIB = 2**10
AMPLE = 1 << 40


def crowd(n: int = 8) -> list[torch.Tensor]:
    """Tensors of 4 KiB: all of them, one after the other, fill a small budget."""
    return [torch.full((KIB,), float(i)) for i in range(n)]


def child(code: str, *arguments: str) -> str:
    """Run code that may crash in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.strip()


class TestOthers:
    @pytest.mark.slow
    def test_other_threads(self):
        """A thread of the block, one that was there before, and a pool read what is away."""
        out = child("""
            import io, queue, threading, torch
            from concurrent.futures import ThreadPoolExecutor
            from repro.outofcore import OutOfCore

            questions, answers = queue.Queue(), queue.Queue()
            def answer():
                while (tensor := questions.get()) is not None:
                    answers.put(tensor.sum().item())
            before = threading.Thread(target=answer, daemon=True)
            before.start()
            pool = ThreadPoolExecutor(1)
            pool.submit(int).result()
            tensors = [torch.full((1024,), float(i)) for i in range(32)]
            right = [1024.0 * i for i in range(32)]

            def save(state, file):
                torch.save(state, file)

            with OutOfCore(24 * 1024) as block:
                for tensor in tensors:
                    tensor.mul_(1)
                file = io.BytesIO()
                thread = threading.Thread(target=save, args=(tensors, file))
                thread.start()
                for _ in range(20):  # while it writes, others come and go
                    for tensor in tensors:
                        tensor.mul_(1)
                thread.join()
                seen = list(pool.map(lambda t: t.sum().item(), tensors))
                assert seen == right, seen
                sums = []
                def add():
                    for _ in range(50):
                        sums.append([tensor.sum().item() for tensor in tensors] == right)
                adding = threading.Thread(target=add)
                adding.start()
                while adding.is_alive():
                    for tensor in tensors:
                        tensor.mul_(1)
                adding.join()
                assert all(sums) and len(sums) == 50
                assert block.statistics.peak_bytes <= 24 * 1024, block.statistics
                if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
                    for tensor in tensors:  # a thread that nobody sees
                        questions.put(tensor)
                    assert [answers.get() for _ in tensors] == right
                questions.put(None)
            file.seek(0)
            loaded = torch.load(file)
            assert [t.sum().item() for t in loaded] == right
            print("right")
        """)
        assert out == "right"

    @pytest.mark.slow
    def test_a_pool_that_trains_its_own_model(self):
        weights = crowd()

        def train(start: float) -> float:
            w = torch.full((KIB,), start, requires_grad=True)
            for _ in range(3):
                (w.square().sum() + sum(other.sum() for other in weights)).backward()
                with torch.no_grad():
                    w -= 0.1 * w.grad
                w.grad = None
            return w.sum().item()

        plain = [train(s) for s in (1.0, 2.0)]
        with OutOfCore(48 * KIB) as block, ThreadPoolExecutor(2) as pool:
            assert list(pool.map(train, (1.0, 2.0))) == plain
            assert train(1.0) == plain[0]
        assert block.statistics.bytes_in > 0

    @pytest.mark.thorough
    def test_asynchronous_collectives(self, tmp_path):
        """Gradients that are being averaged stay; and what is reduced in place is not lost."""
        code = """
            import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
            from repro.outofcore import OutOfCore

            def work(rank, path):
                torch.set_num_threads(1)
                dist.init_process_group(
                    "gloo", init_method="file://" + path, rank=rank, world_size=2
                )
                grads = [torch.full((65536,), float(i)) for i in range(8)]
                with OutOfCore(3 * 65536 * 4 + 4096) as block:
                    for step in range(6):
                        for i, grad in enumerate(grads):
                            grad.fill_(i + rank)
                        # clean copies of them on the host
                        assert [g[0].item() for g in grads] == [i + rank for i in range(8)]
                        works = []
                        for grad in grads:
                            works.append(dist.all_reduce(grad, async_op=True))
                            torch.ones(65536).sum().item()
                        for w in works:
                            w.wait()
                        seen = [g.mean().item() for g in grads]
                        assert seen == [2.0 * i + 1 for i in range(8)], seen
                        block.step()
                assert block.statistics.bytes_out > 0
                dist.destroy_process_group()

            children = [mp.get_context("fork").Process(target=work, args=(r, sys.argv[1]))
                        for r in range(2)]
            for c in children: c.start()
            for c in children: c.join()
            print([c.exitcode for c in children])
        """
        assert child(code, str(tmp_path / "meet")) == "[0, 0]"

    @pytest.mark.thorough
    def test_a_forked_worker_reads_what_is_away(self, tmp_path):
        code = """
            import os, sys, torch
            from repro.outofcore import OutOfCore

            tensors = [torch.full((1024,), float(i)) for i in range(16)]
            folder = sys.argv[1] or None
            with OutOfCore(24 * 1024, swap_folder=folder) as block:
                for tensor in tensors:
                    tensor.mul_(1)
                if (pid := os.fork()) == 0:
                    try:
                        right = [t.sum().item() for t in tensors] == [1024.0 * i for i in range(16)]
                        right = right and tensors[0].numpy().sum() == 0
                        os._exit(0 if right else 1)
                    except RuntimeError as error:
                        os._exit(2 if "exclude=" in str(error) else 3)
                for tensor in tensors:
                    tensor.mul_(2)
                print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
        assert child(code, "") == "0"
        assert child(code, str(tmp_path)) == "2"  # of a file it has no copy


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Branch(), Branch(), Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        futures = [torch.jit.fork(self.one, x), torch.jit.fork(self.two, x)]
        total = self.three(x)
        for future in futures:
            total = total + torch.jit.wait(future)
        return total


class Nested(Forked):
    def both(self, x: torch.Tensor) -> torch.Tensor:
        future = torch.jit.fork(self.one, x)
        return self.two(x) + torch.jit.wait(future)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        future = torch.jit.fork(self.both, x)
        return self.three(x * 2) + torch.jit.wait(future)


class TestScriptsThatFork:
    """Operations of torch.jit.fork come from threads of torch's own, several at once."""

    @pytest.mark.parametrize("network", [Forked, Nested])
    def test_they_give_the_same(self, network):
        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            net = torch.jit.script(network())
            optimizer = torch.optim.SGD(net.parameters(), 0.01)
            x, seen = torch.rand(32, 64), []

            def loop() -> None:
                for _ in range(8):
                    optimizer.zero_grad()
                    loss = (net(x) - x).square().mean()
                    loss.backward()
                    optimizer.step()
                    with torch.no_grad():
                        seen.append((loss.item(), net(x).sum().item()))

            if budget is None:
                loop()
                return seen
            with OutOfCore(budget, model=net, optimizer=optimizer) as block:
                loop()
            assert block.statistics.bytes_in
            assert block.statistics.peak_bytes <= budget + x.nbytes  # it counts once it is used
            return seen

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            train(None)  # the first runs of a script are not optimized
            assert train(120 * KIB) == train(None)
            with pytest.raises(BudgetTooSmall):
                train(40 * KIB)


class TestSizes:
    """C++ code reads lengths and sizes, and keeps their address."""

    @pytest.mark.slow
    @pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
    def test_packed_sequences(self, cell):
        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            net = cell(8, 16, batch_first=True)
            lengths = torch.randint(5, 30, (8,))
            x = torch.randn(8, 30, 8)
            seen = []

            def step() -> None:
                packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, False)
                out, _ = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
                loss = out.square().mean()
                loss.backward()
                seen.append(loss.item())

            if budget is None:
                [step() for _ in range(3)]
                return seen
            with OutOfCore(budget) as block:
                for _ in range(3):
                    step()
                    block.step()
            assert block.statistics.bytes_out > 0
            return seen

        assert train(100 * KIB) == train(None)

    def test_tensor_split_by_a_tensor(self):
        x, sizes = torch.arange(4 * KIB, dtype=torch.float32), torch.tensor([100, 200, 300])
        plain = [part.sum().item() for part in x.tensor_split(sizes)]
        others = crowd()
        with OutOfCore(24 * KIB) as block:
            for _ in range(3):
                sizes.add_(0)
                for other in others:
                    other.mul_(1)
                x.mul_(1)
                assert [part.sum().item() for part in torch.tensor_split(x, sizes)] == plain
                block.step()


class TestGrowth:
    def test_what_grows_keeps_its_values_and_is_counted(self):
        others = crowd()
        with OutOfCore(24 * KIB) as block:
            out = torch.empty(0)
            small = torch.full((10,), 7.0)
            for other in others:
                other.mul_(1)
            small.resize_(1000)[10:] = 7.0  # 40 bytes become 4000
            torch.add(others[0], 1.0, out=out)  # no bytes become 4096
            held = block.statistics.peak_bytes
            for _ in range(3):
                for other in others:
                    other.mul_(1)
                assert small.sum().item() == 7000.0
                assert out.sum().item() == KIB
                block.step()
            assert sum(v.nbytes for v in block._residency.variables()) == 8 * 4096 + 4000 + 4096
        assert held <= 24 * KIB
        assert block.statistics.peak_bytes <= 24 * KIB

    def test_growth_makes_room_before(self):
        others = crowd(5)
        with OutOfCore(24 * KIB) as block, pytest.raises(BudgetTooSmall):
            for other in others:
                other.mul_(1)
            torch.full((10,), 7.0).resize_(7 * KIB)
        assert block.statistics.peak_bytes <= 24 * KIB

    def test_quantisation_aware_training(self):
        from torch.ao.quantization import (
            FakeQuantize,
            FusedMovingAvgObsFakeQuantize,
            MovingAverageMinMaxObserver,
            PerChannelMinMaxObserver,
        )

        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            fused = FusedMovingAvgObsFakeQuantize(MovingAverageMinMaxObserver)
            channels = FakeQuantize(
                PerChannelMinMaxObserver, dtype=torch.qint8, quant_min=-128, quant_max=127,
                qscheme=torch.per_channel_symmetric,
            )  # fmt: skip
            layers = [nn.Linear(64, 64) for _ in range(4)]
            x = torch.randn(16, 64)
            seen = []

            def step() -> None:
                y = x
                for layer in layers:
                    y = F.linear(fused(y), channels(layer.weight), layer.bias)
                loss = y.square().mean()
                loss.backward()
                seen.append(loss.item())

            if budget is None:
                [step() for _ in range(4)]
                return seen
            with OutOfCore(budget) as block:
                for _ in range(4):
                    step()
                    block.step()
            return seen

        assert train(80 * KIB) == train(None)


class TestTheFirstIteration:
    def test_parameters_that_no_operation_has_touched_count(self):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))  # 130 KiB
        held = []

        class Meter(torch.utils._python_dispatch.TorchDispatchMode):
            """The bytes of the parameters that are where they were made, by their addresses."""

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                storages = [p.untyped_storage() for p in model.parameters()]
                variables = [block._residency.known.get(s._cdata) for s in storages]
                held.append(
                    sum(s.nbytes() for s, v in zip(storages, variables, strict=True)
                        if v is None or v.resident)
                )  # fmt: skip
                return func(*args, **(kwargs or {}))

        for named in ({"model": model}, {"optimizer": torch.optim.SGD(model.parameters())}, {}):
            held.clear()
            with OutOfCore(70 * KIB, **named) as block:
                if not named:  # as far as the first module that is called tells
                    model(torch.randn(2, 64)).sum().backward()
                x = torch.randn(2, 64)
                with Meter():
                    model(x).sum().backward()
            assert held and max(held) <= 70 * KIB
            assert all(p.untyped_storage().nbytes() for p in model.parameters())

    def test_what_is_named_must_be_that(self):
        with pytest.raises(ValueError, match="give modules, one or some"):
            OutOfCore(1, model=[torch.ones(1)])


class TestLayouts:
    def test_sparse_tensors(self):
        """COO and CSR, as gradients and as matrices."""

        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            table = nn.Embedding(400, 16, sparse=True)
            eye = torch.eye(64)
            coo, csr = eye.to_sparse(), eye.to_sparse_csr()
            adam = torch.optim.SparseAdam(table.parameters())
            seen = []

            def step() -> None:
                adam.zero_grad()
                rows = table(torch.randint(0, 400, (64,)))
                loss = (torch.sparse.mm(coo, rows) + csr @ rows).square().sum()
                loss.backward()
                adam.step()
                seen.append(loss.item())
                coo.mul_(0.9)

            if budget is None:
                [step() for _ in range(4)]
                return seen
            with OutOfCore(budget):
                [step() for _ in range(4)]
            return seen

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls CSR a beta
            assert train(120 * KIB) == train(None)

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested_tensors(self, layout):
        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            layer = nn.Linear(32, 32)
            parts = [torch.randn(n, 32) for n in (3, 7, 20)]
            others = crowd()
            seen = []

            def step() -> None:
                batch = torch.nested.nested_tensor(parts, layout=layout)
                out = layer(batch)
                for other in others:
                    other.mul_(1)
                loss = torch.nested.to_padded_tensor(out, 0.0).square().sum()
                loss.backward()
                seen.append(loss.item())

            if budget is None:
                [step() for _ in range(3)]
                return seen
            with OutOfCore(budget) as block:
                for _ in range(3):
                    step()
                    block.step()
            return seen

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls them a prototype
            assert train(64 * KIB) == train(None)

    def test_a_tensor_around_others(self):
        from torch.testing._internal.two_tensor import TwoTensor

        others = crowd()
        a, b = torch.ones(KIB), torch.full((KIB,), 2.0)
        with OutOfCore(24 * KIB):
            both = TwoTensor(a, b)
            for _ in range(2):
                for other in others:
                    other.mul_(1)
                result = both * 3
            assert (result.a.sum().item(), result.b.sum().item()) == (3 * KIB, 6 * KIB)


def foreign(tensor: torch.Tensor, how: str, folder: Path) -> torch.Tensor:
    """Return a copy of a tensor in memory that is not torch's alone."""
    if how == "numpy":
        return torch.from_numpy(tensor.numpy().copy())
    if how == "buffer":
        return torch.frombuffer(bytearray(tensor.numpy().tobytes()), dtype=tensor.dtype).view_as(
            tensor
        )
    if how == "mmap":
        path = folder / f"tensor{len(list(folder.iterdir()))}"
        torch.save(tensor, path)
        return torch.load(path, mmap=True)
    if how == "exported":  # to an array that was made before
        tensor.numpy()
        return tensor
    return tensor.clone().share_memory_()


class TestMemoryOfOthers:
    """What torch does not own, or not alone, counts and stays where it is."""

    @pytest.fixture(autouse=True)
    def forget(self):
        _said.clear()

    @pytest.mark.parametrize("how", ["numpy", "buffer", "mmap", "shared", "exported"])
    def test_it_counts_and_stays(self, how, tmp_path):
        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
            for parameter in net.parameters():
                parameter.data = foreign(parameter.detach().clone(), how, tmp_path)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            x, seen = torch.rand(64, 32), []
            places = [p.data_ptr() for p in net.parameters()]

            def loop() -> None:
                for _ in range(5):
                    optimizer.zero_grad()
                    loss = (net(x) - x).square().mean()
                    loss.backward()
                    optimizer.step()
                    seen.append(loss.item())

            if budget is None:
                loop()
                return seen
            held = sum(p.nbytes for p in net.parameters())
            with ExitStack() as stack:
                with pytest.warns(OutOfCoreWarning, match=f"{held} bytes of the model"):
                    block = stack.enter_context(OutOfCore(budget, model=net, optimizer=optimizer))
                loop()
                assert block.statistics.locked_bytes == held
                block.unlock()
                loop()
            assert held < block.statistics.peak_bytes <= budget
            assert block.statistics.iterations == 10
            assert block.statistics.replayed
            assert block.statistics.bytes_in
            assert [p.data_ptr() for p in net.parameters()] == places
            assert all(p.is_shared() == (how == "shared") for p in net.parameters())
            return seen[:5]

        assert train(70 * KIB) == train(None)
        _said.clear()
        with pytest.raises(BudgetTooSmall, match="memory is not torch's own"):
            train(40 * KIB)

    @pytest.mark.parametrize("how", ["numpy", "dlpack", "to_dlpack", "bound", "storage"])
    @pytest.mark.parametrize("before", [True, False])
    def test_an_alias_holds_what_the_tensor_holds(self, how, before):
        def alias_of(tensor: torch.Tensor) -> torch.Tensor:
            if how == "numpy":
                return torch.from_numpy(tensor.numpy())
            if how == "dlpack":
                return torch.from_dlpack(tensor)
            if how == "storage":
                return torch.empty(0).set_(tensor.untyped_storage())
            export = to_dlpack if how == "bound" else torch.utils.dlpack.to_dlpack
            return torch.utils.dlpack.from_dlpack(export(tensor))

        tensors, x = crowd(), torch.zeros(KIB)
        alias = alias_of(x) if before else x
        with OutOfCore(32 * KIB):
            if not before:
                x.add_(0)
                alias = alias_of(x)
            for i in range(4):
                alias.fill_(float(i))
                for tensor in tensors:
                    tensor.mul_(1)
                assert x.sum().item() == i * KIB
                x.add_(1)
                for tensor in tensors:
                    tensor.mul_(1)
                assert alias.sum().item() == (i + 1) * KIB

    @pytest.mark.parametrize("how", ["dlpack", "to_dlpack", "address"])
    def test_an_alias_may_first_be_used_when_the_tensor_would_have_left(self, how):
        tensors, x = crowd(), torch.ones(KIB)
        if how == "address":
            alias = torch.frombuffer(
                (ctypes.c_float * KIB).from_address(x.data_ptr()), dtype=x.dtype
            )
        elif how == "dlpack":
            alias = torch.from_dlpack(x)
        else:
            alias = torch.utils.dlpack.from_dlpack(to_dlpack(x))
        with OutOfCore(32 * KIB) as block:
            x.add_(1)
            for tensor in tensors:
                tensor.mul_(1)
            assert alias.sum().item() == 2 * KIB
            alias.fill_(5)
            for tensor in tensors:
                tensor.mul_(1)
            assert x.sum().item() == 5 * KIB
        assert block.statistics.locked_bytes == 4 * KIB

    def test_what_is_excluded_keeps_its_address(self):
        tensors, x = crowd(), torch.ones(KIB)
        alias = np.from_dlpack(x)  # of which torch does not tell
        with OutOfCore(32 * KIB, exclude=(x,)) as block:
            for _ in range(3):
                x.add_(1)
                for tensor in tensors:
                    tensor.mul_(1)
            assert alias.sum() == x.sum().item() == 4 * KIB
        assert block.statistics.bytes_out > 0

    def test_what_becomes_shared_within_the_block_stays_so(self):
        tensors, x = crowd(), torch.ones(KIB)
        with OutOfCore(24 * KIB) as block:
            x.add_(1)
            x.share_memory_()
            block.unlock()
            for tensor in tensors:
                tensor.mul_(1)
            assert x.is_shared()
        assert x.is_shared()

    def test_a_part_that_is_written_counts_whole(self):
        flat, tensors = torch.zeros(4 * KIB), crowd()
        parts = flat.split(KIB)
        with OutOfCore(32 * KIB) as block:
            for i in range(4):
                assert parts[0].sum().item() == i  # read alone at first
                for part in parts:
                    part.add_(1 / KIB)
                for tensor in tensors:
                    tensor.mul_(1)
                block.step()
            assert any(v.nbytes == flat.nbytes for v in block._residency.variables())
        assert flat.sum().item() == 16
        assert block.statistics.uncounted_bytes == 0
        assert block.statistics.peak_bytes <= 32 * KIB


def write_by_address(tensor: torch.Tensor, minus: torch.Tensor) -> None:
    """Subtract from a tensor as native code does: no mode of torch tells of it."""
    with torch._C.DisableTorchFunction():
        places = [(t.data_ptr(), t.numel()) for t in (tensor, minus)]
    ours, theirs = (
        np.ctypeslib.as_array((ctypes.c_float * n).from_address(at)) for at, n in places
    )
    ours -= 0.1 * theirs


class NativeSGD(torch.optim.Optimizer):
    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                write_by_address(parameter, parameter.grad)


class TestNativeOptimizers:
    @pytest.mark.parametrize("by", ["optimizer", "hand", "half"])
    def test_they_lose_no_update(self, by):
        """Half: native code changes some parameters, operations the others."""

        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 32))
            parameters = list(net.parameters())
            native = NativeSGD(parameters[::2] if by == "half" else parameters)
            others = torch.optim.Adam(parameters[1::2])
            x, seen = torch.rand(64, 32), []

            def loop(block: OutOfCore | None = None) -> None:
                for _ in range(8):
                    net.zero_grad()
                    loss = (net(x) - x).square().mean()
                    loss.backward()
                    if by == "hand":
                        for parameter in parameters:
                            write_by_address(parameter, parameter.grad)
                        if block:
                            block.step()
                    else:
                        native.step()
                    if by == "half":
                        others.step()
                    seen.append(loss.item())

            if budget is None:
                loop()
                return seen
            with OutOfCore(budget, model=net) as block:
                loop(block)
            assert block.statistics.replayed
            assert block.statistics.bytes_in
            return seen

        plain = train(None)
        for budget in (50, 56, 64, 80, 96):
            assert train(budget * KIB) == plain


class TestIterationsThatEnd:
    def test_also_where_no_parameter_is_managed(self):
        net, x = nn.Linear(32, 32), torch.rand(64, 32)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with OutOfCore(40 * KIB, exclude=net.parameters()) as block:
            for _ in range(5):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        assert block.statistics.iterations == 5

    def test_what_never_ends_is_told_once_and_forgotten(self, monkeypatch):
        monkeypatch.setattr("repro.outofcore.iterations._MOST", 50)
        _said.clear()
        net, x = nn.Linear(32, 32), torch.rand(64, 32)
        with OutOfCore(60 * KIB) as block:
            with pytest.warns(OutOfCoreWarning, match="no iteration has ended in 50 op") as said:
                for _ in range(30):
                    net(x).square().mean().backward()
            assert len(said) == 1
            assert len(block._iterations.log) <= 50
            for _ in range(4):
                net(x).square().mean().backward()
                block.step()
            assert block.statistics.replayed


class TestOtherTensors:
    """What has no ordinary memory, and operations that call others."""

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
    def test_forward_mode_differentiation(self):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)), torch.rand(64, 16)
        zero = torch._efficientzerotensor((KIB,))

        def tangent() -> torch.Tensor:
            with fwd.dual_level():
                out = net(fwd.make_dual(x, torch.ones_like(x)))
                return fwd.unpack_dual(out).tangent + zero[:64].view(64, 1)

        plain = tangent()
        with OutOfCore(52 * KIB, model=net) as block:
            for _ in range(4):
                net(x).mean().backward()
                for tensor in crowd():
                    tensor.mul_(1)
                assert torch.equal(tangent(), plain)
                block.step()

    def test_lazy_layers_are_named(self):
        net = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(10))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with OutOfCore(AMPLE, model=net, optimizer=optimizer) as block:
            for _ in range(4):
                optimizer.zero_grad()
                net(torch.rand(4, 8)).sum().backward()
                optimizer.step()
            counted = {id(block._residency.find(p)) for p in net.parameters()}
        assert len(counted) == 4
        assert block.statistics.iterations == 4

    def test_functions_of_functions(self):
        torch.manual_seed(0)
        net, x = nn.Linear(16, 1), torch.rand(64, 16)
        parameters = dict(net.named_parameters())

        def norm(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return functional_call(net, values, (row,)).square().sum()

        def each() -> list[torch.Tensor]:
            one = vmap(grad(norm), (None, 0))(parameters, x)["weight"]
            two = torch.ops.higher_order.cond(
                x.sum() > 0, lambda v: (v @ v.T,), lambda v: (v.cos(),), (x,)
            )[0]
            return [one.detach(), two, jacrev(torch.sin)(x[0])]

        plain = each()
        with OutOfCore(44 * KIB) as block:
            for _ in range(4):
                assert all(map(torch.equal, each(), plain))
                for tensor in crowd():
                    tensor.mul_(1)
                block.step()
            assert block.statistics.bytes_in

    @pytest.mark.parametrize("operator", ["cond", "while_loop"])
    def test_what_needs_compiling_is_refused(self, operator):
        x = torch.rand(4)
        calls = {
            "cond": lambda: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
            "while_loop": lambda: while_loop(
                lambda i, _: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0), x)
            ),
        }
        with OutOfCore(AMPLE), pytest.raises(NotImplementedError, match="needs torch"):
            calls[operator]()


class TestAddresses:
    def test_they_can_be_given_back(self):
        tensors = crowd()
        with OutOfCore(24 * KIB) as block:
            for tensor in tensors[:4]:
                tensor.data_ptr()
            assert block.statistics.locked_bytes == 16 * KIB
            with pytest.raises(BudgetTooSmall, match="whose address is in use"):
                torch.empty(4 * KIB)
            block.unlock(tensors[0])
            assert block.statistics.locked_bytes == 12 * KIB
            block.unlock()
            torch.empty(5 * KIB)
            assert [t.sum().item() for t in tensors] == [KIB * i for i in range(8)]
        with pytest.raises(RuntimeError, match="inside the block"):
            block.unlock()

    def test_safetensors(self, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch")
        state = {f"t{i}": tensor for i, tensor in enumerate(crowd())}
        state["part"] = state["t3"][:0].clone()
        with OutOfCore(24 * KIB) as block:
            for tensor in state.values():
                tensor.mul_(1)
            safetensors.save_file(state, tmp_path / "state")
            assert block.statistics.locked_bytes == 0
            assert block.statistics.peak_bytes <= 24 * KIB
            for tensor in state.values():  # training goes on
                tensor.add_(1)
        loaded = safetensors.load_file(tmp_path / "state")
        assert [loaded[f"t{i}"].sum().item() for i in range(8)] == [KIB * i for i in range(8)]


class TestOtherPaths:
    @pytest.fixture(autouse=True)
    def forget(self):
        _said.clear()

    def test_compiled_functions_are_named_once(self):
        double = torch.compile(lambda x: x * 2, backend="eager")
        with OutOfCore(KIB), pytest.warns(OutOfCoreWarning, match="not compiled") as said:
            double(torch.ones(2))
            double(torch.ones(2))
        assert len(said) == 1

    def test_the_fast_path_of_attention_is_named_once(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        x = torch.randn(2, 3, 8)
        with OutOfCore(64 * KIB):
            layer(x)  # with gradients there is none to leave
            with torch.no_grad(), pytest.warns(OutOfCoreWarning, match="fast path") as said:
                layer(x)
                layer(x)
        assert len(said) == 1


class TestInterrupts:
    def test_one_at_any_point_ends_as_one(self):
        """Ctrl-C after every so many steps of Python: it comes out, and every value is there."""
        for after in range(50, 4000, 97):
            tensors = crowd(6)
            left = [after]

            def trace(frame: FrameType, event: str, _: object, left: list[int] = left):
                left[0] -= 1
                if left[0] == 0:
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGINT)  # twice
                return trace

            seen = 0
            with pytest.raises(KeyboardInterrupt), OutOfCore(16 * KIB):
                try:
                    sys.settrace(trace)
                    while True:
                        for tensor in tensors:
                            tensor.mul_(1)
                            seen += 1
                finally:
                    sys.settrace(None)
            assert [t.sum().item() for t in tensors] == [KIB * i for i in range(6)], after
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_one_while_the_block_ends(self):
        tensors = crowd(8)

        def trace(frame: FrameType, event: str, _: object):
            signal.raise_signal(signal.SIGINT)
            return trace

        block = OutOfCore(16 * KIB)
        block.__enter__()
        for tensor in tensors:
            tensor.mul_(1)
        with pytest.raises(KeyboardInterrupt):
            try:
                sys.settrace(trace)
                block.__exit__(None, None, None)
            finally:
                sys.settrace(None)
        assert not block.entered
        assert [t.sum().item() for t in tensors] == [KIB * i for i in range(8)]

    def test_a_thread_leaves_signals_alone(self):
        def train() -> None:
            with OutOfCore(KIB):
                handlers.append(signal.getsignal(signal.SIGINT))

        handlers: list[object] = []
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        assert handlers == [signal.default_int_handler]


class TestOperations:
    def test_without_a_meta_kernel_the_smallest_budget_does(self):
        data = torch.zeros(4 * KIB)
        data[7] = 1

        def step() -> None:
            torch.nonzero(data)  # how long it is depends on values: the guess is 16 KiB

        trace = record(step)
        with OutOfCore(trace.smallest_budget):
            step()

    @pytest.mark.parametrize(
        "choose",
        [
            lambda x: (x > 1).nonzero(),
            lambda x: x[x > 1],
            lambda x: x.view(8, -1)[x.view(8, -1)[:, 0] > 1],
            lambda x: x.masked_select(x[:1] > 1),
            lambda x: x.long().repeat_interleave(8),
            lambda x: torch.repeat_interleave(x.long() * 4),
            lambda x: torch.bincount(x.long() * 3000),
            lambda x: x.unique(return_inverse=True, return_counts=True),
            lambda x: x.to_sparse(),
        ],
    )
    @pytest.mark.parametrize("room", [0, 300 * KIB])
    def test_what_depends_on_values_stays_within_the_budget(self, choose, room, recwarn):
        """Most of 8 KiB is chosen in the iteration that is planned, all of it after that."""
        x, others = torch.full((2 * KIB,), 2.0), crowd(16)
        x[KIB:] = 0
        budget = record(lambda: choose(x + 2)).smallest_budget + 16 * KIB + room
        with OutOfCore(budget) as block:
            for _ in range(5):
                for other in others:
                    other.add_(1)
                choose(x)
                block.step()
                x[KIB:] = 2
        assert block.statistics.peak_bytes <= budget
        assert not [w for w in recwarn if "made more than could be foretold" in str(w.message)]

    def test_too_many_chosen_values_are_refused_before(self):
        x = torch.ones(2 * KIB)
        with OutOfCore(20 * KIB), pytest.raises(BudgetTooSmall, match="nonzero"):
            x.nonzero()
        with OutOfCore(25 * KIB) as block:
            assert len(x.nonzero()) == 2 * KIB
        x[KIB:] = 0  # 8 KiB of them are known only by counting
        with OutOfCore(17 * KIB) as block:
            assert len(x.nonzero()) == KIB
        assert block.statistics.peak_bytes == 16 * KIB

    @pytest.mark.parametrize("kind", ["all backends", "no fake", "a fake"])
    def test_an_operation_of_ones_own_runs_once(self, kind):
        """Its random numbers and whatever else it does are those of plain training."""
        calls, name = [], f"repro_tests::{kind.replace(' ', '_')}"

        def noise(x: torch.Tensor) -> torch.Tensor:
            calls.append(x.device.type)
            return x + torch.rand(x.shape)

        with torch.library._scoped_library("repro_tests", "FRAGMENT") as library:
            if kind == "all backends":
                library.define(f"{name.partition('::')[2]}(Tensor x) -> Tensor")
                library.impl(name.partition("::")[2], noise, "CompositeExplicitAutograd")
            else:
                made = torch.library.custom_op(name, noise, mutates_args=())
                if kind == "a fake":
                    made.register_fake(torch.empty_like)
            operation = getattr(torch.ops.repro_tests, name.partition("::")[2])

            def train() -> list[float]:
                torch.manual_seed(0)
                return [float(operation(torch.ones(8)).sum()) for _ in range(3)]

            plain = train()
            with OutOfCore(1 << 20):
                assert train() == plain
            assert calls == ["cpu"] * 6

    def test_what_is_not_foretold_is_said_once(self):
        _said.clear()
        x, others = torch.ones(KIB), crowd()
        with torch.library._scoped_library("repro_tests", "FRAGMENT") as library:
            library.define("tripled(Tensor x) -> Tensor")
            library.impl("tripled", lambda x: x.repeat(3), "CPU")
            with OutOfCore(20 * KIB) as block, pytest.warns(OutOfCoreWarning) as said:
                for _ in range(2):
                    [other.add_(1) for other in others]
                    torch.ops.repro_tests.tripled(x)
            assert block.statistics.peak_bytes > 20 * KIB
        assert len(said) == 1 and "tripled made more" in str(said[0].message)
        assert "register_fake" in str(said[0].message)

    @pytest.mark.parametrize(
        "draw",
        [
            lambda g: torch.ops.aten.rand([KIB]),  # as C++ and TorchScript call it
            lambda g: torch.ops.aten.randperm(KIB),
            lambda g: torch.randn(KIB, generator=g),
            lambda g: F.dropout(torch.ones(KIB)),
        ],
    )
    def test_foretelling_draws_no_random_number(self, draw):
        class Counts(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                self.seen += 1
                return operation(*args, **(kwargs or {}))

        def drawn(within: OutOfCore | nullcontext) -> tuple[torch.Tensor, int]:
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(1)
            with Counts() as counts, within:
                before = counts.seen
                values = [draw(generator) for _ in range(3)]
                return torch.stack(values), counts.seen - before

        (plain, count), (values, seen) = drawn(nullcontext()), drawn(OutOfCore(1 << 20))
        assert torch.equal(plain, values) and count == seen

    def test_what_lstms_and_losses_keep_is_foretold(self):
        model, x = nn.LSTM(40, 33, 2, bidirectional=True), torch.randn(7, 5, 40)

        def step() -> None:
            out, _ = model(x)
            F.mse_loss(out, torch.zeros_like(out)).backward()
            model.zero_grad()

        budget = record(step).smallest_budget
        with OutOfCore(budget, model=model) as block:
            for _ in range(4):
                step()
                block.step()
        assert block.statistics.peak_bytes <= budget

    def test_scripted_modules(self):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.b(torch.relu(self.a(x)))

        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            net = torch.jit.script(Net())
            x = torch.randn(16, 32)
            seen = []

            def step() -> None:
                loss = net(x).square().sum()
                loss.backward()
                seen.append(loss.item())

            if budget is None:
                [step() for _ in range(4)]
                return seen
            with OutOfCore(budget) as block:
                for _ in range(4):
                    step()
                    block.step()
            assert block.statistics.locked_bytes == 0
            return seen

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert train(20 * KIB) == train(None)
            with pytest.raises(BudgetTooSmall, match=r"aten\.addmm"):
                train(4 * KIB)


class TestSums:
    """Autograd sums gradients in place, and so does a block; but not into what others hold."""

    def step(self, kept: list[torch.Tensor] | None = None):
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32) for _ in range(4)]
        x = torch.randn(64, 32)

        def run() -> list[torch.Tensor]:
            y = x
            for layer in layers:
                layer.zero_grad()
                z = layer(y).tanh()
                if kept is not None:
                    z.register_hook(lambda grad: kept.append(grad))
                    y.requires_grad and y.register_hook(lambda grad: kept.append(grad))
                y = y + z + y.sin()
            y.square().sum().backward()
            return [p.grad.clone() for layer in layers for p in layer.parameters()]

        return run

    def test_they_are_in_place(self):
        trace = record(self.step(), warmup=1)
        backward = [f.name for f in trace.functions].index("aten.ones_like")
        names = [f.name for f in trace.functions[backward:]]
        assert "aten.add" not in names
        assert names.count("aten.add_") == 6  # two for each layer but the first, whose x is given

    @pytest.mark.parametrize("hold", [False, True])
    def test_every_bit_is_kept(self, hold):
        kept: list[torch.Tensor] = []
        step = self.step(kept if hold else None)
        plain, seen = step(), [grad.clone() for grad in kept]
        kept.clear()
        step = self.step(kept if hold else None)
        with OutOfCore(80 * KIB) as block:
            for _ in range(5):
                ours = step()
                block.step()
                assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
                assert all(torch.equal(a, b) for a, b in zip(kept, seen, strict=True))
                kept.clear()
            assert block.statistics.replayed >= 2
            assert block.statistics.bytes_out > 0

    def test_slices_are_summed_in_place_as_in_plain_training(self):
        """Dense blocks: the gradient of what was put together is divided into slices."""
        torch.manual_seed(0)
        layers = [nn.Conv2d(4 + 2 * i, 2, 3, padding=1) for i in range(5)]
        x = torch.randn(4, 4, 8, 8)

        def step() -> None:
            features = [x]
            for layer in layers:
                layer.zero_grad()
                features.append(layer(torch.cat(features, 1)).relu())
            torch.cat(features, 1).square().sum().backward()

        with torch.profiler.profile() as plain:
            step()
        ran = {event.key: event.count for event in plain.key_averages()}
        names = [f.name for f in record(step, warmup=1).functions]
        assert names.count("aten.add_") == ran["aten::add_"] > 0
        assert names.count("aten.add") == ran.get("aten::add", 0)
