"""Every number that is given is what it has to be, or refused in one line before work starts."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from trainings import TIMES, epochs, make_data, make_model, make_plan, same, train

from repro import dualbatch
from repro.dualbatch import CyclicProgressiveSchedule, ParameterServer, Recipe, Stage, SubStage
from repro.dualbatch.cluster import RayEngine
from repro.dualbatch.engines import Job

NAN, INF = math.nan, math.inf
STATE = {"w": torch.ones(2)}
PLAN = make_plan(2, 1)
NO_NUMBERS = [True, np.True_, "3", [3], {}, 3j, torch.tensor([2.0, 1.0]), NAN, -INF]
NO_WHOLES = [*NO_NUMBERS, INF, 2.5, np.float64(3), -1, np.int64(-2), -(10**30)]


def solve(**given):
    return dualbatch.DualBatchPlan.solve(
        **({"time_model": TIMES, "k": 1.1, "n_small": 2, "n_large": 1, "large_batch": 10,
            "samples": 60} | given)
    )  # fmt: skip


def schedule(stage=(4, 0.1), sub=(), **given):
    return CyclicProgressiveSchedule([Stage(*stage)], [SubStage(*sub)], **given)


def pulled():
    server = ParameterServer(STATE, 2)
    server.pull(0)
    return server


def engine(**given):
    recipe = Recipe(make_model, make_data())
    return RayEngine(Job(recipe, PLAN, epochs(1), lambda state: ParameterServer(state, 3)), **given)


# What takes a whole number, the least that it may be, and whether None is something else there.
WHOLES = {
    "solve n_small": (lambda v: solve(n_small=v), 0, False),
    "solve large_batch": (lambda v: solve(large_batch=v), 2, False),
    "solve samples": (lambda v: solve(samples=v), 3, False),
    "largest_k large_batch": (lambda v: dualbatch.largest_k(TIMES, 1, 1, v), 1, False),
    "epochs": (lambda v: schedule((v, 0.1)), 1, False),
    "resolution": (lambda v: schedule(sub=(v,)), 1, True),
    "warmup_epochs": (lambda v: schedule(warmup_epochs=v), 0, False),
    "workers": (lambda v: ParameterServer(STATE, v), 1, False),
    "pull": (lambda v: pulled().pull(v), 0, False),
    "seed": (lambda v: Recipe(make_model, make_data(), seed=v), 0, False),
}  # fmt: skip
ENOUGH = {"solve samples": 60, "solve large_batch": 10}
# What takes a finite number, some that are out of range, some that are in it, and the same of None.
NUMBERS = {
    "k": (lambda v: solve(k=v), (0, 1, -1.1, INF, 10**400), (1.1, np.float32(1.1)), False),
    "lr": (lambda v: schedule((4, v)), (0, -0.1, INF, 10**400), (0.1, 1, np.float32(0.1)), False),
    "dropout": (lambda v: schedule(sub=(8, v)), (-0.1, 1, 1.5, INF), (0, 0.5, np.float16(0.5)),
                True),
    "set_dropout": (lambda v: dualbatch.set_dropout(nn.Dropout(), v), (-0.1, 1, INF), (0, 0.5),
                    False),
    "factor": (lambda v: pulled().push(0, 0, STATE, v), (0, -1.0, INF), (1, np.float16(2)), False),
    "cpus_per_worker": (lambda v: engine(cpus_per_worker=v), (0, -1, INF), (1, 0.5), True),
}  # fmt: skip


class TestOneByOne:
    @pytest.mark.parametrize("name", [*WHOLES, *NUMBERS])
    def test_what_is_none_is_refused(self, name):
        if name in WHOLES:
            call, least, optional = WHOLES[name]
            wrong = [*NO_WHOLES, least - 1]
            right = [kind(ENOUGH.get(name, max(1, least))) for kind in (int, np.int8, np.uint64)]
        else:
            call, beyond, right, optional = NUMBERS[name]
            wrong = [*NO_NUMBERS, *beyond]
        for value in [*wrong, *([] if optional else [None])]:
            with pytest.raises(ValueError) as caught:  # noqa: PT011 (of each call another)
                call(value)
            assert str(caught.value) and "\n" not in str(caught.value), (value, str(caught.value))
        for value in right:
            call(value)

    def test_numpys_numbers_are_pythons(self):
        given = {"k": 1.1, "n_small": 2, "n_large": 1, "large_batch": 100, "samples": 60_000}
        kinds = dict(zip(given, (np.float64, np.int8, np.uint8, np.int16, np.uint16), strict=True))
        ours = solve(**{name: kinds[name](value) for name, value in given.items()})
        # Of 8 bits, sums and products would overflow.
        assert repr(ours) == repr(solve(**given))
        stages = [(np.int64(3), np.float64(0.1)), (3, 0.1)]
        one, other = (schedule(s, (8, 0.5), warmup_epochs=type(s[0])(2)) for s in stages)
        assert repr(list(one)) == repr(list(other))
        server = ParameterServer(STATE, np.int64(1), "ssp", np.int64(1))
        server.pull(np.int64(0))
        commit = server.push(np.int64(0), np.int64(0), STATE, np.float64(0.5), time_s=np.float64(1))
        assert "np." not in repr(commit) and "np." not in repr(server.staleness)

    @pytest.mark.parametrize("seed", [2**64 - 1, np.uint64(2**63)])
    def test_the_largest_seeds(self, seed):
        one, other = train(seed=seed, count=1), train(seed=int(seed), count=1)
        assert same(one.state, other.state)
        with pytest.raises(ValueError, match=r"seed is 18446744073709551616; give .* from 0 to"):
            train(seed=2**64)


SUB_STAGES = [  # of which the training's plan cannot be a part
    ([SubStage(plan=make_plan(1, 2))], r"the plan of epoch 1 has 1 small-batch and 2 large-batch "
     r"workers for 60 samples, the training's 2 and 1 for 60"),
    ([SubStage(), SubStage(plan=make_plan(samples=90))], r"the plan of epoch 2 .* for 90 samples"),
]  # fmt: skip
TRAININGS = [
    ({"optimizer_state": "keep"}, r"optimizer_state is 'keep'; choose among kept, restarted"),
    ({"model_fn": make_model()}, r"such as lambda: copy.deepcopy\(model\)"),
    ({"autocast": torch.float16}, r"autocast is torch.float16; give torch.bfloat16 or None"),
    ({"time_models": {8: TIMES}}, r"time_models has \{8\}, which the schedule's resolutions lack"),
    ({"engine": "spark"}, r"engine is 'spark'; choose among local, ray"),
    ({"factor": "cubic"}, r"factor is 'cubic'; choose among linear, sqrt, none"),
    ({"loss_fn": nn.CrossEntropyLoss(reduction="sum")}, r"grow with the batch; give reduction="),
    ({"address": "auto"}, r"address cannot be used with engine='local'"),
    *(({"data": data}, r"data is no pair of tensors .*, and no function")
      for data in (make_data()[:1], iter(make_data()))),
    ({"data": (make_data()[0], make_data(59)[1])}, r"60 inputs and 59 targets, the plan is for 60"),
    *(({"schedule": CyclicProgressiveSchedule([Stage(2, 0.1)], subs)}, message)
      for subs, message in SUB_STAGES),
    ({"schedule": CyclicProgressiveSchedule([Stage(1, 0.1)], [SubStage(6, 0.2)]),
      "model_fn": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 3))}, r"has no dropout layer"),
    *(({"jitter": value}, r"jitter is .*; give a share from 0 up to below 1")
      for value in (-0.1, 1, NAN, "0.1", True)),
    *(({"slowdowns": value}, r"slowdowns is .*; give 3 numbers above 0, or None")
      for value in ([1, 1], [1, 1, 0], [1, 1, INF], "123")),
    ({"slowdowns": [1, 1, 1], "engine": "ray"}, r"slowdowns cannot be used with engine='ray'"),
    ({"jitter": 0.1, "follow": []}, r"jitter cannot be used with follow="),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), TRAININGS)
def test_arguments_of_a_training(given, message):
    with pytest.raises(ValueError, match=message):
        train(**given)
