"""Updates over two processes are those of one: layouts, clipping, optimizers, states, precision.

All cases run in one pair of processes, in turns; each is compared with plain torch in this process.
"""

import copy
import io
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import joined
import pairs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import answers, assert_close, error_of, parallel_of, train, weights_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from repro.adaptive import METHODS, DataParallel, InputGradientError, LossCheckError, WholeStepError
from repro.adaptive.optimizers import check_in_parts
from repro.adaptive.reading import Parameters
from repro.microconv import split_batch

pytestmark = pytest.mark.slow
SPLIT = ("all_to_all", "reduce_scatter")
TWO = ("allreduce", "all_to_all")
SIZES = [6, 7, 1, 12]
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd, fused": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, fused=True),
    "adam, fused": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True, fused=True),
    "adam, foreach": lambda ps: torch.optim.Adam(ps, 0.01, foreach=True),
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


def make(seed=0, kind=Layouts, dtype=torch.float64):
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # made as it is: to(dtype) would close gaps
    try:
        return kind()
    finally:
        torch.set_default_dtype(before)


def batch(number, dtype=torch.float64):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(SIZES[number], 3, 3, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(4, (SIZES[number],), generator=generator)


BATCHES = [batch(number) for number in range(4)]


def plainly(optimizer_of, steps=4, model=None):
    """Train in one process with torch alone; return the model and the optimizer."""
    model = model or make()
    optimizer = optimizer_of(list(model.parameters()))
    train(None, model, optimizer, BATCHES[:steps])
    return model, optimizer


# Trainings, by a way of averaging or by torch alone


def laid_out(method, name, clip=None, **options):
    kind = Layouts if "fused" in name else Gaps  # torch's fused ones write into gaps
    model = make(dist.get_rank() if method else 0, kind)  # which DataParallel makes rank 0's
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    found = train(method, model, optimizer, BATCHES, clip=clip, **options)
    return found | {"shift": model.shift.clone()}


class Lamb(torch.optim.Optimizer):
    """Adam-free LAMB: gradients over their common norm, steps by each layer's trust ratio."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        with_gradient = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_gradient]).norm()
        for p in with_gradient:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"] * float(p.norm()))


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, and has none of torch's own attributes, as timm's Lookahead."""

    def __init__(self, parameters):
        self.base = torch.optim.SGD(parameters, 0.3, momentum=0.9)
        self.defaults, self.state = self.base.defaults, self.base.state
        self.param_groups, self.step = self.base.param_groups, self.base.step


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
    "lamb": Lamb,
    "wrapper": Wrapper,
    "hook": with_hook,
    "replaced step": with_replaced_step,
    "derived": type("Derived", (torch.optim.SGD,), {}),
}


