"""Ctrl-C waits until nothing is half done."""

import signal
import threading
from types import CodeType, FrameType
from typing import Any, Self


class Uninterrupted:
    """Between `__enter__` and `__exit__` an interrupt from the keyboard is kept, then delivered.

    Python raises KeyboardInterrupt between any two steps of the main thread, so also while bytes
    are counted or pointers change. `install` has it wait for the end of what is under way, and
    `remove` leaves the signal to who had it before. In other threads than the main one nothing is
    interrupted, and nothing is changed.

    Args:
        code: Of functions that are not to be interrupted before they could enter this.

    Attributes:
        depth: How many things are under way, one within the other.
        pending: The signal and frame of an interrupt that waits.
    """

    def __init__(self, *code: CodeType) -> None:
        self._code = code
        self.depth = 0
        self.pending: tuple[int, FrameType | None] | None = None
        self._before: Any = None
        self._installed = False

    def install(self) -> None:
        """Take the signal, where this is the main thread and it would raise something."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._before = signal.getsignal(signal.SIGINT)
        if callable(self._before):
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Give the signal back; the caller delivers what is pending."""
        if self._installed:
            self._installed = False
            if signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        inside, at = self.depth > 0, frame
        while at is not None and not inside:
            inside, at = at.f_code in self._code, at.f_back
        if inside:
            self.pending = number, frame
        else:
            self._before(number, frame)

    def deliver(self) -> None:
        """Raise what waits, if anything does."""
        if self.pending is not None and not self.depth:
            given, self.pending = self.pending, None
            self._before(*given)

    def __enter__(self) -> Self:
        self.depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1
        if self.pending is not None:
            self.deliver()
