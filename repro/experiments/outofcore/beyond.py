"""How far beyond the device's memory does ResNet-50 train, and at what speed? (Table 1)

Against training in core, against LMS (Le et al. 2019), and with and without chunks; simulated also
at our best, by packed plans with chunks of sizes that variables have.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, exactly, unsure
from repro.experiments.outofcore.drawing import figure
from repro.experiments.outofcore.points import (
    NO_LINK,
    batches,
    end_is_open,
    has_link,
    in_core_batch,
    larger,
    largest_trained,
    need_real_allocators,
    on_cpu,
    place,
    point_at,
    points,
    ran,
    reach_over,
    slowdown,
    speed,
    throughput,
)
from repro.experiments.outofcore.published import (
    CLAIMS,
    IN_CORE_BATCH,
    LARGEST_BATCH,
    LMS_BATCH,
    TABLE,
    faster,
    published,
)
from repro.experiments.outofcore.settings import (
    CHUNKS,
    FITTED,
    IN_CORE,
    LABELS,
    MEASURED,
    MIB,
    MODES,
    PACKED,
    PACKED_MODES,
    PEERS,
    PLACES,
    RESNET,
    SCHEDULE,
    SIMULATED,
    TO_THE_LETTER,
    facts,
    packed,
    resnet,
)
from repro.experiments.query import Results
from repro.experiments.view import caption
from repro.report import DASH

# Ways that are simulated.
OF_THE_V100 = (IN_CORE, "lms", *TO_THE_LETTER, SCHEDULE, CHUNKS, *PACKED_MODES, "bound")
FIT = 0.01  # how far simulated throughputs in core may lie from those that they are fitted to


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return every way to train ResNet-50, by batch size; under smoke no packed plans.

    Packed plans begin well beyond what fits in core: below, any schedule hides its copies.
    """
    beyond = () if profile == "smoke" else (b for b in TABLE["batches"] if b > 2 * IN_CORE_BATCH)
    return resnet(profile) + [packed(batch) for batch in beyond]


def table(results: Results) -> list[dict[str, Any]]:
    """Return images/s by batch size: the paper's, simulated, measured here."""
    heads = [f"{batch} ({batch / IN_CORE_BATCH:.2g}×)" for batch in TABLE["batches"]]
    rows = []

    def add(where: str, method: str, cells: Sequence[str]) -> None:
        cells_by_head = dict(zip(heads, cells, strict=True))
        rows.append({"where": where, "method": method, **cells_by_head})

    for mode, where, method in (
        ("lms_in_core", "paper", "in core, P100 (Le et al.)"),
        ("lms", "paper", "LMS, P100 (Le et al.)"),
        *((mode, "paper, V100", LABELS[mode]) for mode in MODES),
    ):
        rates = published(mode)
        add(where, method, [f"{rates[b]:g}" if b in rates else "x" for b in TABLE["batches"]])
    for where in PLACES:
        label = place(results, where, RESNET)
        if where == MEASURED and (name := ran(results, where, RESNET)) != RESNET:
            label += f", {name}"
        columns = _columns(batches(results, where, RESNET), in_core_batch(results, where, RESNET))
        if where == MEASURED and batches(results, where, RESNET):
            add(label, "batch size", ["" if b is None else f"N = {b}" for b in columns])
        ways = OF_THE_V100 if where == SIMULATED else (*MODES, *TO_THE_LETTER, *PEERS)
        for mode in ways:
            by_batch = points(results, where, RESNET, mode)
            if by_batch:
                add(
                    label,
                    LABELS[mode],
                    [DASH if batch is None else throughput(by_batch, batch) for batch in columns],
                )
            if mode == FITTED and by_batch:
                chunks = _chunks(results)
                add(label, "its chunks (MiB)", [chunks.get(b, DASH) for b in TABLE["batches"]])
    return rows


def _chunks(results: Results) -> dict[int, str]:
    """Return the sizes of the fitted chunks by batch size, in MiB."""
    return {
        record.config["batch"]: f"{record.metrics['rows'][FITTED]['chunk_bytes'] / MIB:.0f}"
        for record in results.ok(PACKED, role=RESNET)
        if FITTED in record.metrics["rows"]
    }


def _columns(sizes: Sequence[int], base: int | None) -> list[int | None]:
    """Return which of our batch sizes stands under each of the paper's: the same, or as large.

    That is, as large over the largest in core, to 5 % or the next whole number.
    """
    columns: list[int | None] = []
    for batch in TABLE["batches"]:
        ours = batch if batch in sizes else None
        if ours is None and base is not None:
            wanted = base * batch / IN_CORE_BATCH
            near = [size for size in sizes if abs(size - wanted) <= max(0.5, 0.05 * wanted)]
            ours = min(near, key=lambda size: abs(size - wanted), default=None)
        columns.append(ours)
    return columns


