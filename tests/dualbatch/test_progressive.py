import pytest
import torch
from torch import nn

from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, Stage, SubStage, set_dropout
from repro.measure import TimeModel

CIFAR = 50_000, [(80, 0.2), (40, 0.02), (20, 0.002)]  # d, then epochs and rates of the stages
IMAGENET = 1_281_167, [(60, 0.2), (30, 0.02), (15, 0.002)]
# Tables 7 and 9, n_S = 1: resolution, dropout, b / a, B_L, B_S of the sub-stages.
CIFAR_SUB = [(24, 0.1, 41.89, 600, 130), (32, 0.2, 30.79, 560, 102)]
IMAGENET_SUB = [
    (160, 0.1, 39.94, 2330, 156), (224, 0.2, 29.99, 1110, 112), (288, 0.3, 17.756, 740, 67),
]  # fmt: skip
# The last epoch of each part.
ENDS_7 = [40, 80, 100, 120, 130, 140]
ENDS_9 = [20, 40, 60, 70, 80, 90, 95, 100, 105]


def plan(ratio, large_batch, samples, n_small=1):
    times = TimeModel(1.0, ratio)
    return DualBatchPlan.solve(times, 1.05, n_small, 4 - n_small, large_batch, samples)


class TestPapersTables:
    @pytest.mark.parametrize(
        ("training", "subs", "ends"),
        [
            (CIFAR, CIFAR_SUB, ENDS_7),
            (IMAGENET, IMAGENET_SUB, ENDS_9),
            (CIFAR, CIFAR_SUB[-1:], [80, 120, 140]),  # dual-batch learning alone
            (IMAGENET, IMAGENET_SUB[-1:], [60, 90, 105]),
        ],
    )
    def test_tables_7_and_9(self, training, subs, ends):
        samples, pairs = training
        sub_stages = [SubStage(r, p, plan(ratio, b, samples)) for r, p, ratio, b, _ in subs]
        schedule = CyclicProgressiveSchedule([Stage(*pair) for pair in pairs], sub_stages)
        assert [sub.plan.small_batch for sub in sub_stages] == [row[-1] for row in subs]
        expected = []
        for part, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            stage, sub = divmod(part, len(subs))
            of = sub_stages[sub]
            row = (stage + 1, sub + 1, pairs[stage][1], of.resolution, of.dropout, of.plan)
            expected += [row] * (end - start)
        found = [(s.stage, s.sub_stage, s.lr, s.resolution, s.dropout, s.plan) for s in schedule]
        assert found == expected and [s.epoch for s in schedule] == list(range(1, ends[-1] + 1))

    def test_warm_up_of_section_5_1_3(self):
        pairs = [(80, 0.1), (40, 0.02), (20, 0.004)]
        schedule = CyclicProgressiveSchedule([Stage(*pair) for pair in pairs], warmup_epochs=5)
        assert len(schedule) == 140
        rates = [s.lr for s in schedule]
        assert rates[:6] == pytest.approx([0.02, 0.036, 0.052, 0.068, 0.084, 0.1])
        assert rates[5:80] == [0.1] * 75
        assert rates[80:120] == [0.02] * 40 and rates[120:] == [0.004] * 20
        assert (schedule[0].resolution, schedule[0].dropout, schedule[0].plan) == (None,) * 3


class TestDivision:
    @pytest.mark.parametrize(
        ("epochs", "parts", "expected"),
        [(7, 2, [3, 4]), (8, 3, [2, 3, 3]), (3, 3, [1, 1, 1]), (10, 4, [2, 3, 2, 3]), (5, 1, [5])],
    )
    def test_uneven(self, epochs, parts, expected):
        subs = [SubStage(10 * (i + 1)) for i in range(parts)]
        schedule = CyclicProgressiveSchedule([Stage(epochs, 0.1), Stage(epochs, 0.01)], subs)
        assert len(schedule) == 2 * epochs
        for stage in (1, 2):
            numbers = [s.sub_stage for s in schedule if s.stage == stage]
            assert numbers == sorted(numbers)
            assert [numbers.count(i + 1) for i in range(parts)] == expected

    def test_at_progress(self):
        schedule = CyclicProgressiveSchedule([Stage(2, 0.1), Stage(1, 0.01)])
        expected = [(0, 1), (1 / 4, 2), (1, 2), (1.25, 3), (2, 3), (2.5, 3), (3, 3), (99, 3)]
        assert [(p, schedule.at_progress(p).epoch) for p, _ in expected] == expected
        # A sum of shares of an epoch is one epoch, though not to the last bit.
        assert schedule.at_progress(0.1 + 0.2 + 0.7).epoch == 2
        assert schedule.at_progress(sum([1 / 49] * 49)).epoch == 2


def test_dropout_is_set_in_every_layer():
    inner = nn.Sequential(nn.Dropout2d(0.7), nn.AlphaDropout(0.1))
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), inner)
    set_dropout(model, 0.25)
    assert [model[1].p, inner[0].p, inner[1].p] == [0.25] * 3
    set_dropout(model, 0)
    x = torch.ones(3, 4)
    assert torch.equal(model[1](x), x)
    with pytest.raises(ValueError, match=r"sets dropout to 0.2, but Linear has no dropout"):
        set_dropout(nn.Linear(1, 1), 0.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": []}, r"there are 0 stages and 1 sub-stages"),
        ({"sub_stages": []}, r"there are 1 stages and 0 sub-stages"),
        (
            {"stages": [Stage(2, 0.1)], "sub_stages": [SubStage()] * 3},
            r"a stage's epochs is 2; give .* at least 3",
        ),
        ({"warmup_epochs": 5}, r"warmup_epochs is 5; give a whole number, from 0 to 4"),
    ],
)
def test_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        CyclicProgressiveSchedule(**({"stages": [Stage(4, 0.1)]} | given))
