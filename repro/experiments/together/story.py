"""What the notebook on all five tells first: our question, what we found, what we had predicted."""

import statistics
from collections.abc import Iterable
from dataclasses import replace

from repro.experiments.design import claims_of
from repro.experiments.judge import Estimate, NotRun
from repro.experiments.query import Results
from repro.experiments.story import Effect, Look, Story
from repro.experiments.together import accuracy, advice, limit
from repro.experiments.together.settings import (
    LIMIT,
    PACE,
    RESNET,
    STRATEGIES,
    TRAIN,
    is_simulated,
    points,
)
from repro.experiments.view import devices


def predicted(artefact: str, key: str) -> float:
    """Return the size that was predicted of a question before there were records."""
    effect = claims_of("together")[artefact][key].effect
    assert isinstance(effect, int | float)
    return effect


def fits(look: Look) -> str:
    """Say which methods train the largest mini-batches, and on how many networks."""
    results = look("limit")
    last = max(limit.multiples(results), default=0)
    ends = {
        way: limit.reached(results, mode)
        for way, mode in {
            "MBS": "mbs",
            "plain accumulation": "accumulation",
            "out-of-core training": "outofcore",
            "save_on_cpu": "save_on_cpu",
            "checkpointing": "checkpointing",
        }.items()
    }
    counted = ", ".join(
        f"{way} on {sum(times == last for times in by_network.values())} of {len(by_network)}"
        for way, by_network in ends.items()
    )
    simulated = " (SIMULATED)" * is_simulated(results)
    return (
        f"Under one memory limit{simulated}, mini-batches {last} times as large as the "
        f"largest that fits undivided train with {counted} networks."
    )


def speed(look: Look) -> str:
    """Say whether streaming is faster than swapping, which we had predicted."""
    found = limit.streaming_over_swapping(look("limit"))
    gaps = {case.label: case for case in found.values() if isinstance(case, Estimate)}
    if not gaps:
        raise NotRun("no mini-batch beyond the largest that fits that both train")
    ends = sorted(gaps, key=lambda name: gaps[name].mean)
    speeds = " to ".join(f"{gaps[name]} ({name})" for name in dict.fromkeys((ends[0], ends[-1])))
    return (
        f"MBS trains {speeds} as many images a second as out-of-core training; we had predicted "
        f"×{predicted('limit', 'streaming_over_swapping'):.2f}."
    )


def advised(look: Look) -> str:
    """Say how often the advice is right."""
    results = look("advice")
    right, near = (exact.text for exact in (advice.right(results), advice.near(results)))
    return f"The command advise predicts which mini-batches fit: {right}; and the time: {near}."


def combined(look: Look) -> str:
    """Say how much is learned, and whether a combination learns more."""
    results = look("accuracy")
    best = accuracy.best_alone(results)
    combinations = {
        case.label: case
        for case in accuracy.together_wins(results).values()
        if isinstance(case, Estimate)
    }
    if not combinations:
        raise NotRun("no combination to compare")
    first = max(combinations, key=lambda name: combinations[name].mean)
    ends = statistics.fmean(accuracy.cell(results, best, "test"))
    record = accuracy.trained(results, best)[0]
    verdict = accuracy.ACCURACY.judge(claims_of("together")["accuracy"]["together_wins"], results)
    updates = accuracy.over(results, "theta_mbs", "fixed", "updates")
    return (
        f"{accuracy.network_of(record)} ends at {ends:.1f} % with the best method alone "
        f"({STRATEGIES[best]}, {record.config['epochs']} epochs). That a combination ends higher: "
        f"{verdict.word} (“{first}” {combinations[first]}). θ-adaptive growth that streams makes "
        f"{updates} of the updates (predicted ×"
        f"{predicted('accuracy', 'fewer_updates'):.2f})."
    )


def _width(results: Results) -> int:
    width: int = results.need(LIMIT, network=RESNET).config["model"]["width"]
    return width


def setup(look: Look) -> Iterable[str]:
    """Yield what the captions of both parts share."""
    measured = look("limit")
    if measured.select(LIMIT):
        config = measured.select(LIMIT)[0].config
        if is_simulated(measured):
            yield (
                f"Part 1: the limit is SIMULATED, halfway between the memory of {config['fits']} "
                "samples undivided and of one more, on live tensors. Host memory, kernels' "
                "workspace and the mini-batch itself do not count. Copies to the host go at the "
                "speed of this machine's memory; over a link swapping would take longer."
            )
        yield (
            f"Part 1: networks are small ({RESNET} of {_width(measured)} channels), weights and "
            "data random (SYNTHETIC). A micro-batch is the largest tried that fits; MBS inside "
            "out-of-core takes at most twice the mini-batch that fits undivided."
        )
    trained = look("accuracy")
    if (record := trained.first(TRAIN)) is not None:
        config = record.config
        rates = ", ".join(f"{rate:g}" for rate in accuracy.searched(trained))
        yield (
            f"Part 2: {config['train_samples']:,} images train, {config['held_out']:,} held-out "
            f"ones choose rates (of {rates}), {config['test_samples']:,} test, at "
            f"{config['sides'][-1]}×{config['sides'][-1]} pixels; {config['epochs']} epochs. "
            "Order, shifts and mirroring are the same for all. No seed that chose a rate judges "
            "it; a method at the lowest or highest rate is untuned, and not compared."
        )
        yield (
            f"Part 2: a device takes {config['memory']} images; the parallel machine is SIMULATED, "
            f"{config['devices']} devices that take {config['step_images']:g} times as long for a "
            "pass as for an image, without communication. Updates of dual-batch learning are its "
            "workers', each on a copy."
        )
    if (paced := trained.first(PACE)) is not None:
        yield (
            "Part 2: seconds are images and passes at their measured pace, without evaluation "
            f"({devices([paced])})."
        )


def effects(look: Look) -> Iterable[Effect]:
    """Yield what growth saves together with streaming, and what streaming costs when it swaps."""
    yield Effect.of(
        "updates, θ-adaptive + MBS over a fixed small batch",
        None,
        accuracy.over(look("accuracy"), "theta_mbs", "fixed", "updates"),
        less=True,
    )
    measured = look("limit")
    swapped = points(measured, RESNET, "mbs_in_outofcore")
    if (point := limit.largest(swapped)) is not None:
        kept = limit.speed(point)
        yield Effect.of(
            f"time of an image, MBS in out-of-core over undivided, {RESNET}",
            None,
            replace(kept, mean=-kept.mean),
            "SIMULATED" * is_simulated(measured),
            less=True,
        )


STORY = Story(
    idea="all five side by side: one memory limit, one budget of samples, and their combinations",
    says="Which of the five bounds memory, at what speed, and which learns more from one budget of "
    "samples, alone or combined? Before there were records we predicted: MBS is "
    f"{predicted('limit', 'streaming_over_swapping'):g} times as fast as out-of-core training, "
    f"checkpointing keeps {predicted('limit', 'recomputing_costs'):g} of the undivided speed, "
    f"growth makes {predicted('accuracy', 'fewer_updates'):g} of the updates, cyclic resolution "
    f"takes {predicted('accuracy', 'cycling_saves'):g} of the time.",
    findings=(fits, speed, advised, combined),
    figure="limit",
    look_for="A row is a method, a panel a network. Darker marks are larger mini-batches, a "
    "red cross is one that does not fit, and right of the dashed line is faster than undivided. "
    "Look for rows without a cross, and for how much speed they keep.",
    setup=setup,
    effects=effects,
    asks="What we asked",
)
