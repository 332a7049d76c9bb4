"""How far beyond the device's memory does ResNet-50 train, and at what speed? (Table 1)

Against training in core, against LMS (Le et al. 2019), and with and without chunks; simulated also
at our best, by packed plans with chunks of sizes that variables have.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import (
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    check,
    claim,
)
from repro.experiments.intervals import NotRun, exactly
from repro.experiments.judging import Part, Verdict, certain, combine, direction, each, equivalence
from repro.experiments.outofcore.drawing import figure
from repro.experiments.outofcore.points import (
    NO_LINK,
    batches,
    both,
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
    over_lms,
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
from repro.report import DASH

if TYPE_CHECKING:
    pass

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


@both(
    "largest_batch",
    f"With chunks, ResNet-50 trains {CLAIMS['largest_over_in_core']:g} times the batch size in "
    "core",
    "Abstract",
)
def largest_batch(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge the largest batch sizes.

    On a CPU the limit is on tensors in core, and on what simulated allocators take with chunks,
    which is more: what trains there has stood the harder test.
    """
    paper = LARGEST_BATCH / IN_CORE_BATCH
    return [larger(results, where, RESNET, (CHUNKS, IN_CORE), paper, expected.sign)]


def _speed_kept(results: Results, where: str, mode: str, batch: int, kept: float) -> list[Part]:
    """Judge whether an image takes at most 1 / `kept` of its time in core."""
    if where == MEASURED and on_cpu(results, RESNET) and not has_link(results, RESNET, mode):
        raise NotRun(NO_LINK)
    size, point = point_at(results, where, batch, mode)
    if point is None:
        return [certain(f"{size} images ran out of memory", False)]
    gap = slowdown(results, where, RESNET, point)
    word, evidence = equivalence(f"time of an image of {size}", gap, 1 / kept - 1, side=1)
    best = points(results, where, RESNET, "bound").get(size)
    if best is not None and best.relative is not None:
        evidence += f"; no schedule takes less than ×{1 / best.relative:.2f}"
    return [(word, evidence)]


