"""Whether the paper's claims hold in the records: simulated at its rates, and measured here."""

import numpy as np

from repro.experiments.design import Part, Results, Verdict, combine
from repro.experiments.outofcore import reading
from repro.experiments.outofcore.grids import PAPER, PIX2PIXHD, RESNET, ROLES
from repro.experiments.outofcore.reading import MEASURED, SIMULATED, Points
from repro.experiments.outofcore.tables import PLACES

CLAIMS = PAPER["claims"]
ROUNDING = 0.97  # batch sizes in proportion are rounded, and looked for to 3 %
FASTER = 1.02  # less is as fast
FLAT = 0.05  # of the limit
_MODES = ("in_core", "schedule", "schedule_va")


def _each_place(results: Results, judge) -> Verdict:  # type: ignore[no-untyped-def]
    parts = [judge(where, place) for where, place in PLACES.items()]
    return combine([part for part in parts if part is not None])


def _speed_kept(results: Results, mode: str, batch: int, least: float) -> Verdict:
    """Judge a way to train at a paper's batch size: whether it fits, and the speed it keeps."""

    def judge(where: str, place: str) -> Part | None:
        base = reading.in_core_batch(results, where, RESNET)
        found = reading.corresponding(results, where, batch, mode)
        if base is None or found is None:
            return None
        size, point = found
        said = f"{place}: {size} ({size / base:.2f}× of {base} in core)"
        if point is None or point.relative is None:
            return "not reproduced", f"{said} ran out of memory"
        word = "reproduced" if point.relative >= least else "partly"
        return word, f"{said} at {point.relative:.0%} (paper {least:.0%})"

    return _each_place(results, judge)


def check_largest(results: Results) -> Verdict:
    """Judge 7.5 times the batch size at 55 % of the speed, with chunks."""
    return _speed_kept(results, "schedule_va", CLAIMS["largest_batch"], CLAIMS["speed_kept"])


def check_alone(results: Results) -> Verdict:
    """Judge 4.9 times the batch size at 68 % of the speed, with scheduling alone."""
    return _speed_kept(results, "schedule", CLAIMS["lms_batch"], CLAIMS["speed_kept_928"])


def _faster(ratio: float) -> str:
    return "reproduced" if ratio >= FASTER else "partly" if ratio > 1 / FASTER else "not reproduced"


def check_over_lms(results: Results) -> Verdict:
    """Judge whether the schedule is faster than the fastest that LMS can do, beyond the core."""
    ours = reading.points(results, SIMULATED, RESNET, "schedule")
    theirs = reading.points(results, SIMULATED, RESNET, "lms")
    base = reading.in_core_batch(results, SIMULATED, RESNET) or 0
    place = PLACES[SIMULATED]
    parts: list[Part] = []
    for batch, point in ours.items():
        if batch <= base or point is None or batch not in theirs:
            continue
        other = theirs[batch]
        if other is None:
            parts.append(("reproduced", f"{place}: at {batch} LMS does not fit"))
            continue
        ratio = point.images_per_s / other.images_per_s
        parts.append((_faster(ratio), f"{place}: at {batch} {ratio:.2f}×"))
    return combine(parts)


def check_reach_over_lms(results: Results) -> Verdict:
    """Judge how much larger a ResNet-50 trains with chunks than with LMS."""
    for record in results.select("reach", role=RESNET):
        if record.status == "ok":
            ours, theirs = record.metrics["schedule_va"], record.metrics["lms"]
            if not theirs:
                break
            return combine([_larger(f"{PLACES[SIMULATED]}: LMS", ours, theirs, CLAIMS["over_lms"])])
    return Verdict("not run", "no records")


def _larger(label: str, ours: int, theirs: int, paper: float) -> Part:
    ratio = ours / theirs
    word = "reproduced" if ratio >= ROUNDING * paper else (
        "partly" if ratio > 1 else "not reproduced")  # fmt: skip
    return word, f"{label}: {ours} over {theirs}, {ratio:.2f}× (paper {paper:g}×)"


def _reach(results: Results, where: str, role: str) -> tuple[int, int, int] | None:
    """Return the largest batch sizes in core, with scheduling alone, and with chunks.

    Simulated: those looked for. Measured: of the batch sizes tried, and on a GPU only, since on a
    CPU the allocators are simulated there, too.
    """
    if where == SIMULATED:
        for record in results.select("reach", role=role):
            if record.status == "ok":
                found = [record.metrics[mode] for mode in _MODES]
                return (found[0], found[1], found[2]) if all(found[:2]) else None
        return None
    if any(record.device["type"] == "cpu" for record in results.select(where, role=role)):
        return None
    base, alone, with_va = (
        reading.largest(reading.points(results, where, role, mode)) for mode in _MODES
    )
    return None if base is None or alone is None or with_va is None else (base, alone, with_va)


