import io
import math
import random
from functools import partial

import numpy as np
import pytest
import torch

from repro.dualbatch import Commit, ParameterServer, ServerError

INF = math.inf
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
AT_EACH_COMMIT = ["journal", "conference", "delta"]


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "mean": torch.randn(2, generator=generator, dtype=torch.float64),
        "count": torch.randint(100, (), generator=generator),
    }


def arrays(state):
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


def close(state, expected):
    for name, array in expected.items():
        np.testing.assert_allclose(state[name].numpy(), array, rtol=1e-12, atol=1e-12)
    assert state["count"].dtype == torch.int64
    return True


def trained(pull, seed):
    """What a worker might push: other weights, and a counter that has grown."""
    state = make_state(seed)
    state["count"] = pull.state["count"] + seed
    return state


def pulled(workers, *sync, **options):
    """A server from which every worker has pulled, and the pulls."""
    server = ParameterServer(make_state(), workers, *sync, **options)
    return server, [server.pull(worker) for worker in range(workers)]


def push(server, worker, **options):
    pull = server.pulls[worker]
    # A seed for each share, so that the same order gives the same pushes.
    state = trained(pull, 1 + 10 * pull.iteration + worker)
    return server.push(worker, pull.iteration, state, 0.5 + worker / 4, **options)


def drive(server, steps, seed=0):
    """Let random workers go on in turn, as far as the server lets them."""
    rng = random.Random(seed)
    for _ in range(steps):
        free = [w for w in range(server.workers) if w not in server.pulls and server.may_start(w)]
        worker = rng.choice(free + sorted(server.pulls))
        if worker in server.pulls:
            push(server, worker)
        else:
            server.pull(worker)


class TestMergeRules:
    @pytest.mark.parametrize("merge", [*AT_EACH_COMMIT, None])
    def test_at_each_commit(self, merge):
        f = 0.7
        rules = {
            "journal": lambda w, pushed, pulled: (w + f * pushed) / (1 + f),
            "conference": lambda w, pushed, pulled: ((2 - f) * w + f * pushed) / 2,
            "delta": lambda w, pushed, pulled: w + f * (pushed - pulled),
        }
        rule, start = rules[merge or "journal"], make_state()
        server, w = ParameterServer(start, 2, merge=merge), arrays(start)
        first, second = server.pull(0), server.pull(1)
        assert close(first.state, w)
        pulled = arrays(second.state)
        for number, (pull, seed) in enumerate([(first, 3), (second, 5)]):
            pushed = trained(pull, seed)
            before = arrays(pushed)
            assert server.push(pull.worker, 0, pushed, f).number == number
            for name in ("weight", "mean"):
                w[name] = rule(w[name], before[name], pulled[name])
            w["count"] = w["count"] + seed  # 3, then 5 more
            assert close(server.state, w)
            assert close(pushed, before)  # what is pushed is read only
        assert server.version == 2
        assert close(start, arrays(make_state()))  # and the initial state was copied

    @pytest.mark.parametrize(
        ("kind", "ulps"), [(torch.bfloat16, 0.51), (torch.float16, 0.51), (torch.float32, 4)]
    )
    def test_what_nobody_trains_stays_and_averages_of_halves_round_once(self, kind, ulps):
        weight = torch.arange(50, dtype=kind)
        server = ParameterServer({"frozen": weight, "trained": weight}, 7, "bsp")
        for number in range(20):
            pulls = [server.pull(worker) for worker in range(7)]
            for worker, pull in enumerate(pulls):
                pull.state["trained"] += worker % 2
                server.push(worker, number, pull.state)
            assert torch.equal(server.state["frozen"], weight)
            mean = pulls[0].state["trained"].double() + 3 / 7
            error = (server.state["trained"].double() - mean).abs() / mean
            assert error.max() <= ulps * torch.finfo(kind).eps

    def test_variances_that_become_negative_are_warned_of(self):
        server = ParameterServer({"0.running_var": torch.ones(2)}, 2, merge="delta")
        server.pull(0), server.pull(1)
        smaller = {"0.running_var": torch.tensor([0.3, 1.0])}
        server.push(0, 0, smaller)
        named = r"'delta' .* variances of BatchNorm negative"
        with pytest.warns(UserWarning, match=named) as caught:
            server.push(1, 0, smaller)
        assert caught[0].filename == __file__

    def test_a_state_that_is_trained_in_place(self):
        server = ParameterServer(make_state(), 1, merge="delta")
        state = server.pull(0).state
        for tensor in state.values():
            tensor += 1
        state["weight"].requires_grad_()  # as a parameter
        server.push(0, 0, state)
        assert not server.state["weight"].requires_grad
        assert close(server.state, {n: array + 1 for n, array in arrays(make_state()).items()})

    def test_average_of_a_round_with_factors(self):
        factors = [0.5, 1.0, 0.25]
        server, w = ParameterServer(make_state(), 3, "bsp"), arrays(make_state())
        assert server.merge == "average"
        for number in range(2):
            pulls = [server.pull(worker) for worker in range(3)]
            pushed = [trained(pull, 1 + 3 * number + i) for i, pull in enumerate(pulls)]
            kept = [arrays(state) for state in pushed]
            for worker in (2, 0, 1):
                assert close(server.state, w)  # nothing is merged before the barrier
                assert server.version == 3 * number
                server.push(worker, number, pushed[worker], factors[worker])
                pushed[worker]["weight"].fill_(99.0)  # what was pushed may change
            for name in ("weight", "mean"):
                w[name] = sum(f * p[name] for f, p in zip(factors, kept, strict=True)) / 1.75
            w["count"] = w["count"] + sum(1 + 3 * number + i for i in range(3))
            assert close(server.state, w) and server.version == 3 * (number + 1)

    def test_the_order_of_commits_in_a_round_changes_no_bit(self):
        states = []
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            server, _ = pulled(3, "bsp")
            for worker in order:
                push(server, worker)
            states.append(server.state)
        assert_same(states[1:], states[:1] * 2)

    @pytest.mark.parametrize("sync", ["bsp", "asp"])
    def test_a_boolean_is_the_last_workers(self, sync):
        server = ParameterServer({"seen": torch.tensor([False, True])}, 1, sync)
        server.push(0, server.pull(0).iteration, {"seen": torch.tensor([True, False])})
        assert server.state["seen"].tolist() == [True, False]