@both(
    "largest_speed",
    f"With chunks, ResNet-50 keeps {100 * CLAIMS['speed_kept']:g} % of the speed in core at "
    f"{CLAIMS['largest_over_in_core']:g} times the batch size",
    "Abstract",
)
def largest_speed(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge the largest batch size of the paper."""
    return _speed_kept(results, where, CHUNKS, LARGEST_BATCH, CLAIMS["speed_kept"])


@both(
    "alone_speed",
    f"Scheduling alone keeps {100 * CLAIMS['speed_kept_928']:g} % of the speed in core at "
    f"{CLAIMS['lms_over_in_core']:g} times the batch size ({LMS_BATCH})",
    "Section 5.1",
)
def alone_speed(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge the largest batch size of LMS."""
    return _speed_kept(results, where, SCHEDULE, LMS_BATCH, CLAIMS["speed_kept_928"])


@claim(
    "faster_than_lms",
    "The schedule is faster than LMS wherever both train beyond the core (as we put it: than the "
    "fastest of LMS's pairs of distances and budgets that torch's allocator serves, on the same "
    "trace)",
    "Section 5.1",
    "simulated",
)
def faster_than_lms(results: Results, expected: Expectation) -> Verdict:
    """Judge each batch size against the paper's ratio of the speeds kept, V100 over P100."""
    ours, theirs = (points(results, SIMULATED, RESNET, mode) for mode in (SCHEDULE, "lms"))
    base = in_core_batch(results, SIMULATED, RESNET) or 0
    parts = []
    for batch, other in theirs.items():
        point = ours.get(batch)
        if batch <= base or point is None or other is None:
            continue
        paper = over_lms(SCHEDULE, batch, batch) if batch in published("lms") else None
        gap = speed(results, SIMULATED, RESNET, point, other)
        parts.append(direction(f"at {batch}", gap, paper, sign=expected.sign))
    return combine(parts)


@claim(
    "larger_than_lms",
    f"With chunks, a {CLAIMS['over_lms']:g} times larger network trains than with LMS",
    "Abstract",
    "simulated",
)
def larger_than_lms(results: Results, expected: Expectation) -> Verdict:
    """Judge the largest batch sizes; LMS's is of the pairs that hold least."""
    ways = (CHUNKS, "lms")
    return combine([larger(results, SIMULATED, RESNET, ways, CLAIMS["over_lms"], expected.sign)])


@claim(
    "faster_beyond_lms",
    f"With chunks, the {CLAIMS['over_lms']:g} times larger network ({LARGEST_BATCH}) trains faster "
    f"than LMS trains its largest ({LMS_BATCH})",
    "Abstract",
    "simulated",
)
def faster_beyond_lms(results: Results, expected: Expectation) -> Verdict:
    """Judge images/s against the paper's ratio of the speeds kept, V100 over P100."""
    _, ours = point_at(results, SIMULATED, LARGEST_BATCH, CHUNKS)
    _, theirs = point_at(results, SIMULATED, LMS_BATCH, "lms")
    if ours is None:
        return combine([certain(f"{LARGEST_BATCH} images ran out of memory", False)])
    if theirs is None:
        raise NotRun(f"LMS trains no {LMS_BATCH} images")
    paper = over_lms(CHUNKS, LARGEST_BATCH, LMS_BATCH)
    gap = speed(results, SIMULATED, RESNET, ours, theirs)
    return combine([direction("images/s", gap, paper, sign=expected.sign)])


@claim(
    "lms_speed",
    f"LMS keeps {100 * CLAIMS['lms_speed_kept']:g} % of the speed in core at its largest batch "
    f"size ({LMS_BATCH})",
    "Section 5.1",
    "simulated",
)
def lms_speed(results: Results, expected: Expectation) -> Verdict:
    """Judge the speed kept; the paper's is of a P100, slower beside as fast a link."""
    _, point = point_at(results, SIMULATED, LMS_BATCH, "lms")
    if point is None or point.relative is None:
        raise NotRun(f"LMS trains no {LMS_BATCH} images")
    gap = exactly(100 * (point.relative - CLAIMS["lms_speed_kept"]), unit="points", digits=1)
    name = f"{100 * point.relative:.0f} % kept, off the paper's by"
    return combine([equivalence(name, gap, expected.allowed())])


@claim(
    "changes_pay",
    "Our changes to the schedule make it faster than the paper's own to the letter, wherever both "
    "train beyond the core (our question, not the paper's)",
    "none",
    "simulated",
)
def changes_pay(results: Results, expected: Expectation) -> Verdict:
    """Judge each batch size; both without chunks."""
    ours, theirs = (points(results, SIMULATED, RESNET, mode) for mode in (SCHEDULE, "paper"))
    base = in_core_batch(results, SIMULATED, RESNET) or 0
    parts = []
    for batch, other in theirs.items():
        point = ours.get(batch)
        if batch > base and point is not None and other is not None:
            gap = speed(results, SIMULATED, RESNET, point, other)
            parts.append(direction(f"at {batch}", gap, sign=expected.sign))
    return combine(parts)


ROW = 0.1  # how far images/s may lie from the paper's


@claim(
    "rows_close",
    f"Simulated images/s of scheduling, without chunks and with, lie within {100 * ROW:g} % of the "
    "paper's, wherever the bound allows",
    "Table 1",
    "simulated",
)
def rows_close(results: Results, expected: Expectation) -> Verdict:
    """Judge each cell of the table; those that no schedule reaches are told, not judged."""
    pairs = [
        (mode, batch, rate)
        for mode in (SCHEDULE, CHUNKS)
        for batch, rate in published(mode).items()
    ]

    def judge(name: str, ratio: float) -> Part:
        gap = exactly(ratio, log=True)
        return equivalence(f"{name} over the paper's", gap, expected.allowed())

    return _against_the_paper(results, expected, pairs, judge)


@claim(
    "rows_reached",
    f"Our best, packed plans with fitted chunks, simulates at no more than {100 * ROW:g} % below "
    "the paper's images/s, with chunks or without, wherever the bound allows (our question, not "
    "the paper's)",
    "none",
    "simulated",
)
def rows_reached(results: Results, expected: Expectation) -> Verdict:
    """Judge each batch size against the faster of the paper's ways; say what mapping comes to."""
    pairs = [(FITTED, batch, faster(batch)) for batch in published(CHUNKS)]

    def judge(name: str, ratio: float) -> Part:
        gap = exactly(100 * (ratio - 1), unit="%", digits=1)
        return equivalence(f"{name} off the paper's by", gap, 100 * expected.allowed(), side=-1)

    verdict = _against_the_paper(results, expected, pairs, judge)
    by_bytes = [
        f"{batch / record.metrics['rows'][FITTED]['time_by_bytes_s']:.0f} at {batch}"
        for record in sorted(results.ok(PACKED, role=RESNET), key=lambda r: r.config["batch"])
        if (batch := record.config["batch"]) > IN_CORE_BATCH and FITTED in record.metrics["rows"]
    ]
    remark = f"were mapping as slow by the byte as with the paper's chunks: {', '.join(by_bytes)}"
    return Verdict(verdict.word, f"{verdict.evidence}; {remark}")


def _against_the_paper(
    results: Results,
    expected: Expectation,
    pairs: Sequence[tuple[str, int, float]],
    judge: Callable[[str, float], Part],
) -> Verdict:
    """Judge simulated ways at batch sizes against the paper's images/s, where the bound allows.

    Args:
        results: Records.
        expected: Whose margin says what the bound allows.
        pairs: Way, batch size, the paper's images/s.
        judge: Of a cell's name and our images/s over the paper's.

    Raises:
        NotRun: None has records.
    """
    best = points(results, SIMULATED, RESNET, "bound")
    parts: list[Part] = []
    beyond = []
    for mode, batch, rate in pairs:
        by_batch = points(results, SIMULATED, RESNET, mode)
        bounded = best.get(batch)
        if batch not in by_batch or bounded is None:
            continue
        name, point = f"{LABELS[mode]} at {batch}", by_batch[batch]
        if bounded.images_per_s < rate * (1 - expected.allowed()):
            beyond.append(f"{name} (at best {bounded.images_per_s:.0f} for {rate:g})")
        elif point is None:
            parts.append(certain(f"{name} ran out of memory", False))
        else:
            parts.append(judge(name, point.images_per_s / rate))
    if not parts:
        raise NotRun("no records")
    verdict = combine(parts)
    if not beyond:
        return verdict
    return Verdict(
        verdict.word,
        f"{verdict.evidence}; no schedule reaches the paper's images/s: {', '.join(beyond)}",
    )


@both(
    "larger_than_alone",
    f"With chunks, a {CLAIMS['over_schedule']:g} times larger ResNet-50 trains than without "
    f"({LARGEST_BATCH} over {LMS_BATCH})",
    "Section 5.1",
)
def larger_than_alone(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge the largest batch sizes."""
    need_real_allocators(results, where, [RESNET])
    paper = CLAIMS["over_schedule"]
    return [larger(results, where, RESNET, (CHUNKS, SCHEDULE), paper, expected.sign)]


@both(
    "alone_ends",
    f"Scheduling alone trains no larger batch size than LMS's largest, {LMS_BATCH}",
    "Section 5.1",
)
def alone_ends(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge the largest batch size, of the same network in as much memory as the paper's."""
    need_real_allocators(results, where, [RESNET])
    alone = largest_trained(results, where, RESNET, SCHEDULE)
    if not alone:
        raise NotRun("scheduling alone trains nothing")
    gap = exactly(alone / LMS_BATCH, log=True)
    word, evidence = equivalence(f"up to {alone}", gap, expected.allowed(), side=1)
    if word == "reproduced" and end_is_open(results, where, RESNET, SCHEDULE):
        word, evidence = "undecided", f"{evidence}; {alone} is the largest that was tried"
    return [(word, evidence)]


@both(
    "faster_with_chunks",
    f"With chunks it is faster at {CLAIMS['lms_over_in_core']:g} times the batch size "
    f"({LMS_BATCH}) than without, for the budget can be larger",
    "Section 5.1",
)
def faster_with_chunks(results: Results, expected: Expectation, where: str) -> list[Part]:
    """Judge the speeds, on a CPU each over that of the reference in the same round."""
    size, alone = point_at(results, where, LMS_BATCH, SCHEDULE)
    _, chunks = point_at(results, where, LMS_BATCH, CHUNKS)
    if chunks is None:
        return [certain(f"with chunks {size} images ran out of memory", False)]
    if alone is None:
        raise NotRun(f"without chunks {size} images ran out of memory")
    gap = speed(results, where, RESNET, chunks, alone)
    paper = published(CHUNKS)[LMS_BATCH] / published(SCHEDULE)[LMS_BATCH]
    return [direction(f"images/s at {size}", gap, paper, sign=expected.sign)]


@claim(
    "larger_than_peers",
    "Larger batch sizes train than by other means of torch (our question, not the paper's)",
    "none",
)
def larger_than_peers(results: Results, expected: Expectation) -> Verdict:
    """Judge what people use today; the speed beside it is told, not judged."""
    ours = points(results, MEASURED, RESNET, CHUNKS)
    swapped = largest_trained(results, MEASURED, RESNET, CHUNKS)

    def judge(mode: str) -> Part:
        size = largest_trained(results, MEASURED, RESNET, mode)
        text = f"{LABELS[mode]} trains up to {size}, swapping up to {swapped}"
        their_point, our_point = points(results, MEASURED, RESNET, mode).get(size), ours.get(size)
        if their_point is not None and our_point is not None:
            gap = speed(results, MEASURED, RESNET, our_point, their_point)
            text += f"; at {size} swapping is {gap} as fast"
        if size <= swapped and end_is_open(results, MEASURED, RESNET, mode):
            return "undecided", f"{text}; {size} is the largest that was tried {LABELS[mode]}"
        return certain(text, swapped > size)

    tried = [mode for mode in PEERS if points(results, MEASURED, RESNET, mode)]
    return combine(each(tried, judge))


TABLE1 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "ResNet-50: the largest batch sizes, and the share of the speed in core by batch size. "
        "Bars: 95 % intervals.",
        facts,
    ),
    claims=(
        *largest_batch,
        *largest_speed,
        *alone_speed,
        faster_than_lms,
        larger_than_lms,
        faster_beyond_lms,
        lms_speed,
        changes_pay,
        rows_close,
        rows_reached,
        *larger_than_alone,
        *alone_ends,
        *faster_with_chunks,
        larger_than_peers,
    ),
    checks=(fitted, within_bound),
)