def whole(method, name, **options):
    model = make()
    return train(method, model, WHOLE[name](list(model.parameters())), BATCHES, **options)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(27, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.two(self.one(x.flatten(1)).tanh())


def precisely(method, how):
    """Four steps, the last of which overflows in rank 1's share."""
    model = make(0, Small, torch.float32)
    batches = [batch(number, torch.float32) for number in range(4)]
    if how == "overflow":
        batches[3][0][-1, 0] = float("inf")
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    clip = 0.3 if how == "scaled and clipped" else None
    if how == "context":
        return train(method, model, optimizer, batches, precision=torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2, init_scale=2.0**10)
    return train(method, model, optimizer, batches, scaler=scaler, clip=clip)


@dataclass
class Pair:
    x: torch.Tensor
    scale: torch.Tensor


class Flexible(nn.Module):
    """Takes a mini-batch in many forms."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(27, 8), nn.Linear(8, 4)

    def forward(self, x, scale=None, table=None, y=None):
        if isinstance(x, Pair):
            x, scale = x.x, x.scale
        hidden = self.one(x.flatten(1)).tanh()
        if scale is not None:
            hidden = hidden * scale[:, None]
        if table is not None:
            hidden = hidden + table.sum(0)
        hidden = self.two(hidden)
        return hidden if y is None else F.cross_entropy(hidden, y)


def forms(x, y):
    """(inputs, targets) of every form."""
    scale = torch.linspace(0.5, 2.0, len(x), dtype=x.dtype)
    return {
        "tuple": ((x, scale), y),
        "dataclass": (Pair(x, scale), y),
        "nested targets": (x, {"first": y, "weights": (scale,)}),
        "no targets": ({"x": x, "y": y}, None),
        "shared": ({"x": x, "table": torch.ones(7, 8, dtype=x.dtype)}, y),
    }


FORMS = tuple(forms(*batch(0)))


def flexible_loss(outputs, targets=None):
    if targets is None:  # the model's own
        return outputs
    if isinstance(targets, dict):
        each = F.cross_entropy(outputs, targets["first"], reduction="none")
        return (each * targets["weights"][0]).mean()
    return F.cross_entropy(outputs, targets)


def formed(method, kind):
    model = make(0, Flexible)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    options = {"shared": ("table",) if kind == "shared" else ()}
    options["micro_batch"] = 2 if method == "allreduce" else None
    given = [forms(*each)[kind] for each in BATCHES]
    return train(method, model, optimizer, given, flexible_loss, **options)


class Tokens(nn.Module):
    """Outputs (B, tokens, classes), or (B, classes, tokens), as torch's own losses take them."""

    def __init__(self, last=False):
        super().__init__()
        self.one, self.last = nn.Linear(27, 20), last

    def forward(self, x):
        outputs = self.one(x.flatten(1)).unflatten(1, (5, 4))
        return outputs if self.last else outputs.mT


def tokens(number):
    """Labels, of which 3 stands for none: in all of the first sample, and in more of the later."""
    x, _ = batch(number)
    labels = torch.arange(len(x) * 5).view(-1, 5) % 3
    labels = torch.where(torch.arange(5) < (torch.arange(len(x)) % 6)[:, None], labels, 3)
    labels[-1, 0] = 1  # never none at all
    return x, labels


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


def lost(method, name, micro_batch=None):
    """Train by a loss that is no plain mean over samples; tokens of a language model."""
    own = name.startswith("own")
    model = make(0, partial(Tokens, own))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = [tokens(number) for number in range(4)]
    options = {"micro_batch": 1 if "constant" in name else micro_batch}
    options["weigh"] = lambda y: (y != 3).sum(1) if own else None
    return train(method, model, optimizer, batches, LOSSES[name], **options)


class Tied(nn.Module):
    """A layer that is not called shares those of one that is; others read, or hold, another's."""

    def __init__(self):
        super().__init__()
        self.one, self.never = nn.Linear(27, 8), nn.Linear(27, 8)
        self.never.weight = self.one.weight
        self.never.bias = self.one.bias
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recur = nn.GRU(8, 8, batch_first=True)
        self.two = nn.Linear(8, 4)

    def forward(self, x):
        x = self.one(x.flatten(1)).tanh()[:, None]
        return self.two(self.recur(self.attend(x, x, x)[0])[0][:, 0])


def sequence():
    layers = nn.Linear(27, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)
    return nn.Sequential(nn.Flatten(), *layers)


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
    model(batch(0)[0])  # its vectors are random buffers
    return model


def compiled():
    model = sequence()
    model[3] = torch.compile(model[3], backend="eager")
    model[4].compile(backend="eager")
    return model


def scripted():
    model = sequence()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model[3] = torch.jit.script(model[3])
    return model


MODELS = {
    "tied": Tied, "pruned": pruned, "normed": normed, "compiled": compiled, "scripted": scripted,
}  # fmt: skip


def modelled(method, name):
    """Train a model whose weights are not those of layers that are called."""
    model = make(0, sequence if not method and name == "compiled" else MODELS[name])
    # With small ones torch's DistributedDataParallel does not compile.
    size = 2**20 if (method, name) == ("allreduce", "compiled") else 200
    seen = []

    def evaluate(number):
        with torch.no_grad():
            seen.append(model(batch(0)[0]))

    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = train(method, model, optimizer, BATCHES, between=evaluate, bucket_bytes=size)
    return found | {"seen": seen}


class Reads(nn.Module):
    """Reads a layer's weight before that layer is called."""

    def __init__(self, how):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(27, 8), nn.Linear(8, 27), nn.Linear(27, 4)
        self.how, self.calls, weight = how, 0, self.two.weight
        held = {"list": [weight], "closure": lambda: weight, "alias": {"of": (weight.detach(),)}}
        self.held = (held | {"partial": partial(torch.clone, weight)}).get(how)
        if how == "buffer":
            self.register_buffer("shared", weight.detach())

    def weight(self):
        if self.how == "list":
            return self.held[0]
        if self.how == "buffer":
            return self.shared
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


def differentiated(model, seen):
    """Go back through a part of the model, as a generator's loss does, and read the rest."""
    model.two.zero_grad()
    model.two(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
    seen += [model.out.weight.detach().clone(), model.two.weight.grad.clone()]


def evaluated(model, seen):
    if seen:
        return
    with torch.inference_mode():  # in which the optimizer's state is made, and updated outside
        outputs = model(torch.ones(2, 27, dtype=torch.float64))
    seen.append(torch.tensor(outputs.tolist()))


BETWEEN = {"clamp": clamped, "average": averaged, "note": noted, "backward": differentiated}
BETWEEN["inference"] = evaluated
OWN = ("attribute", "list", "closure", "alias", "buffer", "partial", "all", "later", "loss")
READS = (*OWN, *BETWEEN)


def read(method, how, size=200):
    """Train a model of which parameters are read before their layers, between steps, in losses."""
    model, seen = make(0, lambda: Reads(how)), []

    def norms_too(outputs, targets):
        return F.cross_entropy(outputs, targets) + 0.1 * sum(p.norm() for p in model.parameters())

    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    loss = norms_too if how == "loss" else F.cross_entropy
    change = BETWEEN.get(how, lambda *_: None)
    options = {"between": lambda _: change(model, seen), "bucket_bytes": size}
    found = train(method, model, optimizer, BATCHES, loss, **options)
    seen = [list(s.parameters()) if isinstance(s, nn.Module) else [s] for s in seen]
    return found | {"seen": [t.detach().clone() for each in seen for t in each]}


def converted(method, **options):
    """Train a model that is converted between steps; keep the gradients of each."""
    model, seen = make(), []

    def between(number):
        seen.extend(p.grad for p in model.parameters())
        layouts = torch.contiguous_format, torch.channels_last
        model.to(memory_format=layouts[number % 2])._apply(torch.clone)

    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    return train(method, model, optimizer, BATCHES, between=between, **options) | {"seen": seen}


# What each key trains, by which ways of averaging
TRAININGS = {
    **{("layout", name): (laid_out, METHODS, (name,), {}) for name in OPTIMIZERS},
    ("layout, whole", "adam, foreach"): (
        laid_out, METHODS, ("adam, foreach",), {"overlap": False},
    ),
    ("converted",): (converted, SPLIT, (), {"overlap": False}),
    ("clip", "sgd"): (laid_out, METHODS, ("sgd", 0.1), {}),
    ("clip", "adam, fused"): (laid_out, METHODS, ("adam, fused", 0.1), {}),
    ("clip", "loosely"): (laid_out, METHODS, ("sgd", 1e9), {}),
    ("whole", "lamb"): (whole, SPLIT, ("lamb",), {"overlap": False}),
    ("whole", "wrapper"): (whole, SPLIT, ("wrapper",), {"overlap": False}),
    ("whole", "hook"): (whole, SPLIT, ("hook",), {"overlap": False}),
    **{
        ("precision", how): (precisely, METHODS, (how,), {})
        for how in ("context", "scaled", "scaled and clipped", "overflow")
    },
    **{("form", kind): (formed, TWO, (kind,), {}) for kind in FORMS},
    **{("loss", name): (lost, TWO, (name,), {}) for name in LOSSES},
    **{("loss, micro-batches", name): (lost, TWO, (name, 2), {}) for name in LOSSES},
    **{("model", name): (modelled, METHODS, (name,), {}) for name in MODELS},
    **{
        ("read", how, size): (read, SPLIT[:1], (how, size), {})
        for how in READS
        for size in (0, 2**20)
    },
}  # fmt: skip


# Other cases: what is refused, changed, saved amid an update


def freeze(wanted):
    def change(model, optimizer):
        model.out.weight.requires_grad_(wanted)
        return lambda: model.out.weight.requires_grad_(not wanted)

    return change


def replace(model, optimizer):
    before, model.out = model.out, nn.Linear(6, 4).double()
    return lambda: setattr(model, "out", before)


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return optimizer.param_groups.pop


def changed(method, what):
    """Change something between steps; note the error, undo it, go on."""
    model = make()
    model.out.weight.requires_grad_(what == "frozen")
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    parallel = parallel_of(model, optimizer, method)
    parallel.step(*batch(0))
    undo = CHANGES[what][0](model, optimizer)
    error = error_of(parallel.step, *batch(1))
    undo()
    parallel.step(*batch(1))
    parallel.close()
    return error, weights_of(model)


NEW = "the model has changed since this DataParallel was made"
CHANGES = {
    "unfrozen": (freeze(True), NEW),
    "frozen": (freeze(False), NEW),
    "replaced": (replace, NEW),
    "group": (add_group, "holds 1 parameters that are not the model's (of shapes (2,))"),
    "hook": (
        lambda model, _: model.mixed.register_post_accumulate_grad_hook(clamp).remove,
        "mixed have a hook of register_post_accumulate_grad_hook",
    ),
    "step hook": (
        lambda _, optimizer: optimizer.register_step_post_hook(clipping).remove,
        "a hook is called around the step of SGD",
    ),
}


def states(method, whose):
    """Save after a step without finish, load amid an update, and train on."""
    model = make()
    optimizer = OPTIMIZERS["adam, foreach"](list(model.parameters()))
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    parallel = parallel_of(model, optimizer, method)
    for number in range(2):
        parallel.step(*batch(number))
    source = {"model": model, "layer": model.turned, "optimizer": optimizer}[whose]
    saved = copy.deepcopy(source.state_dict())
    parallel.step(*batch(2))
    model.load_state_dict(start[0])
    loaded = copy.deepcopy(model.state_dict())
    parallel.step(*batch(2))
    optimizer.load_state_dict(start[1])
    model.load_state_dict(start[0])
    for number in range(2):
        parallel.step(*batch(number))
    parallel.close()
    return {"saved": saved, "loaded": loaded} | pairs.described(model, optimizer)


def unlike(method, rank, what):
    """Another model or option in the other process."""
    model, options = make(0, Small), {}
    if what == "shape" and rank:
        model.two = make(0, lambda: nn.Linear(16, 5))
    elif what == "frozen" and rank:
        model.one.bias.requires_grad_(False)
    elif what == "layout" and rank:
        model.one.weight = nn.Parameter(model.one.weight.detach().t().contiguous().t())
    elif what == "option" and rank:
        options["bucket_bytes"] = 10
    return error_of(parallel_of, model, torch.optim.SGD(model.parameters(), 0.1), method, **options)


def not_the_same(method, rank, what):
    """Another mini-batch, or other shares, in the other process; and then a good step."""
    model = make(0, Small)
    parallel = parallel_of(model, torch.optim.SGD(model.parameters(), 0.1), method)
    x, y = batch(0)
    shares = [2 + rank, 4 - rank] if what == "shares" else None
    given = {"samples": (x[rank:], y[rank:]), "labels": (x, y.roll(rank))}.get(what, (x, y))
    error = error_of(parallel.step, *given, shares=shares)
    parallel.step(x, y, shares=[1, 5])
    parallel.close()
    return error, weights_of(model)


def in_shares(method):
    """Two steps in the shares for processes of which one is five times as fast."""
    model = make(0, Small)
    parallel = parallel_of(model, torch.optim.SGD(model.parameters(), 0.1), method)
    times = {rank: {n: (1 + 4 * rank) * n for n in range(1, 7)} for rank in range(2)}
    shares = [*split_batch(6, times).values()]
    for _ in range(2):
        parallel.step(*batch(0), shares=shares)
    parallel.close()
    return shares, weights_of(model)


def failed_by_both(method, what):
    """An error in both processes, once; and then steps of unequally many micro-batches."""
    model = make()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    options = {"clip_grad_norm": 1e9, "micro_batch": 3, "check": "off"}
    parallel = parallel_of(model, optimizer, method, **options)
    parallel.loss_fn = None if what == "loss" else F.cross_entropy
    x, y = batch(0)
    error = error_of(parallel.step, x * float("nan"), y)
    parallel.loss_fn = F.cross_entropy
    for number in (1, 0):
        parallel.step(*batch(number))
    parallel.close()
    return error, weights_of(model)


class Sometimes(nn.Linear):
    """Has a second layer for samples that are marked."""

    def __init__(self):
        super().__init__(6, 4)
        self.other = nn.Linear(6, 4)

    def forward(self, x):
        chosen = x[:, :1] > 0
        return super().forward(x) + (chosen * self.other(x) if chosen.any() else 0)


def without_last(method):
    """A layer that the last micro-batch does not use; the error and the weights."""
    model, x = make(0, Sometimes), torch.ones(8, 6, dtype=torch.float64)
    x[[2, 3, 6, 7]] = -1.0  # the last two of each process
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    parallel = parallel_of(model, optimizer, method, micro_batch=2)
    error = error_of(parallel.step, x, torch.arange(8) % 4)
    parallel.close()
    return error, weights_of(model)


class Within(nn.Module):
    """A loss of one's own around one of torch's."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=CLASSES)

    def forward(self, outputs, targets):
        return self.loss(outputs, targets)


class Inside(nn.Module):
    """Computes its loss itself, and has batch statistics, random numbers and a count."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(27, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y):
        self.calls += 1
        logits = self.two(self.drop(self.norm(self.one(x.flatten(1)))))
        return {"loss": F.cross_entropy(logits, y, ignore_index=0), "logits": logits}


class Marked(nn.Module):
    """Outputs of another form in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(27, 4)

    def forward(self, x):
        x = self.one(x.flatten(1))
        return {"logits": x} if self.training else x.argmax(1)


UNEVEN = {
    "ignored in a function": lambda o, t: F.cross_entropy(o, t, ignore_index=0),
    "weights within": Within().double(),
    "pairs": lambda o, t: (o @ o.mT).exp().sum().log(),
    "in the model": lambda o: o["loss"],
    "other outputs": lambda o, t: F.cross_entropy(o["logits"], t, reduction="sum"),
}


def checked(name, **options):
    """Take one step with a loss; return the error, and whether all was as before."""
    model = make(0, {"in the model": Inside, "other outputs": Marked}.get(name, Small))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = DataParallel(model, UNEVEN[name], optimizer, timeout_s=30, **options)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x, y = batch(3)
    torch.manual_seed(5)
    given = ({"x": x, "y": y}, None) if name == "in the model" else (x, y)
    error = error_of(parallel.step, *given)
    parallel.close()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    untouched = torch.equal(drawn, torch.rand(1)) and all(m.training for m in model.modules())
    return error, untouched and same(before.values(), model.state_dict().values())


def refused_by_one(rank):
    """A loss that is no mean in one process alone, twice; and then a good step in both."""
    model = make(0, Small)
    loss = UNEVEN["pairs"] if rank else lambda outputs, targets: F.cross_entropy(outputs, targets)
    parallel = parallel_of(model, torch.optim.SGD(model.parameters(), 0.1), "all_to_all", loss)
    errors = [error_of(parallel.step, *batch(3)) for _ in range(2)]
    parallel.loss_fn = F.cross_entropy
    parallel.step(*batch(0))
    parallel.close()
    return errors, weights_of(model)


ONES_ERRORS = {"loss": "TypeError", "targets": "BatchSizeMismatchError", "model": "ValueError"}


def failed_by_one(method, how, rank):
    """An error in one process alone, which goes on with the next mini-batch."""
    model, errors = make(0, Small), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = parallel_of(model, optimizer, method, timeout_s=3, check="off")
    for number in range(3):
        x, y = batch(number)
        failing = rank and number == 1
        parallel.loss_fn = None if failing and how == "loss" else F.cross_entropy
        y = y[:-1] if failing and how == "targets" else y
        model._modules.pop("more", None)
        if failing and how == "model":
            model.more = nn.Linear(1, 1)
        errors.append(error_of(parallel.step, x, y))
    error_of(parallel.close)
    return errors


def compared_by_one(rank):
    """Steps in which one process alone has the memory for a check: checks made, and warnings."""
    model, checks = make(0, Small), []

    def loss(outputs, targets):
        if len(outputs) == 8:  # of 12 samples those that are checked
            checks.append(len(parallel.timings))
            if rank == 0:
                raise torch.OutOfMemoryError
        return F.cross_entropy(outputs, targets)

    parallel = parallel_of(model, torch.optim.SGD(model.parameters(), 0.1), "all_to_all", loss)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            parallel.step(*batch(3))
    parallel.close()
    return sorted({*checks}), [str(each.message) for each in told]


def samplers_halves(x, y):
    """Each process's half of a mini-batch, as by a DistributedSampler."""
    halves = slice(3 * dist.get_rank(), 3 + 3 * dist.get_rank())
    return x[halves], F.one_hot(y[halves], 4).float()


def penalised(outputs, targets):
    """A loss with a tensor of its own that requires a gradient, as of a gradient penalty."""
    mixed = targets.float().requires_grad_()
    (slope,) = torch.autograd.grad((mixed**3).sum(), mixed, create_graph=True)
    return F.cross_entropy(outputs, targets) + slope.square().mean()


WARNED = {
    # what a step warns of: model's loss, mini-batch
    "no tensor of the first mini-batch is the same": (nn.MSELoss(), samplers_halves),
    "": (nn.MSELoss(), lambda x, y: (x + dist.get_rank(), F.one_hot(y, 4).float())),
    "gradients by tensors outside the model (of shape (4,))": (None, lambda x, y: (x, y)),
    " ": (penalised, lambda x, y: (x, y)),
}


def told_of(what):
    """The warnings of two steps."""
    loss, given = WARNED[what]
    scale = nn.Parameter(torch.ones(4))
    model = make(0, Small)
    loss = loss or (lambda o, t: F.cross_entropy(o * scale, t))
    parallel = parallel_of(model, torch.optim.SGD(model.parameters(), 0.1), "all_to_all", loss)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):
            parallel.step(*given(*batch(number)))
    parallel.close()
    return [str(each.message) for each in told]


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

    def loss(outputs, targets):
        real = outputs.abs() if outputs.is_complex() else outputs
        return F.cross_entropy(real.float(), targets)

    parallel = parallel_of(model, torch.optim.SGD(model.parameters(), 0.1), method, loss)
    given = [b.clone().to(torch.complex64) for b in model.buffers()]
    for b in model.buffers():
        b.fill_(1.0 + rank)
    for number in range(2):
        parallel.step(*batch(number, kind))
    parallel.average_buffers()
    parallel.close()
    means = [b for b in model.buffers() if b.is_floating_point() or b.is_complex()]
    own = [b for b in model.buffers() if not (b.is_floating_point() or b.is_complex())]
    number = torch.tensor(rank + 0.5, requires_grad=True)
    report = {"mean": [b.to(torch.complex64) for b in means], "own": own}
    report["numbers"] = [parallel.mean(rank), parallel.mean(number)]
    return report | {"given": given, "weights": weights_of(model)}


def amid(method, what):
    """Change something between a step and the end of its update."""
    model = make(0, Small if what == "type" else Layouts)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    parallel = parallel_of(model, optimizer, method)
    parallel.step(*batch(0))
    error = None
    if what == "hook":
        optimizer.register_step_pre_hook(clipping)
        handle = optimizers.register_optimizer_step_pre_hook(lambda *_: clipping(optimizer))
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
    return error, weights_of(model)


def bounded():
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 3, max_norm=1.0))
    return error_of(parallel_of, model, torch.optim.SGD(model.parameters(), 0.1), "all_to_all")


