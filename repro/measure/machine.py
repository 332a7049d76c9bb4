"""Machine settings for measuring times."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from repro.measure.allocations import keep_freed_memory
from repro.measure.host import cores


@contextmanager
def machine(config: Mapping[str, Any], device: str) -> Iterator[None]:
    """Use a configuration's number of threads, and keep freed memory on a CPU."""
    before = torch.get_num_threads()
    if device == "cpu":
        keep_freed_memory()
        if config.get("threads"):
            torch.set_num_threads(min(config["threads"], cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