@check(
    f"In core, simulated throughputs are the paper's to {100 * FIT:g} %, since the V100's rates "
    "are fitted to them"
)
def fitted(results: Results) -> tuple[bool, str]:
    """Ask whether the fitted line passes through the published throughputs."""
    by_batch = points(results, SIMULATED, RESNET, IN_CORE)
    rates = {
        batch: (point.images_per_s, published(IN_CORE)[batch])
        for batch, point in by_batch.items()
        if point is not None and batch in published(IN_CORE)
    }
    if not rates:
        raise NotRun("no records")
    said = [f"{ours:.1f} for {theirs:g} at {batch}" for batch, (ours, theirs) in rates.items()]
    return all(abs(ours / theirs - 1) <= FIT for ours, theirs in rates.values()), "; ".join(said)


@check("No simulated schedule is faster than what the bound allows")
def within_bound(results: Results) -> tuple[bool, str]:
    """Ask how close each way comes to what no schedule beats."""
    best = points(results, SIMULATED, RESNET, "bound")
    base = in_core_batch(results, SIMULATED, RESNET) or 0
    shares = {
        f"{LABELS[mode]} at {batch}": point.images_per_s / bounded.images_per_s
        for mode in OF_THE_V100[1:-1]
        for batch, point in points(results, SIMULATED, RESNET, mode).items()
        if batch > base and point is not None and (bounded := best.get(batch)) is not None
    }
    if not shares:
        raise NotRun("no records")
    said = "; ".join(f"{name} {share:.0%} of it" for name, share in shares.items())
    return max(shares.values()) <= 1 + 1e-6, said


@check(
    "Simulated allocators serve larger batch sizes with chunks than in core, than LMS's and than "
    "those of scheduling alone"
)
def simulated_reach(results: Results) -> tuple[bool, str]:
    """Ask it of the largest batch sizes; LMS's is of the pairs of distances that hold least."""
    said, held = [], []
    for way, paper in (
        (IN_CORE, LARGEST_BATCH / IN_CORE_BATCH),
        ("lms", CLAIMS["over_lms"]),
        (SCHEDULE, CLAIMS["over_schedule"]),
    ):
        most, other, over = reach_over(results, SIMULATED, RESNET, (CHUNKS, way))
        held.append(most > other)
        said.append(f"{most} over {other} {LABELS[way]} {over}, paper ×{paper:.2f}")
    return all(held), "; ".join(said)


@check(
    f"Simulated, LMS trains {LMS_BATCH} images at {100 * CLAIMS['lms_speed_kept']:g} % of the "
    "speed in core (to 5 points), and scheduling alone trains no more images (to 3 %)"
)
def simulated_rivals(results: Results) -> tuple[bool, str]:
    """Ask how strong our LMS, and our schedule without chunks, are beside the paper's."""
    _, point = point_at(results, SIMULATED, LMS_BATCH, "lms")
    if point is None or point.relative is None:
        return False, f"LMS trains no {LMS_BATCH} images"
    lms, alone = (largest_trained(results, SIMULATED, RESNET, way) for way in ("lms", SCHEDULE))
    near = abs(point.relative - CLAIMS["lms_speed_kept"]) <= 0.05
    said = f"LMS up to {lms}, {point.relative:.1%} kept at {LMS_BATCH}; scheduling alone up to "
    return near and alone <= 1.03 * LMS_BATCH, f"{said}{alone}"


@check(
    f"Simulated, chunks make the schedule faster at {LMS_BATCH} images, and our changes make it "
    "faster than the paper's to the letter wherever both train beyond the core"
)
def simulated_gains(results: Results) -> tuple[bool, str]:
    """Ask it of images/s."""
    _, alone = point_at(results, SIMULATED, LMS_BATCH, SCHEDULE)
    _, chunks = point_at(results, SIMULATED, LMS_BATCH, CHUNKS)
    if alone is None or chunks is None:
        return False, f"{LMS_BATCH} images ran out of memory"
    gaps = {f"with chunks at {LMS_BATCH}": speed(results, SIMULATED, RESNET, chunks, alone)}
    for name, gap in _simulated_over(results, SCHEDULE, "paper").items():
        gaps[f"our changes {name}"] = gap
    return all(gap.mean > 0 for gap in gaps.values()), "; ".join(
        f"{n} {g}" for n, g in gaps.items()
    )


def _simulated_over(results: Results, way: str, other: str) -> dict[str, Estimate]:
    """Return images/s of a simulated way over another's, wherever both train beyond the core.

    Raises:
        NotRun: Nothing fits in core.
    """
    ours, theirs = (points(results, SIMULATED, RESNET, mode) for mode in (way, other))
    base = in_core_batch(results, SIMULATED, RESNET)
    if base is None:
        raise NotRun("nothing fits in core")
    return {
        f"at {batch}": speed(results, SIMULATED, RESNET, point, second)
        for batch, second in theirs.items()
        if batch > base and second is not None and (point := ours.get(batch)) is not None
    }