class Twice(Small):
    """A layer in two checkpoints, whose gradient comes in two parts where they are reentrant."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Parameter(torch.randn(16, 16).mul_(0.2))

    def forward(self, x):
        x = self.one(x.flatten(1)).requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda h: F.linear(h, self.mixed), x, use_reentrant=True)
        return self.two(x)


def in_parts():
    model = make(0, Twice)
    parallel = parallel_of(model, torch.optim.SGD(model.parameters(), 0.1), "all_to_all")
    return error_of(parallel.step, *batch(0))


def copies(method):
    """Copy and save the model amid an update, and train the copy and the model on."""
    model = make()
    parallel = parallel_of(model, OPTIMIZERS["sgd"](list(model.parameters())), method)
    parallel.step(*batch(0))
    copied = copy.deepcopy(model)
    parallel.step(*batch(1))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    tensors = [weights_of(copied), weights_of(torch.load(file, weights_only=False))]
    F.cross_entropy(copied(batch(2)[0]), batch(2)[1]).backward()
    tensors.append([p.grad for p in copied.parameters()])
    parallel.step(*batch(2))
    parallel.close()
    return [*tensors, weights_of(model)]


def looked_at(method):
    """Call the model amid an update where nothing is computed; then clear the optimizer's state."""
    model, (x, y) = make(), batch(0)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    parallel = parallel_of(model, optimizer, method)
    parallel.step(x, y)

    def without_values():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(x))

    errors = [error_of(without_values), error_of(torch.func.jvp, model, (x,), (x,))]
    parallel.finish()
    weights = weights_of(model)
    parallel.step(x, y)
    optimizer.state.clear()
    errors += [error_of(parallel.finish), error_of(parallel.close)]
    return errors, weights


