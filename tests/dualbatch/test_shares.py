"""What data functions must give for their shares, and what becomes of images' sizes."""

import copy
import itertools
import math
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import trainings
from torch import nn
from torch.nn import functional
from trainings import SAMPLES, SYNCS, TIMES, Centre, make_data, make_model, make_plan, same, train

from repro import dualbatch
from repro.dualbatch import CheckpointError, CyclicProgressiveSchedule, Stage, SubStage
from repro.dualbatch.shares import batches_of
from repro.dualbatch.worker import Recipe, Worker
from repro.measure import load_checkpoint

PLAN = replace(make_plan(1, 1), small_samples=25, large_samples=35, small_batch=4)
ONE = dualbatch.DualBatchPlan(TIMES, 1.0, 0, 1, 25, None, 4, 0, 25, 1.0)
IMAGES, LABELS = make_data()


def batches(share):
    """All of a share as it is due."""
    return [(IMAGES[i], LABELS[i]) for i in share.indices.split(share.batch_size)]


def of_sizes(share, sizes):
    ends = itertools.accumulate(sizes)
    parts = [share.indices[end - n : end] for end, n in zip(ends, sizes, strict=True)]
    return [(IMAGES[part], LABELS[part]) for part in parts]


ONCE = "of a share of 25 samples in batches of 4 \\(worker 0, epoch 1\\)"
WRONG = {
    "nothing": (lambda s: iter(()), rf"ends after step 0 {ONCE}, 25 samples too early"),
    "no last batch": (lambda s: batches(s)[:-1], rf"ends after step 6 {ONCE}, 1 samples too early"),
    "a short batch amid": (lambda s: of_sizes(s, [4, 3, 4, 4, 4, 4, 2]),
                           rf"gives 3 inputs and 3 targets where 4 are due at step 2 {ONCE}"),
    "an empty batch at the end": (lambda s: [*batches(s), *of_sizes(s, [0])],
                                  r"gives 0 inputs .* where 0 are due at step 8"),
    "no end": (lambda s: itertools.cycle(batches(s)), r"gives 4 inputs .* 0 are due at step 8"),
    "three things": (lambda s: [(IMAGES[:4], LABELS[:4], None)], r"else than two tensors"),
    "arrays": (lambda s: [(IMAGES[:4].numpy(), LABELS[:4].numpy())], r"else than two tensors"),
    "one target": (lambda s: [(IMAGES[:4], LABELS[0])], r"else than two tensors .* at step 1"),
}  # fmt: skip


class TestDataFunctions:
    @pytest.mark.parametrize("name", WRONG)
    def test_what_is_not_the_share_is_refused(self, name):
        function, message = WRONG[name]
        with pytest.raises(ValueError, match=message) as caught:
            train(ONE, data=function, count=1)
        assert "\n" not in str(caught.value)

    def test_the_share_in_whatever_form_trains_as_tensors_do(self):
        whole = train(PLAN, count=2)
        for data in (batches, lambda s: map(list, batches(s)), trainings.Recorder()):
            assert same(train(PLAN, data=data, count=2).state, whole.state)

    def test_a_function_that_leaves_the_resolution_out(self):
        def smaller(share):
            for images, labels in batches(share):
                side = share.resolution
                yield functional.interpolate(images, (side, 2 * side)), labels

        def long_side(share):
            for images, labels in smaller(share):
                yield images[:, :, : share.resolution - 1, : share.resolution], labels

        schedule = CyclicProgressiveSchedule([Stage(1, 0.1)], [SubStage(4)])
        with pytest.raises(ValueError, match=r"\(10, 2, 3, 4\) for 4 pixels"):
            train(make_plan(0, 2), data=long_side, schedule=schedule)
        with pytest.raises(ValueError, match=r"\(10, 2, 6, 6\) for 4 pixels"):
            train(make_plan(0, 2), data=batches, schedule=schedule)
        assert train(make_plan(0, 2), data=smaller, schedule=schedule).log


