"""Architectures of the papers that torchvision lacks.

Every model raises a ValueError for an option that is not allowed, such as a number below 1; its
text names what is.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from repro.models._shared import check_at_least
from repro.models.amoebanet import amoebanet_d
from repro.models.deeplab import deeplabv3plus
from repro.models.densenet import densenet40
from repro.models.edsr import edsr
from repro.models.pix2pixhd import Pix2PixHD
from repro.models.resnet import resnet18, resnet20, resnet50, resnet101, resnet_cifar
from repro.models.unet import unet

__all__ = [
    "Pix2PixHD", "amoebanet_d", "build", "deeplabv3plus", "densenet40", "edsr", "resnet18",
    "resnet20", "resnet50", "resnet101", "resnet_cifar", "unet",
]  # fmt: skip

_TORCHVISION = "torchvision/"


def build(name: str, **options: Any) -> nn.Module:
    """Build a model by its name in records and on the command line.

    Args:
        name: A function of this package (``"resnet20"``), or ``"torchvision/NAME"`` for an image
            classifier of torchvision.models, which starts from random weights.
        **options: Options of the function: `num_classes`, `width`, ...

    Raises:
        ValueError: The name or an option is unknown, or an option's value is not allowed.
    """
    if name.startswith(_TORCHVISION):
        from repro._torchvision import torchvision  # slow to import

        name = name.removeprefix(_TORCHVISION)
        known = torchvision.models.list_models(module=torchvision.models)
        if name not in known:
            raise ValueError(
                f"torchvision {torchvision.__version__} has no classifier {name!r}: choose "
                f"{_TORCHVISION} and one of {', '.join(known)}"
            )
        check_at_least(1, num_classes=options.get("num_classes", 1))
        try:
            return torchvision.models.get_model(name, weights=None, **options)
        except TypeError as error:
            raise ValueError(f"torchvision's {name} takes other options: {error}") from error
    known = [other for other in __all__ if other not in ("Pix2PixHD", "build")]
    if name not in known:
        raise ValueError(
            f"the model {name!r} is not known: choose one of {', '.join(known)}, or "
            f"{_TORCHVISION}NAME for one of torchvision's, such as {_TORCHVISION}resnet50"
        )
    function: Callable[..., nn.Module] = globals()[name]
    allowed = inspect.signature(function).parameters
    if unknown := [option for option in options if option not in allowed]:
        raise ValueError(
            f"{name} has no option {', '.join(unknown)}: leave it out, or use one of "
            f"{', '.join(allowed)}"
        )
    return function(**options)