def todo(rank):
    """Yield a name and a function of each case; the two split ways share most of their code."""
    yield "listening", joined.listening
    for key, (function, methods, given, options) in TRAININGS.items():
        for method in methods:
            yield (method, *key), partial(function, method, *given, **options)
    yield "in parts", partial(error_of, whole, "all_to_all", "lamb")
    for method in METHODS:
        for what in ("norm", "loss"):
            yield (method, "failed by both", what), partial(failed_by_both, method, what)
        yield (method, "without last"), partial(without_last, method)
        yield (method, "in shares"), partial(in_shares, method)
        for kind in (torch.bfloat16, torch.complex64):
            yield (method, "type", kind), partial(typed, method, kind)
        for what in ("hook", "layout", "type"):
            yield (method, "amid", what), partial(amid, method, what)
    for method in TWO:
        for what in CHANGES:
            if method == "all_to_all" or what != "step hook":  # which allreduce takes
                yield (method, "changed", what), partial(changed, method, what)
        for what in ("shape", "frozen", "layout", "option"):
            yield (method, "unlike", what), partial(unlike, method, rank, what)
        for what in ("samples", "labels", "shares"):
            yield (method, "not the same", what), partial(not_the_same, method, rank, what)
    for whose in ("model", "layer", "optimizer"):
        yield ("states", whose), partial(states, "all_to_all", whose)
    yield "max_norm", bounded
    yield "gradient in parts", in_parts
    yield "copies", partial(copies, "all_to_all")
    yield "looked at", partial(looked_at, "all_to_all")
    for name in UNEVEN:
        yield ("uneven", name), partial(checked, name)
    for method in TWO:
        for how in ONES_ERRORS:
            yield (method, "failed by one", how), partial(failed_by_one, method, how, rank)
    yield "refused by one", partial(refused_by_one, rank)
    yield "compared by one", partial(compared_by_one, rank)
    for what in WARNED:
        yield ("told of", what), partial(told_of, what)


