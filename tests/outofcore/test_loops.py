"""What runs beside a training or does more than compute ends right, or in a named error."""

import copy
import ctypes
import io
import signal
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from ooc_trainings import AMPLE, KIB, back, child, crowd, plain, same, touch, within
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.ao import quantization
from torch.func import functional_call, grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import to_dlpack

from repro.measure.memory import tensors_in
from repro.outofcore import BudgetTooSmall, OutOfCore, record, running
from repro.outofcore.operations import OutOfCoreWarning, _said, result_bytes

# On a CPU, torch 2.13 leaves what is swapped out readable.
READABLE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
by_address = pytest.mark.skipif(not READABLE, reason="what is swapped out has no memory")
BOUND = pytest.param("bound", marks=by_address)


@pytest.fixture(autouse=True)
def nothing_was_said():
    _said.clear()


@pytest.mark.slow
class TestOthers:
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
            threading.Thread(target=answer, daemon=True).start()
            pool = ThreadPoolExecutor(1)
            pool.submit(int).result()
            tensors = [torch.full((1024,), float(i)) for i in range(32)]
            right = [1024.0 * i for i in range(32)]
            sums, file = [], io.BytesIO()

            def add():
                for _ in range(50):
                    sums.append([tensor.sum().item() for tensor in tensors] == right)

            with OutOfCore(24 * 1024) as block:
                for tensor in tensors:
                    tensor.mul_(1)
                waited = block.statistics.on_demand
                thread = threading.Thread(target=tensors[0].sum)
                thread.start()
                thread.join()
                assert block.statistics.on_demand == waited + 1  # it was seen
                for work in (lambda: torch.save(tensors, file), add):
                    thread = threading.Thread(target=work)
                    thread.start()
                    while thread.is_alive():  # while it works, others come and go
                        for tensor in tensors:
                            tensor.mul_(1)
                    thread.join()
                assert list(pool.map(lambda t: t.sum().item(), tensors)) == right
                assert all(sums) and len(sums) == 50
                assert block.statistics.peak_bytes <= 24 * 1024, block.statistics
                if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
                    for tensor in tensors:  # a thread that nobody sees
                        questions.put(tensor)
                    assert [answers.get() for _ in tensors] == right
                questions.put(None)
            file.seek(0)
            assert [t.sum().item() for t in torch.load(file)] == right
            print("right")
        """)
        assert out == "right"

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

        wanted = [train(s) for s in (1.0, 2.0)]
        with OutOfCore(48 * KIB) as block, ThreadPoolExecutor(2) as pool:
            assert list(pool.map(train, (1.0, 2.0))) == wanted and train(1.0) == wanted[0]
        assert block.statistics.bytes_in > 0

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

    def test_a_forked_worker_reads_what_is_away(self, tmp_path):
        code = """
            import os, sys, torch
            from repro.outofcore import OutOfCore

            torch.set_num_threads(1)
            tensors = [torch.full((1 << 15,), float(i)) for i in range(8)]
            values = [float(i) for i in range(2, 10)]
            with OutOfCore(1 << 19, swap_folder=sys.argv[1] or None) as block:
                for tensor in tensors * 2:
                    tensor.add_(1)
                if (pid := os.fork()) == 0:
                    try:
                        right = [t.mean().item() for t in tensors] == values
                        right = right and tensors[0].numpy().mean() == 2
                    except RuntimeError as error:
                        os._exit(2 if "exclude=" in str(error) else 3)
                else:
                    for tensor in tensors:
                        tensor.mul_(2)
            if pid == 0:  # it may leave the block
                os._exit(0 if right and [t.mean().item() for t in tensors] == values else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
        assert child(code, "") == ("0" if READABLE else "2")
        assert child(code, str(tmp_path)) == "2"  # of a file it has no copy


class Branch(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Branch(), Branch(), Branch()

    def both(self, x: torch.Tensor) -> torch.Tensor:
        future = torch.jit.fork(self.one, x)
        return self.two(x) + torch.jit.wait(future)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        futures = [torch.jit.fork(self.one, x), torch.jit.fork(self.both, x)]
        total = self.three(x)
        for future in futures:
            total = total + torch.jit.wait(future)
        return total


@contextmanager
def unwarned(kind: type[Warning]):
    """For what torch deprecates, or calls a beta or a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kind)
        yield


class TestScriptsThatFork:
    """Operations of torch.jit.fork come from threads of torch's own, several at once."""

    def test_they_give_the_same(self):
        def make():
            net = torch.jit.script(Forked())
            optimizer = torch.optim.SGD(net.parameters(), 0.01)
            x = torch.rand(32, 64)

            def step():
                optimizer.zero_grad()
                loss = back((net(x) - x).square().mean())
                optimizer.step()
                with torch.no_grad():
                    return loss, net(x).sum().item()

            return step, {"model": net, "optimizer": optimizer}

        with unwarned(DeprecationWarning):
            plain(make, 8)  # the first runs of a script are not optimized
            block = same(120 * KIB, make, 8)
            assert block.statistics.bytes_in and not block.statistics.locked_bytes
            # The mini-batch counts once it is used.
            assert block.statistics.peak_bytes <= 120 * KIB + 32 * 64 * 4
            with pytest.raises(BudgetTooSmall):
                within(40 * KIB, make, 8)


class TestSizes:
    """C++ code reads lengths and sizes, and keeps their address."""

    @pytest.mark.slow
    def test_packed_sequences(self):
        def make():
            net = nn.LSTM(8, 16, batch_first=True)
            lengths, x = torch.randint(5, 30, (8,)), torch.randn(8, 30, 8)

            def step():
                packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, False)
                out, _ = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
                return back(out.square().mean())

            return step

        assert same(100 * KIB, make, 3).statistics.bytes_out > 0

    def test_tensor_split_by_a_tensor(self):
        def make():
            x, others = torch.arange(4 * KIB, dtype=torch.float32), crowd()
            sizes = torch.tensor([100, 200, 300])

            def step():
                touch([sizes, *others, x])
                return [part.sum().item() for part in torch.tensor_split(x, sizes)]

            return step

        same(24 * KIB, make)

    def test_lengths_that_it_makes_itself_stay(self):
        lengths = torch.arange(64, 0, -1)
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(64, 64, 8), lengths)
        padded = nn.utils.rnn.pad_packed_sequence(packed)[0]
        room = packed.data.nbytes + padded.nbytes + packed.batch_sizes.nbytes
        for more in (0, lengths.nbytes):
            refuses = nullcontext() if more else pytest.raises(BudgetTooSmall)
            with refuses, OutOfCore(room + more):
                packed.data.mul_(1)
                got, held = nn.utils.rnn.pad_packed_sequence(packed)
        assert torch.equal(got, padded) and torch.equal(held, lengths)


