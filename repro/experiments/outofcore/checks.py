"""Whether the paper's claims hold in the records: simulated at its rates, and measured here."""

from repro.experiments.design import Part, Results, Verdict, combine
from repro.experiments.outofcore import reading
from repro.experiments.outofcore.grids import PAPER, PIX2PIXHD, RESNET, ROLES
from repro.experiments.outofcore.reading import MEASURED, SIMULATED, Points
from repro.experiments.outofcore.tables import PLACES

CLAIMS = PAPER["claims"]
ROUNDING = 0.97  # batch sizes in proportion are rounded
FLAT = 0.05  # of the limit


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
        grown = size / base
        said = f"{place}: {size} ({grown:.2f}× of {base} in core)"
        if grown < ROUNDING * batch / CLAIMS["in_core_batch"]:
            return "not reproduced", f"{said} is the largest batch size run"
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


def check_over_lms(results: Results) -> Verdict:
    """Judge whether the schedule is as fast as LMS's best pair."""
    ours = reading.points(results, SIMULATED, RESNET, "schedule")
    theirs = reading.points(results, SIMULATED, RESNET, "lms")
    base = reading.in_core_batch(results, SIMULATED, RESNET) or 0
    parts: list[Part] = []
    for batch, point in ours.items():
        if batch <= base or point is None or batch not in theirs:
            continue
        other = theirs[batch]
        if other is None:
            parts.append(("reproduced", f"{batch}: LMS does not fit"))
            continue
        ratio = point.images_per_s / other.images_per_s
        word = "reproduced" if ratio >= 1 - 1e-6 else "not reproduced"
        parts.append((word, f"{batch}: {ratio:.2f}×"))
    return combine(parts)


def _reach(results: Results, where: str, role: str) -> tuple[int, int, int] | None:
    """Return the largest batch sizes in core, with scheduling alone, and with chunks.

    Simulated: those looked for. Measured: of the batch sizes tried, and on a GPU only, since on a
    CPU the allocators are simulated there, too.
    """
    if where == SIMULATED:
        for record in results.select("reach", role=role):
            if record.status == "ok":
                metrics = record.metrics
                return metrics["in_core"], metrics["schedule"], metrics["schedule_va"]
        return None
    if any(record.device["type"] == "cpu" for record in results.select(where, role=role)):
        return None
    found = [
        reading.largest(reading.points(results, where, role, mode))
        for mode in ("in_core", "schedule", "schedule_va")
    ]
    base, alone, with_va = found
    return None if base is None or alone is None or with_va is None else (base, alone, with_va)


def check_reach(results: Results) -> Verdict:
    """Judge how much larger a ResNet-50 trains with chunks than with scheduling alone."""

    def judge(where: str, place: str) -> Part | None:
        reach = _reach(results, where, RESNET)
        if reach is None:
            return None
        _, alone, with_va = reach
        ratio = with_va / alone
        word = "reproduced" if ratio >= ROUNDING * CLAIMS["over_lms"] else (
            "partly" if ratio > 1 else "not reproduced")  # fmt: skip
        return word, f"{place}: {with_va} over {alone}, {ratio:.2f}× (paper {CLAIMS['over_lms']}×)"

    return _each_place(results, judge)


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
        word = "reproduced" if ratio >= 1 else "not reproduced"
        return word, f"{place}: at {size} {ratio:.2f}× (paper {409 / 400:.2f}×)"

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
            return "partly", f"{place}: {size} cannot be given any budget"
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
        shares = [value / limit for value in lost if value is not None]
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
            parts.append((word, f"{role}, {place}: {alone / base:.1f}× (paper {paper:g}×)"))
    return combine(parts)


def check_growth_with_va(results: Results) -> Verdict:
    """Judge how many times larger chunks train than scheduling alone."""
    least, most = PAPER["section52"]["va_over_schedule"]
    parts: list[Part] = []
    for role in ROLES[1:]:
        for where, place in PLACES.items():
            reach = _reach(results, where, role)
            if reach is None:
                continue
            _, alone, with_va = reach
            ratio = with_va / alone
            word = "reproduced" if ratio >= ROUNDING * least else (
                "partly" if ratio > 1 else "not reproduced")  # fmt: skip
            parts.append((word, f"{role}, {place}: {ratio:.1f}× (paper {least:g} to {most:g}×)"))
    return combine(parts)


def check_gain(results: Results) -> Verdict:
    """Judge whether Pix2PixHD is faster beyond the largest batch size in core."""

    def judge(where: str, place: str) -> Part | None:
        base = reading.in_core_batch(results, where, PIX2PIXHD)
        found = reading.points(results, where, PIX2PIXHD, "schedule_va")
        beyond = {
            batch: point.relative
            for batch, point in found.items()
            if base and batch > base and point is not None and point.relative is not None
        }
        if not beyond:
            return None
        best = max(beyond, key=lambda batch: beyond[batch])
        word = "reproduced" if beyond[best] > 1 else "not reproduced"
        return word, f"{place}: {beyond[best]:.2f}× at {best}"

    return _each_place(results, judge)


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
    with_va = reading.largest(reading.points(results, MEASURED, RESNET, "schedule_va"))
    if with_va is None:
        return Verdict("not run", "no records")
    parts: list[Part] = []
    for mode in ("checkpointing", "save_on_cpu", "expandable_segments"):
        found = reading.points(results, MEASURED, RESNET, mode)
        if not found:
            continue
        size = reading.largest(found)
        label = reading.LABELS[mode]
        if size is None:
            parts.append(("reproduced", f"{label}: nothing fits"))
            continue
        word = "reproduced" if with_va > size else "not reproduced"
        theirs, ours = found[size], reading.points(results, MEASURED, RESNET, "schedule_va")[size]
        speed = ""
        if theirs is not None and ours is not None:
            speed = f", where swapping is {ours.images_per_s / theirs.images_per_s:.2f}× as fast"
        parts.append((word, f"{label} trains up to {size}{speed}; swapping up to {with_va}"))
    return combine(parts)