def work(rank, port, folder):
    pairs.run_cases(rank, port, folder, todo)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return joined.both(joined.forked(), work, tmp_path_factory.mktemp("updates"))


def same(one, other):
    return all(map(torch.equal, one, other))


def compare(both, *key, tolerance=1e-12):
    """Compare a training in both processes, by every way, with that of torch alone."""
    function, methods, given, options = TRAININGS[key]
    options = {name: value for name, value in options.items() if name == "clip"}
    wanted, found = function(None, *given, **options), []
    for method in methods:
        for answer in answers(both, method, *key):
            pairs.assert_trained_alike(answer, wanted, tolerance)
            assert_close(answer.get("seen", []), wanted.get("seen", []), tolerance)
            found.append(answer)
    return wanted, found


@pytest.mark.parametrize("key", [key for key in TRAININGS if key[0].startswith("layout")])
def test_parameters_of_every_layout_train_as_in_one_process(both, key):
    wanted, (plain, *others) = compare(both, *key)
    for answer in others:
        assert torch.equal(answer["shift"], wanted["shift"])  # rank 0's
        # To the last bit those of DistributedDataParallel.
        assert same(answer["weights"], plain["weights"]) and same(answer["state"], plain["state"])


@pytest.mark.parametrize("name", ["sgd", "adam, fused", "loosely"])
def test_clipping_is_by_the_norm_of_the_whole_gradient(both, name):
    wanted, _ = compare(both, "clip", name)
    assert name == "loosely" or min(wanted["norms"]) > 0.1  # every step is clipped


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("what", "kind"), [("norm", "RuntimeError"), ("loss", "TypeError")])
def test_an_error_in_all_processes_changes_nothing(both, method, what, kind):
    """Such as a gradient's norm that is not finite; training goes on."""
    model = make()
    train(None, model, OPTIMIZERS["sgd"](list(model.parameters())), [batch(1), batch(0)])
    for error, weights in answers(both, method, "failed by both", what):
        assert error[0] == kind and (what == "loss" or "non-finite" in error[1])
        assert_close(weights, weights_of(model))


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_the_last_micro_batch_does_not_use_is_an_error(both, method):
    for (kind, text), weights in answers(both, method, "without last"):
        assert kind == "ValueError" and "got no gradient in this mini-batch" in text
        assert same(weights, weights_of(make(0, Sometimes)))