class TestGrowth:
    def test_what_grows_keeps_its_values_and_is_counted(self):
        others = crowd()
        with OutOfCore(24 * KIB) as block:
            out, small = torch.empty(0), torch.full((10,), 7.0)
            touch(others)
            small.resize_(1000)[10:] = 7.0  # 40 bytes become 4000
            torch.add(others[0], 1.0, out=out)  # no bytes become 4096
            for _ in range(3):
                touch(others)
                assert small.sum().item() == 7000.0 and out.sum().item() == KIB
                block.step()
            assert sum(v.nbytes for v in block._residency.variables()) == 8 * 4096 + 4000 + 4096
            with pytest.raises(BudgetTooSmall):
                small.resize_(7 * KIB)  # room is made before
        assert block.statistics.peak_bytes <= 24 * KIB

    def test_quantisation_aware_training(self):
        def make():
            observer = quantization.MovingAverageMinMaxObserver
            fused = quantization.FusedMovingAvgObsFakeQuantize(observer)
            channels = quantization.FakeQuantize(
                quantization.PerChannelMinMaxObserver, dtype=torch.qint8, quant_min=-128,
                quant_max=127, qscheme=torch.per_channel_symmetric,
            )  # fmt: skip
            layers, x = [nn.Linear(64, 64) for _ in range(4)], torch.randn(16, 64)

            def step():
                y = x
                for layer in layers:
                    y = F.linear(fused(y), channels(layer.weight), layer.bias)
                return back(y.square().mean())

            return step

        same(80 * KIB, make)


class TestTheFirstIteration:
    def test_parameters_that_no_operation_has_touched_count(self):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))  # 130 KiB
        held = []

        class Meter(TorchDispatchMode):
            """The bytes of the parameters that are where they were made, by their addresses."""

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                storages = [p.untyped_storage() for p in model.parameters()]
                variables = [block._residency.known.get(s._cdata) for s in storages]
                held.append(sum(s.nbytes() for s, v in zip(storages, variables, strict=True)
                                if v is None or v.resident))  # fmt: skip
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


