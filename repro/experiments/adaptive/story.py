"""What the notebook on θ-adaptive batch sizes tells first."""

import math
from collections.abc import Iterable

from repro.experiments.adaptive import projection, scaling
from repro.experiments.adaptive.breakdown import averaging_ratios
from repro.experiments.adaptive.describing import DATA, choices, in_full
from repro.experiments.adaptive.settings import (
    CIFAR,
    DIV2K,
    PAPER,
    PHANTOM,
    final,
    kept_up,
    trained,
    unit,
)
from repro.experiments.adaptive.strategies import (
    by_strategy,
    end_gap,
    fewer_updates,
    paper_gap,
    papers_updates,
)
from repro.experiments.design import Results
from repro.experiments.intervals import Gap, NotRun, Spread, ratio
from repro.experiments.story import Effect, Look, Story

# The artefact that compares the strategies of each task.
COMPARED = {CIFAR: "figure10", DIV2K: "figure4", PHANTOM: "figure5"}
SCALING = {CIFAR: "figure11", DIV2K: "figure7", PHANTOM: "figure8"}


def _called(look: Look, task: str) -> str:
    """Return the data that stand here for a task's, with whose place they take."""
    record = trained(look(COMPARED[task]), task, "theta")[0]
    name = (record.dataset or {})["name"]
    paper = DATA[task]
    return name if name.startswith(paper.lower().replace("-", "")) else f"{name} (for {paper})"


def saved(results: Results, task: str) -> float:
    """Return how many times fewer updates θ-adaptive training makes than the best fixed batch.

    Raises:
        NotRun: There are no trainings of one of them.
    """
    trainings = by_strategy(results, task)
    if not trainings.get("best") or not trainings.get("theta"):
        raise NotRun("no records")
    return fewer_updates(trainings["best"], trainings["theta"])


def papers_saved(task: str) -> float:
    """Return the same by the paper's schedules."""
    return papers_updates(task, "best") / papers_updates(task, "theta")