class TestImages:
    @pytest.mark.parametrize(("shape", "side"), [((2, 6, 8), 3), ((2, 6, 6), 7), ((72,), 6)])
    def test_others_are_not_squashed_enlarged_or_resized(self, shape, side):
        schedule = CyclicProgressiveSchedule([Stage(1, 0.1)], [SubStage(side)])
        message = rf"resolution {side}, and the inputs are \({SAMPLES}, .*only square images"
        with pytest.raises(ValueError, match=message):
            train(data=(torch.randn(SAMPLES, *shape), LABELS), schedule=schedule)
        # Of their own size they may be whatever the model takes.
        assert train(data=(torch.randn(SAMPLES, 2, 6, 8), LABELS), count=1).log

    @pytest.mark.parametrize("shape", [(6, 6), (2, 6, 6), (6, 6, 1)])
    def test_targets_of_their_size_are_not_left_at_it(self, shape):
        def smaller(share):
            for images, targets in batches(share):
                yield functional.interpolate(images, (4, 4)), targets

        masks, options = torch.zeros(SAMPLES, *shape), {"loss_fn": lambda o, t: o.mean()}
        options["schedule"] = CyclicProgressiveSchedule([Stage(1, 0.1)], [SubStage(4)])
        message = rf"targets are \({SAMPLES}, .* the size of the images, .* resolution 4.*function"
        with pytest.raises(ValueError, match=message):
            train(data=(IMAGES, masks), **options)
        # Two numbers a sample may be anything; a function resizes as it likes.
        for data in ((IMAGES, masks.flatten(1)[:, :2]), smaller):
            assert train(data=data, **options).log
        options["schedule"] = CyclicProgressiveSchedule([Stage(1, 0.1)], [SubStage(6)])
        assert train(data=(IMAGES, masks), **options).log

    def test_smaller_ones_are_averages_of_all_pixels(self):
        images = torch.zeros(4, 2, 6, 6)
        images[..., 1::3] = 1  # of each three columns the middle one, which alone would be taken
        share = dualbatch.Share(torch.arange(4), 4, 2, 0)
        for dtype in (torch.float32, torch.bfloat16):
            ((small, _),) = batches_of((images.to(dtype), LABELS[:4]), share, "")
            assert small.shape == (4, 2, 2, 2) and small.dtype == dtype
            assert (small - 1 / 3).abs().max() < 0.05


def test_the_optimizers_state_stays_and_the_dropout_of_the_setting_before_is_gone():
    worker, new = (Worker(Recipe(make_model, make_data()), make_plan()) for _ in range(2))
    (setting,) = trainings.epochs(1)
    state = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
    left = worker.train(0, 0, state, replace(setting, dropout=0.9)).optimizer
    before = copy.deepcopy(left)
    one, other = (each.train(0, 1, state, setting, left).state for each in (worker, new))
    assert same(one, other)
    torch.testing.assert_close(left, before, rtol=0, atol=0)


def test_the_forward_pass_is_autocast():
    seen = []

    def loss_fn(outputs, targets):
        seen.append(outputs.dtype)
        return functional.cross_entropy(outputs.float(), targets)

    for autocast in (torch.bfloat16, None):
        train(count=1, loss_fn=loss_fn, autocast=autocast)
    assert [*dict.fromkeys(seen)] == [torch.bfloat16, torch.float32]