class TestLayouts:
    def test_sparse_tensors(self):
        """COO and CSR, as gradients and as matrices."""

        def make():
            table = nn.Embedding(400, 16, sparse=True)
            coo, csr = torch.eye(64).to_sparse(), torch.eye(64).to_sparse_csr()
            adam = torch.optim.SparseAdam(table.parameters())

            def step():
                adam.zero_grad()
                rows = table(torch.randint(0, 400, (64,)))
                loss = back((torch.sparse.mm(coo, rows) + csr @ rows).square().sum())
                adam.step()
                coo.mul_(0.9)
                return loss

            return step

        with unwarned(UserWarning):
            same(120 * KIB, make)

    @pytest.mark.parametrize(
        "form", [lambda state: state, lambda state: [state], lambda state: {0: [state]}]
    )
    def test_states_of_optimizers_in_any_container(self, form):
        class SignSGD(torch.optim.Optimizer):
            def step(self):
                with torch.no_grad():
                    for p in self.param_groups[0]["params"]:
                        if p not in self.state:
                            self.state[p] = form(torch.zeros_like(p))
                        (mean,) = tensors_in(self.state[p])
                        p.sub_(mean.mul_(0.9).add_(p.grad).sign(), alpha=0.01)

        def make():
            net = Branch(32)
            optimizer = SignSGD(net.parameters(), {})

            def step():
                optimizer.zero_grad()
                loss = back((net(torch.rand(64, 32)) - 1).square().mean())
                optimizer.step()
                return loss

            return step

        same(56 * KIB, make)

    def test_parts_made_by_an_operation_that_repeats_have_room(self):
        dense, rows, others = torch.ones(16, KIB), torch.arange(4)[None], crowd(40)
        with unwarned(UserWarning), OutOfCore(176 * KIB) as block:
            mask = torch.sparse_coo_tensor(rows, torch.ones(4, KIB), (16, KIB), is_coalesced=True)
            for _ in range(5):
                touch(others)
                dense.sparse_mask(mask)
                touch(others)
                mask.to_dense()
                block.step()
        assert block.statistics.replayed >= 2 and block.statistics.peak_bytes <= 176 * KIB

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested_tensors(self, layout):
        def make():
            layer, others = nn.Linear(32, 32), crowd()
            parts = [torch.randn(n, 32) for n in (3, 7, 20)]

            def step():
                out = layer(torch.nested.nested_tensor(parts, layout=layout))
                touch(others)
                return back(torch.nested.to_padded_tensor(out, 0.0).square().sum())

            return step

        with unwarned(UserWarning):
            same(64 * KIB, make, 3)

    def test_a_tensor_around_others(self):
        others, a, b = crowd(), torch.ones(KIB), torch.full((KIB,), 2.0)
        with OutOfCore(24 * KIB):
            both = TwoTensor(a, b)
            for _ in range(2):
                touch(others)
                result = both * 3
            assert (result.a.sum().item(), result.b.sum().item()) == (3 * KIB, 6 * KIB)

    @pytest.mark.parametrize("named", [False, True])
    def test_parameters_around_other_tensors(self, named):
        def make():
            net, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), torch.ones(64)
            values = net[0].weight.detach()
            net[0].weight = nn.Parameter(TwoTensor(values, values / 2))
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

            def step():
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.a.item()

            return step, {"model": net, "optimizer": optimizer} if named else {}

        block = same(340 * KIB, make)
        assert 128 * KIB < block.statistics.peak_bytes <= 340 * KIB


def foreign(tensor: torch.Tensor, how: str, folder: Path) -> torch.Tensor:
    """Return a copy of a tensor in memory that is not torch's alone."""
    if how == "numpy":
        return torch.from_numpy(tensor.numpy().copy())
    if how == "buffer":
        copied = torch.frombuffer(bytearray(tensor.numpy().tobytes()), dtype=tensor.dtype)
        return copied.view_as(tensor)
    if how == "mmap":
        path = folder / f"tensor{len(list(folder.iterdir()))}"
        torch.save(tensor, path)
        return torch.load(path, mmap=True)
    if how == "exported":  # to an array that was made before
        tensor.numpy()
        return tensor
    return tensor.clone().share_memory_()


