"""What becomes of a worker's momentum between its shares: kept, or begun from nothing."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from trainings import SYNCS, Recorder, make_model, make_plan, resumed, same, train

from repro.dualbatch import CheckpointError

# Shares of unequal times, so that states are stale.
PLAN = replace(make_plan(), small_samples=12, large_samples=36)


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr / 10)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4)


class Precise(torch.optim.Optimizer):
    """Momentum, summed with more digits than the weights have."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            of = self.state[parameter]
            of.setdefault("sum", torch.zeros_like(parameter, dtype=torch.float64))
            parameter -= self.param_groups[0]["lr"] * of["sum"].mul_(0.9).add_(parameter.grad)


class Nested(Precise):
    """The same, with the sum in a container, and a state that its loading changes."""

    def __setstate__(self, state):
        super().__setstate__(state)
        for of in self.state.values():
            of.setdefault("loaded", True)

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            of = self.state[parameter]
            of.setdefault("sums", {"first": [torch.zeros_like(parameter, dtype=torch.float64)]})
            assert isinstance(of.setdefault("size", parameter.shape), torch.Size)
            (total,) = of["sums"]["first"]
            parameter -= self.param_groups[0]["lr"] * total.mul_(0.9).add_(parameter.grad)


def by_hand(result, shares, optimizer_fn, kept):
    """Train the shares of an asynchronous run again: one model and one optimizer per worker."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [make_model() for _ in range(PLAN.n)]
        torch.manual_seed(0)
        states = [{name: t.clone() for name, t in make_model().state_dict().items()}]
    data, optimizers, rates = Recorder(), {}, [0.1, 0.1, 0.02, 0.02]
    for commit, share in zip(result.log, shares, strict=True):
        model, pulled = models[commit.worker], states[commit.pulled]
        model.load_state_dict(pulled)
        if not kept or commit.worker not in optimizers:
            optimizers[commit.worker] = optimizer_fn(model.parameters(), 0.1)
        optimizer = optimizers[commit.worker]
        # Who comes first in an epoch takes the setting of the next one.
        wanted = optimizer_fn(model.parameters(), rates[min(3, -(-commit.pulled // PLAN.n))])
        optimizer.param_groups[0]["lr"] = wanted.param_groups[0]["lr"]
        with torch.random.fork_rng():
            torch.manual_seed(share.seed)
            for images, labels in data(share):
                optimizer.zero_grad()
                functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
        merged = {}
        for name, new in model.state_dict().items():
            now, weight = states[-1][name], commit.factor / (1 + commit.factor)
            whole = not new.is_floating_point()
            merged[name] = now + new - pulled[name] if whole else now.lerp(new, weight)
        states.append(merged)
    return states[-1]


@pytest.mark.parametrize(
    ("optimizer_fn", "kept"),
    [(momentum, True), (momentum, False), (adam, True), (Precise, True), (Nested, True)],
)
def test_the_weights_are_those_of_a_loop_by_hand(optimizer_fn, kept):
    data = Recorder()
    options = {} if kept else {"optimizer_state": "restarted"}  # kept is the default
    result = train(PLAN, data=data, optimizer_fn=optimizer_fn, **options)
    assert same(result.state, by_hand(result, data.shares, optimizer_fn, kept))
    assert not same(result.state, by_hand(result, data.shares, optimizer_fn, not kept))


class Wrapping(torch.optim.Optimizer):
    """Leaves all to an optimizer within, whose state nobody sees."""

    def __init__(self, parameters, lr):
        self.inner = [momentum(parameters, lr)]
        super().__init__(parameters, {"lr": lr})

    def step(self):
        self.inner[0].step()


class Passing(Wrapping):
    """Gives and takes the state of the one within; torch wraps the `step` that it inherits."""

    def state_dict(self):
        return self.inner[0].state_dict()

    def load_state_dict(self, state):
        self.inner[0].load_state_dict(state)


@pytest.mark.parametrize(("options", "make"), [*zip(SYNCS, [None, adam, Passing], strict=True)])
def test_a_checkpoint_goes_on_with_it(options, make, tmp_path):
    options = options | {"optimizer_fn": make, "plan": PLAN}
    path = tmp_path / "training.pt"
    resumed(path, 2, **options)
    with pytest.raises(CheckpointError, match="optimizer_state differ"):
        train(checkpoint=path, optimizer_state="restarted", **options)


def test_passes_of_ones_own_keep_it():
    """As captured ones do, whose gradients and loss are the same tensors at every replay."""

    def captured(model, loss_fn):
        gradients, kept = [torch.zeros_like(p) for p in model.parameters()], torch.zeros(())

        def passes(inputs, targets):
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.copy_(parameter.grad)
            return kept.copy_(loss.detach())

        return passes

    result, plain = train(PLAN, passes_fn=captured), train(PLAN)
    assert same(result.state, plain.state)
    assert [e.train_loss for e in result.history] == [e.train_loss for e in plain.history]
    assert not same(result.state, train(PLAN, optimizer_state="restarted").state)


def two_groups(parameters, lr):
    weights = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() < 2]
    return torch.optim.SGD([{"params": weights}, {"params": rest}], lr, momentum=0.9)


def test_parameters_may_be_looked_at_twice():
    plain = train(optimizer_fn=lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9))
    assert same(train(optimizer_fn=two_groups).state, plain.state)


def scheduled(parameters, lr):
    optimizer = torch.optim.SGD(parameters, lr)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    return optimizer


class Estimating(torch.optim.SGD):
    """Keeps a number in its options, as those that find their own rate do."""

    def step(self):
        super().step()
        for group in self.param_groups:
            group["d"] = group.get("d", 1.0) * 1.1


class Listing(torch.optim.SGD):
    """Keeps its steps in a list, and its parameters in another."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.all, self.steps = list(parameters), [0]

    def step(self):
        super().step()
        self.steps[0] += 1