class TestSynchronisation:
    @pytest.mark.parametrize("bound", [0, 2])
    def test_ssp(self, bound):
        # The fast worker may be `bound` shares ahead, and start one more.
        server = ParameterServer(make_state(), 2, "ssp", bound)
        for _ in range(bound + 1):
            server.pull(0)
            push(server, 0)
        assert not server.may_start(0)
        with pytest.raises(ServerError, match=rf"has committed {bound + 1} .* bound {bound};"):
            server.pull(0)
        server.pull(1)
        assert not server.may_start(0)  # pulling is not committing
        push(server, 1)
        assert server.may_start(0) and server.may_start(1)
        server.pull(0)

    @pytest.mark.parametrize(("seed", "merge"), list(enumerate(AT_EACH_COMMIT)))
    @pytest.mark.parametrize(("sync", "staleness"), [("bsp", 0), ("asp", INF)])
    def test_the_ends_of_ssp(self, sync, staleness, merge, seed):
        ends = ((sync, None), ("ssp", staleness))
        servers = [ParameterServer(make_state(), 3, *end, merge) for end in ends]
        for server in servers:
            rng = random.Random(seed)
            for _ in range(24):
                for worker in range(3):  # each pulls as soon as it may
                    if worker not in server.pulls and server.may_start(worker):
                        server.pull(worker)
                push(server, rng.choice(sorted(server.pulls)))
        orders = [[(c.worker, c.iteration, c.factor) for c in server.log] for server in servers]
        assert orders[0] == orders[1] and close(servers[0].state, arrays(servers[1].state))
        assert servers[0].version == servers[1].version == 24


def test_staleness_in_the_log():
    server, _ = pulled(3)
    push(server, 0)  # 0
    server.pull(0)  # at version 1
    push(server, 1, time_s=2.5, loss=0.75)  # 1: of worker 0
    push(server, 0)  # 1: of worker 1
    server.pull(0)  # at version 3
    push(server, 0)  # 0
    push(server, 2)  # 4
    assert [c.staleness for c in server.log] == [0, 1, 1, 0, 4]
    assert [c.pulled for c in server.log] == [0, 0, 1, 3, 0]
    assert [c.number for c in server.log] == [0, 1, 2, 3, 4]
    assert server.log[1] == Commit(1, 1, 0, 0, 1, 0.75, 2.5, 0.75)
    assert server.iterations == [3, 1, 1]