def alias_of(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """Return another tensor over the memory of one."""
    if how == "numpy":
        return torch.from_numpy(tensor.numpy())
    if how == "dlpack":
        return torch.from_dlpack(tensor)
    if how == "storage":
        return torch.empty(0).set_(tensor.untyped_storage())
    if how == "address":
        place = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
        return torch.frombuffer(place, dtype=tensor.dtype)
    export = to_dlpack if how == "bound" else torch.utils.dlpack.to_dlpack
    return torch.utils.dlpack.from_dlpack(export(tensor))


class TestMemoryOfOthers:
    """What torch does not own, or not alone, counts and stays where it is."""

    @pytest.mark.parametrize("how", ["numpy", "buffer", "mmap", "shared", "exported"])
    def test_it_counts_and_stays(self, how, tmp_path):
        def train(budget: int | None) -> list[float]:
            torch.manual_seed(0)
            net, x = Branch(32), torch.rand(64, 32)
            for parameter in net.parameters():
                parameter.data = foreign(parameter.detach().clone(), how, tmp_path)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            places = [p.data_ptr() for p in net.parameters()]

            def loop() -> list[float]:
                seen = []
                for _ in range(5):
                    optimizer.zero_grad()
                    seen.append(back((net(x) - x).square().mean()))
                    optimizer.step()
                return seen

            if budget is None:
                return loop()
            held = sum(p.nbytes for p in net.parameters())
            with ExitStack() as stack:
                with pytest.warns(OutOfCoreWarning, match=f"{held} bytes of the model"):
                    block = stack.enter_context(OutOfCore(budget, model=net, optimizer=optimizer))
                seen = loop()
                assert block.statistics.locked_bytes == held
                loop()
            statistics = block.statistics
            assert held < statistics.peak_bytes <= budget
            assert statistics.iterations == 10 and statistics.replayed and statistics.bytes_in
            assert [p.data_ptr() for p in net.parameters()] == places
            assert all(p.is_shared() == (how == "shared") for p in net.parameters())
            return seen

        assert train(70 * KIB) == train(None)
        _said.clear()
        with pytest.raises(BudgetTooSmall, match="memory is not torch's own"):
            train(40 * KIB)

    def test_loaded_state_of_an_optimizer_is_named_too(self):
        net, file = nn.Linear(32, 32), io.BytesIO()
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
        block = OutOfCore(AMPLE, model=nn.ModuleList([net]))  # which nobody else holds
        with pytest.warns(OutOfCoreWarning, match="torch.load"), block:
            assert block.statistics.peak_bytes == sum(2 * p.nbytes for p in net.parameters())
            optimizer.step()

    @pytest.mark.parametrize("how", ["numpy", "dlpack", "to_dlpack", BOUND, "storage", "address"])
    @pytest.mark.parametrize("made", ["before", "before, used late", "within"])
    def test_an_alias_holds_what_the_tensor_holds(self, how, made):
        tensors, x = crowd(), torch.zeros(KIB)
        alias = alias_of(x, how) if made != "within" else x
        with OutOfCore(32 * KIB) as block:
            if made != "before":
                x.add_(0)
                touch(tensors)  # without an alias it would leave
            if made == "within":
                alias = alias_of(x, how)
            for i in range(4):
                alias.fill_(float(i))
                touch(tensors)
                assert x.sum().item() == i * KIB
                x.add_(1)
                touch(tensors)
                assert alias.sum().item() == (i + 1) * KIB
        if made == "before, used late" and how != "storage":  # which is the tensor's own
            assert block.statistics.locked_bytes == 4 * KIB

    def test_what_is_excluded_keeps_its_address(self):
        tensors, x = crowd(), torch.ones(KIB)
        alias = np.from_dlpack(x)  # of which torch does not tell
        with OutOfCore(32 * KIB, exclude=(x,)) as block:
            for _ in range(3):
                x.add_(1)
                touch(tensors)
            assert alias.sum() == x.sum().item() == 4 * KIB
        assert block.statistics.bytes_out > 0

    def test_a_part_that_is_written_counts_whole(self):
        flat, tensors = torch.zeros(4 * KIB), crowd()
        parts = flat.split(KIB)
        with OutOfCore(32 * KIB) as block:
            for i in range(4):
                assert parts[0].sum().item() == i  # read alone at first
                for part in parts:
                    part.add_(1 / KIB)
                touch(tensors)
                block.step()
            assert any(v.nbytes == flat.nbytes for v in block._residency.variables())
        assert flat.sum().item() == 16 and block.statistics.uncounted_bytes == 0
        assert block.statistics.peak_bytes <= 32 * KIB


def write_by_address(tensor: torch.Tensor, minus: torch.Tensor) -> None:
    """Subtract from a tensor as native code does: no mode of torch tells of it."""
    with torch._C.DisableTorchFunction():
        places = [(t.data_ptr(), t.numel()) for t in (tensor, minus)]
    views = [np.ctypeslib.as_array((ctypes.c_float * n).from_address(at)) for at, n in places]
    views[0][:] -= 0.1 * views[1]


class NativeSGD(torch.optim.Optimizer):
    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            write_by_address(parameter, parameter.grad)


@by_address
class TestNativeOptimizers:
    @pytest.mark.parametrize("by", ["optimizer", "hand", "half"])
    def test_they_lose_no_update(self, by):
        """Half: native code changes some parameters, operations the others."""

        def make():
            net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 32))
            parameters, x = list(net.parameters()), torch.rand(64, 32)
            native = NativeSGD(parameters[::2] if by == "half" else parameters)
            others = torch.optim.Adam(parameters[1::2])

            def step():
                net.zero_grad()
                loss = back((net(x) - x).square().mean())
                if by == "hand":
                    for parameter in parameters:
                        write_by_address(parameter, parameter.grad)
                else:
                    native.step()
                if by == "half":
                    others.step()
                return loss

            # An optimizer ends iterations by itself.
            return step, {"model": net} | ({} if by == "hand" else {"optimizer": native})

        for budget in (50, 56, 64, 80, 96):
            block = same(budget * KIB, make, 8)
            assert block.statistics.replayed and block.statistics.bytes_in


class TestIterationsThatEnd:
    @pytest.mark.parametrize("managed", [False, True])
    def test_also_where_no_parameter_is_managed_and_where_another_optimizer_follows(self, managed):
        net, x = nn.Linear(32, 32), torch.rand(64, 32)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        named = {"optimizer": optimizer} if managed else {"exclude": net.parameters()}
        with OutOfCore(40 * KIB, **named) as block:
            named.clear()
            for i in range(6):
                if i == 3:  # the earlier one ends here
                    optimizer = torch.optim.Adam(net.parameters())
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        assert block.statistics.iterations == 6

    def test_what_never_ends_is_told_once_and_forgotten(self, monkeypatch):
        monkeypatch.setattr("repro.outofcore.iterations._MOST", 50)
        net, x = nn.Linear(32, 32), torch.rand(64, 32)
        with OutOfCore(60 * KIB) as block:
            with pytest.warns(OutOfCoreWarning, match="no iteration has ended in 50 op") as said:
                for _ in range(30):
                    net(x).square().mean().backward()
            assert len(said) == 1 and len(block._iterations.log) <= 50
            for _ in range(4):
                net(x).square().mean().backward()
                block.step()
            assert block.statistics.replayed


