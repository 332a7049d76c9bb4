"""What the notebook on all five tells first: our question, what we found, what we had predicted."""

from collections.abc import Iterable

from repro.experiments.captions import devices
from repro.experiments.design import expectation
from repro.experiments.intervals import NotRun
from repro.experiments.story import Effect, Look, Story
from repro.experiments.together import accuracy, limit
from repro.experiments.together.settings import (
    LIMIT,
    PACE,
    PREDICTED,
    RESNET,
    TRAIN,
    is_simulated,
    points,
)


def fits(look: Look) -> str:
    """Say which ways train mini-batches far beyond what fits, and on how many networks."""
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
        f"Under one memory limit{simulated}, mini-batches {last} times as large as what fits "
        f"undivided train by {counted} networks."
    )


def speed(look: Look) -> str:
    """Say whether streaming is faster than swapping, which we had predicted."""
    gaps = limit.over_swapping(look("limit"))
    if not gaps:
        raise NotRun("no mini-batch beyond what fits that both train")
    ends = sorted(gaps, key=lambda name: gaps[name].mean)
    speeds = " to ".join(f"{gaps[name]} ({name})" for name in dict.fromkeys((ends[0], ends[-1])))
    return (
        f"MBS trains {speeds} as many images a second as out-of-core training; we had predicted "
        f"×{PREDICTED['streaming_over_swapping']:.2f}."
    )


def combined(look: Look) -> str:
    """Say what a growing batch that streams saves, and whether a combination learns more."""
    results = look("accuracy")
    best, rival, gap = accuracy.best_combination(results)
    expected = expectation("together", "accuracy", "together_wins")
    verdict = accuracy.ACCURACY.judge(accuracy.together_wins, results, expected)
    return (
        f"A θ-adaptive batch that streams makes {accuracy.updates_over_fixed(results)} of the "
        f"updates of a fixed small batch (predicted ×{PREDICTED['updates_over_fixed']:.2f}). That "
        f"a combination learns more than every method alone is {verdict.word}: “{best}” less "
        f"“{rival}” {gap.text(1 - 0.05 / accuracy.CANDIDATES)}."
    )


def setup(look: Look) -> Iterable[str]:
    """Yield what the captions of both parts share."""
    measured = look("limit")
    if measured.select(LIMIT):
        config = measured.select(LIMIT)[0].config
        if is_simulated(measured):
            yield (
                f"Part 1: the limit is SIMULATED, halfway between what {config['fits']} samples "
                "need undivided and one more, on live tensors. Host memory, kernels' workspace and "
                "the mini-batch itself do not count. Copies to the host go at the speed of this "
                "machine's memory; over a link swapping would take longer."
            )
        yield (
            "Part 1: networks are small, weights and data random (SYNTHETIC). A micro-batch is the "
            "largest tried that fits; MBS inside out-of-core takes at most twice what fits "
            "undivided."
        )
    trained = look("accuracy")
    if (record := trained.first(TRAIN)) is not None:
        config = record.config
        rates = ", ".join(f"{rate:g}" for rate in accuracy.searched(trained))
        yield (
            f"Part 2: {config['train_samples']:,} images train, {config['held_out']:,} held-out "
            f"ones choose rates (of {rates}), {config['test_samples']:,} test, at "
            f"{config['sides'][-1]}×{config['sides'][-1]} pixels; {config['epochs']} epochs. "
            "Order, shifts and mirroring are the same for all."
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
        accuracy.updates_over_fixed(look("accuracy")),
        less=True,
    )
    measured = look("limit")
    swapped = points(measured, RESNET, "mbs_in_outofcore")
    if (point := limit.largest(swapped)) is not None:
        yield Effect.of(
            f"time of an image, MBS in out-of-core over undivided, {RESNET}",
            None,
            limit.slowdown(point),
            "SIMULATED" * is_simulated(measured),
            less=True,
        )


STORY = Story(
    idea="all five side by side: one memory limit, one budget of samples, and their combinations",
    says="Which of the five bounds memory, at what speed, and which learns more from one budget of "
    "samples, alone or combined? Before there were records we predicted: MBS is "
    f"{PREDICTED['streaming_over_swapping']:g} times as fast as out-of-core training, "
    f"checkpointing keeps {PREDICTED['recomputing_speed']:g} of the undivided speed, growth makes "
    f"{PREDICTED['updates_over_fixed']:g} of the updates, cyclic resolution takes "
    f"{PREDICTED['cycled_time']:g} of the time.",
    promises=(
        ("what divides the mini-batch always fits", "limit.dividing_always_fits"),
        ("the advice foretells what fits", "advice.fits"),
        ("the advice foretells the time within 15 %", "advice.time"),
        ("a combination beats each method alone", "accuracy.together_wins"),
    ),
    findings=(fits, speed, combined),
    figure="limit",
    look_for="A row is a way to train, a panel a network. Darker marks are larger mini-batches, a "
    "red cross is one that does not fit, and right of the dashed line is faster than undivided. "
    "Look for rows without a cross, and for how much speed they keep.",
    setup=setup,
    effects=effects,
    asks="What we asked",
)