def test_optimizers_that_look_at_all_parameters(both):
    for name in ("lamb", "hook", "wrapper"):
        compare(both, "whole", name)
    for kind, text in answers(both, "in parts"):
        assert kind == "WholeStepError" and "give overlap=False, which steps it once" in text
    parameters = list(make().parameters())
    for name in WHOLE:
        with pytest.raises(WholeStepError):
            check_in_parts(WHOLE[name](parameters))
    optimizer = torch.optim.SGD(parameters, 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check_in_parts(optimizer)
    hook = optimizers.register_optimizer_step_post_hook(lambda *_: None)  # of all optimizers
    try:
        with pytest.raises(WholeStepError, match="a hook is called around the step of SGD"):
            check_in_parts(optimizer)
    finally:
        hook.remove()


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_after_construction_is_refused_before_the_step(both, what):
    model = make()
    model.out.weight.requires_grad_(what == "frozen")
    wanted = weights_of(plainly(OPTIMIZERS["sgd"], 2, model)[0])
    for method in TWO if what != "step hook" else TWO[1:]:
        for (kind, text), weights in answers(both, method, "changed", what):
            assert kind == ("ValueError" if what != "step hook" else "WholeStepError")
            assert CHANGES[what][1] in text
            assert_close(weights, wanted)


def flat(state):
    """Tensors of a state by name, an optimizer's too."""
    inner = [(n, own) for n, own in state.get("state", {}).items()]
    return {f"{n} {k}": v for n, own in inner for k, v in own.items()} or dict(state)


@pytest.mark.parametrize("whose", ["model", "layer", "optimizer"])
def test_states_hold_the_last_update_and_loaded_ones_stay(both, whose):
    model, optimizer = plainly(OPTIMIZERS["adam, foreach"], 2)
    source = {"model": model, "layer": model.turned, "optimizer": optimizer}[whose]
    wanted = flat(source.state_dict())
    for answer in answers(both, "states", whose):
        saved = flat(answer["saved"])
        assert saved.keys() == wanted.keys()
        assert_close([saved[name] for name in wanted], list(wanted.values()))
        assert same(answer["loaded"].values(), make().state_dict().values())
        assert_close(answer["weights"], weights_of(model))


@pytest.mark.parametrize("how", ["context", "scaled", "scaled and clipped", "overflow"])
def test_low_precision(both, how):
    wanted, found = compare(both, "precision", how, tolerance=2e-2 if how == "context" else 1e-5)
    if how == "overflow":
        assert wanted["scales"] == [2.0**10, 2.0**11, 2.0**11, 2.0**10]  # grew, skipped a step
    assert all(same(answer["weights"], found[0]["weights"]) for answer in found)
    alone = precisely("all_to_all", how)  # one process
    assert same(alone["weights"], wanted["weights"]) and alone["scales"] == wanted["scales"]


@pytest.mark.parametrize("what", ["shape", "frozen", "layout", "option"])
def test_models_and_options_that_differ_are_refused(both, what):
    for method in TWO:
        for kind, text in answers(both, method, "unlike", what):
            assert kind == "ValueError"
            assert "rank 0" in text and "rank 1" in text and "make the same model" in text


@pytest.mark.parametrize("what", ["samples", "labels", "shares"])
def test_mini_batches_that_differ_are_refused(both, what):
    model = make(0, Small)
    train(None, model, torch.optim.SGD(model.parameters(), 0.1), BATCHES[:1])
    for method in TWO:
        for (kind, text), weights in answers(both, method, "not the same", what):
            assert kind == "ValueError" and "give the same in every process" in text
            assert_close(weights, weights_of(model))


@pytest.mark.parametrize("what", WARNED)
def test_what_processes_do_not_share_is_warned_of_once(both, what):
    for told in answers(both, "told of", what):
        assert len(told) == bool(what.strip()) and all(what in text for text in told)


def test_inputs_that_wait_for_a_gradient_are_refused():
    model = make(0, Small)
    parallel = parallel_of(model, torch.optim.SGD(model.parameters(), 0.1), "all_to_all")
    x, y = batch(0)
    with pytest.raises(InputGradientError, match=r"give it as \.detach"):
        parallel.step(x.requires_grad_(), y)
    parallel.close()


@pytest.mark.parametrize("method", METHODS)
def test_uneven_shares_train_as_one_process(both, method):
    model = make(0, Small)
    train(None, model, torch.optim.SGD(model.parameters(), 0.1), [batch(0)] * 2)
    for shares, weights in answers(both, method, "in shares"):
        assert shares == [5, 1]
        assert_close(weights, weights_of(model))


@pytest.mark.parametrize("kind", FORMS)
def test_mini_batches_of_any_form(both, kind):
    compare(both, "form", kind)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_no_plain_mean_over_samples(both, name):
    wanted, _ = compare(both, "loss", name)
    compare(both, "loss, micro-batches", name)
    pairs.assert_trained_alike(lost("all_to_all", name, 2), wanted)  # one process


@pytest.mark.parametrize("name", UNEVEN)
def test_a_loss_that_does_not_add_up_is_refused_before_anything_changes(both, name):
    for error, unchanged in [*answers(both, "uneven", name), checked(name, micro_batch=3)]:
        assert error[0] == "LossCheckError", error
        assert "Give weights= to step" in error[1] and "check='off' computes it" in error[1]
        assert unchanged
    loss, _ = checked(name, micro_batch=3, check="off")
    assert isinstance(loss, torch.Tensor)


def test_a_loss_that_one_process_refuses_is_refused_in_all(both):
    model = make(0, Small)
    train(None, model, torch.optim.SGD(model.parameters(), 0.1), BATCHES[:1])
    for rank, (errors, weights) in enumerate(answers(both, "refused by one")):
        for kind, text in errors:
            assert kind == "LossCheckError"
            assert text.startswith("the loss of " if rank else "rank 1: the loss of ")
        assert_close(weights, weights_of(model))


@pytest.mark.parametrize("method", TWO)
@pytest.mark.parametrize("how", ONES_ERRORS)
def test_a_process_that_goes_on_after_an_error_of_its_own_is_an_error_in_all(both, method, how):
    one, other = answers(both, method, "failed by one", how)
    assert other[1][0] == ONES_ERRORS[how] and one[2][0] == other[2][0] == "PeerError"


def test_a_check_that_one_process_cannot_make_is_made_again_in_all(both):
    for checks, told in answers(both, "compared by one"):
        assert checks == [0, 1, 2]
        assert len(told) == 1 and "could not be checked whether" in told[0]


@pytest.mark.parametrize("name", MODELS)
def test_models_whose_weights_are_computed_or_used_by_other_layers(both, name):
    compare(both, "model", name, tolerance=1e-9)


@pytest.mark.parametrize(
    "read",
    [
        dict,
        lambda held: {**held},
        lambda held: held | {},
        lambda held: {} | held,
        lambda held: held.pop("weight"),
        lambda held: held.popitem(),
        lambda held: held.setdefault("weight"),
    ],
)
def test_every_read_of_a_layers_dictionary_updates_before(read):
    updated = []
    read(Parameters({"weight": 1}, updated.extend))
    assert updated == [1]


@pytest.mark.parametrize("how", READS)
def test_parameters_are_updated_before_anyone_reads_them(both, how):
    for size in (0, 2**20):
        compare(both, "read", how, size)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("method", METHODS)
def test_parameters_and_buffers_of_any_type_are_made_the_same(both, method, kind):
    replies = answers(both, method, "type", kind)
    for rank, answer in enumerate(replies):
        assert answer["numbers"] == [0.5, 1.0]
        assert all(torch.equal(own, torch.full_like(own, 1 + rank)) for own in answer["own"])
        for given in answer["given"]:
            assert given.abs().eq(1).all()  # rank 0's, and of booleans both
        for mean in answer["mean"]:
            torch.testing.assert_close(mean, torch.full_like(mean, 1.5))
        assert_close(answer["weights"], replies[0]["weights"], 0)


@pytest.mark.parametrize("method", METHODS)
def test_what_changes_before_the_update_ends_leaves_it_as_it_was(both, method):
    def plain(steps, kind=Layouts):
        return weights_of(plainly(lambda ps: torch.optim.SGD(ps, 0.1), steps, make(0, kind))[0])

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


def test_a_model_that_is_converted_between_steps(both):
    compare(both, "converted")


def test_an_update_that_cannot_be_made_where_the_model_is_read_is_an_error(both):
    plain = weights_of(plainly(OPTIMIZERS["sgd"], 1)[0])
    for errors, weights in answers(both, "looked at"):
        assert {kind for kind, _ in errors} == {"RuntimeError"}
        named = ("under FakeTensorMode", "under a transform of torch.func", *2 * ["was cleared"])
        assert all(name in text for name, (_, text) in zip(named, errors, strict=True))
        assert_close(weights, plain)


def test_copies_of_the_model_hold_the_last_update_and_are_plain(both):
    wanted = [plainly(OPTIMIZERS["sgd"], steps)[0] for steps in (1, 2, 3)]
    wanted[0].zero_grad()
    F.cross_entropy(wanted[0](batch(2)[0]), batch(2)[1]).backward()
    for copied, saved, gradients, trained in answers(both, "copies"):
        assert_close(gradients, [p.grad for p in wanted[0].parameters()])
        for got, model in zip((copied, saved, trained), wanted, strict=True):
            assert_close(got, weights_of(model))


def test_gradients_in_parts_and_layers_that_change_themselves_are_refused(both):
    messages = {"gradient in parts": "mixed is sparse or comes in several parts"}
    for case, message in (messages | {"max_norm": "max_norm=1.0"}).items():
        for kind, text in answers(both, case):
            assert kind == "ValueError" and message in text


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's /proc")
def test_processes_of_one_machine_listen_on_loopback_alone(both):
    for answer in both:
        assert answer["listening"], "gloo listens"
        # 127.0.0.1 as it lies in memory, and as an address of IPv6.
        assert set(answer["listening"]) <= {"0100007F", "0000000000000000FFFF00000100007F"}


def over_kept(kept):
    def loss(outputs, targets):
        if isinstance(outputs, tuple):
            outputs, mask = outputs
            each = F.mse_loss(outputs, targets, reduction="none").mean(1)
            return (each * mask).sum() / mask.sum()
        of = kept(targets)
        function = F.mse_loss if targets.is_floating_point() else F.cross_entropy
        return function(outputs[of], targets[of])

    return loss


class WithMask(Small):
    def forward(self, x, mask):
        return super().forward(x), mask.bool()


FLOATS = torch.linspace(0.5, 2.0, 48, dtype=torch.float64).view(12, 4)
PADDED = torch.arange(12) % 2 == 1
LATER = {  # loss, targets without and with what it leaves out
    "padding": (over_kept(lambda t: t != -100), torch.arange(12) % 4, -100),
    "a class amid others": (over_kept(lambda t: t != 1), torch.arange(12) % 2 * 3, 1),
    "not a number": (over_kept(lambda t: t == t), FLOATS, float("nan")),
    "mask": (over_kept(None), FLOATS, None),
}


def alone(model, loss=F.cross_entropy, lr=0.1, **options):
    """Without other processes."""
    return DataParallel(model, loss, torch.optim.SGD(model.parameters(), lr), **options)


def sgd(model, **options):
    return model, torch.optim.SGD(list(model.parameters()), 0.1, **options)


def expanded():
    model = make()
    model.out.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64).expand(4))
    return sgd(model)