class TestOtherTensors:
    """What has no ordinary memory, and operations that call others."""

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
    def test_forward_mode_differentiation(self):
        def make():
            net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
            x, zero = torch.rand(64, 16), torch._efficientzerotensor((KIB,))

            def step():
                net(x).mean().backward()
                touch(crowd())
                with fwd.dual_level():
                    out = net(fwd.make_dual(x, torch.ones_like(x)))
                    return (fwd.unpack_dual(out).tangent + zero[:64].view(64, 1)).tolist()

            return step, {"model": net}

        same(52 * KIB, make)

    def test_lazy_layers_are_named(self):
        net = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(10))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with OutOfCore(AMPLE, model=net, optimizer=optimizer) as block:
            for _ in range(4):
                optimizer.zero_grad()
                net(torch.rand(4, 8)).sum().backward()
                optimizer.step()
            counted = {id(block._residency.find(p)) for p in net.parameters()}
        assert len(counted) == 4 and block.statistics.iterations == 4

    def test_zeros_as_large_as_a_slices_storage_have_room(self):
        """Of a tangent's kind, as forward-mode differentiation makes them."""
        like, others = torch.zeros(8, KIB), crowd(20)
        with OutOfCore(80 * KIB) as block:
            like.add_(1)
            touch(others)
            torch.ops.aten._new_zeros_with_same_feature_meta(others[0], like[0])
        assert block.statistics.peak_bytes <= 80 * KIB

    def test_wrappers_of_functional_transforms_have_no_memory(self):
        def summed(x: torch.Tensor) -> torch.Tensor:
            touch(others)  # of which some have to leave, for the first time
            return x.sum()

        others = crowd()
        with OutOfCore(24 * KIB):
            assert torch.func.vmap(summed)(torch.ones(2, 3)).tolist() == [3, 3]

    def test_a_traced_function_has_no_operations_of_the_block(self):
        others, x = crowd(), torch.ones(2, 3)

        def summed(x):
            touch(others)  # of which some have to leave, for the first time
            return x.sum()

        plain = make_fx(summed)(x)
        with OutOfCore(24 * KIB):
            traced = make_fx(summed)(x)
        assert traced.code == plain.code

    def test_complex_numbers(self):
        def make():
            weight = torch.randn(6, 6, dtype=torch.complex64, requires_grad=True)
            others = crowd()

            def step():
                weight.grad = None
                inverse = torch.linalg.pinv(weight)  # which conjugates within
                touch(others)
                (torch.fft.fft(inverse @ weight.conj()) + inverse.mH).imag.square().sum().backward()
                return inverse.tolist(), weight.grad.tolist()

            return step

        assert same(20 * KIB, make).statistics.bytes_in

    def test_functions_of_functions(self):
        def make():
            net, x = nn.Linear(16, 1), torch.rand(64, 16)
            parameters = dict(net.named_parameters())

            def norm(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
                return functional_call(net, values, (row,)).square().sum()

            def step():
                one = vmap(grad(norm), (None, 0))(parameters, x)["weight"]
                cond = torch.ops.higher_order.cond
                (two,) = cond(x.sum() > 0, lambda v: (v @ v.T,), lambda v: (v.cos(),), (x,))
                touch(crowd())
                return one.tolist(), two.tolist(), jacrev(torch.sin)(x[0]).tolist()

            return step

        assert same(44 * KIB, make).statistics.bytes_in

    def test_weights_of_a_functional_call_may_be_computed(self):
        net, x = nn.Linear(4, 4), torch.rand(2, 4).bfloat16()
        with OutOfCore(1024 * KIB, model=net):
            halves = {name: weight.bfloat16() for name, weight in net.named_parameters()}
            functional_call(net, halves, (x,)).sum().backward()
        assert net.weight.grad is not None

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

    @pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
    def test_tracing_is_refused(self):
        """A trace of a convolution would return the traced input's activations for every input."""
        model, x = nn.Conv2d(1, 2, 3), torch.rand(1, 1, 5, 5)
        refused = pytest.raises(NotImplementedError, match="trace before the block")
        with torch.no_grad(), OutOfCore(AMPLE), refused:
            torch.jit.trace(model, x)


def write_in_a_backward_pass(x: torch.Tensor, _: torch.Tensor) -> None:
    y = torch.ones(1, requires_grad=True) * 1
    y.register_hook(lambda g: x.data_ptr() and write_by_address(x, torch.full_like(x, -10)))
    y.backward()


class TestAddresses:
    def test_what_is_read_by_its_address_stays(self):
        tensors = crowd()
        with OutOfCore(24 * KIB) as block:
            for tensor in tensors[:4]:
                tensor.data_ptr()
            assert block.statistics.locked_bytes == 16 * KIB
            with pytest.raises(BudgetTooSmall, match="whose address is in use"):
                torch.empty(4 * KIB)
            assert [t.sum().item() for t in tensors] == [KIB * i for i in range(8)]

    @pytest.mark.parametrize(
        "write",
        [
            lambda x, y: x.apply_(lambda a: a + 1),
            lambda x, y: x.map_(y, lambda a, b: a + 1),
            lambda x, y: x.map2_(y, y, lambda a, b, c: a + 1),
            write_in_a_backward_pass,
        ],
    )
    def test_what_no_operation_writes_is_kept(self, write):
        x, tensors = torch.zeros(KIB), crowd()
        with OutOfCore(24 * KIB):
            for i in range(3):
                touch(tensors)
                assert x.sum().item() == i * KIB  # from here on the host's copy is the same
                write(x, tensors[0])
        assert x.sum().item() == 3 * KIB

    def test_own_memory_is_not_called_foreign(self):
        net = nn.Linear(KIB, 1)
        with warnings.catch_warnings(action="error"), OutOfCore(24 * KIB) as block:
            net.weight.data_ptr()
            net.bias.detach().numpy()
            net(torch.ones(1, KIB))
            assert block.statistics.locked_bytes == net.weight.nbytes + net.bias.nbytes

    def test_what_a_serialiser_took_is_taken_anew_after_a_write(self):
        tensor = torch.zeros(KIB)
        with OutOfCore(AMPLE) as block:
            tensor.add_(1)
            saved = [block.snapshot(tensor) for _ in range(2)]
            tensor.add_(1)
            saved.append(block.snapshot(tensor))
        assert saved[0] is saved[1]
        sums = [torch.empty(0).set_(storage).sum().item() for storage in saved]
        assert sums == [KIB, KIB, 2 * KIB]

    def test_a_shallow_copy_shares_its_values(self):
        tensors = crowd()
        with OutOfCore(24 * KIB):
            other = copy.copy(tensors[0])
            other.add_(1)
            touch(tensors)
            assert tensors[0].sum().item() == KIB

    def test_a_plan_holds_no_deep_copies(self):
        tensors, ended = crowd(), []
        with OutOfCore(AMPLE) as block:
            for _ in range(5):
                weakref.finalize(copy.deepcopy(tensors[0]).untyped_storage(), ended.append, 0)
                block.step()
            assert block.statistics.replayed and len(ended) == 5

    def test_what_pickle_took_of_a_tensor_outlives_it(self):
        with OutOfCore(AMPLE):
            taken = [torch.tensor([float(i)]).__reduce_ex__(2) for i in range(200)]
        assert [rebuild(*args).item() for rebuild, args in taken] == [*range(200)]

    def test_safetensors(self, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch")
        state = {f"t{i}": tensor for i, tensor in enumerate(crowd())}
        state["part"] = state["t3"][:0].clone()
        with OutOfCore(24 * KIB) as block:
            touch([*state.values()])
            safetensors.save_file(state, tmp_path / "state")
            assert block.statistics.locked_bytes == 0
            assert block.statistics.peak_bytes <= 24 * KIB
            for tensor in state.values():  # training goes on
                tensor.add_(1)
        loaded = safetensors.load_file(tmp_path / "state")
        assert [loaded[f"t{i}"].sum().item() for i in range(8)] == [KIB * i for i in range(8)]


class TestOtherPaths:
    def test_they_are_named_once(self):
        double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
        with OutOfCore(KIB), pytest.warns(OutOfCoreWarning, match="not compiled") as said:
            double(torch.ones(2))
            double(torch.ones(2))
        assert len(said) == 1
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        x = torch.randn(2, 3, 8)
        with OutOfCore(64 * KIB):
            layer(x)  # with gradients there is none to leave
            with torch.no_grad(), pytest.warns(OutOfCoreWarning, match="fast path") as said:
                layer(x)
                layer(x)
        assert len(said) == 1

    def test_functions_are_compiled_again_after_the_last_of_two_blocks(self, monkeypatch):
        monkeypatch.setattr("repro.outofcore.operations._said", {"compile"})
        graphs = []

        def triple():
            compiled = torch.compile(lambda x: 3 * x, backend=lambda g, _: graphs.append(g) or g)
            return compiled(torch.ones(1))

        entered, ended = threading.Event(), threading.Event()

        def first():
            with OutOfCore(KIB):
                entered.set()
                ended.wait(60)

        thread = threading.Thread(target=first)
        thread.start()
        entered.wait(60)
        with OutOfCore(KIB):
            ended.set()
            thread.join()
            triple()
            assert not graphs
        triple()
        assert len(graphs) == 1

        def block(x):
            with OutOfCore(KIB):
                return 2 * x

        with warnings.catch_warnings():  # torch cannot compile the block itself
            warnings.simplefilter("ignore")
            assert float(torch.compile(block, backend="eager")(torch.ones(()))) == 2
        triple()
        assert len(graphs) == 2

    @pytest.mark.parametrize(
        "of",
        [
            lambda x: torch.autograd.grad(x.prod(0).sum(), x)[0],
            lambda x: torch.autograd.grad((1 + x / 100).prod(), x)[0],
            lambda x: torch.autograd.grad(x.max(), x)[0],
            lambda x: torch.autograd.grad(x.masked_fill(x > 0, x[0, 0]).sin().sum(), x)[0],
            lambda x: torch.linalg.svdvals(x.detach()),
            lambda x: torch.linalg.eigvalsh(x.detach()),
        ],
    )
    def test_what_agrees_up_to_rounding(self, of):
        x = torch.randn(24, 24, requires_grad=True)
        with OutOfCore(AMPLE):
            ours = of(x)
        torch.testing.assert_close(ours, of(x), rtol=1e-4, atol=1e-5)


class TestInterrupts:
    def test_one_at_any_point_ends_as_one(self):
        """Ctrl-C after every so many steps of Python: it comes out, and every value is there."""
        for after in range(50, 4000, 97):
            tensors, left = crowd(6), [after]

            def trace(frame, event, _, left=left):
                left[0] -= 1
                if left[0] == 0:
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGINT)  # twice
                return trace

            with pytest.raises(KeyboardInterrupt), OutOfCore(16 * KIB):
                try:
                    sys.settrace(trace)
                    while True:
                        touch(tensors)
                finally:
                    sys.settrace(None)
            assert [t.sum().item() for t in tensors] == [KIB * i for i in range(6)], after
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_one_while_the_block_ends(self):
        tensors = crowd(8)

        def trace(frame, event, _):
            signal.raise_signal(signal.SIGINT)
            return trace

        block = OutOfCore(16 * KIB)
        block.__enter__()
        touch(tensors)
        with pytest.raises(KeyboardInterrupt):
            try:
                sys.settrace(trace)
                block.__exit__(None, None, None)
            finally:
                sys.settrace(None)
        assert not block.entered
        assert [t.sum().item() for t in tensors] == [KIB * i for i in range(8)]


@contextmanager
def operation(name: str, function, kind: str = "CPU"):
    """Register an operation of one's own: by its kernel alone, or as torch advises."""
    with torch.library._scoped_library("repro_tests", "FRAGMENT") as library:
        if kind.startswith("custom"):
            made = torch.library.custom_op(f"repro_tests::{name}", function, mutates_args=())
            if kind == "custom with a fake":
                made.register_fake(torch.empty_like)
        else:
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, function, kind)
        yield getattr(torch.ops.repro_tests, name)


