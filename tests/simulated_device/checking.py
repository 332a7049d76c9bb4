"""Who raced with whom, where the host waited, and other orders in which work may run."""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simulated_device_native as native
import torch

_TORCH = str(Path(torch.__file__).parent)
_HERE = tuple(str(Path(__file__).with_name(name)) for name in ("checking.py", "interface.py"))

Frame = tuple[str, int, str]  # file, line, function


class RaceError(AssertionError):
    """Operations on the same memory that nothing orders."""


@dataclass(frozen=True)
class Operation:
    """What ran, where it was queued, and on which stream (``host`` for the host itself)."""

    name: str
    stream: str
    stack: tuple[Frame, ...]
    within: str = ""
    writes: bool = False

    @property
    def line(self) -> str:
        """Where the user's code called it."""
        return _line(self.stack)

    def __str__(self) -> str:
        what = f"{self.name} ({'writes' if self.writes else 'reads'})"
        within = f", in the backward pass of {self.within}" if self.within else ""
        return f"{what} on {self.stream}{within}, {self.line}"


@dataclass(frozen=True)
class Race:
    """Two operations on the same memory, at least one of which writes, without an order.

    Attributes:
        first: The one that was called first.
        second: The other.
        nbytes: How much memory they share.
        freed: Where the memory was freed between them, empty where it was not.
        owner: The stream for which it had been allocated.
    """

    first: Operation
    second: Operation
    nbytes: int
    freed: str = ""
    owner: str = ""

    @property
    def missing(self) -> str:
        """What would order them."""
        first, second = self.first.stream, self.second.stream
        if second == "host":
            return f"the host does not wait for {first}: synchronise an event recorded there"
        missing = f"{second} does not wait for {first}: wait for an event recorded there"
        if not self.freed:
            return missing
        if first == self.owner:
            return f"{missing}; the memory was freed, and handed out again: {self.freed}"
        return (
            f"the memory was freed and handed out again while {first} still had to use it: before "
            f"it is freed, record_stream({first}), or let {self.owner} wait; {self.freed}"
        )

    def __str__(self) -> str:
        return f"{self.nbytes} bytes: {self.first}\n    and {self.second}\n    {self.missing}"


@dataclass(frozen=True)
class Block:
    """A place where the host waited for the device.

    Attributes:
        what: Such as ``"waited for an event"`` or ``"copied from the device"``.
        stack: Frames of Python, innermost first.
    """

    what: str
    stack: tuple[Frame, ...]

    @property
    def line(self) -> str:
        """Where the user's code waited."""
        return _line(self.stack)


def _line(stack: tuple[Frame, ...]) -> str:
    for file, line, function in stack:
        if not file.startswith((_TORCH, "<")) and file not in _HERE and "contextlib" not in file:
            return f"{file}:{line} in {function}"
    return f"{stack[0][0]}:{stack[0][1]} in {stack[0][2]}" if stack else "an unknown place"


def _stream(agent: int) -> str:
    if agent == 0:
        return "host"
    device, stream = divmod(agent - 1, native.STREAMS)
    return f"stream {stream} of sim:{device}" if stream else f"the default stream of sim:{device}"


def _operation(found: dict[str, Any]) -> Operation:
    stack, stream = tuple(found["stack"]), _stream(found["agent"])
    return Operation(found["name"], stream, stack, found["within"], found["writes"])


def _race(found: dict[str, Any]) -> Race:
    first, second = _operation(found["first"]), _operation(found["second"])
    life = found["first_life"]
    freed = _line(tuple(life["freed_at"])) if found["reused"] else ""
    return Race(first, second, found["bytes"], freed, _stream(max(0, life["allocated_by"])))


# ---- races


@dataclass
class Findings:
    """What a checked block found; complete once it has ended.

    Attributes:
        races: One of each kind and pair of places.
        count: All of them.
    """

    races: list[Race] = field(default_factory=list)
    count: int = 0


_PATCHED: dict[str, bool] = {"numpy": True, "tolist": False}  # whether the host may write by it


def _told(name: str, write: bool) -> Callable[..., Any]:
    plain = getattr(torch.Tensor, name)

    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cpu" and self.numel():
            storage = self.untyped_storage()
            native.touched_by_host(self.data_ptr(), storage.nbytes(), write, name)
        return plain(self, *args, **kwargs)

    return call


@contextlib.contextmanager
def checked(raises: bool = True) -> Iterator[Findings]:
    """Look for races in what runs inside.

    What ran before counts as done. Every operator of every thread is seen with what it reads and
    writes, also those of backward passes and those of the CPU on pinned memory; an address
    (`data_ptr`) that the host uses by other means is not.

    Args:
        raises: Whether races raise at the end.

    Raises:
        RaceError: There are races; it tells all of them.
    """
    findings = Findings()
    patches = {name: getattr(torch.Tensor, name) for name in _PATCHED}
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    native.check(True)
    for name, write in _PATCHED.items():
        setattr(torch.Tensor, name, _told(name, write))
    try:
        yield findings
    finally:
        for name, plain in patches.items():
            setattr(torch.Tensor, name, plain)
        findings.races, findings.count = list(map(_race, native.races())), native.races_seen()
        native.check(False)
    if raises and findings.races:
        told = "\n".join(map(str, findings.races))
        raise RaceError(f"{findings.count} races, at {len(findings.races)} places:\n{told}")


# ---- other orders


@contextlib.contextmanager
def deferred(seed: int | None = None) -> Iterator[None]:
    """Queue work, and run it as late as the waits allow, so that a missing wait shows in numbers.

    Args:
        seed: Run it in some order that the waits allow instead, chosen by this number.
    """
    native.defer(seed is not None, seed or 0)
    try:
        yield
    finally:
        native.end_deferring()


# ---- waiting


class Blocks(list[Block]):
    """The places where the host waited, in order."""

    def counts(self) -> Counter[str]:
        """Return how often the host did what."""
        return Counter(block.what for block in self)


@contextlib.contextmanager
def counted_blocks() -> Iterator[Blocks]:
    """Collect the places inside where the host waits for the device; complete at the end.

    A wait for an event counts where the host does not know it to be complete; a wait for a stream
    or for the device counts always.
    """
    found, before = Blocks(), native.blocks_seen()
    try:
        yield found
    finally:
        found.extend(Block(what, tuple(stack)) for what, _, stack in native.blocks(before))


# ---- presence and limits


@contextlib.contextmanager
def present(total_bytes: int = 8 * 2**30, pinned_limit_bytes: int | None = None) -> Iterator[None]:
    """Make the device be there, with empty memory and seeds of its own.

    Args:
        total_bytes: Memory of each device.
        pinned_limit_bytes: The most that may be pinned on the host; None for no limit.
    """
    before = native.is_present()
    native.set_present(True)
    if any(native.memory_stats(i)["allocated_bytes"]["current"] for i in range(native.DEVICES)):
        gc.collect()
    native.empty_cache()
    native.empty_pinned_cache()
    for i in range(native.DEVICES):
        native.set_total_bytes(i, total_bytes)
        native.set_limit_bytes(i, total_bytes)
        native.set_generator_state(i, 67280421310721, 0)
        native.reset_peak_memory_stats(i)
    native.reset_peak_pinned_memory_stats()
    native.set_pinned_limit_bytes(2**62 if pinned_limit_bytes is None else pinned_limit_bytes)
    native.forget_blocks()
    try:
        yield
    finally:
        native.forbid_blocks(False)
        torch.accelerator.set_device_index(0)
        native.set_present(before)
