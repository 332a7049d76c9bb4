"""What the command line was given, checked and asked."""

import math
import re

from repro.advise.advising import Advice, advise
from repro.advise.predicting import METHODS, PAIRS
from repro.advise.workload import AdviceError

_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_memory(text: str) -> int:
    """Return bytes of such as ``16GiB``, ``800 MB`` or ``123456789``.

    Raises:
        AdviceError: It is no such text, or not one byte.
    """
    parts = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(parts[2].upper() or "B") if parts else None
    if parts is None or unit is None or (nbytes := math.floor(float(parts[1]) * unit)) < 1:
        raise AdviceError(f"the memory is {text[:40]!r}: give bytes with a unit, such as 16GiB")
    return nbytes


def parse_sides(text: str | None) -> tuple[int, int] | None:
    """Return height and width of such as ``224`` or ``512x1024``; None of None.

    Raises:
        AdviceError: It is no such text.
    """
    if text is None:
        return None
    parts = re.fullmatch(r"([1-9]\d{0,5})(?:[x×]([1-9]\d{0,5}))?", text)
    if parts is None:
        raise AdviceError(f"the image is {text[:40]!r}: give pixels, as 224 or 512x1024")
    return int(parts[1]), int(parts[2] or parts[1])


def ask(
    model: str,
    batch: int,
    memory_bytes: int,
    *,
    image: tuple[int, int] | None,
    classes: int | None,
    device: str,
    optimizer: str,
    method: str | None,
    pairs: bool,
    probe_seconds: float,
) -> Advice:
    """Return what `advise` says of a named model.

    Raises:
        AdviceError: As of `advise`, or the method is none.
    """
    known = (*METHODS, *PAIRS)
    if method is not None and method not in known:
        raise AdviceError(f"the method is {method!r}: choose {', '.join(known)}")
    methods = known if pairs or method in PAIRS else METHODS
    return advise(
        model,
        batch,
        memory_bytes,
        device=device,
        probe_seconds=probe_seconds,
        methods=methods,
        image=image,
        optimizer=optimizer,
        options={} if classes is None else {"num_classes": classes},
    )
