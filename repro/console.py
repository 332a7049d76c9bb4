"""The process around a command: what it prints, how it is interrupted, errors in one line."""

import atexit
import codecs
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

_interrupted: list[int] = []  # every Ctrl-C of the command under way
_said: list[str] = []  # the last line, once it is said
_LONGEST = 1600  # characters of a line, such as one that repeats what was given
INTERRUPTED = "interrupted: what was computed stands, run again to go on"
_ADVICE = {
    errno.ENOSPC: "free some space, then run again",
    errno.EDQUOT: "free some space, then run again",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), then run again",
    errno.EROFS: "give a folder that can be written",
    errno.EACCES: "give yourself access, or give another path",
    errno.EPERM: "give yourself access, or give another path",
    errno.ELOOP: "symbolic links lead to each other; give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EMFILE: "raise the limit of open files (ulimit -n), then run again",
    errno.EIO: "the disk or the terminal failed",
}
_OF_THE_USER = {
    "repro.experiments.design": "UsageError",
    "repro.records": "RecordError",
    "repro.datasets.image_data": "DatasetError",
}


def leave_when_interrupted() -> None:
    """Let Ctrl-C end the process at once, with a line: while modules are imported.

    An exception would end in the middle of an import, which some of them take for another error.
    """
    if _is_ours():
        signal.signal(signal.SIGINT, _leave)
        # In the last moments Python has no handlers, and would take a finished command's code away.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _is_ours() -> bool:
    # Not where it is ignored, as in the background of a shell, or another program's.
    return threading.current_thread() is threading.main_thread() and signal.getsignal(
        signal.SIGINT
    ) in (signal.default_int_handler, _note, _leave)


def _note(number: int, frame: Any) -> None:
    _interrupted.append(number)
    signal.default_int_handler(number, frame)


def _leave(*_: Any) -> None:
    if not _said:
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(130)


def carry_out(command: Callable[[], int], explain: Callable[[Exception], str | None]) -> int:
    """Carry out a command and return the exit code of its process.

    Args:
        command: Returns the exit code.
        explain: Returns what to say of an error that its user can mend, None of any other.

    Raises:
        Exception: What `explain` does not know: a defect, whose traceback is to be seen.
    """
    _use_utf8()
    with _noting_interrupts() as interrupted:
        try:
            code = command()
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            return _say(INTERRUPTED, 130)
        except Exception as error:
            if interrupted:  # and turned into another error on its way
                return _say(INTERRUPTED, 130)
            if isinstance(error, BrokenPipeError) and _let_go():
                return 128 + signal.SIGPIPE
            text = explain(error) or _of_the_system(error)
            if text is None:
                raise
            return _say(f"error: {text}", 2)


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    _interrupted.clear()
    if not _is_ours():
        yield _interrupted
        return
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def again(unraisable: Any) -> None:
        # It came while an object was being removed, from where no exception gets out.
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            hook(unraisable)

    signal.signal(signal.SIGINT, _note)
    sys.unraisablehook = again
    try:
        yield _interrupted
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


def _say(line: str, code: int) -> int:
    if code == 130:
        _said.append(line)
        if _is_ours():  # nothing is left that a second Ctrl-C could end
            signal.signal(signal.SIGINT, _leave)
    try:
        sys.stdout.flush()
        print(one_line(line), file=sys.stderr, flush=True)
    except OSError:
        if _let_go():
            with suppress(OSError):
                print(one_line(line), file=sys.stderr, flush=True)
    return code


def one_line(text: str) -> str:
    """Return a text without line breaks, not too long, with what cannot be printed as escapes."""
    joined = " ".join(text.split())
    if len(joined) > _LONGEST:
        joined = f"{joined[: _LONGEST // 2]} ... {joined[-_LONGEST // 4 :]}"
    return "".join(
        c if c.isprintable() or "\ud800" <= c <= "\udfff" else c.encode("unicode_escape").decode()
        for c in joined
    )


def _let_go() -> bool:
    """Let what cannot be printed go nowhere, so that the process ends silently.

    Returns:
        Whether there was such output.
    """
    any_lost = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
            lost = _has_no_reader(stream)  # a long text may be lost whole, with nothing to flush
        except OSError:
            lost = True
        if lost:
            any_lost = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return any_lost


def _has_no_reader(stream: Any) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # no file, as in a notebook
        return False


def explained(error: Exception, program: str) -> str | None:
    """Return what to say of an error of this package's that tells what its user can do.

    Args:
        error: Any.
        program: The command's name, where the error knows no more of it.
    """
    for module, name in _OF_THE_USER.items():
        # What was not imported was not raised.
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], name)):
            return str(error)
    # Not by class: typer brings its own click, or uses the one installed.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        path = context.command_path if context else program
        return f"{error.format_message().rstrip('.')}; {path} --help says what there is"
    return None


def _of_the_system(error: Exception) -> str | None:
    """Return what to say of an error of the system that its user can mend."""
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _ADVICE):
        where = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        advice = _ADVICE.get(error.errno or 0, "give another path, or mend this one")
        return f"{error.strerror or error}{where}; {advice}"
    if isinstance(error, UnicodeEncodeError) and any(
        "\ud800" <= c <= "\udfff" for c in error.object
    ):
        return f"the name {error.object!r} is not UTF-8; rename it, or give another"
    if isinstance(error, MemoryError):
        return "there is not enough memory for this; give less data, or a smaller profile"
    if type(error) is RuntimeError:  # as pathlib says it
        text = str(error)
        if text.startswith("Symlink loop"):
            return f"{text}; give another path"
        if text.startswith("Could not determine home directory"):
            return "a path begins with ~ and a user that does not exist; give a path without it"
    return None


def _use_utf8() -> None:
    """Print UTF-8 whatever the locale, and let child processes do so.

    What is no text, such as a file's name in another encoding, is shown escaped.
    """
    codecs.register_error("repro_escaped", _escaped)
    if sys.stdout is None or sys.stderr is None:  # closed by whoever started this
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 (to the end)
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="repro_escaped")
    os.environ["PYTHONUTF8"] = "1"
    os.environ["PYTHONIOENCODING"] = "utf-8:backslashreplace"


def _escaped(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    try:
        # Under an ASCII locale Python reads a name's bytes as surrogates, UTF-8 or not.
        raw = part.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return raw.encode(), error.end
    except UnicodeEncodeError:
        return part.encode("ascii", "backslashreplace"), error.end
