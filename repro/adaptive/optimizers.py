"""Learning rates, and the optimizers that may update parameters bucket by bucket.

An update in parts equals the whole update only if each parameter's update depends on its own
gradient and state alone. A probe cannot decide this (it would miss clipping of large gradients
only), so it is taken as known for torch's own optimizers, and for no others.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Each treats every parameter separately; LBFGS does not, SparseAdam needs sparse gradients.
INDEPENDENT = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad,
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.Muon, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip


class WholeStepError(ValueError):
    """An optimizer that may use all parameters at once would be stepped in parts."""


class SchedulerError(ValueError):
    """A learning-rate scheduler sets the rates that a controller should set."""


def check_in_parts(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that must see all gradients at once."""
    name = type(optimizer).__name__
    hooks = (
        *getattr(optimizer, "_optimizer_step_pre_hooks", ()),  # a wrapper has none
        *getattr(optimizer, "_optimizer_step_post_hooks", ()),
        *_global_optimizer_pre_hooks,
        *_global_optimizer_post_hooks,
    )
    if type(optimizer) not in INDEPENDENT:
        why = f"{name} is none of torch's {', '.join(known.__name__ for known in INDEPENDENT)}"
    elif not _is_torchs(optimizer.step):
        why = f"the step of {name} was replaced"
    elif hooks:
        why = f"a hook is called around the step of {name}"
    else:
        return
    raise WholeStepError(
        f"{why}, and may look at all parameters at once, while overlapped averaging steps the "
        "optimizer bucket by bucket: give overlap=False, which steps it once (to clip the norm "
        "of the gradient, clip_grad_norm of DataParallel)"
    )


def _is_torchs(step: Any) -> bool:
    """Whether a step is an optimizer's of torch, in wrappers of torch's (a scheduler's, hooks')."""
    home = ""
    while step is not None:
        function = getattr(step, "__func__", step)
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home.startswith("torch."):
            return False
        step = getattr(function, "__wrapped__", None)
    return home.startswith("torch.optim.")


def no_gradient(names: Sequence[str]) -> str:
    """The error text for parameters without a gradient."""
    return (
        f"{', '.join(names[:5])} got no gradient in this mini-batch, or in its last micro-batch: "
        "set requires_grad to False, or use every parameter in every step"
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory, in any order: no gaps, no element twice."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, others: Iterable[Tensor] = ()
) -> None:
    """Refuse an optimizer that lacks a parameter to train, or holds a foreign one."""
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if lacking := [name for name, p in trained.items() if p not in held]:
        raise ValueError(
            f"the optimizer does not hold {_some(lacking)} of the model, {len(lacking)} of "
            f"{len(trained)} parameters that require a gradient: make it of this model's "
            "parameters (after the model is made, moved or changed), or set requires_grad to False "
            "there. Of two optimizers that share it make one torch.optim.Optimizer, whose "
            "param_groups are those of both and whose step calls theirs, and give overlap=False"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise WholeStepError(
            f"{type(optimizer).__name__} computes the loss again in its step, which DataParallel "
            "does once: give another optimizer"
        )
    fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for name, p in trained.items():
        expanded = any(step == 0 and n > 1 for step, n in zip(p.stride(), p.shape, strict=True))
        if expanded or (p in fused and not is_dense(p)):
            raise ValueError(
                f"{name} has strides {p.stride()} for the shape {tuple(p.shape)}: elements that "
                "share memory, or gaps, beside which torch's fused optimizers write; make it "
                "contiguous() before the optimizer is made, or give fused=False for gaps"
            )
    if foreign := held - set(named.values()) - set(others):
        shapes = [str(tuple(p.shape)) for p in foreign]
        raise ValueError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's (of shapes "
            f"{_some(shapes)}), whose gradients are not averaged: make them part of the model"
        )


def check_hooks(names: Mapping[Tensor, str], expected: int) -> None:
    """Refuse hooks, more than `expected`, that would be called for every part of a gradient."""
    hooked = [
        name for p, name in names.items() if len(p._post_accumulate_grad_hooks or ()) > expected
    ]
    if hooked:
        raise ValueError(
            f"{_some(hooked)} have a hook of register_post_accumulate_grad_hook, which would see "
            "this process's or a micro-batch's part of a gradient, before it is averaged: remove "
            "it; to clip, use clip_grad_norm; to act on whole gradients, a step hook of the "
            "optimizer and overlap=False; if it is that of a DataParallel made before, close() that"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if names[5:] else "")


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, keeping the groups' proportions.

    A group made with the optimizer's own rate gets `lr`, a group with half of that rate half of
    `lr`; if no group has the optimizer's own rate, the group with the largest gets `lr`. A group's
    share of `lr` is its ``lr_scale``; if it lacks one, the first call that sees the group notes it.
    The share of a group added after the first call is that of the rate set last; one made with the
    optimizer's own rate, as where none was given, gets `lr`.

    With torch's SGD the rate multiplies the momentum buffer, so that a change needs no correction.

    Raises:
        SchedulerError: A learning-rate scheduler was made for the optimizer, or a rate has changed
            since the last call: each would overwrite the other's rates.
    """
    groups = optimizer.param_groups
    changed = any(float(g["lr"]) != g["lr_set"] for g in groups if "lr_set" in g)
    if changed or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        rates = ", ".join(f"{float(group['lr']):g}" for group in groups)
        raise SchedulerError(
            f"a learning-rate scheduler, or another, sets the rates (now {rates}), and each would "
            "overwrite the other's: leave it out (controllers have warmup, decay and decay_at), or "
            "set_lr"
        )
    if new := [group for group in groups if "lr_scale" not in group]:
        rates_of_new = [float(group["lr"]) for group in new]
        # An optimizer that wraps others may have no rate of its own.
        default = float(getattr(optimizer, "defaults", {}).get("lr") or 0)
        present = [float(g["lr"]) / g["lr_scale"] for g in groups if g.get("lr_scale")]
        own = default > 0 and default in rates_of_new
        reference = max(present, default=0.0) or (default if own else max(rates_of_new))
        for group, rate in zip(new, rates_of_new, strict=True):
            added = reference if present and own and rate == default else rate
            group["lr_scale"] = added / reference if reference > 0 else 1.0
    for group in groups:
        value = lr * group["lr_scale"]
        if isinstance(group["lr"], Tensor):  # captured graphs read the rate on the device
            group["lr"].fill_(value)
        else:
            group["lr"] = value
        group["lr_set"] = float(group["lr"])
