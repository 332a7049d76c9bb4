"""A function in a process of its own, for settings that hold for a whole process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_ANSWER = "answer: "  # libraries may print lines, too


def in_a_process(
    entry: str, arguments: Sequence[Any], environment: Mapping[str, str] | None = None
) -> Any:
    """Call a function in a new process, and return its result; both ways go by JSON.

    Args:
        entry: ``module:function``.
        arguments: Of the function.
        environment: Variables of the process, besides those of this one.

    Raises:
        RuntimeError: It failed; the text ends as its error output does, without C++ frames.
    """
    module, _, name = entry.partition(":")
    code = f"import json, sys\nfrom {module} import {name}\n"
    code += f"print({_ANSWER!r} + json.dumps({name}(*json.load(sys.stdin))))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, **(environment or {})},
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        # An exception in a destructor has its message before dozens of C++ frames.
        lines = (line for line in done.stderr.splitlines() if not line.startswith("frame #"))
        said = "\n".join(lines)[-2000:]
        raise RuntimeError(f"the process of {entry} failed: {said}")
    return json.loads(answers[-1].removeprefix(_ANSWER))