def _listed(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def accuracy(look: Look) -> str:
    """Say what growing the batch saves in updates, and what it costs in accuracy."""
    gaps = {task: end_gap(look(name), task, "theta", "best") for task, name in COMPARED.items()}
    updates = {task: saved(look(name), task) for task, name in COMPARED.items()}
    each = " ".join(
        f"On {_called(look, task)} {gap.text()}, with {updates[task]:.1f} times fewer updates (the "
        f"paper: {paper_gap(task, 'theta', 'best') or 0.0:+.2f}, "
        f"{papers_saved(task):.1f} times fewer)."
        for task, gap in gaps.items()
    )
    lower = sum(gap.interval()[1] < 0 for gap in gaps.values())
    kept = sum(gap.interval()[0] >= -kept_up(task) for task, gap in gaps.items())
    return (
        f"On {kept} of {len(gaps)} tasks θ-adaptive training certainly ends within the paper's "
        f"margin ({kept_up(CIFAR):g} point, {kept_up(DIV2K):.1f} dB) of the best fixed batch; on "
        f"{lower} it certainly ends below. {each}"
    )


def rival(look: Look) -> str:
    """Say whether growing the batch beats starting with the large one."""
    gaps = {task: end_gap(look(name), task, "theta", "linear") for task, name in COMPARED.items()}
    listed = _listed(f"{gap.text()} on {_called(look, task)}" for task, gap in gaps.items())
    papers = {task: paper_gap(task, "theta", "linear") for task in COMPARED}
    lead = _listed(
        f"{value:+.2f} {unit(task)} on {DATA[task]}"
        for task, value in papers.items()
        if value is not None
    )
    ahead = [task for task, gap in gaps.items() if gap.interval()[0] > 0]
    behind = [task for task, gap in gaps.items() if gap.interval()[1] <= 0]
    if ahead:
        word = "beats" if len(ahead) == len(gaps) else "beats only in part"
    else:
        word = "does not beat" if len(behind) == len(gaps) else "does not certainly beat"
    return (
        f"Growing the batch {word} starting with the large one: θ-adaptive training ends {listed} "
        f"from linear scaling (the paper: {lead})."
    )


def speed(look: Look) -> str:
    """Say what several processes measured, and what was not measured."""
    gaps = {task: _pace(look, task) for task in SCALING}
    speedups = _listed(f"{gap} ({DATA[task]}'s schedule)" for task, gap in gaps.items())
    ways = averaging_ratios(look("figure9"))
    mean = math.exp(math.fsum(gap.mean for gap in ways.values()) / len(ways))
    misses = [
        value / PAPER[task]["speedups"][strategy][1]
        for task in SCALING
        for strategy in projection.SCALED
        for value in projection.predicted(task, strategy)
    ]
    largest = max(value for task in SCALING for _, value in PAPER[task]["speedups"].values())
    return (
        f"Two processes on one machine reach speed-ups of {speedups}, and a step with the paper's "
        f"all-to-all takes ×{mean:.2f} the time of one with an allreduce. No cluster was at hand "
        f"for the paper's speed-up of {largest:g}: a SIMULATED one, fitted to two of its "
        f"strategies, foretells the third at ×{min(misses):.2f} to ×{max(misses):.2f} the paper's "
        "value."
    )


def _pace(look: Look, task: str) -> Gap:
    return scaling.pace(scaling.measured_of(look(SCALING[task]), task), task, "theta")


def setup(look: Look) -> Iterable[str]:
    """Yield networks, data, extents, what was chosen, and what is simulated."""
    every = [look(name) for name in COMPARED.values()]
    for results in every:
        yield from in_full(results)
    chosen = dict.fromkeys(said for results in every for said in choices(results))
    if chosen:
        yield f"Where the paper is silent. {' '.join(chosen)}"
    yield from scaling.steps_in_full(look("figure7"))


def effects(look: Look) -> Iterable[Effect]:
    """Yield how many updates θ-adaptive training saves, and what accuracy it keeps."""
    results = look(COMPARED[CIFAR])
    label = "updates of the best fixed batch over θ-adaptive's, CIFAR-10"
    yield Effect(label, papers_saved(CIFAR), saved(results, CIFAR), None, "STAND-IN")
    ends = {
        name: final(records, "accuracy") for name, records in by_strategy(results, CIFAR).items()
    }
    kept = ratio(ends["theta"], ends["best"], Spread.pooled_logs(ends.values()))
    paper = PAPER[CIFAR]
    yield Effect.of(
        "accuracy over the best fixed batch's, CIFAR-10",
        paper["theta"]["value"] / paper["best"]["value"],
        kept,
        "STAND-IN",
    )


_NODES, _SPEEDUP = PAPER[CIFAR]["speedups"]["theta"]

STORY = Story(
    idea="begin with a small batch; let batch and learning rate grow once θ, the fall of the cost "
    "over the distance that the weights moved, has peaked; average gradients while others are "
    "computed",
    says="A batch that grows from 256 to 2048 images while training keeps the accuracy of a small "
    "one on CIFAR-10 within 1 % (90.79 % beside 91.51 %), and so scales to 256 nodes with a "
    "speed-up of 64.64, where the small batch ends at 3.49.",
    promises=(
        ("a growing batch is as accurate as a small one (CIFAR-10)", "figure10.theta_keeps_up"),
        ("it is so in super-resolution (DIV2K)", "figure4.theta_keeps_up"),
        ("growing the rate along beats growing the batch alone", "figure10.scheduled_below_theta"),
        (f"a speed-up of {_SPEEDUP} on {_NODES} nodes", "figure11.theta_speedup"),
    ),
    findings=(accuracy, rival, speed),
    figure="figure10",
    look_for="In the lower row the paper's hollow marks stay nearly level from the most updates to "
    "the fewest, but for plain SGD; ours should do so too.",
    setup=setup,
    effects=effects,
)
