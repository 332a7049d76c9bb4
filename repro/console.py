"""The process around a command: UTF-8, Ctrl-C, users' errors in one line."""

import errno
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

INTERRUPTED = "interrupted: finished work is kept, run again to go on"
_LONGEST = 1600  # characters of a line, such as an error that repeats a long argument
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# By name, since not all are imported.
_OF_THE_USER = {"UsageError", "RecordError", "DatasetError", "AdviceError", "WorkerDied"}
_OF_PATHLIB = ("Symlink loop", "Could not determine home directory")


def carry_out(command: Callable[[], int], program: str) -> int:
    """Run a command and return the exit code of its process: 2 for bad input, 130 for Ctrl-C.

    The advice on wrong options names the `program`. A defect of this package is raised, to be shown
    with its traceback.
    """
    _use_utf8()
    with noting_interrupts() as interrupted:
        try:
            code = command()
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            return _say(INTERRUPTED, 130)
        except Exception as error:
            if interrupted:  # the interrupt was turned into another error
                return _say(INTERRUPTED, 130)
            if isinstance(error, BrokenPipeError) and _has_no_reader():
                _print_nowhere()
                return 128 + signal.SIGPIPE
            if (text := explained(error, program)) is None:
                raise
            return _say(f"error: {text}", 2)


@contextmanager
def noting_interrupts() -> Iterator[list[int]]:
    """Note every Ctrl-C inside: code that it ends may turn it into an error of its own."""
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield noted  # it is another thread's, or ignored
        return

    def note(number: int, frame: Any) -> Any:
        noted.append(number)
        return before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _say(line: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:
        _print_nowhere()
    with suppress(OSError):
        print(one_line(line), file=sys.stderr, flush=True)
    return code


def _has_no_reader() -> bool:
    with suppress(OSError, ValueError):  # stdout is no file, as in a notebook
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    return False


def _print_nowhere() -> None:
    """Discard all further output, so that the process ends silently."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    """Return a text in one shortened line, with unprintable characters escaped."""
    from repro.report import printable

    joined = printable(" ".join(text.split()))
    if len(joined) <= _LONGEST:
        return joined
    return f"{joined[: _LONGEST // 2]} ... {joined[-_LONGEST // 4 :]}"


def explained(error: Exception, program: str) -> str | None:
    """Return the message for an error that the user can correct, None for a defect."""
    text = str(error)
    if hasattr(error, "format_message"):  # an error of click or of typer's own copy of it
        context = getattr(error, "ctx", None)
        path = context.command_path if context else program
        return f"{error.format_message().rstrip('.')}; {path} --help says what there is"
    if _OF_THE_USER & {kind.__name__ for kind in type(error).__mro__}:
        return text
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        where = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        full = error.errno in _FULL
        advice = "free some space, then run again" if full else "give another path"
        return f"{error.strerror or text}{where}; {advice}"
    if isinstance(error, MemoryError):
        return "there is not enough memory for this; give less data, or a smaller profile"
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return f"the name {error.object!r} is not UTF-8; rename it, or give another"
    if type(error) is RuntimeError and text.startswith(_OF_PATHLIB):
        return f"{text}; give another path"
    return None


def _use_utf8() -> None:
    """Print UTF-8 in any locale, invalid text as escapes, also in child processes."""
    if sys.stdout is None or sys.stderr is None:  # closed by the parent process
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 (to the end)
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    os.environ["PYTHONUTF8"] = "1"
    os.environ["PYTHONIOENCODING"] = "utf-8:backslashreplace"
