"""What the notebook on μ-cuDNN tells first."""

from collections.abc import Iterable
from dataclasses import replace

from repro.experiments import microconv
from repro.experiments.design import Results
from repro.experiments.intervals import Gap, NotRun
from repro.experiments.microconv import describing
from repro.experiments.microconv.benchmark import LIMIT_MIB, TORCH, measured_gain
from repro.experiments.microconv.describing import stands_in
from repro.experiments.microconv.iterations import FREE, TRIED, over_undivided, published, untouched
from repro.experiments.microconv.settings import CAFFE, ITERATED, LIMITS_MIB, PAPER, told_limit
from repro.experiments.microconv.shared_workspace import wd_gain
from repro.experiments.story import Effect, Look, Story
from repro.records import Record

SMALL = LIMITS_MIB[0]


def gains(results: Results) -> dict[str, Gap]:
    """Return by network how much faster its iterations are divided, within a limit that binds.

    Raises:
        NotRun: No network was held to one both ways.
    """
    by_network: dict[str, Gap] = {}
    for role in ITERATED:
        try:
            by_network[role] = over_undivided(results, role)
        except NotRun:
            continue
    if not by_network:
        raise NotRun("no network was held to a limit that binds")
    return by_network


def left_to_torch(results: Results) -> tuple[list[str], list[str]]:
    """Return the networks tuned without a limit, and those that `tune` left to torch.

    Raises:
        NotRun: None was tuned so.
    """
    found = (results.first("iterations", role=role, rivals=None) for role in TRIED)
    records = [record for record in found if record]
    tuned = [record for record in records if FREE in record.metrics["forms"]]
    if not tuned:
        raise NotRun("no network was tuned without a limit")
    left = [record.config["role"] for record in tuned if untouched(record, FREE)]
    return [record.config["role"] for record in tuned], left


def within_limits(look: Look) -> str:
    """Say for which networks dividing wins within a limit that binds, and for which it does not."""
    results = look("iterations")
    by_word: dict[str, list[str]] = {}
    for role, gap in gains(results).items():
        low, high = gap.interval()
        word = "faster" if low > 0 else "slower" if high < 0 else "not certainly faster"
        mark = " (STAND-IN)" * stands_in(results.need("iterations", role=role, rivals=None))
        name = "AlexNet with two groups" if role == CAFFE else role
        by_word.setdefault(word, []).append(f"{name}{mark} {gap}, paper ×{published(role):.2f}")
    parts = [f"{word}: {'; '.join(networks)}" for word, networks in by_word.items()]
    return f"Divided, iterations within limits that bind are {'. They are '.join(parts)}."


def without_a_limit(look: Look) -> str:
    """Say that nothing is gained without a limit: what `tune` leaves, and what dividing costs."""
    tuned, left = left_to_torch(look("iterations"))
    gap, layers, _ = measured_gain(look("figure8"), TORCH)
    _, high = gap.interval()
    advice = ": divide for a limit, not for speed" if left == tuned and high < 0 else ""
    return (
        f"Without a limit, tune leaves torch's own convolutions as they are in {len(left)} of "
        f"{len(tuned)} networks, and {len(layers)} of DeepBench's layers divided within "
        f"{LIMIT_MIB} MiB have {gap} of the speed of torch's own{advice}."
    )


def one_workspace(look: Look) -> str:
    """Say what sharing one workspace out (WD) gains over a limit for each kernel."""
    results = look("figure11")
    _, _, comparison = wd_gain(results, "AlexNet", SMALL, SMALL)
    if comparison.unfit:
        raise NotRun("; ".join(comparison.unfit))
    paper = PAPER["figure11"]["alexnet_120"][1]
    total, each = (told_limit(results.profile, "AlexNet", mode, SMALL) for mode in ("WD", "WR"))
    low, high = comparison.gap.interval()
    verdict = "is faster" if low > 0 else "is slower" if high < 0 else "is not certainly faster"
    return (
        f"One workspace of {total} shared out among AlexNet's kernels (WD) {verdict} than {each} "
        f"for each, undivided: {comparison.gap}; the paper has ×{paper:.2f}."
    )


def setup(look: Look) -> Iterable[str]:
    """Yield networks and what they stand in for, algorithms, what limits hold and compare."""
    records: dict[str, Record] = {}
    for name in microconv.PAPER.artefacts:
        records |= {record.identity: record for record in look(name).records}
    return describing.setup(records.values())


def effects(look: Look) -> Iterable[Effect]:
    """Yield what dividing gives within a limit, and what it costs where there need be none."""
    results = look("iterations")
    ran = gains(results)
    faster = sum(gap.interval()[0] > 0 for gap in ran.values())
    yield Effect.of(
        f"speed-up of an AlexNet iteration within a limit that binds ({faster} of {len(ran)} "
        "networks gain)",
        published("AlexNet"),
        over_undivided(results, "AlexNet"),
    )
    gap, _, _ = measured_gain(look("figure8"), TORCH)
    yield Effect.of(
        f"time of layers divided within {LIMIT_MIB} MiB over torch's own without a limit",
        None,
        replace(gap, mean=-gap.mean),
        less=True,
    )


_P100 = PAPER["figure9"]["speedup_64"]["P100"]

STORY = Story(
    idea="divide the mini-batch of each convolution by itself, so that a faster algorithm fits "
    "into the scratch memory (workspace) that it may take",
    says="Divided into micro-batches, each convolution fits faster algorithms into the same "
    f"workspace and computes the same result: convolutions of AlexNet run {_P100[1]:.2f} times as "
    f"fast, iterations of ResNet-18 {PAPER['abstract']['resnet18']:.2f} times, layers of DeepBench "
    f"{PAPER['figure8']['mean']:.2f} times on average and at most "
    f"{PAPER['figure8']['largest']:.2f} times.",
    promises=(
        ("every network is faster within a memory limit", "iterations.divided_faster"),
        (
            "3×3 convolutions (three layers) are faster than undivided there",
            "figure8.three_by_three",
        ),
        ("the loss does not change", "iterations.same_loss"),
    ),
    findings=(within_limits, without_a_limit, one_workspace),
    figure="iterations",
    look_for="On the left, dots right of 1 are networks that run faster divided than undivided "
    "within the same limit. On the right, divided ones (squares) come back to torch's own time "
    "(1), and undivided ones (diamonds) often do not.",
    setup=setup,
    effects=effects,
)
