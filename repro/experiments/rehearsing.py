"""What a run would build, hold and take, found without its data, its device or its time.

A paper's ``rehearsal.py`` builds model, data and optimizer of a run as the run itself does, but on
tensors that have shapes and no content, and takes the first training step. A recipe that cannot
start fails here.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from repro.experiments import arguments
from repro.experiments.design import SEEDS, Artefact, Paper, Run, UsageError
from repro.measure.datasheets import DEVICES, GIB, LAUNCH_S, REACHED, Device
from repro.measure.fake_tensors import Work
from repro.report import DASH

PROFILES = ("gpu", "paper")  # whose data are imagined

GROUNDS = (
    "Memory is of live tensors in the first two steps; a kernel's workspace comes on top. Times "
    f"are ESTIMATED, not measured: each operation by itself at {100 * REACHED:.0f} % of the data "
    f"sheet's rate of computing or moving, at least {1e6 * LAUNCH_S:.0f} μs; loading, evaluation "
    "and processes are not in them."
)


def seconds(work: Work, device: Device) -> float:
    """Estimate the time of a step: each operation takes what it computes or moves, the longer.

    Operations are not fused, and a data sheet's rates are reached by the share `REACHED`.
    """
    return sum(
        max(
            flops / (REACHED * (device.low_flops if low else device.flops)),
            moved / (REACHED * device.bandwidth),
            LAUNCH_S,
        )
        for flops, moved, low in work.operations
    )


@dataclass(frozen=True)
class Rehearsal:
    """What a run comes to.

    Attributes:
        model: As torch's module is called, with the number of its parameters.
        data: Images of an epoch and their sides.
        epochs: Of the whole run.
        parts: Training steps of the whole run that are alike, and the work of one of them.
        peak_bytes: Of two steps on the device: live tensors, no kernel's workspace.
        limit_bytes: That the run sets on the device, or its paper's device has; None for neither.
        expected: Whether it fits into that by the paper; None where the paper does not say.
    """

    model: str
    data: str
    epochs: float
    parts: tuple[tuple[float, Work], ...]
    peak_bytes: int
    limit_bytes: int | None = None
    expected: bool | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the peak lies within the limit; None where there is none."""
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes

    def seconds(self, device: Device) -> float:
        """Estimate the time of the whole run on a device; see `seconds`."""
        return sum(steps * seconds(work, device) for steps, work in self.parts)


def rehearse(paper: Paper, run: Run) -> Rehearsal | None:
    """Rehearse a run; None where it computes or measures what is no training.

    Raises:
        Exception: Whatever the run itself would raise at its start.
    """
    module = importlib.import_module(f"repro.experiments.{paper.key}.rehearsal")
    rehearsal: Rehearsal | None = module.rehearse(run)
    return rehearsal


def rows(
    named: Sequence[tuple[Paper, Sequence[Artefact]]],
    profile: str,
    on: str,
    seeds: Sequence[int] | None,
    kept: arguments.Choices,
    changed: arguments.Choices,
    tell: Callable[[str], None] = lambda line: None,
) -> list[dict[str, str]]:
    """Return the rows of `table` of all artefacts.

    Args:
        named: Papers with some of their artefacts.
        profile: One of `PROFILES`.
        on: A device of `DEVICES`, by whose data sheet times are estimated.
        seeds: Instead of the profile's.
        kept: What `arguments.only` keeps of a plan.
        changed: What `arguments.changed_runs` changes in it.
        tell: Called with each artefact's name before it is built.

    Raises:
        UsageError: The profile, the device or a choice is none.
    """
    if profile not in PROFILES:
        raise UsageError(
            f"--rehearse builds what a GPU would run, and the profile is {profile}; "
            f"add --profile {' or '.join(PROFILES)}"
        )
    if on not in DEVICES:
        raise UsageError(f"--on is {on!r}; choose {', '.join(DEVICES)}")
    listed: list[dict[str, str]] = []
    count = len(seeds or SEEDS[profile])
    for paper, artefacts in named:
        # The papers' own data, at hand or not.
        chosen = {task: next(iter(names), "") for task, names in paper.datasets[profile].items()}
        # Choices are of the whole plan: an artefact may lack the key, as where all is computed.
        planned = arguments.plan(paper, artefacts, profile, chosen)
        varied = arguments.changed_runs(paper, planned, changed)
        wanted = set(arguments.only(list(varied.values()), kept))
        for artefact in artefacts:
            tell(f"{paper.key}/{artefact.name}")
            runs = [varied[run] for run in artefact.runs(profile, chosen)]
            runs = [run for run in dict.fromkeys(runs) if run in wanted]
            listed += table(paper, artefact, runs, count, DEVICES[on])
    return listed


def table(
    paper: Paper, artefact: Artefact, runs: Sequence[Run], seeds: int, device: Device
) -> list[dict[str, str]]:
    """Return what an artefact's runs come to, a row for each model and size of images.

    Args:
        paper: Of the artefact.
        artefact: Whose runs they are.
        runs: Of one profile.
        seeds: Of a run that names none.
        device: By whose data sheet times are estimated.
    """
    groups: dict[tuple[str, str, float], list[tuple[Rehearsal, int]]] = {}
    others = 0
    for run in runs:
        rehearsal = rehearse(paper, run)
        if rehearsal is None:
            others += 1
            continue
        count = seeds if run.seeds is None else len(run.seeds)
        groups.setdefault((rehearsal.model, rehearsal.data, rehearsal.epochs), []).append(
            (rehearsal, count)
        )
    name = f"{paper.key}/{artefact.name}"
    rows = [
        {
            "artefact": name,
            "runs": str(sum(count for _, count in group)),
            "model": model,
            "data": data,
            "epochs": f"{epochs:g}",
            "peak (GiB)": _range([one.peak_bytes / GIB for one, _ in group]),
            "limit (GiB)": _range([o.limit_bytes / GIB for o, _ in group if o.limit_bytes]) or DASH,
            "fit": _count([o.fits for o, _ in group if o.fits is not None]),
            "as in the paper": _count(
                [o.fits == o.expected for o, _ in group if None not in (o.fits, o.expected)]
            ),
            f"h on {device.name} (ESTIMATED)": _hours(group, device),
        }
        for (model, data, epochs), group in groups.items()
    ]
    if others:
        row = dict.fromkeys(rows[0] if rows else ("artefact", "runs", "model"), DASH)
        rows.append(row | {"artefact": name, "runs": str(others), "model": "solved or measured"})
    return rows


def _hours(group: Sequence[tuple[Rehearsal, int]], device: Device) -> str:
    # What runs out of memory takes no time.
    took = [count * one.seconds(device) for one, count in group if one.fits is not False]
    return f"{sum(took) / 3600:.2g}"


def _count(values: Sequence[bool]) -> str:
    return f"{sum(values)} of {len(values)}" if values else DASH


def _range(values: Sequence[float]) -> str:
    ends = [f"{value:.3g}" for value in (min(values), max(values))] if values else []
    return " to ".join(dict.fromkeys(ends))
