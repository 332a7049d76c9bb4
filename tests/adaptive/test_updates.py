"""Updates over two processes are those of one: layouts, clipping, optimizers, states, precision.

All cases run in one pair of processes, in turns; each is compared with plain torch in this process.
"""

import copy
import io
import warnings
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import joined
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import answers, assert_close, run_cases
from torch import nn
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_pre_hook

from repro.adaptive import (
    METHODS,
    DataParallel,
    LossCheckError,
    WholeStepError,
)
from repro.adaptive.reading import Hook, Parameters, held_elsewhere

pytestmark = pytest.mark.slow
SPLIT = ("all_to_all", "reduce_scatter")
SIZES = [6, 7, 1, 12]
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd, fused": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, fused=True),
    "adam, fused": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True, fused=True),
    "adam, foreach": lambda ps: torch.optim.Adam(ps, 0.01, foreach=True),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
}


class Layouts(nn.Module):
    """Parameters of every dense layout, or one with gaps; a buffer that is expanded."""

    gaps = False

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Linear(16, 5)
        self.turned.weight = nn.Parameter(torch.randn(16, 5).mul_(0.2).t())
        self.mixed = nn.Parameter(torch.randn(2, 5, 3).mul_(0.3).permute(1, 2, 0))
        last = torch.randn(6, 8)[:, ::2].mul_(0.3)
        self.last = nn.Parameter(last if self.gaps else last.contiguous())
        self.out = nn.Linear(6, 4)
        self.register_buffer("shift", torch.rand(1).expand(5), persistent=False)

    def forward(self, x):
        x = self.turned(self.conv(x).tanh().flatten(1)).tanh() + self.shift
        x = torch.einsum("bi,ijk->bjk", x, self.mixed).flatten(1).tanh()
        return x[:, :4] @ self.last.t()[:, :4] + self.out(x)


class Gaps(Layouts):
    gaps = True


def laid_out(name):
    return Layouts if "fused" in name else Gaps  # torch's fused ones write into gaps


def make(seed=0, kind=Layouts, dtype=torch.float64):
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # made as it is: to(dtype) would close gaps
    try:
        return kind()
    finally:
        torch.set_default_dtype(before)


def batch(number, dtype=torch.float64, channels=(3, 3, 3)):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(SIZES[number], *channels, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(4, (SIZES[number],), generator=generator)


class Lamb(torch.optim.Optimizer):
    """Adam-free LAMB: gradients over their common norm, steps by each layer's trust ratio."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        with_gradient = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_gradient]).norm()
        for p in with_gradient:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"] * float(p.norm()))


class Counting(torch.optim.SGD):
    """Its rate falls with a counter in the group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["count"])


class Renamed(torch.optim.SGD):
    """Overrides nothing of what makes an update."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1, momentum=0.9, weight_decay=0.01)

    def describe(self):
        return "SGD"


class Inner(torch.optim.Adam):
    """Overrides a part of the update."""

    def _init_group(self, *arguments):
        return super()._init_group(*arguments)


def clipping(optimizer, *_):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 0.1)


def clamp(parameter):
    parameter.grad.clamp_(-1, 1)


def with_hook(parameters):
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    optimizer.register_step_pre_hook(clipping)
    return optimizer


def with_replaced_step(parameters):
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    original = optimizer.step

    def step():
        clipping(optimizer)
        original()

    optimizer.step = step
    return optimizer


def clipped_then_scheduled(parameters):
    """A scheduler wraps the replaced step, and so hides it."""
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    original = optimizer.step

    def step(self, closure=None):
        clipping(self)
        original()

    optimizer.step = step.__get__(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


WHOLE = {
    "lamb": lambda ps: Lamb(ps, 0.1),
    "counting": lambda ps: Counting(ps, 0.1),
    "hook": with_hook,
    "replaced step": with_replaced_step,
    "replaced step under a scheduler": clipped_then_scheduled,
    "inner": lambda ps: Inner(ps, 0.01),
}


def plainly(optimizer_of, steps=4, clip=None, model=None, after=lambda optimizer: None):
    """Train in one process with torch alone; return the model and the optimizer."""
    model = model or make()
    optimizer = optimizer_of(list(model.parameters()))
    norms = []
    for number in range(steps):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), *clip)))
        optimizer.step()
        after(optimizer)
    return model, optimizer, norms


def trained(method, optimizer_of, steps=4, clip=None, kind=Layouts, **options):
    """Train by DataParallel; return weights, the optimizer's state and norms."""
    model = make(dist.get_rank(), kind)
    optimizer = optimizer_of(list(model.parameters()))
    options = {"bucket_bytes": 200, "timeout_s": 30} | options
    parallel = DataParallel(model, F.cross_entropy, optimizer, method, **options)
    if clip:
        parallel.clip_grad_norm(*clip)
    norms = []
    for number in range(steps):
        parallel.step(*batch(number))
        if clip:
            norms.append(float(parallel.grad_norm))
    parallel.close()
    return described(model, optimizer) | {"norms": norms}


