"""Optimizers whose step of a layer follows the layer's norm: LARS and LAMB (section V).

Differs from the papers: vectors (biases, scales and shifts of normalisation) take the plain step,
without weight decay, since the norm of a vector that begins at 0 says nothing.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _Layerwise(torch.optim.Optimizer):
    """Goes through the parameters that have a gradient; options are those of the update."""

    def __init__(self, params: Iterable[Tensor], lr: float, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group, self.state[p])

    def _update(self, p: Tensor, gradient: Tensor, group: Any, state: Any) -> None:
        raise NotImplementedError


def _ratio(weights: Tensor, update: Tensor, more: Tensor | float = 0.0) -> Tensor:
    """‖w‖ / (‖update‖ + more), 1 where either norm is 0."""
    weights_norm, update_norm = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(update)
    both = (weights_norm > 0) & (update_norm > 0)
    return torch.where(both, weights_norm / (update_norm + more), torch.ones_like(weights_norm))


class LARS(_Layerwise):
    """Momentum SGD with a rate of each layer's own.

    Source: You, Gitman, Ginsburg, "Scaling SGD batch size to 32K for ImageNet training"
    (arXiv:1708.03888), equation 6 and Algorithm 1: `lr` is γ, `momentum` m, `weight_decay` β and
    `trust` η, the share of its norm by which a layer moves at a rate of 1.
    """

    def _update(self, p: Tensor, gradient: Tensor, group: Any, state: Any) -> None:
        if p.ndim > 1:
            decay = group["weight_decay"]
            more = decay * torch.linalg.vector_norm(p)
            local = group["trust"] * _ratio(p, gradient, more)  # equation 6
            gradient = local * (gradient + decay * p)
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(p)
        velocity = state["velocity"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"])
        p.sub_(velocity)


class LAMB(_Layerwise):
    """Adam with a rate of each layer's own.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (arXiv:1904.00962), Algorithm 2, with φ the identity: `lr` is η, `betas` are of the running
    means of gradient and squared gradient, `eps` is ε and `weight_decay` λ.
    """

    def _update(self, p: Tensor, gradient: Tensor, group: Any, state: Any) -> None:
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        first, second = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - first)
        square = state["square"].lerp_(gradient.square(), 1 - second)
        mean = mean / (1 - first ** state["step"])
        update = mean / ((square / (1 - second ** state["step"])).sqrt() + group["eps"])
        if p.ndim > 1:
            update = update + group["weight_decay"] * p
            update = _ratio(p, update) * update
        p.sub_(update, alpha=group["lr"])