def _over_alone(results: Results, role: str, paper: float) -> list[Part]:
    """Judge how much larger a network trains with chunks than with scheduling alone."""
    parts = []
    for where, place in PLACES.items():
        reach = _reach(results, where, role)
        if reach is not None:
            _, alone, with_va = reach
            part = _larger(f"{role}, {place}", with_va, alone, paper)
            parts.append(_unless_last(results, where, role, "schedule_va", with_va, part))
    return parts


def _unless_last(results: Results, where: str, role: str, mode: str, size: int, part: Part) -> Part:
    """Say that nothing is known where a size that is too small is the largest that was tried."""
    tried = reading.points(results, where, role, mode) if where == MEASURED else {}
    if part[0] == "reproduced" or size != max(tried, default=0):
        return part
    return "not run", f"{part[1]}, the largest that was tried"


def check_reach(results: Results) -> Verdict:
    """Judge how much larger a ResNet-50 trains with chunks than with scheduling alone."""
    return combine(_over_alone(results, RESNET, CLAIMS["over_schedule"]))


def check_end_of_alone(results: Results) -> Verdict:
    """Judge whether scheduling alone ends at 4.9 times the batch size in core."""
    paper = CLAIMS["lms_batch"] / CLAIMS["in_core_batch"]
    parts: list[Part] = []
    for where, place in PLACES.items():
        reach = _reach(results, where, RESNET)
        if reach is None:
            continue
        base, alone, _ = reach
        word = "reproduced" if alone / base <= paper / ROUNDING else "not reproduced"
        parts.append((word, f"{place}: up to {alone}, {alone / base:.1f}× (paper {paper:.1f}×)"))
    return combine(parts)


def check_faster_with_va(results: Results) -> Verdict:
    """Judge whether chunks make 4.9 times the batch size faster, as the budget is larger."""

    def judge(where: str, place: str) -> Part | None:
        pair = [
            reading.corresponding(results, where, CLAIMS["lms_batch"], mode)
            for mode in ("schedule", "schedule_va")
        ]
        if pair[0] is None or pair[1] is None:
            return None
        size, alone = pair[0]
        with_va = pair[1][1]
        if with_va is None:
            return "not reproduced", f"{place}: {size} ran out of memory"
        if alone is None:
            return "reproduced", f"{place}: {size} trains with chunks only"
        ratio = with_va.images_per_s / alone.images_per_s
        return _faster(ratio), f"{place}: at {size} {ratio:.2f}× (paper {409 / 400:.2f}×)"

    return _each_place(results, judge)


def check_fragmentation(results: Results) -> Verdict:
    """Judge which part of the memory scheduling alone can be given at 4.9 times the batch size."""

    def judge(where: str, place: str) -> Part | None:
        found = reading.corresponding(results, where, CLAIMS["lms_batch"], "schedule")
        limit = reading.limit_bytes(results, where, RESNET)
        if found is None or limit is None:
            return None
        size, point = found
        if point is None or point.budget_bytes is None:
            return "not run", f"{place}: {size} cannot be given any budget"
        share = point.budget_bytes / limit
        word = "reproduced" if share <= 0.6 else "partly" if share < 0.9 else "not reproduced"
        return word, f"{place}: at {size} {share:.0%} of the limit (paper 50 %)"

    return _each_place(results, judge)


def check_close(results: Results) -> Verdict:
    """Judge whether chunks leave less between the budget and what is taken, where both train."""

    def judge(where: str, place: str) -> Part | None:
        limit = reading.limit_bytes(results, where, RESNET)
        alone = reading.points(results, where, RESNET, "schedule")
        batch = reading.largest(alone)
        if limit is None or batch is None:
            return None
        lost = [
            _lost(alone, batch),
            _lost(reading.points(results, where, RESNET, "schedule_va"), batch),
        ]
        if lost[0] is None or lost[1] is None:
            return None
        shares = [max(0, value) / limit for value in lost if value is not None]
        word = "reproduced" if shares[1] <= shares[0] / 2 else (
            "partly" if shares[1] < shares[0] else "not reproduced")  # fmt: skip
        return word, (
            f"{place}: at {batch} {shares[1]:.0%} of the limit lie between budget and use, "
            f"{shares[0]:.0%} without chunks"
        )

    return _each_place(results, judge)


def _lost(found: Points, batch: int) -> int | None:
    point = found.get(batch)
    if point is None or point.budget_bytes is None or point.reserved_bytes is None:
        return None
    return point.reserved_bytes - point.budget_bytes


def check_growth(results: Results) -> Verdict:
    """Judge how many times larger scheduling alone trains the other networks."""
    parts: list[Part] = []
    for role in ROLES[1:]:
        for where, place in PLACES.items():
            reach = _reach(results, where, role)
            if reach is None:
                continue
            base, alone, _ = reach
            paper = PAPER["section52"]["schedule"][role]
            word = "reproduced" if alone / base >= ROUNDING * paper else (
                "partly" if alone > base else "not reproduced")  # fmt: skip
            part = word, f"{role}, {place}: {alone / base:.1f}× (paper {paper:g}×)"
            parts.append(_unless_last(results, where, role, "schedule", alone, part))
    return combine(parts)