def more_than(model):
    return model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], 0.1)


REFUSED = {
    r"does not hold mixed, last, .*, 8 of 8 parameters": lambda: (make(), sgd(make())[1]),
    r"holds 1 parameters that are not the model's \(of shapes \(2,\)\)": lambda: more_than(make()),
    r"last has strides \(8, 2\) .* or give fused=False": lambda: sgd(make(0, Gaps), fused=True),
    r"LBFGS computes the loss again": lambda: (m := make(), torch.optim.LBFGS(m.parameters())),
    r"out.bias has strides \(0,\) for the shape \(4,\): elements that share": expanded,
}  # fmt: skip


class TestOneProcess:
    """The same arguments without other processes."""

    @pytest.mark.parametrize("name", LATER)
    def test_what_a_loss_leaves_out_is_found_when_it_comes(self, name):
        loss, y, left_out = LATER[name]
        model = make(0, WithMask if left_out is None else Small)
        parallel = alone(model, loss, micro_batch=4)
        x, later = torch.randn(12, 27, dtype=torch.float64), y.clone()
        good = bad = x
        if left_out is None:
            mask = torch.ones(12, dtype=x.dtype)
            good, bad = (x, mask), (x, torch.where(PADDED, torch.zeros_like(mask), mask))
        else:
            later[PADDED] = left_out
        parallel.step(good, y)
        for _ in range(2):  # the second is refused as the first was
            before = weights_of(model)
            with pytest.raises(LossCheckError, match=r"Give weights= to step"):
                parallel.step(bad, later)
            assert same(before, model.parameters())
            parallel.step(good, y)
        parallel.step(bad, later, weights=~PADDED)

    @pytest.mark.filterwarnings("ignore:.*quantiz")
    def test_a_quantized_buffer(self):
        model = nn.Linear(4, 4)
        prior = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        model.register_buffer("prior", prior)
        alone(model, nn.CrossEntropyLoss(), micro_batch=5).step(
            torch.ones(16, 4), torch.arange(16) % 4
        )
        assert torch.equal(model.prior.int_repr(), prior.int_repr())

    @pytest.mark.parametrize("options", [{}, {"ignore_index": -100}, {"weight": torch.rand(256)}])
    def test_labels_of_a_byte(self, options):
        torch.manual_seed(0)
        x, y = torch.randn(24, 8), torch.randint(150, 160, (24,), dtype=torch.uint8)
        loss, model = nn.CrossEntropyLoss(**options), nn.Linear(8, 256)
        plain = copy.deepcopy(model)
        train(None, plain, torch.optim.SGD(plain.parameters(), 1.0), [(x, y)], loss)
        alone(model, loss, 1.0, micro_batch=5).step(x, y)
        assert_close(list(model.parameters()), list(plain.parameters()), 1e-5)

    def test_a_hook_on_a_loss_makes_it_one_of_ones_own(self):
        model, loss = make(0, Small), nn.CrossEntropyLoss()
        loss.register_forward_hook(lambda _, given, value: value * (given[1] == 0).sum())
        parallel = alone(model, loss, micro_batch=4)
        x = torch.randn(12, 27, dtype=torch.float64)
        parallel.step(x, torch.full((12,), 2))
        with pytest.raises(LossCheckError):
            parallel.step(x, torch.arange(12) % 3)

    def test_an_error_of_the_model_is_no_lost_process(self):
        def loss(outputs, targets):
            raise RuntimeError("the skip connection has 3 channels")

        with pytest.raises(RuntimeError, match=r"^the skip connection has 3 channels"):
            alone(make(0, Small), loss).step(*batch(0))

    @pytest.mark.parametrize("message", REFUSED)
    def test_an_optimizer_of_other_parameters(self, message):
        model, optimizer = REFUSED[message]()
        with pytest.raises(ValueError, match=message):
            DataParallel(model, F.cross_entropy, optimizer)
