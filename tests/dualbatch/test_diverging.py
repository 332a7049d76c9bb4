"""What is not finite ends a training by name, wherever it arises, and is never merged."""

import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import SYNCS, TIMES, Recorder, make_data, same, train

from repro import dualbatch
from repro.dualbatch import CheckpointError, NonFiniteError, ParameterServer
from repro.dualbatch.checks import not_finite
from repro.measure import load_checkpoint, save_checkpoint

NAN, INF = math.nan, math.inf


class Poisoned(Recorder):
    """Data with one bad value in one step of one share, or none."""

    def __init__(self, share=-1, step=0, value=0.0):
        super().__init__()
        self.bad, self.value = (share, step), value

    def __call__(self, share):
        number = len(self.shares)
        for step, (images, labels) in enumerate(super().__call__(share), 1):
            if (number, step) == self.bad:
                images = images.clone()
                images[0, 0, 0, 0] = self.value
            yield images, labels


class TestTrainings:
    @pytest.mark.slow
    @pytest.mark.parametrize("options", SYNCS)
    def test_a_bad_value_is_named_where_it_was_seen_first(self, options, tmp_path):
        whole, path = train(data=Poisoned(), **options), tmp_path / "training.pt"
        for number, step, value in [(0, 1, NAN), (10, 2, -INF)]:
            path.unlink(missing_ok=True)
            data, ended = Poisoned(number, step, value), []
            with pytest.raises(NonFiniteError, match=r"loss is nan.*lower.*\(it was 0") as caught:
                train(data=data, checkpoint=path, on_epoch=ended.append, **options)
            commit = whole.log[number]
            epoch = commit.iteration + 1  # in these plans no worker is an epoch ahead
            error = caught.value
            assert (error.worker, error.epoch, error.step) == (commit.worker, epoch, step)
            assert f"(worker {commit.worker}, epoch {epoch}, step {step} of its" in str(error)
            assert len(data.shares) == number + 1  # no other share was begun
            # What stood before stands, and a training without the bad value goes on from it.
            assert len(ended) == number // 3 and path.exists() == (number >= 3)
            assert same(train(data=Poisoned(), checkpoint=path, **options).state, whole.state)

    @pytest.mark.parametrize("what", ["weight", "buffer"])
    def test_a_finite_loss_hides_nothing(self, what):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(72, 3)
                self.register_buffer("seen", torch.zeros(2))

            def forward(self, images):
                outputs = self.linear(images.flatten(1))
                if what == "buffer":
                    self.seen += INF
                    return outputs
                return outputs + (outputs - outputs.detach()).abs().sum().sqrt()  # slope of 0/0

        name = "seen" if what == "buffer" else "linear.weight"
        plan = dualbatch.DualBatchPlan(TIMES, 1.0, 0, 3, 60, None, 20, 0, 20, 1.0)
        with pytest.raises(NonFiniteError, match=rf"'{name}' is not finite after") as caught:
            train(plan, model_fn=Net)
        assert (caught.value.worker, caught.value.epoch, caught.value.step) == (0, 1, 1)

    def test_half_precision_losses_are_no_divergence(self):
        class Net(nn.Linear):
            def forward(self, images):
                return super().forward(images.flatten(1))[:, 0]

        images = make_data()[0]
        result = train(
            model_fn=lambda: Net(72, 1).half(),
            data=(images.half(), torch.full((60,), 100.0).half()),
            loss_fn=functional.mse_loss,  # near 1e4: ten times that is beyond the type
            optimizer_fn=torch.optim.SGD,
            schedule=dualbatch.CyclicProgressiveSchedule([dualbatch.Stage(1, 1e-6)]),
        )
        assert result.history[0].train_loss == pytest.approx(1e4, rel=0.05)

    def test_a_checkpoint_of_a_training_that_diverged(self, tmp_path):
        path = tmp_path / "training.pt"
        train(checkpoint=path, count=2)
        content = load_checkpoint(path)
        content["server"]["state"]["1.running_var"][1] = NAN
        save_checkpoint(path, content)
        with pytest.raises(CheckpointError, match=r"has a '1.running_var' that is not finite"):
            train(checkpoint=path, count=2)


class TestServer:
    STATE = {"w": torch.ones(4), "mean": torch.zeros(2), "n": torch.tensor(3)}  # noqa: RUF012

    def poisoned(self, name, value):
        state = {key: tensor.clone() for key, tensor in self.STATE.items()}
        state[name][-1] = value
        return state

    @pytest.mark.parametrize(("name", "value"), [("w", NAN), ("mean", INF)])
    @pytest.mark.parametrize(
        ("sync", "merge"),
        [("asp", "journal"), ("bsp", "average"), ("bsp", "delta"), ("ssp", "journal")],
    )
    def test_nothing_bad_is_merged(self, sync, merge, name, value):
        server = ParameterServer(self.STATE, 2, sync, 1 if sync == "ssp" else None, merge)
        server.pull(0), server.pull(1)
        server.push(1, 0, self.STATE, 0.5)
        before = repr(server.state_dict())
        with pytest.raises(NonFiniteError, match=rf"'{name}' is not finite \(worker 0, epoch 1\)"):
            server.push(0, 0, self.poisoned(name, value), 1e-30)
        with pytest.raises(NonFiniteError, match=r"the loss is nan"):
            server.push(0, 0, self.STATE, loss=NAN)
        assert repr(server.state_dict()) == before
        # The same share again, as it should be.
        assert server.push(0, 0, self.STATE, loss=1.0).number == 1
        assert server.version == 2 and server.state["w"].tolist() == [1.0] * 4

    @pytest.mark.parametrize("sync", ["asp", "bsp"])
    def test_a_merge_that_overflows(self, sync):
        server = ParameterServer(self.STATE, 2, sync, merge="delta")
        server.pull(0), server.pull(1)
        server.push(0, 0, self.poisoned("w", 3e38))
        before = repr(server.state_dict())
        with pytest.raises(NonFiniteError, match=r"merging makes 'w' overflow \(worker 1, epoch 1"):
            server.push(1, 0, self.poisoned("w", 3e38))
        assert repr(server.state_dict()) == before


def test_all_of_a_state_is_waited_for_at_once():
    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*arguments, **options or {})

    kinds = torch.float32, torch.float64, torch.int64, torch.bfloat16
    state = {f"{n}": torch.full((3,), n, dtype=kind) for n, kind in enumerate(kinds * 4)}
    with Waits() as waits:
        assert not_finite(state) is None
        state["3"][1], state["9"][2] = INF, NAN
        assert not_finite(state) == "3" and not_finite({}) is None
    assert waits.count <= 2


def test_the_error_crosses_processes():
    error = NonFiniteError("the loss is nan", 1, 2, 3, 0.5)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.worker, again.epoch, again.step) == (str(error), 1, 2, 3)
    assert isinstance(again, FloatingPointError) and "\n" not in str(error)
