"""What the notebook on θ-adaptive batch sizes tells first."""

import math
from collections.abc import Iterable

from repro.experiments.adaptive import projection, scaling
from repro.experiments.adaptive.breakdown import all_to_all_faster, averaging_ratios
from repro.experiments.adaptive.describing import DATA, choices, in_full, ran
from repro.experiments.adaptive.settings import (
    CIFAR,
    DIV2K,
    PAPER,
    PHANTOM,
    has_learned,
    kept_up,
    trained,
)
from repro.experiments.adaptive.strategies import (
    by_strategy,
    end_gap,
    end_of,
    ends_of,
    fewer_updates,
    papers_updates,
    reported_of,
)
from repro.experiments.design import Results
from repro.experiments.judge import NOT_REPRODUCED, Estimate, NotRun, equivalence, ratio
from repro.experiments.story import Effect, Look, Story

# The artefact that compares the strategies of each task.
COMPARED = {CIFAR: "figure10", DIV2K: "figure4", PHANTOM: "figure5"}
SCALING = {CIFAR: "figure11", DIV2K: "figure7", PHANTOM: "figure8"}


def _called(look: Look, task: str) -> str:
    """Return the data that stand here for a task's, and what they stand for."""
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


def _cannot_tell(look: Look, task: str) -> str:
    """Say why ends of a task's trainings say nothing, nothing where they do."""
    try:
        has_learned(look(COMPARED[task]), task)
    except NotRun as reason:
        return str(reason)
    return ""


def _ended(look: Look, task: str, other: str) -> str:
    """Say where θ-adaptive training and another ended, beside the paper's values."""
    results = look(COMPARED[task])
    gap = end_gap(results, task, "theta", other)
    ends = [end_of(results, task, name).mean for name in ("theta", other)]
    paper, papers_other = (reported_of(task, name).get("value") for name in ("theta", other))
    shown = "%" if task == CIFAR else "dB"
    said = f"; the paper: {paper:.2f} beside {papers_other:.2f} {shown}" if papers_other else ""
    return (
        f"{ran(trained(results, task, 'theta'))} on {_called(look, task)} ends at {ends[0]:.1f} "
        f"beside {ends[1]:.1f} {shown} ({gap}{said})"
    )


def accuracy(look: Look) -> str:
    """Say what growing the batch saves in updates, and what it costs in accuracy."""
    words: dict[str, list[str]] = {"reproduced": [], "undecided": [], NOT_REPRODUCED: []}
    each = []
    for task, name in COMPARED.items():
        ended = _ended(look, task, "best")
        if reason := _cannot_tell(look, task):
            each.append(f"On {_called(look, task)} nothing can be told: {reason}.")
            continue
        gap = end_gap(look(name), task, "theta", "best")
        words[equivalence("", gap, kept_up(task), side=-1)[0]].append(_called(look, task))
        each.append(
            f"{ended} with {saved(look(name), task):.1f} times fewer updates (the paper: "
            f"{papers_saved(task):.1f} times fewer)."
        )
    said = [
        f"{what} on {_listed(words[word])}"
        for word, what in (
            ("reproduced", "certainly keeps up"),
            ("undecided", "may keep up"),
            (NOT_REPRODUCED, "certainly ends lower"),
        )
        if words[word]
    ]
    return (
        f"Beside the best fixed batch, within {kept_up(CIFAR):g} point or {kept_up(DIV2K):.1f} dB, "
        f"θ-adaptive training {_listed(said) if said else 'was not compared'}. {' '.join(each)}"
    )


def rival(look: Look) -> str:
    """Say whether growing the batch beats starting with the large one."""
    ended = {task: _ended(look, task, "linear") for task in COMPARED}
    told = [task for task in COMPARED if not _cannot_tell(look, task)]
    gaps = [end_gap(look(COMPARED[task]), task, "theta", "linear") for task in told]
    ahead = sum(gap.interval()[0] > 0 for gap in gaps)
    behind = sum(gap.interval()[1] <= 0 for gap in gaps)
    if ahead:
        word = "beats" if ahead == len(gaps) else "beats only in part"
    else:
        word = "does not beat" if gaps and behind == len(gaps) else "does not certainly beat"
    listed = " ".join(f"{ended[task]}." for task in told)
    return (
        f"Growing the batch {word} starting with the large one, its rate in proportion (linear "
        f"scaling). {listed}"
    )


def speed(look: Look) -> str:
    """Say what several processes measured, and what was not measured."""
    gaps = {task: _pace(look, task) for task in SCALING}
    speedups = _listed(f"{gap} ({DATA[task]}'s schedule)" for task, gap in gaps.items())
    ways = averaging_ratios(look("figure9"))
    mean = math.exp(math.fsum(gap.mean for gap in ways.values()) / len(ways))
    try:
        all_to_all_faster(look("figure9"))
        why = ""
    except NotRun as reason:
        why = f" ({reason})"
    misses = [
        value / PAPER[task]["speedups"][strategy][1]
        for task in SCALING
        for strategy in projection.SCALED
        for value in projection.predicted(task, strategy)
    ]
    largest = max(value for task in SCALING for _, value in PAPER[task]["speedups"].values())
    return (
        f"Two processes on one machine reach speed-ups of {speedups}. A step with the paper's "
        f"all-to-all takes ×{mean:.2f} the time of one with an allreduce{why}. No cluster was at "
        f"hand for the paper's speed-up of {largest:g}: a SIMULATED one, fitted to two of its "
        f"strategies, predicts the third at ×{min(misses):.2f} to ×{max(misses):.2f} the paper's "
        "value."
    )


def _pace(look: Look, task: str) -> Estimate:
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
    kept = ratio(ends_of(results, CIFAR, "theta"), ends_of(results, CIFAR, "best"))
    paper = PAPER[CIFAR]
    yield Effect.of(
        "accuracy over the best fixed batch's, CIFAR-10",
        paper["theta"]["value"] / paper["best"]["value"],
        kept,
        "STAND-IN",
    )


STORY = Story(
    idea="begin with a small batch; let batch and learning rate grow once θ, the fall of the cost "
    "over the distance that the weights moved, has peaked; average gradients while others are "
    "computed",
    says="A batch that grows from 256 to 2048 images while training keeps the accuracy of a small "
    "one on CIFAR-10 within 1 % (90.79 % beside 91.51 %), and so scales to 256 nodes with a "
    "speed-up of 64.64, where the small batch ends at 3.49.",
    findings=(accuracy, rival, speed),
    figure="figure10",
    look_for="In the lower row the paper's hollow marks stay nearly level from the most updates to "
    "the fewest, but for plain SGD; ours should do so too.",
    setup=setup,
    effects=effects,
)
