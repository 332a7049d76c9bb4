"""Trainings by two joined processes in turns, and the same by plain torch in one."""

import os
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from repro.adaptive import DataParallel, join_processes
from repro.adaptive.reading import Parameters


def parallel_of(model, optimizer, method, loss=F.cross_entropy, **options):
    options = {"bucket_bytes": 200, "timeout_s": 30} | options
    return DataParallel(model, loss, optimizer, method, **options)


def plain_step(model, loss, optimizer, x, y, precision, scaler, clip):
    """Make a step of torch alone; return the loss and the gradient's norm."""
    optimizer.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision is not None):
        if isinstance(x, tuple):
            outputs = model(*x)
        else:
            outputs = model(**x) if isinstance(x, Mapping) else model(x)
        value = loss(outputs) if y is None else loss(outputs, y)
    (scaler.scale(value) if scaler else value).backward()
    if scaler and clip:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    return value.detach(), norm


def train(
    method, model, optimizer, batches, loss=F.cross_entropy, *, between=lambda number: None,
    weigh=lambda y: None, precision=None, scaler=None, clip=None, **options,
):  # fmt: skip
    """Train by DataParallel, or with `method` None by torch alone; return all that came of it."""
    parallel, losses, norms, scales = None, [], [], []
    if method:
        options |= {"scaler": scaler, "clip_grad_norm": clip}
        parallel = parallel_of(model, optimizer, method, loss, **options)
    with torch.autocast("cpu", precision) if method and precision else nullcontext():
        for number, (x, y) in enumerate(batches):
            if parallel:
                value, norm = parallel.step(x, y, weights=weigh(y)), parallel.grad_norm
            else:
                value, norm = plain_step(model, loss, optimizer, x, y, precision, scaler, clip)
            losses.append(value)
            norms.append(0.0 if norm is None else float(norm))
            scales.append(scaler.get_scale() if scaler else 1.0)
            between(number)
    if parallel:
        losses = [parallel.mean(value) for value in losses]
        parallel.close()
        assert hooks_of(model, optimizer) == 0
    found = {"losses": list(map(float, losses)), "norms": norms, "scales": scales}
    found["timings"] = parallel and list(map(vars, parallel.timings))
    return described(model, optimizer) | found


def described(model, optimizer):
    """Weights, and the optimizer's state with its layout."""
    states = [sorted(optimizer.state.get(p, {}).items()) for p in model.parameters()]
    state = [v for own in states for _, v in own if isinstance(v, torch.Tensor)]
    strides, state = [v.stride() for v in state], [v.clone() for v in state]
    return {"weights": weights_of(model), "state": state, "strides": strides}


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def hooks_of(model, optimizer):
    """How much is left at a model and an optimizer of what DataParallel puts there."""
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    for name in ("state_dict", "load_state_dict"):  # a wrapper has none
        hooks.append(getattr(optimizer, f"_optimizer_{name}_pre_hooks", None))
    for module in model.modules():
        assert not isinstance(module._parameters, Parameters)
    return sum(len(each or ()) for each in hooks)


def error_of(function, *arguments, **options):
    """Return what a function returns, or its error's class and text."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)


def run_cases(rank, port, folder, todo):
    """Join the other process; save the result, or the error's text, of each (key, function)."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    reports = {"joined": [join_processes("cpu", 60), join_processes("cpu", 60)]}
    for key, run in todo(rank):
        try:
            reports[key] = run()
        except Exception:
            reports[key] = traceback.format_exc()
    torch.save(reports, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def answers(both, *key):
    """Return both processes' answers to a case, neither of which is an error's text."""
    found = [answer[key if len(key) > 1 else key[0]] for answer in both]
    for each in found:
        assert not isinstance(each, str), each
    return found


def assert_close(got, wanted, tolerance=1e-12):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_trained_alike(answer, wanted, tolerance=1e-12):
    """Compare what `train` returns, weights and states, losses, norms and scales."""
    for name in ("weights", "state"):
        assert_close(answer[name], wanted[name], tolerance)
    for name in ("losses", "norms"):
        close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
        torch.testing.assert_close(answer[name], wanted[name], **close)
    assert answer["scales"] == wanted["scales"] and answer["strides"] == wanted["strides"]