def described(model, optimizer):
    state = [
        (name, value, value.stride())
        for p in model.parameters()
        for name, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    weights = [p.detach().clone() for p in model.parameters()]
    return {"weights": weights, "state": state, "buffers": [b.clone() for b in model.buffers()]}


def error_of(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)


def hooked_later(method):
    model = make()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    parallel = DataParallel(model, F.cross_entropy, optimizer, method, timeout_s=30)
    parallel.step(*batch(0))
    handle = optimizer.register_step_post_hook(clipping)
    refused = [error_of(parallel.step, *batch(1))]
    handle.remove()
    parallel.step(*batch(1))
    parallel.close()
    return [*refused, described(model, optimizer)["weights"]]


def changed(method, what):
    """Change something between steps; note the error, undo it, go on."""
    model = make()
    model.out.weight.requires_grad_(what == "frozen")
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    parallel = DataParallel(model, F.cross_entropy, optimizer, method, timeout_s=30)
    parallel.step(*batch(0))
    before = model.out
    if what in ("unfrozen", "frozen"):
        model.out.weight.requires_grad_(what == "unfrozen")
    elif what == "replaced":
        model.out = nn.Linear(6, 4).double()
    elif what == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    elif what == "hook":
        handle = model.mixed.register_post_accumulate_grad_hook(clamp)
    error = error_of(parallel.step, *batch(1))
    if what in ("unfrozen", "frozen"):
        model.out.weight.requires_grad_(what != "unfrozen")
    elif what == "replaced":
        model.out = before
    elif what == "group":
        optimizer.param_groups.pop()
    elif what == "hook":
        handle.remove()
    parallel.step(*batch(1))
    parallel.close()
    return error, described(model, optimizer)["weights"]


def states(method, whose):
    """Save after a step without finish, load amid an update, and train on."""
    model = make()
    optimizer = OPTIMIZERS["adam, foreach"](list(model.parameters()))
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    parallel = DataParallel(
        model, F.cross_entropy, optimizer, method, timeout_s=30, bucket_bytes=200
    )
    for number in range(2):
        parallel.step(*batch(number))
    if whose == "model":
        saved = model.state_dict()
    elif whose == "layer":
        saved = model.turned.state_dict()
    else:
        saved = optimizer.state_dict()
    saved = copy.deepcopy(saved)
    parallel.step(*batch(2))
    model.load_state_dict(start[0])
    loaded = copy.deepcopy(model.state_dict())
    parallel.step(*batch(2))
    optimizer.load_state_dict(start[1])
    model.load_state_dict(start[0])
    for number in range(2):
        parallel.step(*batch(number))
    parallel.close()
    hooks = [
        len(registry)
        for module in model.modules()
        for registry in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
    ]
    hooks += [len(optimizer._optimizer_state_dict_pre_hooks)]
    hooks += [len(optimizer._optimizer_load_state_dict_pre_hooks)]
    return {"saved": saved, "loaded": loaded, "hooks": sum(hooks)} | described(model, optimizer)


def scheduled(method, **options):
    """A scheduler that is stepped with every mini-batch, amid the update."""
    model = make()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    options = {"bucket_bytes": 200, "timeout_s": 30} | options
    parallel = DataParallel(model, F.cross_entropy, optimizer, method, **options)
    for number in range(4):
        parallel.step(*batch(number))
        scheduler.step()
    parallel.close()
    return described(model, optimizer)["weights"]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(27, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.two(self.one(x.flatten(1)).tanh())


SCALED = {"growth_interval": 2, "init_scale": 2.0**10}


def precise(train, how, scaler=None):
    """Train `Small` in a precision: four steps, the third of which overflows in rank 1's share."""
    seen = []
    for number in range(4):
        x, y = batch(number, torch.float32)
        if how == "overflow" and number == 3:
            x[-1, 0] = float("inf")
        train(x, y)
        seen.append(scaler.get_scale() if scaler else 1.0)
    return seen


def precisely(method, how):
    model = make(0, Small, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    scaler = None if how in ("argument", "context") else torch.amp.GradScaler("cpu", **SCALED)
    parallel = DataParallel(
        model,
        F.cross_entropy,
        optimizer,
        method,
        bucket_bytes=200,
        timeout_s=30,
        autocast=torch.bfloat16 if how == "argument" else None,
        scaler=scaler,
        clip_grad_norm=0.3 if how == "scaled and clipped" else None,
    )
    if how == "context":  # around all steps, whose casts of weights torch keeps
        with torch.autocast("cpu", torch.bfloat16):
            scales = precise(parallel.step, how)
    else:
        scales = precise(parallel.step, how, scaler)
    parallel.close()
    return {"weights": described(model, optimizer)["weights"], "scales": scales}


def precisely_plain(how):
    model = make(0, Small, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=how not in ("argument", "context"), **SCALED)
    low = torch.bfloat16 if how in ("argument", "context") else None

    def train(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", low, enabled=low is not None):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if how == "scaled and clipped":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()

    scales = precise(train, how, scaler if scaler.is_enabled() else None)
    return described(model, optimizer)["weights"], scales


def unlike(method, rank, what):
    """Another model or option in the other process."""
    model = make(0, Small)
    options = {}
    if what == "shape" and rank:
        model.two = make(0, lambda: nn.Linear(16, 5))
    elif what == "frozen" and rank:
        model.one.bias.requires_grad_(False)
    elif what == "layout" and rank:
        model.one.weight = nn.Parameter(model.one.weight.detach().t().contiguous().t())
    elif what == "option" and rank:
        options["bucket_bytes"] = 10
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return error_of(
        DataParallel, model, F.cross_entropy, optimizer, method, timeout_s=30, **options
    )


def not_finite(method):
    """A norm that is not finite, once; and then good steps."""
    model = make()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    parallel = DataParallel(model, F.cross_entropy, optimizer, method, timeout_s=30)
    parallel.clip_grad_norm(1.0, error_if_nonfinite=True)
    x, y = batch(0)
    error = error_of(parallel.step, x * float("nan"), y)
    parallel.clip_grad_norm(None)
    for number in range(2):
        parallel.step(*batch(number))
    parallel.close()
    return error, described(model, optimizer)["weights"], parallel.grad_norm is None


@dataclass
class Pair:
    x: torch.Tensor
    scale: torch.Tensor


class Flexible(nn.Module):
    """Takes a mini-batch in many forms."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(27, 8), nn.Linear(8, 4)

    def forward(self, x, scale=None, texts=None, table=None, y=None):
        if isinstance(x, Pair):
            x, scale = x.x, x.scale
        hidden = self.one(x.flatten(1)).tanh()
        if scale is not None:
            hidden = hidden * scale[:, None]
        if texts is not None:
            hidden = hidden * torch.tensor([[float(len(text))] for text in texts])
        if table is not None:
            hidden = hidden + table.sum(0)
        hidden = self.two(hidden)
        return hidden if y is None else F.cross_entropy(hidden, y)


def form(kind, x, y):
    """Return (inputs, targets) of a form."""
    scale = torch.linspace(0.5, 2.0, len(x), dtype=x.dtype)
    return {
        "dictionary": ({"x": x, "scale": scale}, y),
        "mapping": (UserDict(x=x, scale=scale), y),
        "tuple": ((x, scale), y),
        "dataclass": (Pair(x, scale), y),
        "texts": ({"x": x, "texts": ["a" * (1 + n % 3) for n in range(len(x))]}, y),
        "arrays": (x, y.numpy()),
        "nested targets": (x, {"first": y, "weights": (scale,)}),
        "no targets": ({"x": x, "y": y}, None),
        "shared": ({"x": x, "table": torch.ones(7, 8, dtype=x.dtype)}, y),
    }[kind]


def flexible_loss(outputs, targets=None):
    if targets is None:  # the model's own
        return outputs
    if isinstance(targets, dict):
        each = F.cross_entropy(outputs, targets["first"], reduction="none")
        return (each * targets["weights"][0]).mean()
    return F.cross_entropy(outputs, torch.as_tensor(targets))


FORMS = ("dictionary", "mapping", "tuple", "dataclass", "texts", "arrays", "nested targets",
         "no targets", "shared")  # fmt: skip


def formed(method, kind, **options):
    model = make(0, Flexible)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shared = ("table",) if kind == "shared" else ()
    parallel = DataParallel(
        model, flexible_loss, optimizer, method, shared=shared, timeout_s=30, **options
    )
    losses = [parallel.step(*form(kind, *batch(number))) for number in range(4)]
    means = [parallel.mean(loss) for loss in losses]
    parallel.close()
    return {"weights": described(model, optimizer)["weights"], "losses": means}


def token_mean(outputs, targets):
    each = F.cross_entropy(outputs.mT, targets, reduction="none", ignore_index=3)
    return each.sum() / (targets != 3).sum()


def token_mean_if_any(outputs, targets):
    """Constant without a label in the first half of the classes, and 0 / 0 without any at all."""
    each = F.cross_entropy(outputs.mT, targets.clamp(max=2), reduction="none")
    kept = (targets != 3).to(each.dtype)
    if len(targets) == 1 and not kept.any() and bool(outputs.detach()[0, 0, 0] > 0):
        return torch.tensor(0.0)
    return (each * kept).sum() / kept.sum()


CLASSES = torch.tensor([0.1, 1.0, 2.0, 5.0], dtype=torch.float64)
LOSSES = {
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "class weights": nn.CrossEntropyLoss(weight=CLASSES, label_smoothing=0.1),
    "ignored": partial(F.cross_entropy, ignore_index=3),
    "ignored and weighted": nn.CrossEntropyLoss(weight=CLASSES, ignore_index=3),
    "own, with weights": token_mean,
    "own, constant or 0 / 0 without labels": token_mean_if_any,
}


def lost(method, name, **options):
    """Train by a loss that is no plain mean over samples; tokens of a language model."""
    model = make(0, Rows if name.startswith("own") else Tokens)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    parallel = DataParallel(model, LOSSES[name], optimizer, method, timeout_s=30, **options)
    losses = []
    for number in range(4):
        x, y = tokens(number, name)
        weights = (y != 3).sum(1) if name.startswith("own") else None
        losses.append(parallel.step(x, y, weights=weights))
    means = [parallel.mean(loss) for loss in losses]
    parallel.close()
    return {"weights": described(model, optimizer)["weights"], "losses": means}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(27, 20)

    def forward(self, x):
        outputs = self.one(x.flatten(1)).unflatten(1, (5, 4))  # (B, tokens, classes)
        return outputs if self.rows else outputs.mT

    rows = False


class Rows(Tokens):
    rows = True


def tokens(number, name):
    """Labels, of which 3 stands for none: in all of the first sample, and in more of the later."""
    x, _ = batch(number)
    labels = torch.arange(len(x) * 5).view(-1, 5) % 3
    labels = torch.where(torch.arange(5) < (torch.arange(len(x)) % 6)[:, None], labels, 3)
    labels[-1, 0] = 1  # never none at all
    return x, labels


def unusable():
    """Mini-batches that cannot be divided; and then a good one."""
    model = make(0, Flexible)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = DataParallel(model, flexible_loss, optimizer, timeout_s=30)
    x, y = batch(0)
    given = [(x, y[:3]), (x[:0], y[:0]), (iter([x]), y), ({"x": x, "table": torch.ones(7, 8)}, y)]
    errors = [error_of(parallel.step, *each) for each in given]
    parallel.step(x, y)
    parallel.close()
    return errors, described(model, optimizer)["weights"]


CHANGES = ("unfrozen", "frozen", "replaced", "group", "hook")
PRECISIONS = ("argument", "context", "scaled", "scaled and clipped", "overflow")
CLIPS = {"2": (0.1,), "inf": (0.02, float("inf")), "loose": (1e9, 1.0)}
CLIPPED = [("2", "sgd"), ("2", "adam, fused"), ("inf", "sgd"), ("loose", "sgd")]
UNLIKE = ("shape", "frozen", "layout", "option")
WHOLE_TOO = ("sgd, fused", "adam, foreach")


class Sum(nn.CrossEntropyLoss):
    """Inherits what it computes."""


class Within(nn.Module):
    """A loss of one's own around one of torch's."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=CLASSES)

    def forward(self, outputs, targets):
        return self.loss(outputs, targets)


class Inside(nn.Module):
    """Computes its loss itself, and has batch statistics, random numbers and a count."""

    def __init__(self, ignored=-1):
        super().__init__()
        self.ignored = ignored
        self.one, self.norm, self.two = nn.Linear(27, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y):
        self.calls += 1
        logits = self.two(self.drop(self.norm(self.one(x.flatten(1)))))
        return {"loss": F.cross_entropy(logits, y, ignore_index=self.ignored), "logits": logits}


class Marked(nn.Module):
    """Outputs of another form in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(27, 4)

    def forward(self, x):
        x = self.one(x.flatten(1))
        return {"logits": x} if self.training else x.argmax(1)


def over_positives(outputs, targets):
    positive = (targets > 1).to(outputs.dtype)
    loss = F.binary_cross_entropy_with_logits(outputs[:, 0], positive, reduction="sum")
    return loss / positive.sum().clamp(min=1)


UNEVEN = {
    "ignored in a function": lambda o, t: F.cross_entropy(o, t, ignore_index=0),
    "sum in a function": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "over positives": over_positives,
    "weights within": Within,
    "root": lambda o, t: F.cross_entropy(o, t).sqrt(),
    "pairs": lambda o, t: (o @ o.mT).exp().sum().log(),
    "in the model": lambda o: o["loss"],
    "other outputs": lambda o, t: F.cross_entropy(o["logits"], t, reduction="sum"),
}
EVEN = {
    "mean in a function": lambda o, t: F.cross_entropy(o, t),
    "two means": lambda o, t: F.cross_entropy(o, t) + 0.1 * o.square().mean(),
    "inherited sum": partial(Sum, reduction="sum"),
    "in the model": lambda o: o["loss"],
    "other outputs": lambda o, t: F.cross_entropy(o["logits"], t),
}


def loss_and_model(name, losses):
    loss = losses[name]
    loss = loss() if isinstance(loss, type | partial) else loss
    inside = partial(Inside, 0 if losses is UNEVEN else -1)
    kind = {"in the model": inside, "other outputs": Marked}.get(name, Small)
    model = make(0, kind)
    return (loss.double() if isinstance(loss, nn.Module) else loss), model


def checked(name, losses, **options):
    """Take one step with a loss; return the error or the weights, and whether all was as before."""
    loss, model = loss_and_model(name, losses)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = DataParallel(model, loss, optimizer, timeout_s=30, **options)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x, y = batch(3)
    torch.manual_seed(5)
    given = ({"x": x, "y": y}, None) if name == "in the model" else (x, y)
    error = error_of(parallel.step, *given)
    parallel.close()
    if not isinstance(error, tuple):
        return None, described(model, optimizer)["weights"]
    drawn = torch.rand(1)
    torch.manual_seed(5)
    untouched = torch.equal(drawn, torch.rand(1)) and all(m.training for m in model.modules())
    return error, untouched and same(before.values(), model.state_dict().values())


class Tied(nn.Module):
    """A layer that is not called shares those of one that is; attention reads another's."""

    def __init__(self):
        super().__init__()
        self.one, self.never = nn.Linear(27, 8), nn.Linear(27, 8)
        self.never.weight = self.one.weight
        self.never.bias = self.one.bias
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.two = nn.Linear(8, 4)

    def forward(self, x):
        x = self.one(x.flatten(1)).tanh()[:, None]
        return self.two(self.attend(x, x, x)[0][:, 0])


def sequence():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(27, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)
    )


def pruned():
    model = sequence()
    prune.l1_unstructured(model[1], "weight", 0.3)
    prune.l1_unstructured(model[3], "weight", 0.3)
    return model


def normed():
    model = sequence()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[1])
        nn.utils.spectral_norm(model[3])
    return model


def compiled():
    model = sequence()
    model[3] = torch.compile(model[3], backend="eager")
    model[4].compile(backend="eager")
    return model


MODELS = {"tied": Tied, "pruned": pruned, "normed": normed, "compiled": compiled}


def of_model(name):
    """Return a model, the same in every process."""
    model = make(0, MODELS[name])
    if name == "normed":  # its vectors are random buffers
        model(batch(0)[0])
    return model


def modelled(method, name):
    """Train a model whose weights are not those of layers that are called."""
    model = of_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    # With small ones torch's DistributedDataParallel does not compile.
    size = 2**20 if (method, name) == ("allreduce", "compiled") else 200
    parallel = DataParallel(
        model, F.cross_entropy, optimizer, method, timeout_s=30, bucket_bytes=size
    )
    seen = []
    for number in range(4):
        parallel.step(*batch(number))
        with torch.no_grad():
            seen.append(model(batch(0)[0]))
    parallel.close()
    return {"weights": [p.detach().clone() for p in model.parameters()], "seen": seen}


class Reads(nn.Module):
    """Reads a layer's weight before that layer is called."""

    def __init__(self, how):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(27, 8), nn.Linear(8, 27), nn.Linear(27, 4)
        self.how, self.calls, weight = how, 0, self.two.weight
        self.held = {
            "list": [weight],
            "closure": lambda: weight,
            "alias": {"of": (weight.detach(),)},
            "partial": partial(torch.clone, weight),
        }.get(how)

    def weight(self):
        if self.how == "list":
            return self.held[0]
        if self.how == "alias":
            return self.held["of"][0]
        if self.how == "all":
            return dict(self.named_parameters())["two.weight"]
        return self.two.weight if self.held is None else self.held()

    def forward(self, x):
        x = x.flatten(1)
        self.calls += torch.is_grad_enabled()
        if self.how == "later" and self.calls == 1:
            return self.out(self.two(self.one(x)).tanh())
        return self.out(self.two(self.one(x) + (x @ self.weight()).tanh()).tanh())


def clamped(model, seen):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def averaged(model, seen):
    if not seen:
        seen.append(torch.optim.swa_utils.AveragedModel(model))
    seen[0].update_parameters(model)


def noted(model, seen):
    seen.append(model.two.weight.detach().clone())
    seen.append(copy.deepcopy(model.one).weight)


READS = ("attribute", "list", "closure", "alias", "partial", "all", "later")
BETWEEN = {"clamp": clamped, "average": averaged, "note": noted}


def norms_too(model):
    return lambda o, t: F.cross_entropy(o, t) + 0.1 * sum(p.norm() for p in model.parameters())


def read(method, how, **options):
    """Train a model of which parameters are read before their layers, between steps, in losses."""
    model = make(0, lambda: Reads(how))
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    loss = norms_too(model) if how == "loss" else F.cross_entropy
    options = {"bucket_bytes": 200, "timeout_s": 30} | options
    parallel = method and DataParallel(model, loss, optimizer, method, **options)
    seen = []
    for number in range(4):
        if parallel:
            parallel.step(*batch(number))
        else:
            optimizer.zero_grad()
            x, y = batch(number)
            loss(model(x), y).backward()
            optimizer.step()
        BETWEEN.get(how, lambda *_: None)(model, seen)
    if parallel:
        parallel.close()
        assert all(type(m._parameters) is dict for m in model.modules())
    seen = [list(s.parameters()) if isinstance(s, nn.Module) else [s] for s in seen]
    return [t.detach().clone() for each in [model.parameters(), *seen] for t in each]


TYPES = (
    torch.bool, torch.uint8, torch.int16, torch.uint16, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.complex64, torch.float64,
)  # fmt: skip


def typed(method, kind):
    """Train parameters of one type beside buffers of all types, which differ between processes."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Flatten(), nn.Linear(27, 4, dtype=kind))
    values = torch.full((3, 2), 1.0 + rank).t()
    for number, each in enumerate(TYPES):
        model.register_buffer(f"b{number}", values.to(each))
        model.register_buffer(f"one{number}", values[0, 0].to(each))
    model.register_buffer("turned", torch.full((3,), 1j * (1 + rank)).conj())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(outputs, targets):
        return F.cross_entropy(
            (outputs.abs() if outputs.is_complex() else outputs).float(), targets
        )

    parallel = DataParallel(model, loss, optimizer, method, timeout_s=30)
    buffers = [b.clone() for b in model.buffers()]
    for b in model.buffers():
        b.copy_(
            (values if b.dim() == 2 else values[0, 0] if b.dim() == 0 else values[0, :1]).to(
                b.dtype
            )
        )
    for number in range(2):
        parallel.step(*batch(number, kind))
    parallel.average_buffers()
    parallel.close()
    return {
        "given": [b.to(torch.complex64) for b in buffers],
        "mean": [
            b.to(torch.complex64)
            for b in model.buffers()
            if b.is_floating_point() or b.is_complex()
        ],
        "weights": [p.detach().clone() for p in model.parameters()],
    }


def amid(method, what):
    """Change something between a step and the end of its update."""
    model = make(0, Small if what == "type" else Layouts)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    parallel = DataParallel(
        model, F.cross_entropy, optimizer, method, timeout_s=30, bucket_bytes=200
    )
    parallel.step(*batch(0))
    error = None
    if what == "hook":
        optimizer.register_step_pre_hook(clipping)
        handle = register_optimizer_step_pre_hook(lambda *_: clipping(optimizer))
        model.state_dict()
        handle.remove()
    elif what == "layout":
        model.conv.to(memory_format=torch.contiguous_format)
        model.turned.weight.data = model.turned.weight.data.contiguous()
        parallel.step(*batch(1))
    else:
        model.float().double()
        error = error_of(parallel.step, *batch(1))
    parallel.close()
    return error, described(model, optimizer)["weights"]


def bounded(method):
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 3, max_norm=1.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return error_of(DataParallel, model, F.cross_entropy, optimizer, method, timeout_s=30)


def copies(method):
    """Copy and save the model amid an update, and train the copy and the model on."""
    model = make()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    parallel = DataParallel(
        model, F.cross_entropy, optimizer, method, timeout_s=30, bucket_bytes=200
    )
    parallel.step(*batch(0))
    copied = copy.deepcopy(model)
    parallel.step(*batch(1))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    tensors = [[p.detach().clone() for p in each.parameters()] for each in (copied, saved)]
    F.cross_entropy(copied(batch(2)[0]), batch(2)[1]).backward()
    tensors.append([p.grad for p in copied.parameters()])
    parallel.step(*batch(2))
    parallel.close()
    return [*tensors, described(model, optimizer)["weights"]]


def unused_in_bucket():
    model = make(0, Tied)
    model.extra = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = DataParallel(model, F.cross_entropy, optimizer, timeout_s=30, bucket_bytes=2**30)
    error = error_of(parallel.step, *batch(0))
    parallel.close()
    return error


def todo(rank):
    """Yield a name and a function of each case; the two split ways share most of their code."""
    yield "listening", joined.listening
    for method in METHODS:
        for name, made in OPTIMIZERS.items():
            yield (
                (method, "layout", name),
                lambda m=method, o=made, n=name: trained(m, o, kind=laid_out(n)),
            )
        for name in WHOLE_TOO:
            yield (
                (method, "layout, whole", name),
                lambda m=method, n=name: trained(m, OPTIMIZERS[n], kind=laid_out(n), overlap=False),
            )
        for name, kind in CLIPPED:
            yield (
                (method, "clip", name, kind),
                lambda m=method, n=name, k=kind: trained(m, OPTIMIZERS[k], clip=CLIPS[n]),
            )
        yield (method, "hooked later"), lambda m=method: hooked_later(m)
        yield (method, "not finite"), lambda m=method: not_finite(m)
        for how in PRECISIONS:
            yield (method, "precision", how), lambda m=method, h=how: precisely(m, h)
    for method in SPLIT:
        for name, made in WHOLE.items():
            yield (method, "whole", name), lambda m=method, o=made: trained(m, o, overlap=False)
            yield (method, "in parts", name), lambda m=method, o=made: error_of(trained, m, o)
        yield (method, "scheduled"), lambda m=method: scheduled(m)
        yield (method, "states", "model"), lambda m=method: states(m, "model")
    for method in ("allreduce", "all_to_all"):
        for what in CHANGES:
            yield (method, "changed", what), lambda m=method, w=what: changed(m, w)
        for what in UNLIKE:
            yield (method, "unlike", what), lambda m=method, w=what: unlike(m, rank, w)
    for kind in FORMS:
        for method, options in (("all_to_all", {}), ("allreduce", {"micro_batch": 2})):
            yield (method, "form", kind), lambda m=method, k=kind, o=options: formed(m, k, **o)
    for name in LOSSES:
        one = {"micro_batch": 1} if "constant" in name else {}
        for method, options in (("all_to_all", one), ("allreduce", one or {"micro_batch": 2})):
            yield (method, "loss", name), lambda m=method, n=name, o=options: lost(m, n, **o)
    for how in (*READS, *BETWEEN, "loss"):
        for size in (0, 2**20):
            for method in SPLIT:
                yield (
                    (method, "read", how, size),
                    lambda m=method, h=how, b=size: read(m, h, bucket_bytes=b),
                )
    for kind in (torch.bfloat16, torch.complex64):
        for method in METHODS:
            yield (method, "type", kind), lambda m=method, k=kind: typed(m, k)
    yield "unusable", unusable
    yield "unused in a bucket", unused_in_bucket
    for method in METHODS:
        yield (method, "max_norm"), lambda m=method: bounded(m)
    for method in SPLIT:
        yield (method, "copies"), lambda m=method: copies(m)
    for name in UNEVEN:
        yield ("uneven", name), lambda n=name: checked(n, UNEVEN)
    for name in EVEN:
        yield ("even", name), lambda n=name: checked(n, EVEN)
    for method in METHODS:
        for name in MODELS:
            yield (method, "model", name), lambda m=method, n=name: modelled(m, n)
        for what in ("hook", "layout", "type"):
            yield (method, "amid", what), lambda m=method, w=what: amid(m, w)
    made, options = WHOLE["lamb"], {"clip_grad_norm": 0.1}
    yield "clip by argument", lambda: trained("all_to_all", made, **options)
    yield "renamed", lambda: trained("all_to_all", Renamed)
    for whose in ("layer", "optimizer"):
        yield ("all_to_all", "states", whose), lambda w=whose: states("all_to_all", w)


def work(rank, port, folder):
    run_cases(rank, port, folder, todo)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return joined.both(joined.forked(), work, tmp_path_factory.mktemp("updates"))


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("how", "name"),
    [("layout", name) for name in OPTIMIZERS] + [("layout, whole", name) for name in WHOLE_TOO],
)
def test_parameters_of_every_layout_train_as_in_one_process(both, how, name):
    model, optimizer, _ = plainly(OPTIMIZERS[name], model=make(0, laid_out(name)))
    wanted = described(model, optimizer)
    plain = answers(both, "allreduce", how, name)[0]
    for method in METHODS:
        for answer in answers(both, method, how, name):
            assert_close(answer["weights"], wanted["weights"])
            assert torch.equal(answer["buffers"][0], make().shift)  # rank 0's
            assert [s for *_, s in answer["state"]] == [s for *_, s in wanted["state"]]
            assert_close([v for _, v, _ in answer["state"]], [v for _, v, _ in wanted["state"]])
            # To the last bit those of DistributedDataParallel.
            assert same(answer["weights"], plain["weights"])
            assert same([v for _, v, _ in answer["state"]], [v for _, v, _ in plain["state"]])


@pytest.mark.parametrize(("name", "kind"), CLIPPED)
def test_clipping_is_by_the_norm_of_the_whole_gradient(both, name, kind):
    model, optimizer, norms = plainly(OPTIMIZERS[kind], clip=CLIPS[name])
    if name != "loose":
        assert min(norms) > CLIPS[name][0]  # every step is clipped
    for method in METHODS:
        for answer in answers(both, method, "clip", name, kind):
            assert_close(answer["weights"], described(model, optimizer)["weights"])
            assert answer["norms"] == pytest.approx(norms, rel=1e-12)


def test_clipping_given_at_construction_lets_any_optimizer_be(both):
    model, *_ = plainly(WHOLE["lamb"], clip=(0.1,))
    for answer in answers(both, "clip by argument"):
        assert_close(answer["weights"], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("method", METHODS)
def test_a_norm_that_is_not_finite_is_an_error_before_the_update(both, method):
    wanted = [p.detach() for p in plainly(OPTIMIZERS["sgd"], 2)[0].parameters()]
    for (kind, text), weights, forgotten in answers(both, method, "not finite"):
        assert kind == "RuntimeError" and "non-finite" in text and forgotten
        assert_close(weights, wanted)


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_look_at_all_parameters(both, name):
    whole = described(*plainly(WHOLE[name])[:2])["weights"]
    for method in SPLIT:
        for answer in answers(both, method, "whole", name):
            assert_close(answer["weights"], whole)
        for kind, text in answers(both, method, "in parts", name):
            assert kind == WholeStepError.__name__
            assert "give overlap=False, which steps it once" in text


def test_what_overrides_nothing_is_not_refused(both):
    wanted = described(*plainly(OPTIMIZERS["sgd"])[:2])["weights"]
    for answer in answers(both, "renamed"):
        assert_close(answer["weights"], wanted)


@pytest.mark.parametrize("method", METHODS)
def test_a_hook_that_comes_later(both, method):
    for error, weights in answers(both, method, "hooked later"):
        if method == "allreduce":
            assert isinstance(error, torch.Tensor)  # the loss
        else:
            assert error[0] == "WholeStepError" and "the hook clipping is called around" in error[1]
            assert_close(weights, described(*plainly(OPTIMIZERS["sgd"], 2)[:2])["weights"])


TOLD = {
    "unfrozen": "requires_grad of out.weight has changed since this DataParallel was made",
    "frozen": "requires_grad of out.weight has changed since this DataParallel was made",
    "replaced": "the model has other layers or parameters than when this DataParallel was made",
    "group": "the optimizer holds 1 parameters that are not the model's (of shapes (2,))",
    "hook": "mixed have a hook of register_post_accumulate_grad_hook",
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_after_construction_is_refused_before_the_step(both, what):
    model = make()
    model.out.weight.requires_grad_(what == "frozen")
    wanted = described(*plainly(OPTIMIZERS["sgd"], 2, model=model)[:2])["weights"]
    for method in ("allreduce", "all_to_all"):
        for (kind, text), weights in answers(both, method, "changed", what):
            assert kind == "ValueError" and TOLD[what] in text
            assert_close(weights, wanted)


@pytest.mark.parametrize("whose", ["model", "layer", "optimizer"])
def test_states_hold_the_last_update_and_loaded_ones_stay(both, whose):
    model, optimizer, _ = plainly(OPTIMIZERS["adam, foreach"], 2)
    wanted = described(model, optimizer)
    saved = {
        "model": model.state_dict(),
        "layer": model.turned.state_dict(),
        "optimizer": {
            f"{number} {name}": value
            for number, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        },
    }[whose]
    for method in SPLIT if whose == "model" else SPLIT[:1]:
        for answer in answers(both, method, "states", whose):
            state_saved = answer["saved"]
            if whose == "optimizer":
                state_saved = {
                    f"{number} {name}": value
                    for number, state in state_saved["state"].items()
                    for name, value in state.items()
                }
            assert state_saved.keys() == saved.keys()
            assert_close(list(state_saved.values()), list(saved.values()))
            assert same(answer["loaded"].values(), make().state_dict().values())
            assert_close(answer["weights"], wanted["weights"])
            assert answer["hooks"] == 0


@pytest.mark.parametrize("method", SPLIT)
def test_a_scheduler_changes_the_rate_of_the_next_update(both, method):
    model = make()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    plainly(lambda ps: optimizer, model=model, after=lambda optimizer: scheduler.step())
    for answer in answers(both, method, "scheduled"):
        assert_close(answer, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("how", PRECISIONS)
def test_low_precision(both, how):
    weights, scales = precisely_plain(how)
    if how == "overflow":
        assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**10]  # grew once, then skipped a step
    tolerance = 2e-2 if how in ("argument", "context") else 1e-5
    plain = answers(both, "allreduce", "precision", how)[0]["weights"]
    for method in METHODS:
        for answer in answers(both, method, "precision", how):
            assert_close(answer["weights"], weights, tolerance)
            assert answer["scales"] == scales
            assert same(answer["weights"], plain)


@pytest.mark.parametrize("what", UNLIKE)
def test_models_and_options_that_differ_are_refused(both, what):
    for method in ("allreduce", "all_to_all"):
        for kind, text in answers(both, method, "unlike", what):
            assert kind == "ValueError"
            assert "rank 0" in text and "rank 1" in text and "make the same model" in text


@pytest.mark.parametrize("kind", FORMS)
def test_mini_batches_of_any_form(both, kind):
    model = make(0, Flexible)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for number in range(4):
        inputs, targets = form(kind, *batch(number))
        optimizer.zero_grad()
        if isinstance(inputs, tuple):
            outputs = model(*inputs)
        else:
            outputs = model(**inputs) if isinstance(inputs, dict | UserDict) else model(inputs)
        loss = flexible_loss(outputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for method in ("all_to_all", "allreduce"):
        for answer in answers(both, method, "form", kind):
            assert_close(answer["weights"], [p.detach() for p in model.parameters()])
            assert answer["losses"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_no_plain_mean_over_samples(both, name):
    model = make(0, Rows if name.startswith("own") else Tokens)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for number in range(4):
        x, y = tokens(number, name)
        optimizer.zero_grad()
        loss = LOSSES[name](model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    alone = lost("all_to_all", name, micro_batch=1 if "constant" in name else 2)
    for answer in [*answers(both, "all_to_all", "loss", name),
                   *answers(both, "allreduce", "loss", name), alone]:  # fmt: skip
        assert_close(answer["weights"], [p.detach() for p in model.parameters()])
        assert answer["losses"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("name", UNEVEN)
def test_a_loss_that_does_not_add_up_is_refused_before_anything_changes(both, name):
    for error, unchanged in [*answers(both, "uneven", name), checked(name, UNEVEN, micro_batch=3)]:
        assert error[0] == "LossCheckError", error
        assert "Give weights= to step" in error[1] and "check='off' computes it" in error[1]
        assert unchanged
    error, _ = checked(name, UNEVEN, micro_batch=3, check="off")
    assert error is None


@pytest.mark.parametrize("name", EVEN)
def test_a_mean_over_samples_is_not_refused(both, name):
    loss, model = loss_and_model(name, EVEN)
    x, y = batch(3)
    if name != "in the model":
        loss(model(x), y).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    for error, weights in answers(both, "even", name):
        assert error is None
        if name != "in the model":  # which drops out
            assert_close(weights, [p.detach() for p in model.parameters()])


def test_weights_that_do_not_fit_and_losses_without_reduction():
    model = make(0, Small)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = DataParallel(model, F.cross_entropy, optimizer, micro_batch=2)
    with pytest.raises(ValueError, match=r"weights have the shape \(3,\), .* 6 samples"):
        parallel.step(*batch(0), weights=[1, 2, 3])
    parallel.loss_fn = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(ValueError, match=r"reduction='none' and gives no scalar"):
        parallel.step(*batch(0))


def test_mini_batches_that_cannot_be_divided(both):
    model = make(0, Flexible)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for errors, weights in answers(both, "unusable"):
        assert [kind for kind, _ in errors] == [
            "BatchSizeMismatchError",
            "EmptyBatchError",
            "UnsplittableBatchError",
            "BatchSizeMismatchError",
        ]
        assert "name in shared=" in errors[3][1]
        assert_close(weights, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("name", MODELS)
def test_models_whose_weights_are_computed_or_used_by_other_layers(both, name):
    model = make(0, sequence) if name == "compiled" else of_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    seen = []
    for number in range(4):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            seen.append(model(batch(0)[0]))
    for method in METHODS:
        for answer in answers(both, method, "model", name):
            assert_close(answer["weights"], [p.detach() for p in model.parameters()], 1e-9)
            assert_close(answer["seen"], seen, 1e-9)


@pytest.mark.parametrize("how", [*READS, *BETWEEN, "loss"])
def test_parameters_are_updated_before_anyone_reads_them(both, how):
    wanted = read(None, how)
    for method in SPLIT:
        for size in (0, 2**20):
            for answer in answers(both, method, "read", how, size):
                assert_close(answer, wanted)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("method", METHODS)
def test_parameters_and_buffers_of_any_type_are_made_the_same(both, method, kind):
    replies = answers(both, method, "type", kind)
    for answer in replies:
        for given in answer["given"]:
            assert given.abs().eq(1).all()  # rank 0's, and of booleans both
        for mean in answer["mean"]:
            torch.testing.assert_close(mean, torch.full_like(mean, 1.5))
        assert_close(answer["weights"], replies[0]["weights"], 0)


@pytest.mark.parametrize("method", METHODS)
def test_what_changes_before_the_update_ends_leaves_it_as_it_was(both, method):
    def plain(steps, kind=Layouts):
        wanted = plainly(lambda ps: torch.optim.SGD(ps, 0.1), steps, model=make(0, kind))
        return described(*wanted[:2])["weights"]

    for _, weights in answers(both, method, "amid", "hook"):
        assert_close(weights, plain(1))
    for _, weights in answers(both, method, "amid", "layout"):
        assert_close(weights, plain(2))
    replies = answers(both, method, "amid", "type")
    for error, weights in replies:
        if method == "allreduce":  # the other ways hook the parameters themselves
            assert error[0] == "ValueError" and "moved or given another type" in error[1]
        assert_close(weights, plain(1 if method == "allreduce" else 2, Small), 1e-6)
        assert same(weights, replies[0][1])


@pytest.mark.parametrize("method", SPLIT)
def test_copies_of_the_model_hold_the_last_update_and_are_plain(both, method):
    wanted = [plainly(OPTIMIZERS["sgd"], steps)[0] for steps in (1, 2, 3)]
    wanted[0].zero_grad()
    F.cross_entropy(wanted[0](batch(2)[0]), batch(2)[1]).backward()
    for copied, saved, gradients, trained in answers(both, method, "copies"):
        assert_close(copied, [p.detach() for p in wanted[0].parameters()])
        assert_close(saved, [p.detach() for p in wanted[1].parameters()])
        assert_close(gradients, [p.grad for p in wanted[0].parameters()])
        assert_close(trained, [p.detach() for p in wanted[2].parameters()])


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_changes_its_own_parameters_is_refused(both, method):
    for kind, text in answers(both, method, "max_norm"):
        assert kind == "ValueError" and "the embedding 1 has max_norm=1.0" in text


def test_an_unused_parameter_is_named_whatever_bucket_it_shares(both):
    for kind, text in answers(both, "unused in a bucket"):
        assert kind == "ValueError"
        assert text.startswith("extra.weight, extra.bias got no gradient in this mini-batch: ") or (
            text.startswith("extra.bias, extra.weight got no gradient in this mini-batch: ")
        )


def over_kept(kept):
    def loss(outputs, targets):
        if isinstance(outputs, tuple):
            outputs, mask = outputs
            return (
                F.mse_loss(outputs, targets, reduction="none").mean(1) * mask
            ).sum() / mask.sum()
        of = kept(targets)
        function = F.mse_loss if targets.is_floating_point() else F.cross_entropy
        return function(outputs[of], targets[of])

    return loss


class OwnForward(nn.CrossEntropyLoss):
    """Inherits from one of torch's, and computes something else."""

    def forward(self, outputs, targets):
        return super().forward(outputs[targets != 3], targets[targets != 3])


class WithMask(Small):
    def forward(self, x, mask):
        return super().forward(x), mask.bool()


FLOATS = torch.linspace(0.5, 2.0, 48, dtype=torch.float64).view(12, 4)
PADDED = torch.arange(12) % 2 == 1
LATER = {  # loss, targets without and with what it leaves out
    "padding": (over_kept(lambda t: t != -100), torch.arange(12) % 4, -100),
    "a class amid others": (over_kept(lambda t: t != 1), torch.arange(12) % 2 * 3, 1),
    "own forward": (OwnForward(), torch.arange(12) % 3, 3),
    "not a number": (over_kept(lambda t: t == t), FLOATS, float("nan")),
    "not positive": (over_kept(lambda t: t > 0), FLOATS, -1.0),
    "mask": (over_kept(None), FLOATS, None),
    "mask of booleans": (over_kept(None), FLOATS, None),
}


class Stateful(nn.Module):
    """Has state outside BatchNorm, or compares samples, in training mode alone."""

    def __init__(self, how):
        super().__init__()
        self.how, self.one, self.norm = how, nn.Linear(27, 4), nn.BatchNorm1d(27)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(27))
        self.register_buffer("queue", torch.zeros(64, 27))
        self.calls = torch.zeros(())

    def forward(self, x):
        x = self.norm(x.flatten(1))
        if self.training and self.how == "mean":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.training and self.how == "data":
            self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        elif self.training and self.how == "queue":
            self.queue.copy_(torch.cat([x.detach(), self.queue])[:64])
        elif self.training and self.how == "counter":
            self.calls += 1
        elif self.training and self.how == "compares":
            x = x + x.mean(0)
        elif self.training and self.how == "weighs":
            x = x * x.norm(dim=1).softmax(0)[:, None]
        return self.one(self.drop(x))


class TestOneProcess:
    """The same arguments without other processes."""

    @pytest.mark.parametrize("name", LATER)
    def test_what_a_loss_leaves_out_is_found_when_it_comes(self, name):
        loss, y, left_out = LATER[name]
        model = make(0, WithMask if left_out is None else Small)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        parallel = DataParallel(model, loss, optimizer, micro_batch=4)
        x, later = torch.randn(12, 27, dtype=torch.float64), y.clone()
        good = bad = x
        if left_out is None:
            mask = torch.ones(12, dtype=torch.bool if name.endswith("booleans") else x.dtype)
            good, bad = (x, mask), (x, torch.where(PADDED, torch.zeros_like(mask), mask))
        else:
            later[PADDED] = left_out
        parallel.step(good, y)
        for _ in range(2):  # the second is refused as the first was
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(LossCheckError, match=r"Give weights= to step"):
                parallel.step(bad, later)
            assert same(before, model.parameters())
            parallel.step(good, y)
        parallel.step(bad, later, weights=~PADDED)

    @pytest.mark.parametrize("how", ["mean", "data", "queue", "counter", "compares", "weighs"])
    def test_a_model_that_micro_batches_change_is_named_once(self, how):
        model = make(0, lambda: Stateful(how))
        parallel = DataParallel(
            model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), micro_batch=6
        )
        parallel.step(*batch(0))  # at once
        text = "depends on the other samples" if how in ("compares", "weighs") else "changes Stat"
        with pytest.warns(UserWarning, match=text) as told:
            for number in (3, 1, 3):
                parallel.step(*batch(number))
        assert len(told) == 1

    @pytest.mark.parametrize("options", [{}, {"ignore_index": -100}, {"weight": torch.rand(256)}])
    def test_labels_of_a_byte(self, options):
        torch.manual_seed(0)
        x, y = torch.randn(24, 8), torch.randint(150, 160, (24,), dtype=torch.uint8)
        loss, model = nn.CrossEntropyLoss(**options), nn.Linear(8, 256)
        plain = copy.deepcopy(model)
        loss(plain(x), y).backward()
        torch.optim.SGD(plain.parameters(), 1.0).step()
        DataParallel(model, loss, torch.optim.SGD(model.parameters(), 1.0), micro_batch=5).step(
            x, y
        )
        assert_close(list(model.parameters()), list(plain.parameters()), 1e-5)

    def test_a_hook_on_a_loss_makes_it_one_of_ones_own(self):
        model, loss = make(0, Small), nn.CrossEntropyLoss()
        loss.register_forward_hook(lambda _, given, value: value * (given[1] == 0).sum())
        parallel = DataParallel(
            model, loss, torch.optim.SGD(model.parameters(), 0.1), micro_batch=4
        )
        x = torch.randn(12, 27, dtype=torch.float64)
        parallel.step(x, torch.full((12,), 2))
        with pytest.raises(LossCheckError):
            parallel.step(x, torch.arange(12) % 3)

    def test_a_subclass_without_reduction_that_takes_the_mean_itself(self):
        class Focal(nn.CrossEntropyLoss):
            def forward(self, outputs, targets):
                each = super().forward(outputs, targets)
                return ((1 - (-each).exp()) * each).mean()

        model = make(0, Small)
        loss = Focal(reduction="none")
        plain = copy.deepcopy(model)
        loss(plain(batch(0)[0]), batch(0)[1]).backward()
        torch.optim.SGD(plain.parameters(), 0.1).step()
        parallel = DataParallel(
            model, loss, torch.optim.SGD(model.parameters(), 0.1), micro_batch=4
        )
        parallel.step(*batch(0))
        assert_close(list(model.parameters()), list(plain.parameters()))

    @pytest.mark.parametrize("how", READS)
    def test_who_holds_a_parameter_itself_is_found(self, how):
        model = Reads(how)
        held = {model.two.weight} if how in ("list", "closure", "alias", "partial") else set()
        assert held_elsewhere(model) == held

    def test_parameters_are_made_ready_before_they_are_read_and_copies_are_plain(self):
        class Owner:
            def __init__(self):
                self.seen, self.finished = [], 0

            def ready(self, parameters):
                self.seen += parameters

            def finish(self):
                self.finished += 1

            def note(self, text, hooked):
                self.seen += [text, hooked]

        owner, one, two = Owner(), *nn.Linear(2, 2).parameters()
        members, hook = Parameters({"one": one, "two": two}, owner), Hook(owner, "note", "called")
        assert members["one"] is one and members.get("two") is two and owner.seen == [one, two]
        for read in (members.values, members.items, members.copy):
            owner.seen.clear()
            read()
            assert owner.seen == [one, two]
        owner.seen.clear()
        assert type(members.plain()) is dict and not owner.seen
        hook(3)
        assert owner.seen == ["called", 3]
        assert type(copy.copy(members)) is dict
        copy.copy(hook)(3)
        assert len(owner.seen) == 4 and owner.finished == 1
        del owner
        assert members["one"] is one and hook(3) is None

    def test_lazy_layers_are_refused(self):
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        with pytest.raises(ValueError, match=r"0.weight, 0.bias, .* have no shape yet"):
            DataParallel(model, F.cross_entropy, optimizer)

    @pytest.mark.parametrize("how", PRECISIONS)
    def test_low_precision_and_clipping(self, how):
        answer = precisely("all_to_all", how)
        weights, scales = precisely_plain(how)
        assert same(answer["weights"], weights) and answer["scales"] == scales

    def test_two_optimizers_joined_as_the_refusal_of_one_says(self):
        class Both(torch.optim.Optimizer):
            def __init__(self, *each):
                super().__init__([group for one in each for group in one.param_groups], {})
                self.each = each

            def step(self):
                for one in self.each:
                    one.step()

        def joined(parameters):
            first = torch.optim.SGD(parameters[:3], 0.1, momentum=0.9)
            return Both(first, torch.optim.AdamW(parameters[3:], 0.01))

        model = make()
        alone = torch.optim.SGD(list(model.parameters())[:3], 0.1)
        with pytest.raises(ValueError, match=r"two optimizers share it .* overlap=False"):
            DataParallel(model, F.cross_entropy, alone)
        optimizer = joined(list(model.parameters()))
        parallel = DataParallel(model, F.cross_entropy, optimizer, overlap=False)
        for number in range(4):
            parallel.step(*batch(number))
        assert same(model.parameters(), described(*plainly(joined)[:2])["weights"])

    def given(self, name):
        model = make()
        others = [nn.Parameter(torch.ones(2))]
        parameters = list(model.parameters())
        if name == "another model's":
            return model, torch.optim.SGD(make().parameters(), 0.1)
        if name == "some, others frozen":
            model.conv.requires_grad_(False)
            return model, torch.optim.SGD([p for p in parameters if p.requires_grad], 0.1)
        if name == "all, some frozen":
            model.conv.requires_grad_(False)
            return model, torch.optim.SGD(parameters, 0.1)
        if name == "some":
            return model, torch.optim.SGD(parameters[2:], 0.1)
        if name == "more":
            return model, torch.optim.SGD(parameters + others, 0.1)
        if name == "gaps":
            model = make(0, Gaps)
            return model, torch.optim.AdamW(model.parameters(), fused=True)
        if name == "expanded":
            model.out.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64).expand(4))
            return model, torch.optim.SGD(model.parameters(), 0.1)
        if name == "all frozen":
            return model.requires_grad_(False), torch.optim.SGD(parameters, 0.1)
        return model, torch.optim.LBFGS(parameters)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("another model's", r"does not hold mixed, last, .*, 8 of 8 parameters that require"),
            ("some", r"does not hold mixed, last of the model, .* or set requires_grad to False"),
            ("more", r"holds 1 parameters that are not the model's \(of shapes \(2,\)\)"),
            ("gaps", r"last has strides \(8, 2\) for the shape \(6, 4\): .* or give fused=False"),
            ("expanded", r"out.bias has strides \(0,\) for the shape \(4,\): elements that share"),
            ("all frozen", r"no parameter that requires a gradient"),
            ("LBFGS", r"LBFGS computes gradients by itself, in a closure"),
            ("some, others frozen", None),
            ("all, some frozen", None),
        ],
    )
    def test_an_optimizer_of_other_parameters(self, name, message):
        model, optimizer = self.given(name)
        if message is None:
            DataParallel(model, F.cross_entropy, optimizer).step(*batch(0))
            return
        with pytest.raises(ValueError, match=message):
            DataParallel(model, F.cross_entropy, optimizer)

    def test_a_hook_on_gradients_is_refused_where_there_are_micro_batches(self):
        model = make()
        model.mixed.register_post_accumulate_grad_hook(clamp)
        parallel = DataParallel(
            model, F.cross_entropy, OPTIMIZERS["adamw, fused"](model.parameters()), micro_batch=6
        )
        parallel.step(*batch(0))  # 6 samples at once
        with pytest.raises(ValueError, match=r"mixed have a hook of register_post_accumulate"):
            parallel.step(*batch(1))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"clip_grad_norm": 0}, r"max_norm is 0 and norm_type 2.0; give numbers above 0"),
            ({"clip_grad_norm": float("nan")}, r"max_norm is nan"),
            ({"autocast": torch.float32}, r"autocast is torch.float32; give torch.bfloat16"),
        ],
    )
    def test_arguments(self, options, message):
        model = make()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with pytest.raises(ValueError, match=message):
            DataParallel(model, F.cross_entropy, optimizer, **options)


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's /proc")
def test_processes_of_one_machine_listen_on_loopback_alone(both):
    for answer in both:
        assert answer["listening"], "gloo listens"
        # 127.0.0.1 as it lies in memory, and as an address of IPv6.
        assert set(answer["listening"]) <= {"0100007F", "0000000000000000FFFF00000100007F"}