ROW = 0.1  # how far images/s may lie below the paper's


@check(
    "Our best, packed plans with fitted chunks, simulates at no more than "
    f"{100 * ROW:g} % below the paper's images/s, with chunks or without, wherever the bound allows"
)
def rows_reached(results: Results) -> tuple[bool, str]:
    """Ask it of each batch size beside the paper's faster way; say what mapping comes to."""
    by_batch, best = (points(results, SIMULATED, RESNET, mode) for mode in (FITTED, "bound"))
    shares, said, beyond = [], [], []
    for batch in published(CHUNKS):
        bounded, rate = best.get(batch), faster(batch)
        if batch not in by_batch or bounded is None:
            continue
        point = by_batch[batch]
        if bounded.images_per_s < rate * (1 - ROW):
            beyond.append(f"{batch} (at best {bounded.images_per_s:.0f} for {rate:g})")
            continue
        shares.append(point.images_per_s / rate if point else 0.0)
        said.append(f"{100 * (shares[-1] - 1):+.1f} % at {batch}" if point else f"x at {batch}")
    if not shares:
        raise NotRun("no records")
    if beyond:
        said.append(f"no schedule reaches the paper's images/s at {', '.join(beyond)}")
    by_bytes = [
        f"{batch / record.metrics['rows'][FITTED]['time_by_bytes_s']:.0f} at {batch}"
        for record in sorted(results.ok(PACKED, role=RESNET), key=lambda r: r.config["batch"])
        if (batch := record.config["batch"]) > IN_CORE_BATCH and FITTED in record.metrics["rows"]
    ]
    said.append(
        f"were mapping as slow by the byte as with the paper's chunks: {', '.join(by_bytes)}"
    )
    return min(shares) >= 1 - ROW, "; ".join(said)


@check(
    "On a CPU a batch as much larger than the largest in core as the paper's trains, to a "
    "twentieth: the sizes tried end there, and the simulated allocators serve some budget"
)
def trains_on_a_cpu(results: Results) -> tuple[bool, str]:
    """Ask it of what is measured with simulated allocators."""
    if not on_cpu(results, RESNET):
        raise NotRun("no records of a CPU")
    most, fits, over = reach_over(results, MEASURED, RESNET, (CHUNKS, IN_CORE))
    said = f"{ran(results, MEASURED, RESNET)}: {most} over {fits} {over}"
    return most / fits >= 0.95 * LARGEST_BATCH / IN_CORE_BATCH, said


def larger_than_core(results: Results) -> Cases:
    """Compare the largest batch sizes within the limit, of real allocators."""
    need_real_allocators(results, MEASURED, [RESNET])
    paper = LARGEST_BATCH / IN_CORE_BATCH
    return {RESNET: larger(results, RESNET, (CHUNKS, IN_CORE), paper)}


# Batch sizes at which the paper says, or its Table 1 shows, which share of the speed is kept.
KEPT = {
    "512 with chunks": (512, CHUNKS),
    f"{LMS_BATCH} without": (LMS_BATCH, SCHEDULE),
    f"{LARGEST_BATCH} with chunks": (LARGEST_BATCH, CHUNKS),
}


def speed_kept(results: Results) -> Cases:
    """Return the measured time of an image over its time in core."""

    def slower(name: str) -> Estimate | Exact:
        batch, mode = KEPT[name]
        if on_cpu(results, RESNET) and not has_link(results, RESNET, mode):
            raise NotRun(NO_LINK)
        size, point = point_at(results, MEASURED, batch, mode)
        if point is None:
            return Exact(False, f"{size} images ran out of memory")
        label = f"{ran(results, MEASURED, RESNET)}, {size} {name.partition(' ')[2]}: "
        return replace(slowdown(results, MEASURED, RESNET, point), label=f"{label}time of an image")

    return cases(KEPT, slower)


@check(
    f"Simulated, the schedule keeps {100 * CLAIMS['speed_kept']:g} % of the speed in core at "
    f"{LARGEST_BATCH} images with chunks, {100 * CLAIMS['speed_kept_928']:g} % at {LMS_BATCH} "
    "without"
)
def simulated_speed(results: Results) -> tuple[bool, str]:
    """Ask it of the times in core, which are the paper's; say what no schedule beats."""
    held, said = [], []
    for batch, mode, share in (
        (LARGEST_BATCH, CHUNKS, CLAIMS["speed_kept"]),
        (LMS_BATCH, SCHEDULE, CLAIMS["speed_kept_928"]),
    ):
        _, point = point_at(results, SIMULATED, batch, mode)
        best = points(results, SIMULATED, RESNET, "bound").get(batch)
        kept = point.relative if point is not None else None
        held.append(kept is not None and kept >= share)
        text = f"{batch} {LABELS[mode]}: " + ("out of memory" if kept is None else f"{kept:.0%}")
        if best is not None and best.relative is not None:
            text += f", no schedule more than {best.relative:.0%}"
        said.append(text)
    return all(held), "; ".join(said)


