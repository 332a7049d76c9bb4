"""A paper's recipe and each profile's, item by item: ``[[recipe]]`` of its TOML."""

from collections.abc import Mapping, Sequence
from typing import Any

from repro.experiments.arguments import plan
from repro.experiments.design import LONG, SEEDS, Paper, Run, paper_toml
from repro.report import DASH

PROFILES = {"paper profile": "paper", "gpu": "gpu", "long": LONG, "quick": "quick"}  # by column


def recipe(paper: Paper) -> list[dict[str, str]]:
    """Return a row for every item: the paper's value, those of planned runs, why they differ.

    An item names keys of a configuration (``ours``), and which of the planned runs has it
    (``where``); with ``every`` all their values are listed. ``same`` is a text for all profiles.
    """
    plans = {}
    for column, profile in PROFILES.items():
        chosen = {task: names[0] for task, names in paper.datasets[profile].items()}
        plans[column] = plan(paper, paper.artefacts.values(), profile, chosen)
    compared = []
    for row in paper_toml(paper.key)["recipe"]:
        ours = {name: _value(row, runs, PROFILES[name]) for name, runs in plans.items()}
        why = "" if all(value == row["paper"] for value in ours.values()) else row["why"]
        compared.append(
            {"item": row["item"], "paper": row["paper"], **ours, "why they differ": why}
        )
    return compared


def _value(row: Mapping[str, Any], runs: Sequence[Run], profile: str) -> str:
    if "same" in row:
        return str(row["same"])
    if row["ours"] == "seeds":
        return str(len(SEEDS[profile]))
    keys = [row["ours"]] if isinstance(row["ours"], str) else row["ours"]
    values: dict[str, None] = {}
    for run in runs:
        config = {"experiment": run.experiment, **run.config}
        if all(_at(config, key) == value for key, value in row["where"].items()):
            ours = [value for key in keys if (value := _at(config, key)) is not ...]
            values[", ".join(map(_text, ours)) or DASH] = None
            if not row.get("every"):
                break
    return ", ".join(values) or "not run"


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit():
            value = value[int(part)]
        else:
            value = value.get(part, ...) if isinstance(value, Mapping) else ...
    return value


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = [str(value["name"])] if "name" in value else []
        parts += [f"{name} {_text(one)}" for name, one in value.items() if name != "name"]
        return ", ".join(parts)
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    if value is None:
        return "all"
    return f"{value:g}" if isinstance(value, float) else str(value)
