"""What the notebook on out-of-core training tells first."""

import math
from collections.abc import Iterable

from repro.experiments.judge import Estimate, NotRun
from repro.experiments.outofcore import PAPER as ARTEFACTS
from repro.experiments.outofcore import schedules, settings
from repro.experiments.outofcore.panels import kept
from repro.experiments.outofcore.points import (
    in_core_batch,
    largest,
    on_cpu,
    place,
    point_at,
    points,
    ran,
    reach_over,
    slowdown,
    speed,
)
from repro.experiments.outofcore.published import (
    CLAIMS,
    IN_CORE_BATCH,
    LARGEST_BATCH,
    LMS_BATCH,
    over_lms,
    published,
)
from repro.experiments.outofcore.settings import (
    CHUNKS,
    IN_CORE,
    MEASURED,
    RESNET,
    SCHEDULE,
    SIMULATED,
    departures,
)
from repro.experiments.query import Results
from repro.experiments.story import Effect, Look, Story

LIMIT = settings.PAPER["limit_gib"]


def slower(results: Results, where: str) -> tuple[int, Estimate]:
    """Return the paper's largest batch size here, and its time of an image over that in core.

    Raises:
        NotRun: No records, or it ran out of memory.
    """
    size, point = point_at(results, where, LARGEST_BATCH, CHUNKS)
    if point is None:
        raise NotRun(f"{size} images ran out of memory")
    return size, slowdown(results, where, RESNET, point)


def on_a_gpu(look: Look) -> str:
    """Say how far and how fast a GPU trained, beside the paper's speed at that batch size.

    Raises:
        NotRun: No GPU did.
    """
    results = look("table1")
    where = place(results, MEASURED, RESNET)
    fits = in_core_batch(results, MEASURED, RESNET)
    ours = points(results, MEASURED, RESNET, CHUNKS)
    size = largest(ours)
    if on_cpu(results, RESNET) or fits is None or size is None or (point := ours[size]) is None:
        raise NotRun("no GPU's records")
    rates, core = published(CHUNKS), max(published(IN_CORE).values())
    paper = f"; the paper keeps {rates[size] / core:.0%}" if size in rates else ""
    found = kept(results, MEASURED, RESNET, point)
    if found is None:
        raise NotRun("no speed in core")
    share, interval = found
    spread = " [{:.0%}, {:.0%}]".format(*interval) if interval else ""
    return (
        f"{where[0].upper()}{where[1:]}, within {LIMIT} GiB (SIMULATED limit): {fits} images fit "
        f"in core; with chunks {size:,} have trained so far, at {point.images_per_s:,.0f} "
        f"images/s, {share:.0%}{spread} of the speed in core{paper}."
    )


def cost(look: Look) -> str:
    """Say how much longer an image takes beyond the core, and what no schedule beats."""
    results = look("table1")
    size, gap = slower(results, SIMULATED)
    best = points(results, SIMULATED, RESNET, "bound").get(size)
    if best is None:
        raise NotRun("no records of what no schedule beats")
    sentence = (
        f"At {size:,} images an image takes {gap} as long as in core (SIMULATED V100), the "
        f"paper's ×{1 / CLAIMS['speed_kept']:.2f}; at the link's rate no schedule of our traces "
        f"takes less than {slowdown(results, SIMULATED, RESNET, best)}."
    )
    try:
        batch, measured = slower(results, MEASURED)
    except NotRun:
        return sentence
    configs = [record.config for record in results.select(MEASURED, role=RESNET)]
    return f"{sentence} Measured ({departures(configs)}), it is {measured} at {batch:,} images."