def test_a_callers_autocast_keeps_no_weights_from_before_a_step():
    alone = train(count=2, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        within = train(count=2, autocast=torch.bfloat16)
    assert same(alone.state, within.state)


def test_a_model_in_evaluation_mode_is_trained():
    assert same(train(model_fn=lambda: make_model().eval()).state, train().state)


def test_the_loss_of_a_share_is_the_mean_over_its_samples():
    # 25 in batches of 10, 10 and 5.
    options = {"data": make_data(50), "loss_fn": lambda o, t: 0 * o.sum() + len(o)}
    history = train(make_plan(0, 2, 50), count=1, **options).history
    assert history[0].train_loss == pytest.approx((10 * 10 + 10 * 10 + 5 * 5) / 25)


class Counting(nn.Module):
    """A model whose output depends on buffers that no state has: one changed, one replaced."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(72, 3)
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.register_buffer("longer", torch.ones(1), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(3), persistent=False)
        self.register_buffer("later", None, persistent=False)

    def forward(self, images):
        self.steps += 1
        self.longer = torch.cat([self.longer, self.steps[None]])
        return self.head(images.flatten(1)) * (1 + 0.1 * self.longer.mean()) * self.wide


class Linear(nn.Sequential):
    """No statistics and no dropout: the parts of a mini-batch add up."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(72, 3, dtype=torch.float64))


DOUBLE = (IMAGES.double(), LABELS)


class TestModels:
    def test_buffers_that_are_not_saved_start_anew_with_each_share(self, tmp_path):
        options = {"model_fn": Counting, "evaluate": lambda model: {"steps": float(model.steps)}}
        whole = trainings.resumed(tmp_path / "training.pt", 1, **options)
        assert [entry.metrics["steps"] for entry in whole.history] == [0.0] * 4
        assert same(train(model_fn=Counting, follow=whole.log).state, whole.state)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"loss_fn": lambda o, t: functional.cross_entropy(o, t, reduction="none")},
             r"loss_fn returns torch.float32 \(\d+,\); give the mean"),
            ({"loss_fn": lambda o, t: 1.0}, r"loss_fn leaves no gradient in the model"),
            ({"loss_fn": lambda o, t: functional.cross_entropy(o.detach(), t)}, r"no gradient in"),
            ({"model_fn": lambda: make_model().requires_grad_(False)}, r"no weight to train"),
            ({"model_fn": nn.Flatten}, r"no weight to train"),
            *(({"model_fn": lambda last=last: nn.Sequential(nn.Flatten(), last())},
               rf"model_fn's model has 1\.{name}, .*no shape yet.*call the model")
              for last, name in ((partial(nn.LazyLinear, 3), "weight, 1.bias"),
                                 (partial(nn.LazyBatchNorm1d, affine=False), "running_mean"))),
            # A rest of one sample.
            ({"plan": ONE, "data": batches, "model_fn": lambda: nn.Sequential(
                nn.Flatten(), nn.Linear(72, 3), nn.BatchNorm1d(3)
             )}, r"more than 1 value per channel"),
            ({"passes_fn": lambda model, loss_fn: lambda x, y: None}, r"NoneType.*give the mean"),
            ({"passes_fn": lambda model, loss_fn: lambda x, y: 1.0}, r"leaves no gradient"),
            ({"passes_fn": lambda model, loss_fn: None, "autocast": torch.bfloat16},
             r"enter torch.autocast there"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_trained_is_named(self, options, message):
        with pytest.raises(ValueError, match=message) as caught:
            train(count=1, **options)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("way", ["itself", "a part", "assigned", "an earlier run's"])
    def test_a_model_that_is_shared_is_refused(self, way):
        one = Linear()
        state = one.state_dict()

        def assigned():
            model = Linear()
            model.load_state_dict(state, assign=True)
            return model

        made = {
            "itself": lambda: one,
            "a part": lambda: nn.Sequential(one, nn.Linear(3, 3, dtype=torch.float64)),
            "assigned": assigned,
            "an earlier run's": lambda: models.pop(),
        }
        models = [one, Linear(), one]
        before, options = copy.deepcopy(state), {"data": DOUBLE, "model_fn": made[way]}
        with pytest.raises(ValueError, match=r"shares tensors .*lambda: copy.deepcopy\(model\)"):
            train(**options)
            train(**options)
        if way != "an earlier run's":
            assert same(one.state_dict(), before)
        copies = [train(data=DOUBLE, model_fn=lambda: copy.deepcopy(one)).state for _ in range(2)]
        assert same(*copies)

    @pytest.mark.parametrize("kind", ["extra state", "a hook"])
    def test_tensors_made_for_a_state_are_not_taken_for_shared_ones(self, kind):
        class Made(Linear):
            if kind == "extra state":

                def get_extra_state(self):
                    return torch.zeros(1)

                def set_extra_state(self, state):
                    assert state.shape == (1,)

        def model_fn():
            model = Made()
            if kind == "a hook":
                model.register_state_dict_post_hook(hook)
            return model

        def hook(module, state, prefix, metadata):
            for name in (f"{prefix}1.weight", f"{prefix}1.bias"):
                state[name] = state[name].clone()

        made = [train(data=DOUBLE, model_fn=model_fn, count=1).state for _ in range(3)]
        assert same(made[0], made[2])

    def test_what_evaluate_does_to_its_model_reaches_no_worker(self):
        def change(model):
            model.requires_grad_(False).half()
            torch.set_grad_enabled(False)

        try:
            assert same(train(evaluate=change).state, train().state)
        finally:
            torch.set_grad_enabled(True)

    def test_all_generators_follow_the_share(self):
        def data(share):
            for images, labels in batches(share):
                yield images + float(np.random.rand()) + random.random(), labels  # noqa: NPY002

        def states():
            of_numpy = np.random.get_state()[1].tolist()  # noqa: NPY002
            return random.getstate(), of_numpy, torch.get_rng_state().tolist()

        before = states()
        one = train(PLAN, data=data, evaluate=lambda model: {"loss": 1.0})
        assert states() == before
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)
        assert same(train(PLAN, data=data).state, one.state)


class Arc(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(3))

    def forward(self, outputs, targets):
        return functional.cross_entropy(outputs @ self.w, targets)


ARC = Arc()
TRAINABLE = {
    "a module": (ARC, "loss_fn.w"),
    "a partial": (partial(functional.cross_entropy, weight=torch.ones(3, requires_grad=True)),
                  r"loss_fn\(weight\)"),
    "a closure": ((lambda arc: lambda outputs, targets: arc(outputs, targets))(ARC),
                  "loss_fn.arc.w"),
}  # fmt: skip


def drawing():
    generator = np.random.default_rng(0)
    return {"data": lambda share: ((x * generator.random(), y) for x, y in batches(share))}


