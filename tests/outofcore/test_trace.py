import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import chain, least_s, random_trace

from repro import outofcore
from repro.outofcore import BudgetTooSmall, Function, Trace, TraceError, plan_swaps, record
from repro.outofcore.allocator import ChunkedAllocator, replay
from repro.outofcore.plan import requests


class TestTrace:
    def test_live_bytes_by_counting(self):
        rng = random.Random(3)
        for _ in range(300):
            trace = random_trace(rng)
            n, expected = len(trace.functions), []
            for i in range(n):
                alive = {*trace.persistent, *trace.held}
                for name, (birth, death) in trace.lifetimes.items():
                    if birth <= i < death or birth <= i + n < death:
                        alive.add(name)
                expected.append(sum(trace.sizes[name] for name in alive))
            assert trace.live_bytes == expected

    def test_what_no_function_uses_is_held(self):
        trace = chain(8, width=10, weight=3)
        sizes, kinds = {**trace.sizes, "spare": 50}, {"spare": "parameter"}
        more = Trace(trace.functions, sizes, kinds, trace.deaths)
        assert more.held == ("spare",) and more.persistent == trace.persistent
        assert more.live_bytes == [alive + 50 for alive in trace.live_bytes]
        assert more.smallest_budget == trace.smallest_budget
        core = replay(ChunkedAllocator(1), requests(plan_swaps(more, more.peak_bytes)))
        assert core.peaks["requested_bytes"] == more.peak_bytes
        # Only the spare one has to leave, or others as well.
        times = [1.0] * len(trace.functions)
        for budget in (trace.peak_bytes, 50):
            for plan in (plan_swaps(more, budget), outofcore.plan_packed(more, budget, times, 8.0)):
                assert plan.verify() <= budget
                assert least_s(plan, times, 8.0) <= plan.simulate(times, 8.0).time_s


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 32))