@check(
    "Simulated, the schedule is faster than LMS at its best distances wherever both train beyond "
    f"the core, and with chunks at {LARGEST_BATCH} images than LMS at {LMS_BATCH}"
)
def simulated_over_lms(results: Results) -> tuple[bool, str]:
    """Ask it of images/s."""
    gaps = _simulated_over(results, SCHEDULE, "lms")
    _, ours = point_at(results, SIMULATED, LARGEST_BATCH, CHUNKS)
    _, theirs = point_at(results, SIMULATED, LMS_BATCH, "lms")
    if ours is not None and theirs is not None:
        over = speed(results, SIMULATED, RESNET, ours, theirs)
        gaps[f"at {LARGEST_BATCH} over LMS at {LMS_BATCH}"] = over
    if not gaps:
        raise NotRun("no records")
    said = "; ".join(f"{name} {gap}" for name, gap in gaps.items())
    return all(gap.mean > 0 for gap in gaps.values()), said


def larger_than_alone(results: Results) -> Cases:
    """Compare the largest batch sizes with chunks and without."""
    need_real_allocators(results, MEASURED, [RESNET])
    return {RESNET: larger(results, RESNET, (CHUNKS, SCHEDULE), CLAIMS["over_schedule"])}


def alone_ends(results: Results) -> Cases:
    """Compare the largest batch size without chunks with LMS's in the paper."""
    need_real_allocators(results, MEASURED, [RESNET])
    alone = largest_trained(results, MEASURED, RESNET, SCHEDULE)
    if not alone:
        raise NotRun("scheduling alone trains nothing")
    open_ = alone <= LMS_BATCH and end_is_open(results, MEASURED, RESNET, SCHEDULE)
    gap = (unsure if open_ else exactly)(alone / LMS_BATCH, log=True)
    note = f"{alone} is the largest that was tried" if open_ else ""
    return {RESNET: replace(gap, label=f"{RESNET}, up to {alone}", note=note)}


def faster_with_chunks(results: Results) -> Cases:
    """Compare the speeds, on a CPU each over that of the reference in the same round."""
    size, alone = point_at(results, MEASURED, LMS_BATCH, SCHEDULE)
    _, chunks = point_at(results, MEASURED, LMS_BATCH, CHUNKS)
    if chunks is None:
        return {"images/s": Exact(False, f"{size} images ran out of memory with chunks")}
    if alone is None:
        raise NotRun(f"without chunks {size} images ran out of memory")
    gap = speed(results, MEASURED, RESNET, chunks, alone)
    label = f"{ran(results, MEASURED, RESNET)}, images/s at {size}"
    return {"images/s": replace(gap, label=label)}


def larger_than_peers(results: Results) -> Cases:
    """Compare the largest batch sizes with what people use today; the speed is told beside."""
    ours = points(results, MEASURED, RESNET, CHUNKS)

    def over(mode: str) -> Estimate | Exact:
        # Any larger batch size will do: what was not tried of ours need not be.
        found = larger(results, RESNET, (CHUNKS, mode), 1.01)
        theirs = points(results, MEASURED, RESNET, mode)
        size = largest_trained(results, MEASURED, RESNET, mode)
        their_point, our_point = theirs.get(size), ours.get(size)
        if isinstance(found, Exact) or their_point is None or our_point is None:
            return found
        gap = speed(results, MEASURED, RESNET, our_point, their_point)
        told = f"at {size} swapping is {gap} as fast"
        return replace(found, note="; ".join([*filter(None, [found.note]), told]))

    tried = [mode for mode in PEERS if points(results, MEASURED, RESNET, mode)]
    if not tried:
        raise NotRun("no records")
    return cases(tried, over)


TABLE1 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "ResNet-50: the largest batch sizes, and the share of the speed in core by batch size. "
        "Bars: 95 % intervals.",
        facts,
    ),
    claims={
        "larger_than_core": larger_than_core,
        "speed_kept_here": speed_kept,
        "larger_than_alone_here": larger_than_alone,
        "alone_ends_here": alone_ends,
        "faster_with_chunks_here": faster_with_chunks,
        "larger_than_peers": larger_than_peers,
    },
    checks=(
        fitted,
        within_bound,
        simulated_reach,
        simulated_rivals,
        simulated_gains,
        simulated_speed,
        simulated_over_lms,
        rows_reached,
        trains_on_a_cpu,
    ),
)
