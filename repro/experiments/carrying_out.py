"""The command ``run``: the runs that are asked for, tried without a device or computed."""

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.experiments import PAPERS, arguments, find_artefacts
from repro.experiments.design import RAY_ADDRESS, SEEDS, Artefact, Paper, Run, UsageError
from repro.experiments.run import Setting, execute, survey
from repro.experiments.workers import Workers, default_count
from repro.records import local_store
from repro.report import DASH

ALL = "all"  # papers, as a target


@dataclass(frozen=True)
class Choices:
    """Which runs are asked for."""

    named: Sequence[tuple[Paper, Sequence[Artefact]]]  # papers with some of their artefacts
    seeds: tuple[int, ...] | None  # instead of the profile's
    kept: arguments.Choices  # keys and values of --only; see `arguments.only`
    changed: arguments.Choices  # keys and values of --set; see `arguments.changed_runs`

    @classmethod
    def of(
        cls,
        targets: Sequence[str] | None,
        seeds: str | None,
        only: Sequence[str] | None,
        changes: Sequence[str] | None,
    ) -> "Choices":
        """Read the command line's texts.

        Raises:
            UsageError: One names nothing that there is.
        """
        kept = [arguments.parse_choice(text) for text in only or ()]
        changed = [arguments.parse_choice(text) for text in changes or ()]
        listed = arguments.parse_seeds(seeds)
        if not targets:
            raise UsageError(
                "name what to run: PAPER, PAPER/ARTEFACT (python -m repro list names them), or "
                f"all, which is {', '.join(PAPERS)}; all takes some 25 minutes on two cores by "
                "profile quick"
            )
        grouped: dict[str, tuple[Paper, list[Artefact]]] = {}
        for target in PAPERS if ALL in targets else targets:
            paper, artefacts = find_artefacts(target)
            grouped.setdefault(paper.key, (paper, []))[1].extend(artefacts)
        return cls(list(grouped.values()), listed, kept, changed)

    @property
    def text(self) -> str:
        """Those that change runs, as a command line has them."""
        return " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in self.changed)


def try_runs(
    choices: Choices,
    profile: str,
    on: str,
    given: Mapping[str, Any],
    tell: Callable[[str], None],
) -> list[dict[str, str]]:
    """Try the first steps of runs; see `dry_run`.

    Args:
        choices: Of runs.
        profile: Of the runs: ``gpu`` or ``paper``.
        on: A device of `DEVICES`, by whose data sheet times are estimated.
        given: Options that mean nothing here, by name.
        tell: Called with each run's name before it is tried.

    Returns:
        A row for each model, size of images and result of every artefact.

    Raises:
        UsageError: One of those options is given, or the profile, device or a choice is none.
    """
    import pandas as pd

    from repro.experiments.dry_run import Tried, try_first_steps
    from repro.measure.datasheets import DEVICES, GIB

    for name in [name for name, value in given.items() if value]:
        raise UsageError(
            f"--dry-run needs neither data nor device, and takes no --{name}; leave it out "
            "(--on names the device whose time is estimated)"
        )
    if profile not in ("gpu", "paper"):
        raise UsageError(
            f"--dry-run tries what a GPU would run, and the profile is {profile}; "
            "add --profile gpu or paper"
        )
    if on not in DEVICES:
        raise UsageError(f"--on is {on!r}; choose {', '.join(DEVICES)}")
    listed: list[dict[str, Any]] = []
    for paper, artefacts in choices.named:
        # The papers' own data, at hand or not.
        chosen = {task: next(iter(names), "") for task, names in paper.datasets[profile].items()}
        plan = arguments.plan(paper, artefacts, profile, chosen)
        # Choices are of the whole plan: an artefact may lack the key, as where all is computed.
        varied = arguments.changed_runs(paper, plan, choices.changed)
        wanted = set(arguments.only(list(varied.values()), choices.kept))
        tried: dict[Run, Tried] = {}
        for artefact in artefacts:
            name = f"{paper.key}/{artefact.name}"
            for run in dict.fromkeys(varied[run] for run in artefact.runs(profile, chosen)):
                if run not in wanted:
                    continue
                if run not in tried:
                    tell(f"{name}: {run}")
                    tried[run] = try_first_steps(paper, run)
                one = tried[run]
                count = len(choices.seeds or SEEDS[profile] if run.seeds is None else run.seeds)
                seconds = count * (one.steps or math.nan) * one.work.seconds(DEVICES[on])
                listed.append(
                    {"artefact": name, "runs": count, "model": one.model, "images": one.images}
                    | {"result": one.result, "s": seconds}
                    | {"peak": (one.peak_bytes or math.nan) / GIB}
                )
    if not listed:
        return []
    columns = ["artefact", "model", "images", "result"]
    return [
        {"artefact": artefact, "runs": f"{group.runs.sum()}", "model": model, "images": images}
        | {"peak (GiB)": _range(group.peak.min(), group.peak.max())}
        | {f"h on {on} (ESTIMATED)": _range(group.s.sum(min_count=1) / 3600)}
        | {"result": result}
        for (artefact, model, images, result), group in pd.DataFrame(listed).groupby(
            columns, sort=False
        )
    ]


def _range(*ends: float) -> str:
    return DASH if math.isnan(ends[0]) else " to ".join(dict.fromkeys(f"{v:.3g}" for v in ends))


def compute(
    choices: Choices,
    setting: Setting,
    wanted: Sequence[str],
    address: str | None,
    workers: int | None,
    tell: Callable[[str], None],
) -> int:
    """Compute the records that are not there yet; everything is checked before anything runs.

    Args:
        choices: Of runs.
        setting: Where and how.
        wanted: Datasets by name, instead of the best at hand.
        address: Of a Ray cluster.
        workers: Processes for runs that measure nothing.
        tell: Called with a line on each paper.

    Returns:
        How many runs failed, now or before, or were left out.

    Raises:
        UsageError: A choice is none, or the machine lacks something that all runs need.
    """
    if setting.device != "cpu" and (workers or 1) > 1:
        raise UsageError(
            f"--workers is {workers}, and runs on {setting.device} share its memory: leave it "
            "out, or give --device cpu"
        )
    plans = []
    for paper, artefacts in choices.named:
        chosen = arguments.choose_datasets(paper, setting.profile, wanted, setting.root)
        runs = arguments.plan(paper, artefacts, setting.profile, chosen)
        runs = arguments.with_changes(paper, runs, choices.changed)
        runs = arguments.only(runs, choices.kept)
        plans.append((paper, runs, ", ".join(filter(None, chosen.values())) or "none"))
    if address is not None:
        if not any("ray" in run.config.values() for _, runs, _ in plans for run in runs):
            raise UsageError(
                f"--address is {address!r}, and no run of the plan uses Ray; add --set engine=ray"
            )
        os.environ[RAY_ADDRESS] = address
    if setting.profile == "paper":
        arguments.require_data([(paper, runs) for paper, runs, _ in plans], setting.root)
    for paper, runs, _ in plans:
        survey(paper, runs, setting, local_store(setting.profile))
    failed = 0
    count = workers or default_count(setting.profile, setting.device)
    with Workers(count) as side_by_side:
        for paper, runs, used in plans:
            tally = execute(paper, runs, setting, workers=side_by_side)
            tell(f"{paper.key}, profile {setting.profile}: {tally}; data: {used}")
            failed += tally.failed + tally.failed_before + tally.left_out
            if tally.missing and sum(len(artefacts) for _, artefacts in choices.named) == 1:
                raise UsageError(tally.missing[0])  # nothing else was asked for
    return failed
