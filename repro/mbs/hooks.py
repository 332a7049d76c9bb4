"""Hooks on parameters, held back to be called once per mini-batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from repro.mbs.errors import HookError


class DeferredHooks:
    """Holds back hooks on parameters during the micro-batches, and calls them once at the end.

    A hook that clamps a gradient, or updates the parameter and frees its gradient, is written for
    the gradient of the whole mini-batch. One of `Tensor.register_hook` receives it before it is
    added to an existing gradient, one of `Tensor.register_post_accumulate_grad_hook` the parameter
    afterwards. Hooks of torch.distributed are called as usual. Of a fully sharded model (`sharded`)
    torch calls only the latter, which of `FullyShardedDataParallel` are left as they are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sharded: bool = False) -> None:
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        self._held: list[tuple[nn.Parameter, str, dict[int, Callable[..., Any]]]] = []
        for parameter in parameters:
            if sharded and not hasattr(parameter, "device_mesh"):
                continue
            if getattr(parameter, "_in_backward_optimizers", None):
                raise HookError(
                    "a parameter is updated in the backward pass (_apply_optimizer_in_backward), "
                    "which would be once per micro-batch; call the optimizer after backward, or "
                    "put it into register_post_accumulate_grad_hook, which is called once"
                )
            for name in kinds[sharded:]:
                hooks = getattr(parameter, name, None)
                users = {key: hook for key, hook in (hooks or {}).items() if not _is_torchs(hook)}
                if users:
                    self._held.append((parameter, name, users))

    def __enter__(self) -> "DeferredHooks":
        for parameter, name, held in self._held:
            hooks = getattr(parameter, name)
            for key in held:
                del hooks[key]
        return self

    def __exit__(self, *_: Any) -> None:
        for parameter, name, held in self._held:
            hooks = getattr(parameter, name)
            every = {**hooks, **held}
            hooks.clear()
            hooks.update(sorted(every.items()))  # keys grow with registration: the order of calls

    def on_gradients(self) -> None:
        """Call the hooks on gradients; `Parameter.grad` holds only the mini-batch's gradient."""
        for parameter, name, held in self._held:
            if name != "_backward_hooks" or parameter.grad is None:
                continue
            hooks = getattr(parameter, name)
            for key, hook in list(held.items()):
                hooks[key] = hook  # registered, so that it may remove itself
                result = hook(parameter.grad)
                if result is not None:
                    parameter.grad = result
                if hooks.pop(key, None) is None:
                    del held[key]

    def on_parameters(self, touched: Sequence[torch.Tensor]) -> None:
        """Call the hooks on parameters after the accumulation of their gradients."""
        ids = {id(parameter) for parameter in touched}
        for parameter, name, held in self._held:
            if name == "_post_accumulate_grad_hooks" and id(parameter) in ids:
                for hook in held.values():
                    hook(parameter)


def _is_torchs(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or ""
    if module.startswith("torch.autograd.graph"):
        raise HookError(
            "a parameter has a hook of torch.autograd.graph.register_multi_grad_hook, which would "
            "be called once per micro-batch; use register_post_accumulate_grad_hook, which is "
            "called once per mini-batch"
        )
    return module.startswith("torch.distributed")