@pytest.mark.parametrize(("sync", "staleness"), [("bsp", None), ("asp", None), ("ssp", 1)])
def test_a_share_counts_once(sync, staleness):
    server, (pull, _) = pulled(2, sync, staleness)
    state = trained(pull, 3)
    with pytest.raises(ServerError, match=r"pushes share 1, and has pulled share 0 that is"):
        server.push(0, 1, state)
    server.push(0, 0, state)
    before = server.state_dict()
    with pytest.raises(ServerError, match=r"worker 0 pushes share 0, and has pulled none"):
        server.push(0, 0, state)
    assert_same(server.state_dict(), before)
    # Nor when the next share of the worker is under way.
    push(server, 1)
    server.pull(0)
    with pytest.raises(ServerError, match=r"pushes share 0, and has pulled share 1"):
        server.push(0, 0, state)


class TestStateDict:
    @pytest.mark.parametrize("stop", [7, 30])
    @pytest.mark.parametrize(("sync", "staleness"), [("bsp", None), ("asp", None), ("ssp", 1)])
    def test_goes_on_identically(self, sync, staleness, stop):
        server = ParameterServer(make_state(), 3, sync, staleness)
        drive(server, stop)
        buffer = io.BytesIO()
        torch.save(server.state_dict(), buffer)
        buffer.seek(0)
        other = ParameterServer(make_state(9), 3, sync, staleness)
        other.load_state_dict(torch.load(buffer, weights_only=True))
        for each in (server, other):
            drive(each, 40, seed=1)
        assert_same(other.state_dict(), server.state_dict())
        assert len(server.log) > 10

    def test_of_other_workers_or_models(self):
        saved = ParameterServer(make_state(), 2).state_dict()
        with pytest.raises(ValueError, match=r"checkpoint is of 2 workers, .* this server has 3"):
            ParameterServer(make_state(), 3).load_state_dict(saved)
        server = ParameterServer(make_state() | {"weight": torch.zeros(3, 3)}, 2)
        with pytest.raises(ValueError, match=r"'weight', \(3, 2\).*lacks .*'weight', \(3, 3\)"):
            server.load_state_dict(saved)
        assert server.state["weight"].sum() == 0


NOT_MERGED = [
    (torch.tensor([1.0, math.nan]), r"initial state's 'x' is not finite"),
    (torch.ones(2, dtype=torch.complex64), r"'x' is of type torch.complex64, which cannot"),
    ({"any": 1}, r"'x' is of type dict, which cannot be merged"),
    (torch.zeros(2).to(torch.float8_e4m3fn), r"'x' is of type torch.float8_e4m3fn, which cannot"),
    (torch.eye(2).to_sparse(), r"'x' is of type torch.sparse_coo, which cannot be merged"),
]


class TestErrors:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"sync": "sync"}, r"sync is 'sync'; choose among bsp, asp, ssp"),
            ({"merge": "mean"}, r"merge is 'mean'; choose among average, journal, conference"),
            ({"merge": "average"}, r"merge='average' .* needs sync='bsp', not 'asp'"),
            ({"staleness": 1}, r"staleness is 1 with sync='asp'"),
            ({"sync": "ssp"}, r"staleness is None; give a whole number, at least 0"),
            ({"sync": "ssp", "staleness": -1}, r"staleness is -1; give a whole number"),
            *(({"state": {"x": value}}, message) for value, message in NOT_MERGED),
        ],
    )
    def test_arguments(self, given, message):
        with pytest.raises(ValueError, match=message):
            ParameterServer(**({"state": make_state(), "workers": 2} | given))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mean": None}, r"it has \[\] and lacks \[\('mean', \(2,\), torch.float64\)\]; push"),
            ({"other": torch.zeros(1)}, r"it has \[\('other', .* and lacks \[\]"),
            ({"mean": torch.zeros(2)}, r"torch.float32.* and lacks .*torch.float64"),
        ],
    )
    def test_what_cannot_be_merged_changes_nothing(self, change, message):
        server, (pull, _) = pulled(2)
        before = server.state_dict()
        state = {n: t for n, t in (pull.state | change).items() if t is not None}
        with pytest.raises(ValueError, match=message):
            server.push(0, 0, state)
        for factor in (0.0, math.inf):
            with pytest.raises(ValueError, match=rf"factor is {factor}; give a finite number abov"):
                server.push(0, 0, pull.state, factor)
        for call in (server.pull, lambda worker: server.push(worker, 0, pull.state)):
            with pytest.raises(ValueError, match=r"worker is 2; give a whole number, from 0 to 1"):
                call(2)
        assert_same(server.state_dict(), before)