def check_growth_with_va(results: Results) -> Verdict:
    """Judge how many times larger chunks train than scheduling alone."""
    least, _ = PAPER["section52"]["va_over_schedule"]
    return combine([part for role in ROLES[1:] for part in _over_alone(results, role, least)])


def check_gain(results: Results) -> Verdict:
    """Judge whether Pix2PixHD is faster beyond the largest batch size in core, where measured.

    Simulated times are in proportion to bytes, and could show no such gain.
    """
    base = reading.in_core_batch(results, MEASURED, PIX2PIXHD)
    beyond = [
        (point.relative, batch)
        for batch, point in reading.points(results, MEASURED, PIX2PIXHD, "schedule_va").items()
        if base and batch > base and point is not None and point.relative is not None
    ]
    if not beyond:
        return Verdict("not run", "no records")
    middle = float(np.median([relative for relative, _ in beyond]))
    best, batch = max(beyond)
    text = f"{PLACES[MEASURED]}: {middle:.2f}× in the middle, {best:.2f}× at {batch}"
    return Verdict(_faster(middle), text)


def check_cost_of_chunks(results: Results) -> Verdict:
    """Judge what chunks cost in speed where both train beyond the core; on a GPU only."""
    ratios = []
    for role in ROLES:
        if _reach(results, MEASURED, role) is None:
            continue
        base = reading.in_core_batch(results, MEASURED, role) or 0
        with_va = reading.points(results, MEASURED, role, "schedule_va")
        for batch, point in reading.points(results, MEASURED, role, "schedule").items():
            other = with_va.get(batch)
            if batch > base and point is not None and other is not None:
                ratios.append(other.images_per_s / point.images_per_s)
    if not ratios:
        return Verdict("not run", "needs a GPU: simulated mapping costs nothing")
    middle = float(np.median(ratios))
    word = "reproduced" if middle >= 0.9 else "partly" if middle >= 0.75 else "not reproduced"
    text = f"{middle:.2f}× in the middle of {len(ratios)}, at least {min(ratios):.2f}×"
    return Verdict(word, f"{PLACES[MEASURED]}: {text}")


def check_internal(results: Results) -> Verdict:
    """Judge whether internal fragmentation shrinks as batch sizes grow beyond the core."""
    base = reading.in_core_batch(results, SIMULATED, RESNET) or 0
    found = reading.points(results, SIMULATED, RESNET, "schedule_va")
    lost = {
        batch: point.row["internal_bytes"]
        for batch, point in found.items()
        if batch > base and point is not None
    }
    if len(lost) < 2:
        return Verdict("not run", "no records")
    first, last = min(lost), max(lost)
    word = "reproduced" if lost[last] < lost[first] else "not reproduced"
    text = f"{reading.gib(lost[first])} at {first}, {reading.gib(lost[last])} at {last}"
    return Verdict(word, f"{PLACES[SIMULATED]}: {text}")


def check_flat(results: Results) -> Verdict:
    """Judge whether memory with chunks is the same at all batch sizes beyond the core."""
    parts: list[Part] = []
    for role in ROLES[1:]:
        for where, place in PLACES.items():
            base = reading.in_core_batch(results, where, role)
            limit = reading.limit_bytes(results, where, role)
            taken = [
                point.reserved_bytes
                for batch, point in reading.points(results, where, role, "schedule_va").items()
                if base and batch > base and point is not None and point.reserved_bytes is not None
            ]
            if limit is None or len(taken) < 2:
                continue
            spread = (max(taken) - min(taken)) / limit
            word = "reproduced" if spread <= FLAT else "not reproduced"
            parts.append((word, f"{role}, {place}: within {spread:.1%} of the limit"))
    return combine(parts)


def check_peers(results: Results) -> Verdict:
    """Judge whether swapping trains larger than what people use today instead."""
    ours = reading.points(results, MEASURED, RESNET, "schedule_va")
    if not ours:
        return Verdict("not run", "no records")
    with_va = reading.largest(ours) or 0
    parts: list[Part] = []
    for mode in ("checkpointing", "save_on_cpu", "expandable_segments"):
        found = reading.points(results, MEASURED, RESNET, mode)
        if not found:
            continue
        size = reading.largest(found) or 0
        word = "reproduced" if with_va > size else "not reproduced"
        speed = ""
        theirs, swapped = found.get(size), ours.get(size)
        if theirs is not None and swapped is not None:
            ratio = swapped.images_per_s / theirs.images_per_s
            speed = f", where swapping is {ratio:.2f}× as fast"
        label = f"{PLACES[MEASURED]}: {reading.LABELS[mode]}"
        parts.append((word, f"{label} trains up to {size}{speed}; swapping up to {with_va}"))
    return combine(parts)
