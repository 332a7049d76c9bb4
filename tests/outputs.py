"""What a model returns in the manner of Hugging Face's: a dictionary that is a dataclass."""

from collections import OrderedDict
from dataclasses import dataclass

import torch


class Output(OrderedDict):  # type: ignore[type-arg]  # made as Hugging Face makes its own
    pass


@dataclass
class ModelOutput(Output):
    """A loss and logits, by attribute and by key; those that are None have no key."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)
