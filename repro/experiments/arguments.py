"""Checked arguments of commands: profile, device, folders, datasets, seeds, choices of runs."""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

from repro import paths
from repro.experiments.design import COMPUTING_PROFILES, PROFILES, Artefact, Paper, Run, UsageError

STAND_IN = "REPRO_STAND_IN"  # in the environment, so that notebooks' kernels know of it, too

# Commands that compute nothing answer at once: torch and the datasets are imported where they work.


def default_profile() -> str:
    """Return ``gpu`` where torch finds an accelerator and ``quick`` where it does not."""
    from repro.measure import accelerator

    return "gpu" if accelerator.present() else "quick"


def default_device() -> str:
    """Return the accelerator that torch finds, such as ``cuda``, else ``cpu``."""
    from repro.measure import accelerator

    return accelerator.present() or "cpu"


def check_profile(profile: str, computing: bool = True) -> str:
    """Return `profile` if it exists, and computes where that is asked."""
    allowed = COMPUTING_PROFILES if computing else PROFILES
    if profile not in allowed:
        hint = "; 'view' shows records and computes none" if profile == "view" else ""
        raise UsageError(f"unknown profile {profile!r}; choose {', '.join(allowed)}{hint}")
    return profile


def check_device(device: str) -> str:
    """Return the one name of a device that is present: ``cpu``, or ``cuda:0``, ``cuda:1``, ...

    Any accelerator will do that torch has a module for.
    """
    from repro.measure import accelerator

    parts = re.fullmatch(r"([a-z]+)(?::(0|[1-9][0-9]{0,3}))?", str(device))
    kind, number = (parts[1], int(parts[2] or 0)) if parts and isinstance(device, str) else ("", 0)
    if kind == "cpu" and number == 0:
        return "cpu"
    with suppress(RuntimeError, ValueError):  # torch knows no such kind
        if number < accelerator.count(kind):
            return f"{kind}:{number}"
    allowed = "'cpu' (no accelerator is present)"
    if present := accelerator.present():
        allowed = f"'cpu' and '{present}:0' to '{present}:{accelerator.count(present) - 1}'"
    raise UsageError(f"device {device!r} is not available here; allowed are {allowed}")


def ending(hours: float | None) -> float | None:
    """Return when to begin no further run, on `time.monotonic`'s clock; None for never."""
    if hours is None:
        return None
    if not 0 < hours < 10_000:
        raise UsageError(f"--hours is {hours:g}; give a number above 0, such as 2.5")
    return time.monotonic() + 3600 * hours


def check_data(root: str | None) -> str | None:
    """Return `root` if it is a folder or None, and `$REPRO_DATA`, where it is set, is one."""
    if problem := paths.data_problem(root):
        raise UsageError(problem)
    return root


def allow_stand_in(profile: str) -> None:
    """Let the profile ``paper`` take other data where its own lack, also in notebooks."""
    if profile != "paper":
        raise UsageError(f"--data-stand-in is for profile paper, not for {profile}; leave it out")
    os.environ[STAND_IN] = "1"


def data_at_hand(root: str | None) -> dict[str, str]:
    """Return the datasets that can be loaded without a download, with their locations."""
    from repro import datasets

    present = datasets.available(root)
    if (times := datasets.find_times(root)) is not None:
        present[datasets.TIMES] = f"at {times}"
    return present


def choose_datasets(
    paper: Paper, profile: str, wanted: Sequence[str] = (), root: str | None = None
) -> dict[str, str]:
    """Choose a dataset for each task of a paper: one asked for by name, else the best at hand.

    Under the profile ``paper`` it is the paper's own, at hand or not, unless stand-ins are allowed.
    """
    from repro import datasets

    check_data(root)
    tasks = paper.datasets[profile]
    served = sorted({name for names in tasks.values() for name in names})
    for name in wanted:
        if name not in datasets.NAMES:
            raise UsageError(f"unknown dataset {name!r}; choose among {', '.join(datasets.NAMES)}")
        if tasks and name not in served:
            raise UsageError(
                f"dataset {name!r} serves no experiment of {paper.key} under the profile "
                f"{profile!r}; choose among {', '.join(served)}"
            )
    present = data_at_hand(root)
    own_data = profile == "paper" and os.environ.get(STAND_IN, "") in ("", "0")
    chosen = {}
    for task, names in tasks.items():
        asked = [name for name in wanted if name in names]
        if own_data and not asked and datasets.TIMES not in names:
            asked = list(names[:1])
        # A task that nothing can stand in for is left out, and its artefacts say "not run".
        chosen[task] = (asked or [name for name in names if name in present] or [""])[0]
        if len(asked) > 1:
            raise UsageError(
                f"datasets {' and '.join(map(repr, asked))} serve the same task of {paper.key}, "
                f"{task}; give one of them"
            )
    return chosen


Choices = Sequence[tuple[str, str]]


def plan(
    paper: Paper,
    artefacts: Iterable[Artefact],
    profile: str,
    chosen: Mapping[str, str],
    changes: Choices = (),
    kept: Choices = (),
) -> list[Run]:
    """Return the runs that the artefacts need, each once; see `with_changes` and `only`."""
    runs = [run for artefact in artefacts for run in artefact.runs(profile, chosen)]
    return only(with_changes(paper, runs, changes), kept)


