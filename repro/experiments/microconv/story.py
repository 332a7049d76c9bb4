"""What the notebook on μ-cuDNN tells first."""

from collections.abc import Iterable
from dataclasses import replace

from repro.experiments import microconv
from repro.experiments.judge import Estimate, NotRun
from repro.experiments.microconv import describing
from repro.experiments.microconv.benchmark import LIMIT_MIB, TORCH, measured_gain
from repro.experiments.microconv.iterations import (
    DIVIDED,
    FREE,
    PLAIN,
    TRIED,
    gain,
    over_undivided,
    published,
    untouched,
    wd_over_wr,
)
from repro.experiments.microconv.settings import ITERATED, PAPER
from repro.experiments.query import Results
from repro.experiments.story import Effect, Look, Story
from repro.records import Record


def gains(results: Results) -> dict[str, Estimate]:
    """Return by network how much faster its iterations are divided, within a limit that binds.

    Raises:
        NotRun: No network was held to one both ways.
    """
    by_network: dict[str, Estimate] = {}
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


def _than(estimate: Estimate) -> str:
    low, high = estimate.interval()
    return "faster" if low > 0 else "slower" if high < 0 else "not certainly faster"


def within_limits(look: Look) -> str:
    """Say for which networks dividing wins over undivided, and what it is of torch's own speed."""
    results = look("iterations")
    by_word: dict[str, list[str]] = {}
    for role, faster in gains(results).items():
        record = results.need("iterations", role=role, rivals=None)
        own = gain(record, PLAIN, DIVIDED)
        by_word.setdefault(_than(faster), []).append(
            f"{faster.label} {faster}, paper ×{published(role):.2f} "
            f"({own.shown(own.mean)} of torch's own speed without a limit)"
        )
    parts = [f"{word.capitalize()}: {'; '.join(networks)}." for word, networks in by_word.items()]
    return (
        "Iterations divided are compared with undivided ones within a limit that binds, where some "
        f"kernels fall back to algorithms of this package. {' '.join(parts)}"
    )


def without_a_limit(look: Look) -> str:
    """Say that nothing is gained without a limit: what `tune` leaves, and what dividing costs."""
    tuned, left = left_to_torch(look("iterations"))
    over_torch = measured_gain(look("figure8"), TORCH)
    _, high = over_torch.interval()
    advice = ": divide for a limit, not for speed" if left == tuned and high < 0 else ""
    return (
        f"Without a limit, tune leaves torch's own convolutions as they are in {len(left)} of "
        f"{len(tuned)} networks. DeepBench's layers divided within {LIMIT_MIB} MiB "
        f"({over_torch.label}) have {over_torch} of the speed of torch's own{advice}."
    )


def one_workspace(look: Look) -> str:
    """Say what sharing one workspace out (WD) gains over a limit for each kernel, both divided."""
    (faster,) = wd_over_wr(look("iterations")).values()
    if not isinstance(faster, Estimate):
        raise NotRun(str(faster))
    return (
        f"One workspace shared out among all kernels (WD) is {_than(faster)} than a limit for each "
        f"(WR): {faster.label} {faster}. {faster.note}."
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
    faster = sum(gained.interval()[0] > 0 for gained in ran.values())
    yield Effect.of(
        "speed-up of an AlexNet iteration over undivided within a limit that binds, which leaves "
        f"kernels to algorithms of ours ({faster} of {len(ran)} networks gain)",
        published("AlexNet"),
        over_undivided(results, "AlexNet"),
    )
    over_torch = measured_gain(look("figure8"), TORCH)
    yield Effect.of(
        f"time of layers divided within {LIMIT_MIB} MiB over torch's own without a limit",
        None,
        replace(over_torch, mean=-over_torch.mean),
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
    findings=(within_limits, without_a_limit, one_workspace),
    figure="iterations",
    look_for="On the left, dots right of 1 are networks that run faster divided than undivided "
    "within the same limit. On the right, divided ones (squares) come back to torch's own time "
    "(1), and undivided ones (diamonds) often do not.",
    setup=setup,
    effects=effects,
)
