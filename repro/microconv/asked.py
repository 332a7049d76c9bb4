"""What `tune` is asked to tune, and where."""

from typing import Any

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class NotTunableError(ValueError):
    """`tune` was given no model or no sample of it, or is called where its times would be wrong."""


def check_model(model: Any, function: str) -> None:
    """Refuse what is no model.

    Raises:
        NotTunableError: The text says what to put into which.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise NotTunableError(
            f"{function}() was given the class {model.__name__}; give a model of it, such as "
            f"{model.__name__}()"
        )
    if not isinstance(model, nn.Module):
        kind = getattr(model, "__name__", type(model).__name__)
        raise NotTunableError(
            f"{function}() was given {kind}, which is no module, but changes layers and knows of "
            "no mini-batch: tune the model first, and give that to whatever trains it (Micro-Batch "
            "Streaming, dual-batch learning, θ-adaptive or out-of-core training)"
        )


def check_asked(model: Any) -> None:
    """Refuse what is no model, and times that are not those of the convolutions.

    Raises:
        NotTunableError: The text says what to put into which.
    """
    check_model(model, "tune")
    if modes := _get_current_dispatch_mode_stack():
        inside = ", ".join(dict.fromkeys(type(mode).__module__ for mode in modes))
        raise NotTunableError(
            f"tune() is called where every operation is watched ({inside}), which takes longer "
            "than a small convolution: its times would be wrong, and kept. Call tune() before, "
            "outside of OutOfCore, MemoryBudget or another mode; the tuned model runs inside"
        )
