"""Random number generators of a forward pass, saved and restored together."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from repro.measure import accelerator

_KINDS: Any = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NAMES = "torch.Generator, numpy.random.Generator, numpy.random.RandomState and random.Random"


class Randomness:
    """The generators of Python, numpy and torch (CPU and `device`), and the given `generators`.

    Raises:
        ValueError: One of `generators` is of an unknown type.
    """

    def __init__(self, device: torch.device, generators: Sequence[Any] = ()) -> None:
        self._device = device
        one = isinstance(generators, _KINDS)
        self._generators: list[Any] = [generators] if one else list(generators)
        for generator in self._generators:
            if not isinstance(generator, _KINDS):
                raise ValueError(f"generators holds {type(generator).__name__}; known are {_NAMES}")

    def get(self) -> list[Any]:
        """Return the states."""
        states: list[Any] = [random.getstate(), np.random.get_state()]  # noqa: NPY002
        return [*states, accelerator.get_rng(self._device), *map(_state_of, self._generators)]

    def set(self, states: list[Any]) -> None:
        """Restore states returned by `get`."""
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        accelerator.set_rng(self._device, states[2])
        for generator, state in zip(self._generators, states[3:], strict=True):
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()