def against_lms(look: Look) -> str:
    """Say how fast the method trains beside LMS."""
    results = look("table1")
    _, alone = point_at(results, SIMULATED, LMS_BATCH, SCHEDULE)
    _, chunks = point_at(results, SIMULATED, LARGEST_BATCH, CHUNKS)
    _, lms = point_at(results, SIMULATED, LMS_BATCH, "lms")
    if alone is None or chunks is None or lms is None:
        raise NotRun("one of them trains no such batch size")
    alone_over, chunks_over = (
        speed(results, SIMULATED, RESNET, point, lms) for point in (alone, chunks)
    )
    return (
        f"At {LMS_BATCH} images the schedule alone is {alone_over} as fast as LMS at its best "
        f"distances (SIMULATED V100, paper ×{over_lms(SCHEDULE, LMS_BATCH, LMS_BATCH):.2f}); at "
        f"{LARGEST_BATCH:,} images it is, with chunks, {chunks_over} as fast as LMS at {LMS_BATCH} "
        f"(paper ×{over_lms(CHUNKS, LARGEST_BATCH, LMS_BATCH):.2f})."
    )


def as_run(look: Look) -> str:
    """Say how fast the paper's schedule is beside others where they run."""
    results = look("schedules")
    gaps = [schedules.faster(results, settings.LITERAL, name) for name in OTHERS]
    if not all(isinstance(gap, Estimate) for gap in gaps):
        raise NotRun("the schedule ran out of memory")
    lms, vdnn, on_demand = gaps
    network = ran(results, settings.BY_SCHEDULE, RESNET)
    configs = [record.config for record in results.ok(settings.BY_SCHEDULE)]
    return (
        f"Measured, {network} ({departures(configs)}): the paper's schedule has {lms} of the speed "
        f"of LMS at its best distances (paper ×{over_lms(SCHEDULE, LMS_BATCH, LMS_BATCH):.2f}), "
        f"{vdnn} of vDNN's and {on_demand} of that on demand."
    )


OTHERS = (settings.LMS, settings.VDNN, settings.ON_DEMAND)


def setup(look: Look) -> Iterable[str]:
    """Yield what is simulated and how, the networks that ran, limits, the host's memory."""
    records = {
        record.identity: record for name in ARTEFACTS.artefacts for record in look(name).records
    }
    return settings.setup(list(records.values()))


def effects(look: Look) -> Iterable[Effect]:
    """Yield how many times the batch size in core trains, and what an image then takes.

    As a GPU measured it where one did, else simulated.
    """
    results = look("table1")
    ours = points(results, MEASURED, RESNET, CHUNKS)
    size, fits = largest(ours), in_core_batch(results, MEASURED, RESNET)
    if not on_cpu(results, RESNET) and size is not None and fits and (point := ours[size]):
        tried = "largest batch size tried over the largest in core"
        yield Effect(tried, LARGEST_BATCH / IN_CORE_BATCH, size / fits)
        core, rates = max(published(IN_CORE).values()), published(CHUNKS)
        paper = core / rates[size] if size in rates else None
        label = f"time of an image in a batch of {size:,} over the largest in core"
        longer = slowdown(results, MEASURED, RESNET, point)
        yield Effect.of(label, paper, longer, less=True)
        return
    *_, gap = reach_over(results, SIMULATED, RESNET, (CHUNKS, IN_CORE))
    label = "largest batch size over the largest in core"
    yield Effect(label, LARGEST_BATCH / IN_CORE_BATCH, math.exp(gap.mean), None, "SIMULATED")
    size, longer = slower(results, SIMULATED)
    label = f"time of an image in a batch of {size:,} over the largest in core"
    yield Effect(label, 1 / CLAIMS["speed_kept"], math.exp(longer.mean), None, "SIMULATED", True)


STORY = Story(
    idea="copy tensors that are not needed now to the host's memory, and back in time; build the "
    "device's memory of pieces, so that gaps between tensors are not lost",
    says="Swapped by a window of bytes, with memory in chunks behind virtual addresses, a "
    f"ResNet-50 trains with a batch size of {LARGEST_BATCH}, "
    f"{CLAIMS['largest_over_in_core']:g} times the largest in {LIMIT} GB, at "
    f"{100 * CLAIMS['speed_kept']:g} % of the speed, and a {CLAIMS['over_lms']:g} times larger "
    "network than the state of the art (LMS), faster.",
    findings=(on_a_gpu, cost, against_lms, as_run),
    figure="table1",
    look_for="Ours should lie on the paper's hollow marks and reach as far to the right. In the "
    "shaded area no schedule of our traces can be: its copies take longer at the link's rate.",
    setup=setup,
    effects=effects,
)