def counting():
    def loss_fn(outputs, targets):
        loss_fn.calls += 1
        return functional.cross_entropy(outputs, targets)

    loss_fn.calls = 0
    return {"loss_fn": loss_fn}


class Ageing(Linear):
    """A model that counts, and whose other number becomes a tensor, which is not looked at."""

    def __init__(self):
        super().__init__()
        self.steps, self._rate, self.side, self.penalty = 0, np.float64(0), None, 0.0

    def forward(self, images):
        self.steps, self.side, self.penalty = self.steps + 1, images.shape[-1], images.mean()
        self._rate += 1
        return super().forward(images.double())


KEPT_NOWHERE = {
    "a model's number": (lambda: {"model_fn": Ageing}, r"\[model\]._rate, \[model\].steps"),
    "a function's": (counting, r"loss_fn\(attribute calls\)"),
    "attribute": (lambda: {"loss_fn": Centre(True)}, "loss_fn.count"),
    "buffers within": (lambda: {"loss_fn": partial(Centre())}, "loss_fn.c, loss_fn.steps"),
    "generator": (drawing, "data.generator"),
}


class Truthless(partial):
    """A function without a truth value, as a compiled module is."""

    def __bool__(self):
        raise TypeError


def test_functions_have_no_truth():
    plain = {"loss_fn": functional.cross_entropy, "optimizer_fn": torch.optim.SGD}
    made = {name: Truthless(function) for name, function in plain.items()}
    assert same(train(**made).state, train(**plain).state)


def test_the_callers_default_device_plays_no_part():
    model = make_model()
    options = {"model_fn": lambda: copy.deepcopy(model), "data": make_data()}
    with torch.device("meta"):
        inside = train(**options)
    assert same(inside.state, train(**options).state)


class TestWhatFunctionsKeep:
    @pytest.mark.parametrize("name", TRAINABLE)
    def test_a_loss_with_weights_of_its_own_is_refused(self, name):
        loss_fn, path = TRAINABLE[name]
        with pytest.raises(ValueError, match=rf"loss_fn has tensors .*\({path}\).*model_fn"):
            train(loss_fn=loss_fn)

    @pytest.mark.parametrize(
        ("options", "optimizer_state"), list(zip(SYNCS, ["kept", "restarted", "kept"], strict=True))
    )
    def test_each_worker_has_its_own_buffers_of_a_loss(self, options, optimizer_state, tmp_path):
        options, loss = options | {"optimizer_state": optimizer_state}, Centre()
        whole, path = train(loss_fn=loss, **options), tmp_path / "run.pt"
        assert int(loss.steps) == 0 and not same(whole.state, train(**options).state)
        trainings.interrupt(path, 2, loss_fn=loss, **options)
        kept, plan = load_checkpoint(path)["server"]["optimizers"], make_plan()
        for worker, kind in enumerate(plan.kinds):
            steps = math.ceil(plan.share_of(kind) / plan.batch_of(kind))
            assert int(kept[worker][-1]["steps"]) in (2 * steps, 3 * steps)
        assert same(train(loss_fn=Centre(), checkpoint=path, **options).state, whole.state)
        assert same(train(loss_fn=Centre(), follow=whole.log, **options).state, whole.state)

    @pytest.mark.parametrize("name", KEPT_NOWHERE)
    def test_what_is_kept_elsewhere_is_warned_of_and_in_no_checkpoint(self, name, tmp_path):
        make, path = KEPT_NOWHERE[name]
        with pytest.warns(UserWarning, match=rf"^{path} changed as the training went on"):
            train(PLAN, **make())
        file = tmp_path / "run.pt"
        with pytest.raises(CheckpointError, match=rf"of epoch 1: {path} changed .*buffers of a m"):
            train(PLAN, checkpoint=file, **make())
        assert not file.exists()

    def test_a_buffer_that_grows_is_refused(self):
        class Growing(Centre):
            def forward(self, outputs, targets):
                loss = super().forward(outputs, targets)
                self.c = self.c.expand(1, 3).clone()
                return loss

        with pytest.raises(ValueError, match=r"changes the shape of its buffer 'c'"):
            train(loss_fn=Growing(), count=1)


def test_the_pages_passes_train_as_the_loss_does():
    page = (Path(__file__).parents[2] / "docs" / "dualbatch.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n([^`]*\bdef passes\b[^`]*)^```", page, re.MULTILINE)
    names = {}
    exec(block, names)
    options = {"data": DOUBLE, "model_fn": Linear, "count": 1}
    states = (train(**more, **options).state for more in ({}, {"passes_fn": names["passes"]}))
    for one, other in zip(*(state.values() for state in states), strict=True):
        torch.testing.assert_close(one, other)