class TestRecorded:
    """A trace is that of a block: what is held beside a step, and operations on lists in parts."""

    @pytest.mark.parametrize(
        ("optimizer", "options", "kind"),
        [
            (torch.optim.AdamW, {"fused": True}, ""),
            (torch.optim.Adam, {"foreach": True, "amsgrad": True}, "clip"),
            (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "lr": 0.1}, "keep gradients"),
            (torch.optim.Adafactor, {"foreach": True}, "unused layer"),
            (torch.optim.Adam, {}, "teacher"),
            (torch.optim.Adam, {"foreach": True}, "average elsewhere"),
        ],
    )
    def test_budgets_peaks_and_host_memory_are_a_blocks(self, optimizer, options, kind):
        def make():
            model = network()
            if kind == "unused layer":
                model.spare = nn.Linear(100, 100)
            held = [model]
            if kind in ("teacher", "average elsewhere"):
                held.append(network().requires_grad_(False))
                held[1].unused = nn.BatchNorm1d(1000)
                held[1].forward = held[1][:4].forward
            trainer, x = optimizer(model.parameters(), **options), torch.rand(16, 32)

            def step() -> None:
                trainer.zero_grad(set_to_none=kind != "keep gradients")
                aim = held[1](x).detach() if kind == "teacher" else x
                (model[:4](x) - aim).square().mean().backward()
                if kind == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                trainer.step()

            return step, {"model": held, "optimizer": trainer}

        step, given = make()
        # Modules and optimizers that take part tell by themselves of what they hold.
        needed = given if kind == "average elsewhere" else {}
        first, later = record(step, **needed), record(step, warmup=1, **needed)
        smallest = max(first.smallest_budget, later.smallest_budget)

        def run(budget: int):
            step, given = make()
            with outofcore.OutOfCore(budget, **given) as block:
                for _ in range(4):
                    step()
            return block.statistics

        assert run(1 << 30).peak_bytes == later.peak_bytes
        for budget in (smallest, (smallest + later.peak_bytes) // 2):
            seen = run(budget)
            assert seen.peak_bytes <= budget
            most = max(outofcore.host_bytes(trace, budget) for trace in (first, later))
            assert 0 < seen.host_bytes <= most
        with pytest.raises(BudgetTooSmall):
            run(smallest - 4)

    def test_the_parts_of_sparse_buffers_count(self):
        model = nn.Linear(32, 32)
        model.register_buffer("adjacency", torch.eye(64).to_sparse())

        def step():
            (model.adjacency @ model(torch.ones(64, 32))).sum().backward()

        trace = record(step, warmup=2, model=model)
        with outofcore.OutOfCore(2**30, model=model) as block:
            for _ in range(3):
                step()
                block.step()
        assert trace.peak_bytes == block.statistics.peak_bytes

    def test_losses_patches_and_lstms_take_what_they_take(self):
        def make(loss_fn):
            model, x = nn.LSTM(40, 33, bidirectional=True), torch.rand(7, 5, 40)

            def step() -> None:
                out = model(x)[0].sigmoid()
                loss_fn(out, torch.zeros_like(out)).backward()
                model.zero_grad()

            return step

        summed = partial(F.smooth_l1_loss, reduction="sum")

        def of_patches(out: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return F.unfold(out.view(7, 1, 30, 11), 3).square().sum()

        for loss_fn in (F.mse_loss, summed, F.binary_cross_entropy, F.l1_loss, of_patches):
            with FakeTensorMode():
                traced = record(make(loss_fn), warmup=2, device="meta")
            assert traced == record(make(loss_fn), warmup=2, device="cpu")

    @pytest.mark.parametrize("evaluated", [False, True])
    def test_batchnorm_of_transposed_inputs_takes_what_it_takes(self, evaluated):
        def make():
            norm, head = nn.BatchNorm1d(32).train(not evaluated), nn.Linear(32, 8)
            x = torch.rand(4, 16, 32)

            def step() -> None:
                out = head(norm(x.transpose(1, 2)).transpose(1, 2)).square().mean()
                out.backward()
                norm.zero_grad()
                head.zero_grad()

            return step

        with FakeTensorMode():
            traced = record(make(), warmup=2, device="meta")
        assert traced == record(make(), warmup=2, device="cpu")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_mixed_precision_takes_what_it_takes(self, dtype):
        def make(loss_fn):
            model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.SiLU())
            x, target = torch.rand(4, 3, 9, 9), torch.rand(4, 32, 7, 7)

            def step() -> None:
                with torch.autocast("cpu", dtype):
                    out = model(x)
                loss_fn(out, target.to(out.dtype) if loss_fn is F.l1_loss else target).backward()
                model.zero_grad()

            return step

        for loss_fn in (F.l1_loss, F.smooth_l1_loss):  # the second of mixed operands
            with FakeTensorMode():
                traced = record(make(loss_fn), warmup=2, device="meta")
            assert traced == record(make(loss_fn), warmup=2, device="cpu")

    def test_an_lstm_in_bfloat16_stays_within_its_smallest_budget(self):
        def make():
            model, x = nn.LSTM(32, 32, 2).bfloat16(), torch.rand(10, 16, 32).bfloat16()

            def step() -> None:
                model.zero_grad()
                model(x)[0].float().square().mean().backward()

            return model, step

        model, step = make()
        budget = record(step, warmup=1, model=model).smallest_budget
        model, step = make()
        with outofcore.OutOfCore(budget, model=model) as block:
            for _ in range(4):
                step()
        assert block.statistics.peak_bytes <= budget


FIRST, OTHER = Function("f", (), ("a",)), Function("g")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (((), {}), "at least one function"),
        (((FIRST,), {}), "'a' has no size"),
        *((((FIRST,), {"a": size}), "the size of 'a'") for size in (-1, 1.5, True)),
        (((FIRST,), {"a": 1}, {"a": "weight"}), "choose one of parameter"),
        *((((FIRST, OTHER), {"a": 1}, {}, {"a": death}), "give 1 to 2") for death in (0, 3, 1.0)),
        (((OTHER,), {"a": 1}, {}, {"a": 1}), "no function uses it"),
    ],
)
def test_errors(given, message):
    with pytest.raises(TraceError, match=message):
        Trace(*given)


@pytest.mark.parametrize("which", ["inputs", "outputs"])
def test_a_text_is_no_sequence_of_names(which):
    with pytest.raises(TraceError, match=f"{which} of f .*'ab'"):
        Function("f", **{which: "ab"})