CHOICES = [
    lambda x: (x > 1).nonzero(),
    lambda x: x[x > 1],
    lambda x: x.view(8, -1)[x.view(8, -1)[:, 0] > 1],
    lambda x: x.masked_select(x[:1] > 1),
]


ONE = torch.ones(1)


class TestOperations:
    @pytest.mark.parametrize(
        "choose",
        [
            *CHOICES,
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

    @pytest.mark.parametrize(
        "source",
        [
            lambda given, shape: given,
            lambda given, shape: torch.ones(shape),
            lambda given, shape: ONE.new_ones(shape),
            lambda given, shape: ONE.repeat(shape),
            lambda given, shape: F.pad(ONE, (0, shape.numel() - 1)).view(shape),
            lambda given, shape: F.interpolate(ONE[None, None], size=shape.numel()).view(shape),
            lambda given, shape: ONE.expand(shape) * 2,
        ],
    )
    @pytest.mark.parametrize("last", [(4, 64), (64, 8), (4096, 1)])
    def test_other_sizes_stay_within_the_budget(self, source, last, recwarn):
        """Of as many numbers a product may take more; a plan's sizes are of other shapes."""
        others, given = crowd(24), [torch.ones(shape) for shape in [(32, 8)] * 4 + [last]]
        with OutOfCore(80 * KIB) as block:
            for one in given:
                touch(others)
                x = source(one, one.shape)
                (x.unsqueeze(2) @ x.unsqueeze(1)).sum()
                block.step()
        assert block.statistics.peak_bytes <= 80 * KIB
        assert block.statistics.replayed == 2 and not recwarn.list

    @pytest.mark.parametrize("choose", CHOICES)
    def test_values_are_counted_only_where_the_most_do_not_fit(self, choose, monkeypatch):
        x, counted, count = torch.full((2 * KIB,), 2.0), [], torch.count_nonzero
        x[KIB:] = 0
        monkeypatch.setattr(torch, "count_nonzero", lambda m: counted.append(m) or count(m))
        for budget in (KIB * KIB, 11 * KIB):
            assert not counted
            with OutOfCore(budget), suppress(BudgetTooSmall):
                choose(x.mul_(1))
        assert counted

    def test_a_batch_norm_and_adam_that_repeat_are_not_sized_again(self, monkeypatch):
        """On a CPU a batch norm makes an empty tensor, which is no variable and so in no plan."""
        sized, size = [], running.result_bytes
        monkeypatch.setattr(running, "result_bytes", lambda *a: sized.append(a[0]) or size(*a))
        model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.rand(4, 8)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        with OutOfCore(AMPLE) as block:
            for _ in range(5):
                sized.clear()
                model(x).sum().backward()
                optimizer.step()  # divides by other numbers each time
        assert not sized and block.statistics.replayed

    def test_a_mask_beside_other_indices_is_counted(self):
        x, mask = torch.rand(KIB, 8), torch.zeros(KIB, dtype=torch.bool)
        mask[[2, 5, 9]] = True
        with OutOfCore(KIB * KIB):
            chosen = x[mask, torch.tensor([0, 1, 2])]
        assert torch.equal(chosen, x[[2, 5, 9], [0, 1, 2]])
        index = torch.ops.aten.index.Tensor
        assert result_bytes(index, (x, [mask, torch.arange(3)]), {}, KIB * KIB) == (12, True)

    @pytest.mark.parametrize("dims", [(2, 3), (3, 2), (2, 2), (3, 3)])
    def test_products_of_groups_are_counted(self, dims):
        operation = torch.ops.aten._grouped_mm.default
        for columns in (48, 46):
            shapes = {2: ((32, 16), (columns, 16)), 3: ((4, 32, 16), (4, columns, 16))}
            a, b = (torch.randn(shapes[dim][place]) for place, dim in enumerate(dims))
            b = b.mT
            ends = {(2, 3): 32, (3, 2): columns, (2, 2): 16}.get(dims)
            offs = ends and torch.arange(1, 5, dtype=torch.int32) * (ends // 4)
            size = operation(a, b, offs).untyped_storage().nbytes()
            told, exact = result_bytes(operation, (a, b, offs), {}, KIB)
            assert exact and size <= told < size + 16

    def test_too_many_chosen_values_are_refused_before(self):
        x = torch.ones(2 * KIB)
        with OutOfCore(20 * KIB), pytest.raises(BudgetTooSmall, match="nonzero"):
            x.nonzero()
        with OutOfCore(25 * KIB):
            assert len(x.nonzero()) == 2 * KIB
        x[KIB:] = 0  # 8 KiB of them are known only by counting
        with OutOfCore(17 * KIB) as block:
            assert len(x.nonzero()) == KIB
        assert block.statistics.peak_bytes == 16 * KIB
        one = torch.zeros(4 * KIB)
        one[7] = 1
        # The guess of a recording is 16 KiB.
        with OutOfCore(record(lambda: torch.nonzero(one)).smallest_budget):
            torch.nonzero(one)

    @pytest.mark.parametrize("kind", ["CompositeExplicitAutograd", "custom", "custom with a fake"])
    def test_an_operation_of_ones_own_runs_once(self, kind):
        """Its random numbers and whatever else it does are those of plain training."""
        calls = []

        def noise(x: torch.Tensor) -> torch.Tensor:
            calls.append(x.device.type)
            return x + torch.rand(x.shape)

        with operation(kind.replace(" ", "_"), noise, kind) as called:
            same(AMPLE, lambda: lambda: float(called(torch.ones(8)).sum()), 3)
        assert calls == ["cpu"] * 6

    def test_what_is_not_foretold_is_said_once(self):
        x, others = torch.ones(KIB), crowd()
        with operation("tripled", lambda x: x.repeat(3)) as tripled:
            with OutOfCore(20 * KIB) as block, pytest.warns(OutOfCoreWarning) as said:
                for _ in range(2):
                    touch(others)
                    tripled(x)
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
        def drawn(block: OutOfCore | nullcontext) -> torch.Tensor:
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(1)
            with block:
                return torch.stack([draw(generator) for _ in range(3)])

        assert torch.equal(drawn(nullcontext()), drawn(OutOfCore(AMPLE)))


class TestSums:
    """Autograd sums gradients in place, and so does a block; but not into what others hold."""

    def step(self, kept: list[torch.Tensor] | None = None):
        layers, x = [nn.Linear(32, 32) for _ in range(4)], torch.randn(64, 32)

        def run():
            y = x
            for layer in layers:
                layer.zero_grad()
                z = layer(y).tanh()
                if kept is not None:
                    z.register_hook(kept.append)
                    y.requires_grad and y.register_hook(kept.append)
                y = y + z + y.sin()
            y.square().sum().backward()
            grads = [*(p.grad for layer in layers for p in layer.parameters()), *(kept or ())]
            if kept is not None:
                kept.clear()
            return [one.tolist() for one in grads]

        return run

    @pytest.mark.parametrize("kept", [None, []])
    def test_every_bit_is_kept(self, kept):
        statistics = same(80 * KIB, lambda: self.step(kept), 5).statistics
        assert statistics.replayed >= 2 and statistics.bytes_out > 0

    def test_slices_are_summed_in_place_as_in_plain_training(self):
        """Dense blocks: the gradient of what was put together is divided into slices."""
        layers = [nn.Conv2d(4 + 2 * i, 2, 3, padding=1) for i in range(5)]
        x = torch.randn(4, 4, 8, 8)

        def step() -> None:
            features = [x]
            for layer in layers:
                layer.zero_grad()
                features.append(layer(torch.cat(features, 1)).relu())
            torch.cat(features, 1).square().sum().backward()

        with torch.profiler.profile(acc_events=True) as profiled:
            step()
        ran = {event.key: event.count for event in profiled.key_averages()}
        names = [f.name for f in record(step, warmup=1).functions]
        assert names.count("aten.add_") == ran["aten::add_"] > 0
        assert names.count("aten.add") == ran.get("aten::add", 0)