def parse_choices(texts: Sequence[str] | None) -> Choices:
    """Read texts ``KEY=VALUE``."""
    pairs = []
    for text in texts or ():
        key, _, value = text.partition("=")
        if not key or not value:
            raise UsageError(f"{text!r} is not of the form KEY=VALUE, such as mini_batch=64")
        pairs.append((key, value))
    return pairs


def only(runs: Sequence[Run], choices: Choices) -> list[Run]:
    """Return the runs whose configuration has one of the values of every key that is named.

    A key may be ``OUTER.INNER``; several values of one key admit any of them.
    """
    kept = list(runs)
    for key in dict.fromkeys(key for key, _ in choices):
        wanted = [value for name, value in choices if name == key]
        values = {r: _text(found) for r in runs if (found := value_at(r.config, key)) is not ...}
        for value in wanted:
            if value not in values.values():
                known = ", ".join(dict.fromkeys(values.values()))
                advice = f"choose among {known}" if known else _keys_advice(runs)
                raise UsageError(f"no run of the plan has {key}={value}; {advice}")
        kept = [run for run in kept if values.get(run) in wanted]
    return kept


def value_at(config: Any, key: str) -> Any:
    """Return the value at a key such as ``optimizer.rate`` or ``sizes.0``; ``...`` for none."""
    for part in key.split("."):
        try:
            config = config[int(part) if isinstance(config, list) else part]
        except (LookupError, TypeError, ValueError):
            return ...
    return config


def _with(config: Any, key: str, value: Any) -> Any:
    outer, dot, inner = key.partition(".")
    changed, place = copy(config), int(outer) if isinstance(config, list) else outer
    changed[place] = _with(config[place], inner, value) if dot else value
    return changed


def with_changes(paper: Paper, runs: Sequence[Run], choices: Choices) -> list[Run]:
    """Return the runs, each once, with other values in their configurations.

    A key may be ``OUTER.INNER``; a value is read as JSON where it is such.
    """
    for key, text in choices:
        present = [value for run in runs if _is_plain(value := value_at(run.config, key))]
        if not present:
            raise UsageError(f"no run of the plan has a {key!r} to set; {_keys_advice(runs)}")
        if sum(key == other for other, _ in choices) > 1:
            raise UsageError(f"{key} is set twice; give it one value")
        value = _checked(key, text, present, paper.options.get(key))
        runs = [
            replace(run, config=_with(run.config, key, value))
            if _is_plain(value_at(run.config, key))
            else run
            for run in runs
        ]
    return list(dict.fromkeys(runs))


def _checked(key: str, text: str, present: Sequence[Any], allowed: Sequence[str] | None) -> Any:
    """Return a value for a key; it has to be like those that are present, or one of `allowed`."""
    texts = allowed or sorted({value for value in present if isinstance(value, str)})
    if texts:
        if text not in texts:
            raise UsageError(f"unknown {key} {text!r}; choose among {', '.join(texts)}")
        return text
    value: Any = text
    examples = [value for value in present if value is not None]
    with suppress(ValueError, RecursionError):  # it is no JSON
        value = json.loads(text)
    kinds, such = set(map(type, examples)), _text(next(iter(examples), None))
    like = not kinds or type(value) in kinds or (float in kinds and type(value) is int)
    if not (like and _is_plain(value)):
        raise UsageError(f"{key}={text} is of another type than {key}={such}")
    if isinstance(value, int | float) and not abs(value) < 2**63:
        raise UsageError(f"{key}={text} is not finite, or beyond 64 bits; give one such as {such}")
    # Counts and sizes start at one, where the plan's do; a rate or a margin may be 0.
    least = int(kinds == {int} and min(examples) > 0)
    if kinds and kinds <= {int, float} and min(examples) >= 0 and not value >= least:
        raise UsageError(f"{key}={text} is below {least}; give one such as {such}")
    return value


def _keys_advice(runs: Sequence[Run]) -> str:
    keys = sorted({key for run in runs for key, value in run.config.items() if _is_plain(value)})
    return f"their keys are {', '.join(keys)}" if keys else "its runs have no such keys"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Read a number of seeds (``3`` is 0, 1, 2) or a list (``0,5,7``, ``5,``); None stays None."""
    if text is None or not str(text).strip():
        return None
    text = str(text)  # a notebook may have a number for it
    numbers: tuple[int, ...] = ()
    if re.fullmatch(r"\s*\d{1,10}\s*(,\s*\d{1,10}\s*)*,?\s*", text, re.ASCII):
        numbers = tuple(map(int, text.strip().removesuffix(",").split(",")))
        if "," not in text:
            numbers = tuple(range(numbers[0])) if numbers[0] <= 1000 else ()
    # numpy's generators take seeds of 32 bits.
    if not numbers or max(numbers) >= 2**32 or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"seeds are {text!r}; give how many (3), or a list of distinct ones from 0 to "
            "4294967295 (0,5,7)"
        )
    return numbers