class Knowing(torch.optim.SGD):
    """Has a number for each parameter, and tells of its steps."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.numbers, told = {p: number for number, p in enumerate(parameters)}, []
        self.register_step_post_hook(lambda *_: told.append(self))


@pytest.mark.parametrize(("kind", "plain"), [(Knowing, torch.optim.SGD), (Passing, momentum)])
def test_what_an_optimizer_knows_of_parameters_and_tells_is_no_state(kind, plain):
    assert same(train(optimizer_fn=kind).state, train(optimizer_fn=plain).state)


MADE = {}  # looked up by a function that makes its optimizer once
OTHER = make_model()
WRONG = {
    "of another model": (lambda p, lr: torch.optim.SGD(OTHER.parameters(), lr),
                         r"SGD of parameters that are not the worker's"),
    "of the head": (lambda p, lr: torch.optim.SGD(p[-2:], lr),
                    r"leaves parameters out .*\(0.weight, 0.bias, 1.weight, 1.bias\)"),
    "with a scheduler": (scheduled, r"attaches a learning-rate scheduler.*\(Stage, warmup_epochs"),
    "and a scheduler": (lambda p, lr: (torch.optim.SGD(p, lr), None), r"returns tuple; give one"),
    "nothing": (lambda p, lr: None, r"returns NoneType; give one optimizer"),
    "with a closure": (torch.optim.LBFGS, r"LBFGS, whose step needs a closure"),
    "made once": (lambda p, lr: MADE.setdefault("it", torch.optim.SGD(p, lr)),
                  r"returns the same optimizer again"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_optimizer_that_does_not_train_the_worker_is_refused(name):
    MADE.clear()
    optimizer_fn, message = WRONG[name]
    with pytest.raises(ValueError, match=rf"optimizer_fn .*{message}"):
        train(optimizer_fn=optimizer_fn)


@pytest.mark.parametrize("kind", [Estimating, Listing, Wrapping])
def test_options_that_an_optimizer_changes_are_refused_where_they_would_be_lost(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__} changes options or attributes as it"):
        train(optimizer_fn=kind)
    assert train(optimizer_fn=kind, optimizer_state="restarted").log
