"""Cells of trainings with their estimates, and the names of what ran in the paper's place."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from repro.experiments import design
from repro.experiments.design import paper_toml
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference, or_none
from repro.experiments.mbs.runs import CLASSIFIERS, INITIAL, PUBLISHED, ROLES, task_of
from repro.experiments.query import Results
from repro.experiments.view import panel, stand_ins
from repro.records import Record
from repro.report import summary

WAYS = ("without", "with")
_NAMES: dict[str, str] = paper_toml("mbs")["networks"]
_LIMITED = ("train", "size", "step")  # experiments that keep to a memory limit
_DATA = {"segmentation": "Carvana", "classification": "Flowers-102"}  # the paper's


def trainings(results: Results, role: str, mini_batch: int, streamed: bool) -> list[Record]:
    """Return the trainings of a model at the higher resolution, one per seed."""
    found = results.select("train", role=role, mini_batch=mini_batch, resolution="high")
    return [record for record in found if (record.config["micro_batch"] is not None) == streamed]


def initial(results: Results, role: str, way: str) -> list[Record]:
    """Return the trainings at the initial mini-batch, ``without`` or ``with`` MBS."""
    return trainings(results, role, INITIAL[role], way == "with")


def best(results: Results, records: Sequence[Record]) -> BySeed:
    """Return the best metric of every training that ran, in percent."""
    ran = [record for record in records if record.status == "ok"]
    return results.cell(ran, lambda record: float(record.metrics["best"]))


def in_points(records: Sequence[Record], first: BySeed, second: BySeed) -> Estimate:
    """Return a metric of some of the records less that of others, in points, seed by seed.

    The step is one test image's share of an accuracy; 0 of IoU, which counts pixels.
    """
    # Whole test sets (None), of which records hold no size, have more than 1,000 images.
    tested = [r.config["test_samples"] or 1000 for r in records if r.config["role"] in CLASSIFIERS]
    found = difference(first, second, "points", step=100 / min(tested, default=math.inf))
    return found.named(ran_as(records[0].config["role"], records))


def gap(results: Results, first: Sequence[Record], second: Sequence[Record]) -> Estimate:
    """Return the best metric of some trainings less that of others; see `in_points`."""
    return in_points([*first, *second], best(results, first), best(results, second))


def same_result(results: Results, roles: Sequence[str]) -> Cases:
    """Best metric with MBS less that without, at the initial mini-batch."""
    return cases(roles, lambda role: gap(results, *(initial(results, role, w) for w in WAYS[::-1])))


def told(number: Callable[..., Estimate], *arguments: Any) -> str | None:
    """Return a number as text without a unit; None where it cannot be had."""
    found = or_none(number, *arguments)
    return None if found is None else str(replace(found, unit=""))


def check(
    parts: Callable[..., Iterator[tuple[bool, str]]], **options: Any
) -> Callable[[Results], tuple[bool, str]]:
    """Make a check of a function that yields, of each part, whether it holds and its numbers."""

    def joined(results: Results) -> tuple[bool, str]:
        found = list(parts(results, **options))
        if not found:
            raise NotRun("no records")
        return all(holds for holds, _ in found), "; ".join(text for _, text in found)

    return joined


def result(records: Sequence[Record], values: Sequence[float]) -> str:
    """Return the mean over seeds, or how the runs ended where none was trained."""
    if values or not records:
        return summary(values) if values else "not run"
    return {"ok": "1 step fits"}.get(status := records[0].status, status.replace("_", " "))


def networks(role: str, records: Iterable[Record]) -> list[str]:
    """Return the networks that ran in a role, by the paper's name only where they are the same."""
    ran = [r for r in records if r.config["role"] == role and r.experiment != "foretell"]
    models = [record.config["model"] for record in ran]
    names = [role if m == PUBLISHED[role] else _NAMES[m["name"]].format(**m) for m in models]
    return list(dict.fromkeys(names))


def ran_as(role: str, records: Iterable[Record]) -> str:
    """Return which network ran in a role: ``ResNet-8 (for ResNet-50)``, or the paper's own name."""
    names = " and ".join(name for name in networks(role, records) if name != role)
    return f"{names} (for {role})" if names else role


def whose(role: str, records: Sequence[Record]) -> str:
    """Return a panel's title: network and data of our numbers."""
    shown = [record for record in records if record.config["role"] == role]
    if not shown:
        return f"{role}: not run"
    data = dict.fromkeys(record.dataset["name"] for record in shown if record.dataset)
    return panel(role, " and ".join(networks(role, shown)), " and ".join(data))


def marks(results: Results) -> Iterable[str]:
    """Yield the stand-ins for the paper's data, networks and memory, for a caption."""
    records = [record for record in results.records if record.experiment != "foretell"]
    data = [(r.dataset["name"], _DATA[task_of(r.config["role"])]) for r in records if r.dataset]
    yield from stand_ins([*data, *((name, r) for r in ROLES for name in networks(r, records))])
    limited = [r.config for r in records if r.experiment in _LIMITED]
    if any(config.get("limit_bytes") or config.get("limit_fits") for config in limited):
        yield "SIMULATED memory limit."


artefact = partial(design.artefact, "mbs", facts=marks)
