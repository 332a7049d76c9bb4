"""Every claim about out-of-core training, judged on records made up; so is what it reads."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from invented import make_record

from repro.experiments import load_paper
from repro.experiments.design import SEEDS, Results, Run, Verdict
from repro.experiments.outofcore import checks, grids, reading
from repro.experiments.outofcore.grids import DEEPLAB, DENSENET, MODES, PIX2PIXHD, RESNET, ROLES
from repro.experiments.outofcore.reading import GIB, MEASURED, MIB, SIMULATED, Point
from repro.experiments.outofcore.tables import PLACES

PAPER = load_paper("outofcore")
FAILED = {"status": "failed", "error": "ValueError: wrong"}
OUT_OF_MEMORY = {"status": "out_of_memory", "error": "OutOfMemoryError: no room"}
GPU = {"type": "cuda", "name": "NVIDIA X", "slug": "x", "memory_bytes": 2**36}
PEERS = ("checkpointing", "save_on_cpu", "expandable_segments")
LARGEST = "the largest"  # in a key of `World`: the largest batch size that the way trains
RATE = 100.0  # images/s of the largest mini-batch in core
CLAIMS = {
    claim.check.__name__: (name, claim)
    for name, artefact in PAPER.artefacts.items()
    for claim in artefact.claims
}
RELATIVE = {  # to the speed in core; what is missing is 1.2
    (RESNET, "schedule"): 0.7,
    (RESNET, "schedule_va"): 0.75,
    (RESNET, "lms"): 0.6,
    (RESNET, "checkpointing"): 0.6,
    (RESNET, "save_on_cpu"): 0.5,
}

# The largest batch sizes in core, with scheduling alone and with chunks, as the paper has it; but
# that a ResNet-50 of 1472 was looked for and found.
REACH: dict[str, dict[str, tuple[int, int, int]]] = {
    SIMULATED: {
        RESNET: (190, 928, 1472),
        DENSENET: (128, 512, 1536),
        PIX2PIXHD: (5, 20, 36),
        DEEPLAB: (9, 48, 144),
    },
    "smoke": {
        RESNET: (4, 16, 16),
        DENSENET: (4, 12, 12),
        PIX2PIXHD: (4, 4, 4),
        DEEPLAB: (4, 4, 4),
    },
    "quick": {
        RESNET: (12, 59, 91),
        DENSENET: (8, 32, 64),
        PIX2PIXHD: (4, 16, 32),
        DEEPLAB: (6, 24, 24),
    },
    "gpu": {
        RESNET: (190, 928, 1440),
        DENSENET: (128, 512, 1024),
        PIX2PIXHD: (4, 16, 32),
        DEEPLAB: (6, 32, 64),
    },
}
REACH["paper"] = REACH["gpu"]

# Given a run: the changes to its record, None for no record.
Maker = Callable[[Run], Mapping[str, Any] | None]
Key = tuple[str | int, ...]


def results_of(runs: Sequence[Run], make: Maker, profile: str = "quick") -> Results:
    records = []
    for run in runs:
        changes = make(run)
        if changes is None:
            continue
        for seed in run.seeds if run.seeds is not None else SEEDS[profile]:
            values = {"paper": "outofcore", "config": run.config, "seed": seed, "dataset": None}
            records.append(make_record(run.experiment, **values | changes))
    return Results(runs, SEEDS[profile], records)


def made_results(artefact: str, make: Maker, profile: str = "quick") -> Results:
    return results_of(PAPER.artefacts[artefact].runs(profile, {}), make, profile)


def timing(seconds: float, n: int = 3) -> dict[str, Any]:
    """Return samples with this median; the machine was slow in the first round."""
    return {"samples_s": [9 * seconds] + [seconds] * (n - 1), "warmup": 1}


def _of(rules: Mapping[Key, Any], default: Any, *cell: str | int) -> Any:
    """Return the value of the last rule whose key's parts are all the cell's."""
    for key, value in rules.items():
        if set(key) <= set(cell):
            default = value
    return default


@dataclass(frozen=True)
class World:
    """Outcomes of all runs: as the paper has it, but for rules.

    A rule's key names any of: place, network, way to train, batch size, `LARGEST`.

    Attributes:
        profile: Of the runs.
        places: Which of "simulated" and "measured" have records.
        reach: Largest batch size that fits, 0 for none; a way to train stands for its own.
        relative: Throughput over that of the largest mini-batch in core.
        budget: Share of the limit that the schedule is given.
        taken: Share of the limit that the allocator takes.
        internal: MiB that chunks lose inside, simulated.
        status: What a record is instead, such as `FAILED`; None where there is none.
    """

    profile: str = "quick"
    places: tuple[str, ...] = (SIMULATED, MEASURED)
    reach: Mapping[Key, int | str] = field(default_factory=dict)
    relative: Mapping[Key, float] = field(default_factory=dict)
    budget: Mapping[Key, float] = field(default_factory=dict)
    taken: Mapping[Key, float] = field(default_factory=dict)
    internal: Mapping[Key, int] = field(default_factory=dict)
    status: Mapping[Key, Mapping[str, Any] | None] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.profile in ("gpu", "paper")

    def limit(self, where: str) -> int:
        return 16 * GIB if where == SIMULATED or self.on_gpu else 64 * MIB

    def reached(self, where: str, role: str, mode: str) -> int:
        sizes = REACH[SIMULATED if where == SIMULATED else self.profile][role]
        usual = dict(zip(MODES, sizes, strict=True))
        usual |= {"lms": sizes[1], "expandable_segments": sizes[0]}
        usual["checkpointing"] = {"smoke": 4, "quick": 32}.get(self.profile, 512)
        usual["save_on_cpu"] = 256
        found = _of(self.reach, usual[mode], where, role, mode)
        return usual[found] if isinstance(found, str) else found

    def row(self, where: str, role: str, mode: str, batch: int) -> dict[str, Any] | None:
        """Return the numbers of a way to train, None where it does not fit."""
        most = self.reached(where, role, mode)
        if batch > most:
            return None
        cell = (where, role, mode, batch, *([LARGEST] if batch == most else []))
        usual = RELATIVE.get((role, mode), 1.2)
        if mode in ("in_core", "expandable_segments"):
            usual = 1.0 if batch == most else 0.8
        limit = self.limit(where)
        reserved = int(limit * _of(self.taken, 0.95 if mode == "schedule_va" else 0.9, *cell))
        row = {
            "time_s": batch / (RATE * _of(self.relative, usual, *cell)),
            "reserved_bytes": reserved,
            "held_bytes": reserved - MIB,
        }
        if mode in ("schedule", "schedule_va", "lms"):
            share = _of(self.budget, 0.85 if mode == "schedule_va" else 0.5, *cell)
            row |= {"budget_bytes": int(limit * share), "window_bytes": 8 * MIB}
        if where == SIMULATED:
            row["internal_bytes"] = MIB * _of(self.internal, 2000 - batch, *cell)
        return row

    def __call__(self, run: Run) -> Mapping[str, Any] | None:
        config = run.config
        role, batch = config["role"], config.get("batch", "looked for")
        where = MEASURED if run.experiment == MEASURED else SIMULATED
        if where not in self.places:
            return None
        of_gpu = {"device": GPU} if where == MEASURED and self.on_gpu else {}
        unusual = _of(self.status, "as usual", where, role, batch, config.get("mode", "no mode"))
        if unusual != "as usual":
            return unusual and unusual | of_gpu
        if run.experiment == "reach":
            modes = (*MODES, *["lms"] * config["lms"])
            sizes = {mode: self.reached(where, role, mode) for mode in modes}
            return {"metrics": {"limit_bytes": self.limit(where), **sizes}}
        if run.experiment == SIMULATED:
            return self.simulated(role, batch, (*MODES, *["lms"] * config["lms"]))
        return self.measured(config) | of_gpu

    def simulated(self, role: str, batch: int, modes: Sequence[str]) -> dict[str, Any]:
        rows = {mode: self.row(SIMULATED, role, mode, batch) for mode in modes}
        metrics = {
            "limit_bytes": self.limit(SIMULATED),
            "peak_bytes": batch * 80 * MIB,
            "smallest_budget": 8 * MIB,
            "functions": 379,
            "rows": {mode: row for mode, row in rows.items() if row is not None},
        }
        if "in_core" in metrics["rows"]:
            del metrics["rows"]["in_core"]["held_bytes"]  # it is the peak
        return {"metrics": metrics}

    def measured(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        mode = config["mode"]
        row = self.row(MEASURED, config["role"], mode, config["batch"])
        if row is None:
            return OUT_OF_MEMORY
        timings = {"iteration": timing(row.pop("time_s"))}
        if not self.on_gpu:
            timings["reference"] = timing(config["base_batch"] / RATE)
            if mode not in ("schedule", "schedule_va"):
                del row["reserved_bytes"]  # the limit is on tensors
        metrics = row | {"limit_bytes": self.limit(MEASURED)}
        return {"metrics": metrics, "timings": timings}


# What makes a claim fail, whatever the place.
WRONG: dict[str, dict[str, dict[Key, Any]]] = {
    "check_largest": {"reach": {("schedule_va",): "schedule"}},
    "check_alone": {"reach": {("schedule",): "in_core"}},
    "check_over_lms": {"relative": {("lms",): 2.0}},
    "check_reach_over_lms": {"reach": {("schedule_va",): "lms"}},
    "check_reach": {"reach": {("schedule_va",): "schedule"}},
    "check_end_of_alone": {"reach": {("schedule",): 1120}},
    "check_cost_of_chunks": {"relative": {("schedule_va",): 0.5}},
    "check_internal": {"internal": {(1440,): 1900}},
    "check_faster_with_va": {"relative": {("schedule_va",): 0.5}},
    "check_peers": {"reach": {(peer,): "schedule_va" for peer in PEERS}},
    "check_fragmentation": {"budget": {("schedule",): 0.95}},
    "check_close": {"budget": {("schedule_va",): 0.4}},
    "check_growth": {"reach": {("schedule",): "in_core"}},
    "check_growth_with_va": {"reach": {("schedule_va",): "schedule"}},
    "check_gain": {"relative": {("schedule_va",): 0.9}},
    "check_flat": {"taken": {("schedule_va", LARGEST): 0.5}},
}
# The batch sizes of Table 1 end at what the paper trains with chunks.
RIGHT: dict[str, dict[str, dict[Key, Any]]] = {
    "check_reach": {"reach": {(MEASURED, "schedule"): 512}},
}
ONE_PLACE = {
    "check_over_lms": SIMULATED,
    "check_reach_over_lms": SIMULATED,
    "check_internal": SIMULATED,
    "check_peers": MEASURED,
    "check_gain": MEASURED,
    "check_cost_of_chunks": MEASURED,
}
# On a CPU the allocators that decide upon the largest batch sizes are simulated: not judged.
OF_A_GPU = ("check_reach", "check_end_of_alone", "check_growth", "check_growth_with_va")
BOTH_PLACES = [
    (check, profile)
    for check, profile in itertools.product(CLAIMS, ("quick", "gpu"))
    if check not in ONE_PLACE and (profile == "gpu" or check not in OF_A_GPU)
]
JUDGED = [
    (check, profile)
    for check, profile in itertools.product(CLAIMS, ("quick", "gpu", "paper"))
    if (check, profile) != ("check_cost_of_chunks", "quick")  # chunks cost nothing there
]


def verdict(check: str, make: Maker, profile: str = "quick") -> Verdict:
    artefact, claim = CLAIMS[check]
    return claim.check(made_results(artefact, make, profile))


def word(check: str, world: World) -> str:
    return verdict(check, world, world.profile).word


def said(check: str, world: World) -> str:
    return verdict(check, world, world.profile).evidence


def largest(
    check: str, where: str, role: str, in_core: int, alone: int, with_va: int, profile: str = "gpu"
) -> Verdict:
    """Judge a network of which these are the largest batch sizes, looked for or measured."""
    reach = {("in_core",): in_core, ("schedule",): alone, ("schedule_va",): with_va}
    sizes = sorted(set(reach.values()))
    runs = [grids.reach(role)]
    if where == MEASURED:
        sizes.append(99_999)  # does not fit
        runs = [grids.measured(profile, role, b, mode) for b in sizes for mode in MODES]
    world = World(profile, reach=reach)
    return CLAIMS[check][1].check(results_of(runs, world, profile))


class TestEveryClaim:
    def test_each_check_is_one_claim_and_each_claim_has_a_check(self):
        written = {
            name
            for name, value in vars(checks).items()
            if name.startswith("check_") and value.__module__ == checks.__name__
        }
        assert written == set(CLAIMS) == set(WRONG)
        assert len(CLAIMS) == sum(len(artefact.claims) for artefact in PAPER.artefacts.values())
        assert all(claim.text and claim.source for _, claim in CLAIMS.values())

    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu", "paper"])
    def test_without_records_it_is_not_run(self, profile):
        for check in CLAIMS:
            found = verdict(check, lambda run: None, profile)
            assert found.word == "not run", check
            assert found.evidence in ("no records", "needs a GPU: simulated mapping costs nothing")

    @pytest.mark.parametrize("outcome", [FAILED, OUT_OF_MEMORY])
    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu"])
    def test_where_nothing_worked_it_is_not_reproduced(self, outcome, profile):
        for check in CLAIMS:
            found = verdict(check, lambda run: outcome, profile)
            assert found.word in ("not run", "not reproduced"), check

    @pytest.mark.parametrize(("check", "profile"), JUDGED)
    def test_as_the_paper_has_it(self, check, profile):
        found = verdict(check, World(profile, **RIGHT.get(check, {})), profile)
        assert found.word == "reproduced", found.evidence
        assert any(c.isdigit() for c in found.evidence) and "nan" not in found.evidence

    @pytest.mark.parametrize(("check", "profile"), JUDGED)
    def test_otherwise(self, check, profile):
        found = verdict(check, World(profile, **WRONG[check]), profile)
        assert found.word == "not reproduced", found.evidence
        assert any(c.isdigit() for c in found.evidence)

    @pytest.mark.parametrize("where", PLACES)
    @pytest.mark.parametrize(("check", "profile"), BOTH_PLACES)
    def test_partly_where_one_place_says_so(self, check, profile, where):
        rules = {
            name: {(where, *key): value for key, value in rule.items()}
            for name, rule in WRONG[check].items()
        }
        (other,) = set(PLACES) - {where}
        for name, rule in RIGHT.get(check, {}).items():
            if where == SIMULATED:
                rules[name] = rule | rules[name]
        found = verdict(check, World(profile, **rules), profile)
        assert found.word == "partly" and PLACES[other] in found.evidence

    @pytest.mark.parametrize("where", PLACES)
    @pytest.mark.parametrize(("check", "profile"), BOTH_PLACES)
    def test_one_place_alone_is_judged_and_named(self, check, profile, where):
        for rules, expected in (
            (RIGHT.get(check, {}), "reproduced"),
            (WRONG[check], "not reproduced"),
        ):
            found = verdict(check, World(profile, places=(where,), **rules), profile)
            assert found.word == expected
            (other,) = set(PLACES) - {where}
            assert PLACES[where] in found.evidence and PLACES[other] not in found.evidence

    @pytest.mark.parametrize("check", ONE_PLACE)
    def test_of_one_place_the_other_does_not_count(self, check):
        (other,) = set(PLACES) - {ONE_PLACE[check]}
        assert word(check, World("gpu", places=(other,))) == "not run"
        rules = {
            name: {(other, *key): value for key, value in rule.items()}
            for name, rule in WRONG[check].items()
        }
        assert word(check, World("gpu", **rules)) == "reproduced"

    @pytest.mark.parametrize("check", OF_A_GPU)
    def test_largest_batch_sizes_on_a_cpu_do_not_count(self, check):
        assert word(check, World(places=(MEASURED,))) == "not run"
        assert PLACES[MEASURED] not in said(check, World())
        assert word(check, World(status={(SIMULATED, "no mode"): None})) == "not run"
        assert word(check, World(status={(SIMULATED, "looked for"): FAILED})) == "not run"

    @pytest.mark.parametrize("check", [*OF_A_GPU, "check_reach_over_lms"])
    def test_where_a_search_finds_none(self, check):
        reach = {("in_core",): 0, ("schedule",): 0, ("lms",): 0}
        assert word(check, World(reach=reach)) in ("not run", "not reproduced")

    @pytest.mark.parametrize("check", ["check_over_lms", "check_peers", "check_cost_of_chunks"])
    def test_of_one_place_its_name_is_said_too(self, check):
        assert ONE_PLACE[check] in said(check, World("gpu"))

    @pytest.mark.parametrize("check", ["check_reach_over_lms", "check_internal", "check_gain"])
    def test_of_one_place_its_name_is_said(self, check):
        assert ONE_PLACE[check] in said(check, World("gpu"))

    @pytest.mark.parametrize(
        ("check", "profile"), [*((check, "quick") for check in CLAIMS), ("check_largest", "gpu")]
    )
    def test_any_single_record_missing_or_failed_or_alone_is_no_exception(self, check, profile):
        artefact, claim = CLAIMS[check]
        full = made_results(artefact, World(profile), profile)
        runs = [run for run, _ in full.expected]
        assert full.missing == 0
        for one in full.records:
            values = {"config": one.config, "device": one.device, **FAILED}
            failed = make_record(one.experiment, **values)
            rest = [record for record in full.records if record is not one]
            for records in ([one], rest, [*rest, failed]):
                found = claim.check(Results(runs, (0,), records))
                assert found.word in Verdict.WORDS and found.evidence

    @pytest.mark.parametrize("check", CLAIMS)
    def test_failed_records_are_as_good_as_none(self, check):
        some = {
            (SIMULATED, 256): FAILED, (SIMULATED, 192): FAILED, (SIMULATED, 16): FAILED,
            (MEASURED, 8): FAILED, (MEASURED, 79): FAILED, (MEASURED, 20): FAILED,
        }  # fmt: skip
        without = dict.fromkeys(some)
        assert verdict(check, World(status=some)) == verdict(check, World(status=without))


# What is said where all is as the paper has it, simulated and measured on a CPU.
EVIDENCE = {
    "check_largest": (
        "simulated, V100: 1440 (7.58× of 190 in core) at 75% (paper 55%)",
        "measured here: 91 (7.58× of 12 in core) at 75% (paper 55%)",
    ),
    "check_alone": (
        "simulated, V100: 928 (4.88× of 190 in core) at 70% (paper 68%)",
        "measured here: 59 (4.92× of 12 in core) at 70% (paper 68%)",
    ),
    "check_reach_over_lms": ("simulated, V100: LMS: 1472 over 928, 1.59× (paper 1.55×)",),
    "check_reach": ("ResNet-50, simulated, V100: 1472 over 928, 1.59× (paper 1.55×)",),
    "check_end_of_alone": ("simulated, V100: up to 928, 4.9× (paper 4.9×)",),
    "check_over_lms": tuple(f"simulated, V100: at {batch} 1.17×" for batch in (256, 512, 928)),
    "check_internal": ("simulated, V100: 1.70 GiB at 256, 0.55 GiB at 1440",),
    "check_cost_of_chunks": ("needs a GPU: simulated mapping costs nothing",),
    "check_peers": (
        "measured here: checkpointing trains up to 32, where swapping is 1.25× as fast",
        "swapping up to 91",
    ),
    "check_faster_with_va": (
        "simulated, V100: at 928 1.07× (paper 1.02×)",
        "measured here: at 59 1.07× (paper 1.02×)",
    ),
    "check_fragmentation": (
        "simulated, V100: at 928 50% of the limit (paper 50 %)",
        "measured here: at 59 50% of the limit (paper 50 %)",
    ),
    "check_close": (
        "simulated, V100: at 928 10% of the limit lie between budget and use, 40% without chunks",
        "measured here: at 59 10% of the limit lie between budget and use, 40% without chunks",
    ),
    "check_growth": (
        "DenseNet, simulated, V100: 4.0× (paper 1.5×)",
        "Pix2PixHD, simulated, V100: 4.0× (paper 4×)",
        "DeepLabv3+, simulated, V100: 5.3× (paper 5.3×)",
    ),
    "check_growth_with_va": (
        "DenseNet, simulated, V100: 1536 over 512, 3.00× (paper 1.5×)",
        "Pix2PixHD, simulated, V100: 36 over 20, 1.80× (paper 1.5×)",
        "DeepLabv3+, simulated, V100: 144 over 48, 3.00× (paper 1.5×)",
    ),
    "check_gain": (f"measured here: 1.25× in the middle, 1.30× at {REACH['quick'][PIX2PIXHD][2]}",),
    "check_flat": tuple(
        f"{role}, {place}: within 0.0% of the limit"
        for role in ROLES[1:]
        for place in PLACES.values()
        if (role, place) != (DEEPLAB, PLACES[MEASURED])  # one size beyond the core is not two
    ),
}


# And on a GPU.
EVIDENCE_GPU = {
    "check_reach": (
        "ResNet-50, simulated, V100: 1472 over 928, 1.59× (paper 1.55×)",
        "ResNet-50, measured here: 1440 over 928, 1.55× (paper 1.55×)",
    ),
    "check_end_of_alone": (
        "simulated, V100: up to 928, 4.9× (paper 4.9×)",
        "measured here: up to 928, 4.9× (paper 4.9×)",
    ),
    "check_cost_of_chunks": ("measured here: 1.00× in the middle of 6, at least 1.00×",),
    "check_growth": (
        "DenseNet, simulated, V100: 4.0× (paper 1.5×)",
        "DenseNet, measured here: 4.0× (paper 1.5×)",
        "Pix2PixHD, simulated, V100: 4.0× (paper 4×)",
        "Pix2PixHD, measured here: 4.0× (paper 4×)",
        "DeepLabv3+, simulated, V100: 5.3× (paper 5.3×)",
        "DeepLabv3+, measured here: 5.3× (paper 5.3×)",
    ),
    "check_growth_with_va": (
        "DenseNet, simulated, V100: 1536 over 512, 3.00× (paper 1.5×)",
        "DenseNet, measured here: 1024 over 512, 2.00× (paper 1.5×)",
        "Pix2PixHD, simulated, V100: 36 over 20, 1.80× (paper 1.5×)",
        "Pix2PixHD, measured here: 32 over 16, 2.00× (paper 1.5×)",
        "DeepLabv3+, simulated, V100: 144 over 48, 3.00× (paper 1.5×)",
        "DeepLabv3+, measured here: 64 over 32, 2.00× (paper 1.5×)",
    ),
    "check_gain": ("measured here: 1.20× in the middle, 1.30× at 32",),
    "check_alone": (
        "simulated, V100: 928 (4.88× of 190 in core) at 70% (paper 68%)",
        "measured here: 928 (4.88× of 190 in core) at 70% (paper 68%)",
    ),
}


@pytest.mark.parametrize(
    ("check", "profile", "parts"),
    [
        *((check, "quick", parts) for check, parts in EVIDENCE.items()),
        *((check, "gpu", parts) for check, parts in EVIDENCE_GPU.items()),
    ],
)
def test_evidence_names_batch_sizes_ratios_and_the_papers_values(check, profile, parts):
    world = World(profile, relative={(PIX2PIXHD, "schedule_va", LARGEST): 1.3})
    assert said(check, world) == "; ".join(parts)


def test_every_evidence_is_compared():
    assert set(EVIDENCE) == set(CLAIMS)


class TestSpeedKept:
    CASES: ClassVar = [
        ("check_largest", "schedule_va", 0.55, {SIMULATED: 1440, "quick": 91, "gpu": 1440}),
        ("check_alone", "schedule", 0.68, {SIMULATED: 928, "quick": 59, "gpu": 928}),
    ]

    @pytest.mark.parametrize(("check", "mode", "least", "sizes"), CASES)
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    def test_the_speed(self, check, mode, least, sizes, profile):
        for where in PLACES:
            size = sizes[where if where == SIMULATED else profile]
            for factor, expected in ((1.001, "reproduced"), (0.999, "partly"), (0.01, "partly")):
                relative = {(mode, size): factor * least}
                world = World(profile, places=(where,), relative=relative)
                found = verdict(check, world, profile)
                assert found.word == expected
                assert f"{PLACES[where]}: {size} (" in found.evidence
                assert f" at {factor * least:.0%} (paper {least:.0%})" in found.evidence

    @pytest.mark.parametrize(("check", "mode", "least", "sizes"), CASES)
    def test_slow_in_one_place_is_partly(self, check, mode, least, sizes):
        world = World(relative={(SIMULATED, mode): 0.9 * least})
        assert word(check, world) == "partly"

    @pytest.mark.parametrize(("check", "mode", "least", "sizes"), CASES)
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    def test_out_of_memory(self, check, mode, least, sizes, profile):
        found = verdict(check, World(profile, reach={(mode,): "in_core"}), profile)
        assert found.word == "not reproduced"
        assert f"{sizes[SIMULATED]} (" in found.evidence
        assert f"measured here: {sizes[profile]} (" in found.evidence
        assert found.evidence.count("ran out of memory") == 2

    def test_on_a_gpu_batch_sizes_are_the_papers_whatever_fits_in_core(self):
        world = World("gpu", (MEASURED,), reach={("in_core",): 256, ("schedule",): 1248})
        assert "measured here: 928 (3.62× of 256 in core) at 70%" in said("check_alone", world)
        world = World("gpu", (MEASURED,), reach={("in_core",): 128})
        found = verdict("check_alone", world, "gpu")
        assert found.word == "reproduced"
        assert "measured here: 928 (7.25× of 128 in core) at 70%" in found.evidence

    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    def test_where_that_batch_size_was_not_run(self, profile):
        status = {("schedule_va", size): None for size in (91, 1440)}
        world = World(profile, (MEASURED,), status=status)
        assert word("check_largest", world) == "not run"

    def test_without_any_that_fits_in_core(self):
        assert word("check_largest", World(reach={("in_core",): 0})) == "not run"


class TestOverLMS:
    def test_what_fits_in_core_does_not_count(self):
        world = World(reach={("in_core",): 256}, relative={(256, "lms"): 5.0})
        found = verdict("check_over_lms", world)
        assert found.word == "reproduced"
        assert found.evidence == "simulated, V100: at 512 1.17×; simulated, V100: at 928 1.17×"

    @pytest.mark.parametrize(
        ("ratio", "expected"),
        [
            (1.2, "reproduced"),
            (1.021, "reproduced"),
            (1.019, "partly"),
            (0.981, "partly"),  # 1 / 1.02 are 0.9804
            (0.979, "not reproduced"),
        ],
    )
    def test_the_speed(self, ratio, expected):
        world = World(relative={("schedule",): 0.6 * ratio, ("lms",): 0.6})
        found = verdict("check_over_lms", world)
        assert found.word == expected and f"at 928 {ratio:.2f}×" in found.evidence

    def test_faster_at_some_sizes_only(self):
        found = verdict("check_over_lms", World(relative={("lms", 512): 1.4}))
        assert found.word == "partly"
        assert found.evidence == "; ".join(
            f"simulated, V100: at {rest}" for rest in ("256 1.17×", "512 0.50×", "928 1.17×")
        )

    def test_where_lms_does_not_fit(self):
        found = verdict("check_over_lms", World(reach={("lms",): 512}))
        assert found.word == "reproduced"
        assert found.evidence == "; ".join(
            f"simulated, V100: at {rest}"
            for rest in ("256 1.17×", "512 1.17×", "928 LMS does not fit")
        )

    def test_where_nothing_fits_beyond_the_core(self):
        assert word("check_over_lms", World(reach={("schedule",): "in_core"})) == "not run"

    @pytest.mark.parametrize(
        ("with_va", "expected"),
        [
            (1504, "reproduced"),  # 0.97 of 1.55 are 1.5035
            (1503, "partly"),
            (1001, "partly"),
            (1000, "not reproduced"),
        ],
    )
    def test_how_much_larger(self, with_va, expected):
        world = World(reach={("lms",): 1000, ("schedule_va",): with_va})
        found = verdict("check_reach_over_lms", world)
        ratio = f"{with_va} over 1000, {with_va / 1000:.2f}× (paper 1.55×)"
        assert (found.word, found.evidence) == (expected, f"simulated, V100: LMS: {ratio}")

    def test_the_search_that_failed(self):
        world = World(status={("looked for",): FAILED})
        assert word("check_reach_over_lms", world) == "not run"


class TestReach:
    @pytest.mark.parametrize(
        ("with_va", "expected"),
        [
            (1504, "reproduced"),  # 0.97 of 1.55 are 1.5035
            (1503, "partly"),
            (1001, "partly"),
            (1000, "not reproduced"),
            (900, "not reproduced"),
        ],
    )
    @pytest.mark.parametrize("where", PLACES)
    def test_words(self, with_va, expected, where):
        found = largest("check_reach", where, RESNET, 200, 1000, with_va)
        assert found.word == expected
        ratio = with_va / 1000
        evidence = f"{RESNET}, {PLACES[where]}: {with_va} over 1000, {ratio:.2f}× (paper 1.55×)"
        assert found.evidence == evidence

    def test_the_largest_that_was_tried_leaves_it_open(self):
        for check, role in (("check_reach", RESNET), ("check_growth_with_va", PIX2PIXHD)):
            most = max(run.config["batch"] for run in
                       (grids.table1 if role == RESNET else grids.figures4_5)("gpu")
                       if run.experiment == MEASURED and run.config["role"] == role)  # fmt: skip
            reach = {("schedule",): most, ("schedule_va",): most}
            status = {(other,): None for other in ROLES if other != role}
            found = verdict(check, World("gpu", (MEASURED,), reach=reach, status=status), "gpu")
            assert found.word == "not run" and "the largest that was tried" in found.evidence

    def test_the_papers_own_numbers_would_do(self):
        world = World(reach={(SIMULATED, "schedule_va"): 1440})
        assert word("check_reach", world) == "reproduced"

    @pytest.mark.parametrize("mode", MODES)
    def test_nothing_is_said_where_one_way_has_no_records(self, mode):
        world = World("gpu", (MEASURED,), status={(mode,): None})
        assert word("check_reach", world) == "not run"


class TestEndOfAlone:
    @pytest.mark.parametrize(
        ("alone", "expected"),
        [
            (5036, "not reproduced"),  # 928 over 190 are 4.884, and over 0.97 5.035
            (5035, "reproduced"),
            (1000, "reproduced"),
        ],
    )
    @pytest.mark.parametrize("where", PLACES)
    def test_words(self, alone, expected, where):
        found = largest("check_end_of_alone", where, RESNET, 1000, alone, 9000)
        evidence = f"{PLACES[where]}: up to {alone}, {alone / 1000:.1f}× (paper 4.9×)"
        assert (found.word, found.evidence) == (expected, evidence)


class TestCostOfChunks:
    @pytest.mark.parametrize(
        ("ratio", "expected"),
        [
            (0.901, "reproduced"),
            (0.899, "partly"),
            (0.751, "partly"),
            (0.749, "not reproduced"),
        ],
    )
    def test_words(self, ratio, expected):
        # Six sizes beyond the core: slow at one, fast at another.
        relative = {("schedule",): 0.5, ("schedule_va",): 0.5 * ratio}
        relative |= {("schedule_va", 192): 0.1, ("schedule_va", 512): 5.0}
        relative |= {("schedule_va", size): 0.001 for size in (2, 64, 128, 1024, 1536)}
        found = verdict("check_cost_of_chunks", World("gpu", relative=relative), "gpu")
        assert found.word == expected
        assert found.evidence == f"measured here: {ratio:.2f}× in the middle of 6, at least 0.20×"

    def test_on_a_cpu_nothing_is_said(self):
        assert word("check_cost_of_chunks", World()) == "not run"

    def test_it_is_judged_where_section_5_2_has_it(self):
        artefact, _ = CLAIMS["check_cost_of_chunks"]
        results = made_results(artefact, World("gpu"), "gpu")
        assert {record.config["role"] for record in results.records} >= set(ROLES[1:])


class TestInternal:
    @pytest.mark.parametrize(("last", "expected"), [
        (1743, "reproduced"), (1744, "not reproduced"), (1900, "not reproduced"),
    ])  # fmt: skip
    def test_the_first_and_the_last_beyond_the_core(self, last, expected):
        inner = {(64,): 1, (190,): 1, (512,): 9000, (256,): 1744, (1440,): last}
        found = verdict("check_internal", World(internal=inner))
        assert found.word == expected
        text = f"1.70 GiB at 256, {last / 1024:.2f} GiB at 1440"
        assert found.evidence == f"simulated, V100: {text}"

    def test_one_size_is_not_enough(self):
        assert word("check_internal", World(reach={("schedule_va",): 256})) == "not run"


class TestFasterWithVA:
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    @pytest.mark.parametrize("where", PLACES)
    def test_the_speed(self, profile, where):
        for ratio, expected in (
            (1.021, "reproduced"),
            (1.019, "partly"),
            (0.981, "partly"),  # 1 / 1.02 are 0.9804
            (0.979, "not reproduced"),
        ):
            relative = {("schedule",): 0.5, ("schedule_va",): 0.5 * ratio}
            world = World(profile, places=(where,), relative=relative)
            found = verdict("check_faster_with_va", world, profile)
            assert found.word == expected
            assert found.evidence.endswith(f" {ratio:.2f}× (paper 1.02×)")

    def test_other_sizes_do_not_count(self):
        slow = {("schedule_va", size): 0.1 for size in (32, 71, 79, 91, 512, 1120, 1248, 1440)}
        assert word("check_faster_with_va", World(relative=slow)) == "reproduced"

    def test_out_of_memory(self):
        found = verdict("check_faster_with_va", World(reach={("schedule",): "in_core"}))
        assert found.word == "reproduced"
        assert "simulated, V100: 928 trains with chunks only" in found.evidence
        found = verdict("check_faster_with_va", World(reach={("schedule_va",): "in_core"}))
        assert found.word == "not reproduced"
        assert "measured here: 59 ran out of memory" in found.evidence
        nothing = World(reach={("schedule",): "in_core", ("schedule_va",): "in_core"})
        assert word("check_faster_with_va", nothing) == "not reproduced"

    def test_two_batch_sizes_are_not_compared(self):
        world = World(places=(MEASURED,), status={("schedule_va", 59): None})
        assert word("check_faster_with_va", world) == "not run"


class TestPeers:
    @pytest.mark.parametrize(
        ("size", "expected"),
        [(79, "reproduced"), (90, "reproduced"), (91, "not reproduced")],
    )
    def test_reach(self, size, expected):
        found = verdict("check_peers", World(reach={("checkpointing",): size}))
        assert found.word == expected
        trained = 79 if size == 90 else size
        assert f"checkpointing trains up to {trained}, where" in found.evidence
        assert "swapping is 1.25× as fast" in found.evidence
        assert found.evidence.endswith("swapping up to 91")

    def test_all_of_a_gpus(self):
        found = verdict("check_peers", World("gpu"), "gpu")
        assert found.word == "reproduced"
        assert found.evidence.split("; ")[::2] == [
            f"measured here: {rest} as fast"
            for rest in (
                "checkpointing trains up to 512, where swapping is 1.25×",
                "save_on_cpu trains up to 256, where swapping is 1.50×",
                "in core, expandable segments trains up to 190, where swapping is 0.75×",
            )
        ]
        assert set(found.evidence.split("; ")[1::2]) == {"swapping up to 1440"}

    def test_partly_where_one_reaches_as_far(self):
        world = World("gpu", reach={("save_on_cpu",): "schedule_va"})
        assert word("check_peers", world) == "partly"

    def test_where_nothing_of_a_peer_fits(self):
        found = verdict("check_peers", World(reach={("checkpointing",): 0}))
        assert found.word == "reproduced"
        assert found.evidence == "measured here: checkpointing trains up to 0; swapping up to 91"

    def test_where_a_peer_was_not_run(self):
        found = verdict("check_peers", World("gpu", status={("save_on_cpu",): FAILED}), "gpu")
        assert found.word == "reproduced" and "save_on_cpu" not in found.evidence
        assert word("check_peers", World(status={("checkpointing",): None})) == "not run"

    def test_where_swapping_was_not_run(self):
        assert word("check_peers", World(status={("schedule_va",): None})) == "not run"

    def test_where_nothing_of_swapping_fits(self):
        assert word("check_peers", World(reach={("schedule_va",): 0})) == "not reproduced"


class TestFragmentation:
    @pytest.mark.parametrize(
        ("share", "expected"),
        [
            (0.5, "reproduced"),
            (0.599, "reproduced"),
            (0.601, "partly"),
            (0.899, "partly"),
            (0.901, "not reproduced"),
            (1.0, "not reproduced"),
        ],
    )
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    @pytest.mark.parametrize("where", PLACES)
    def test_words(self, share, expected, profile, where):
        world = World(profile, places=(where,), budget={("schedule",): share})
        found = verdict("check_fragmentation", world, profile)
        assert found.word == expected
        assert f" {share:.0%} of the limit (paper 50 %)" in found.evidence

    def test_other_sizes_do_not_count(self):
        others = {("schedule", size): 0.95 for size in (512, 32)}
        assert word("check_fragmentation", World(budget=others)) == "reproduced"

    def test_where_there_is_no_budget(self):
        found = verdict("check_fragmentation", World(reach={("schedule",): "in_core"}))
        assert found.word == "not run"
        assert "simulated, V100: 928 cannot be given any budget" in found.evidence
        assert "measured here: 59 cannot be given any budget" in found.evidence


class TestClose:
    @pytest.mark.parametrize(
        ("budget", "expected"),
        [
            (0.751, "reproduced"),  # 0.2 of the limit are half of what lies there without chunks
            (0.749, "partly"),
            (0.551, "partly"),
            (0.549, "not reproduced"),
        ],
    )
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    @pytest.mark.parametrize("where", PLACES)
    def test_words(self, budget, expected, profile, where):
        world = World(profile, places=(where,), budget={("schedule_va",): budget})
        found = verdict("check_close", world, profile)
        assert found.word == expected
        assert f"{0.95 - budget:.0%} of the limit lie between budget and use" in found.evidence
        assert "40% without chunks" in found.evidence

    def test_at_the_largest_that_scheduling_alone_trains(self):
        world = World(reach={("schedule",): 512}, places=(SIMULATED,))
        assert "at 512 10%" in said("check_close", world)

    def test_where_chunks_do_not_reach_as_far(self):
        assert word("check_close", World(reach={("schedule_va",): "in_core"})) == "not run"

    def test_less_than_the_budget_is_nothing_lost(self):
        rules = {"budget": {("schedule_va",): 0.95}, "taken": {("schedule_va",): 0.9}}
        found = verdict("check_close", World(**rules))
        assert found.word == "reproduced" and " at 928 0% of the limit lie" in found.evidence


class TestGrowth:
    @pytest.mark.parametrize(
        ("role", "alone", "expected"),
        [
            (DENSENET, 1456, "reproduced"),  # 0.97 of 1.5 times
            (DENSENET, 1454, "partly"),
            (PIX2PIXHD, 3881, "reproduced"),  # 0.97 of 4 times
            (PIX2PIXHD, 3879, "partly"),
            (DEEPLAB, 5142, "reproduced"),  # 0.97 of 5.3 times
            (DEEPLAB, 5140, "partly"),
            (DEEPLAB, 1001, "partly"),
            (DEEPLAB, 1000, "not reproduced"),
            (DENSENET, 500, "not reproduced"),
        ],
    )
    @pytest.mark.parametrize("where", PLACES)
    def test_scheduling_alone(self, role, alone, expected, where):
        found = largest("check_growth", where, role, 1000, alone, 9000)
        assert found.word == expected
        assert found.evidence.startswith(f"{role}, {PLACES[where]}: {alone / 1000:.1f}× (paper ")

    @pytest.mark.parametrize(
        ("with_va", "expected"),
        [
            (1456, "reproduced"),  # 0.97 of 1.5 times
            (1454, "partly"),
            (1001, "partly"),
            (1000, "not reproduced"),
        ],
    )
    @pytest.mark.parametrize("role", ROLES[1:])
    @pytest.mark.parametrize("where", PLACES)
    def test_with_chunks(self, with_va, expected, role, where):
        found = largest("check_growth_with_va", where, role, 100, 1000, with_va)
        assert found.word == expected
        ratio = f"{with_va} over 1000, {with_va / 1000:.2f}× (paper 1.5×)"
        assert found.evidence == f"{role}, {PLACES[where]}: {ratio}"

    @pytest.mark.parametrize("check", ["check_growth", "check_growth_with_va", "check_flat"])
    @pytest.mark.parametrize("role", ROLES[1:])
    def test_partly_where_one_network_does_not(self, check, role):
        rules = {
            name: {(role, *key): value for key, value in rule.items()}
            for name, rule in WRONG[check].items()
        }
        assert word(check, World(**rules)) == "partly"

    def test_networks_that_were_not_run_are_left_out(self):
        status = {(DENSENET,): None, (PIX2PIXHD,): FAILED}
        for check in ("check_growth", "check_growth_with_va", "check_flat"):
            found = verdict(check, World(status=status))
            assert found.word == "reproduced" and "DeepLabv3+" in found.evidence
            assert "DenseNet" not in found.evidence and "Pix2PixHD" not in found.evidence


class TestGain:
    @pytest.mark.parametrize(
        ("middle", "expected"),
        [
            (1.021, "reproduced"),
            (1.019, "partly"),
            (0.981, "partly"),  # 1 / 1.02 are 0.9804
            (0.979, "not reproduced"),
        ],
    )
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    def test_the_middle_beyond_the_core(self, middle, expected, profile):
        fits = {("schedule_va", 2): 9.0, ("schedule_va", 4): 9.0}
        most = REACH[profile][PIX2PIXHD][2]
        relative = {("schedule_va",): middle - 0.1, ("schedule_va", most): middle + 0.1} | fits
        if profile == "gpu":  # 8, 16, 24 and 32 images
            relative |= {("schedule_va", 16): middle, ("schedule_va", 24): middle}
        found = verdict("check_gain", World(profile, relative=relative), profile)
        assert found.word == expected
        text = f"{middle:.2f}× in the middle, {middle + 0.1:.2f}× at {most}"
        assert found.evidence == f"measured here: {text}"

    def test_where_nothing_fits_beyond_the_core(self):
        found = verdict("check_gain", World(reach={("schedule_va",): "in_core"}))
        assert found.word in ("not run", "not reproduced")


class TestFlat:
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    @pytest.mark.parametrize("where", PLACES)
    def test_the_spread(self, profile, where):
        for spread, expected in ((0.049, "reproduced"), (0.051, "not reproduced")):
            taken = {("schedule_va", LARGEST): 0.95 - spread}
            world = World(profile, places=(where,), taken=taken)
            found = verdict("check_flat", world, profile)
            assert found.word == expected
            several = 2 if (profile, where) == ("quick", MEASURED) else 3
            assert found.evidence.count(f"within {spread:.1%} of the limit") == several

    def test_in_core_does_not_count(self):
        taken = {
            (where, role, "schedule_va", REACH[key][role][0]): 0.2
            for where, key in ((SIMULATED, SIMULATED), (MEASURED, "quick"))
            for role in ROLES[1:]
        }
        assert word("check_flat", World(taken=taken)) == "reproduced"

    def test_one_size_beyond_the_core_is_not_enough(self):
        sizes = REACH["quick"]
        status = {(role, "schedule_va", sizes[role][1]): None for role in ROLES[1:]}
        assert word("check_flat", World(places=(MEASURED,), status=status)) == "not run"


def rounds(*seconds: float) -> dict[str, Any]:
    return {"samples_s": list(seconds), "warmup": 1}


def only(made: Mapping[tuple[str, int], Mapping[str, Any]], profile: str = "quick") -> Results:
    """Return Table 1's results, measured: given a way to train and a batch size."""
    return made_results(
        "table1", lambda run: made.get((run.config.get("mode"), run.config.get("batch"))), profile
    )


class TestReading:
    def test_simulated_points_by_hand(self):
        def rows(**of):
            return {"metrics": {"limit_bytes": 16, "peak_bytes": 11, "rows": of}}

        of = {
            64: rows(
                in_core={"time_s": 0.32, "reserved_bytes": 12},  # 200 images/s
                schedule={"time_s": 0.4, "reserved_bytes": 13, "budget_bytes": 14, "held_bytes": 9},
            ),
            256: rows(in_core={"time_s": 2.56, "reserved_bytes": 15}),  # 100 images/s
            512: rows(
                lms={"time_s": 6.4, "reserved_bytes": 13, "budget_bytes": 5, "held_bytes": 4}
            ),
            928: FAILED,
        }
        results = made_results(
            "table1",
            lambda run: of.get(run.config.get("batch")) if run.experiment == SIMULATED else None,
        )
        in_core = reading.points(results, SIMULATED, RESNET, "in_core")
        assert list(in_core) == [64, 256, 512] and in_core[512] is None
        assert [p.images_per_s for p in in_core.values() if p] == pytest.approx([200, 100])
        assert [p.relative for p in in_core.values() if p] == pytest.approx([1.0, 0.5])
        assert [p.held_bytes for p in in_core.values() if p] == [11, 11]
        assert [p.budget_bytes for p in in_core.values() if p] == [None, None]
        alone = reading.points(results, SIMULATED, RESNET, "schedule")
        assert alone[64].images_per_s == pytest.approx(160)
        assert alone[64].relative == pytest.approx(0.8)
        assert (alone[64].reserved_bytes, alone[64].budget_bytes) == (13, 14)
        assert alone[64].held_bytes == 9 and alone[64].row["time_s"] == 0.4
        assert alone[256] is None and alone[512] is None
        lms = reading.points(results, SIMULATED, RESNET, "lms")
        assert list(lms) == [256, 512]  # where it was planned
        assert lms[256].images_per_s == pytest.approx(100)  # what fits in core is not swapped
        assert lms[512].relative == pytest.approx(0.4)
        assert reading.largest(in_core) == 256
        assert reading.in_core_batch(results, SIMULATED, RESNET) == 256
        assert reading.in_core_batch(results, MEASURED, RESNET) is None
        assert reading.limit_bytes(results, SIMULATED, RESNET) == 16
        assert reading.limit_bytes(results, MEASURED, RESNET) is None

    def test_without_anything_in_core_there_is_no_relative_throughput(self):
        for place in PLACES:
            world = World("gpu", reach={("in_core",): 0})
            found = reading.points(made_results("table1", world, "gpu"), place, RESNET, "schedule")
            assert found[928].relative is None and found[928].images_per_s == pytest.approx(70)

    def test_lms_is_of_resnet_only(self):
        results = made_results("figure4", World())
        assert reading.points(results, SIMULATED, DENSENET, "lms") == {}

    def test_on_a_cpu_it_is_the_median_of_paired_ratios(self):
        # By round 32 / 12 of 3, 1 / 2 and 2 / 4; the ratio of the medians would be 1.
        swapped = {
            "metrics": {"limit_bytes": 7, "held_bytes": 5, "budget_bytes": 6, "reserved_bytes": 8},
            "timings": {"iteration": rounds(1.0, 2.0, 4.0), "reference": rounds(3.0, 1.0, 2.0)},
        }
        results = only({("schedule", 32): swapped, ("schedule", 16): OUT_OF_MEMORY,
                        ("schedule", 59): FAILED})  # fmt: skip
        found = reading.points(results, MEASURED, RESNET, "schedule")
        assert list(found) == [16, 32] and found[16] is None
        assert found[32].images_per_s == 16.0
        assert found[32].relative == pytest.approx(32 / 12 / 2)
        assert (found[32].budget_bytes, found[32].reserved_bytes) == (6, 8)
        assert found[32].held_bytes == 5
        assert reading.limit_bytes(results, MEASURED, RESNET) == 7

    def test_on_a_gpu_it_is_over_the_best_throughput_in_core(self):
        def timed(*seconds):
            sizes = {"limit_bytes": 9, "held_bytes": 5, "reserved_bytes": 8}
            return {"metrics": sizes, "timings": {"iteration": rounds(*seconds)}, "device": GPU}

        results = only({
            ("in_core", 64): timed(1.0, 9.0, 1.0),  # 64 images/s
            ("in_core", 128): timed(1.6, 1.6, 0.1),  # 80 images/s
            ("in_core", 190): timed(3.8, 3.8, 3.8),  # 50 images/s
            ("in_core", 256): OUT_OF_MEMORY,
            ("schedule", 512): timed(16.0, 1.0, 20.0),  # 32 images/s
        }, "gpu")  # fmt: skip
        found = reading.points(results, MEASURED, RESNET, "in_core")
        assert [p and p.relative for p in found.values()] == pytest.approx([0.8, 1.0, 0.625, None])
        found = reading.points(results, MEASURED, RESNET, "schedule")
        assert found[512].relative == pytest.approx(0.4)
        assert reading.points(results, MEASURED, RESNET, "schedule_va") == {}

    def test_largest(self):
        here = Point(1.0, None, None, None, None, {})
        assert reading.largest({4: here, 8: here, 16: None}) == 8
        assert reading.largest({4: here, 8: None, 16: here}) == 16
        assert reading.largest({4: None}) is None and reading.largest({}) is None

    @pytest.mark.parametrize(
        ("batch", "size"),
        [(40, 100), (31, 10), (32, 100), (1, 10), (1e4, 100), (10, 10)],  # even is 31.6
    )
    def test_nearest_is_so_in_proportion(self, batch, size):
        here = Point(1.0, None, None, None, None, {})
        assert reading.nearest({10: None, 100: here}, batch) == size

    def test_nearest_of_none(self):
        assert reading.nearest({}, 10) is None

    def test_corresponding(self):
        results = made_results("table1", World())
        for paper, here in zip((64, 128, 190, 256, 512, 928, 1120, 1248, 1440),
                               grids.BATCHES["quick"], strict=True):  # fmt: skip
            size, point = reading.corresponding(results, MEASURED, paper, "schedule_va")
            assert size == here and point.images_per_s == pytest.approx(75)
            assert reading.corresponding(results, SIMULATED, paper, "schedule_va")[0] == paper
        assert reading.corresponding(results, MEASURED, 1440, "schedule") == (91, None)

    @pytest.mark.parametrize(("size", "near"), [(53, True), (52, False), (64, True), (65, False)])
    def test_corresponding_is_within_a_tenth(self, size, near):
        # 12 in core, as 190 in the paper: 928 are 58.6, and a tenth of these 5.9.
        sizes = (12, size)
        runs = [grids.measured("quick", RESNET, batch, mode) for batch in sizes for mode in MODES]
        results = results_of(runs, World(reach={("schedule",): 999}))
        found = reading.corresponding(results, MEASURED, 928, "schedule")
        assert (found is not None and found[0] == size) == near

    def test_corresponding_on_a_gpu_is_the_same_batch_size(self):
        results = made_results("table1", World("gpu", reach={("in_core",): 0}), "gpu")
        size, point = reading.corresponding(results, MEASURED, 928, "schedule")
        assert size == 928 and point.images_per_s == pytest.approx(70)

    def test_corresponding_without_records(self):
        nothing = made_results("table1", World(reach={("in_core",): 0}))
        assert reading.corresponding(nothing, MEASURED, 928, "schedule") is None
        alone = made_results("table1", World(status={("schedule_va",): None}))
        assert reading.corresponding(alone, MEASURED, 928, "schedule_va") is None

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (None, "–"),
            (16 * GIB, "16.00 GiB"),
            (GIB // 4, "0.25 GiB"),
            (GIB // 4 - MIB, "255.0 MiB"),
            (3 * MIB // 2, "1.5 MiB"),
        ],
    )
    def test_bytes(self, count, text):
        assert reading.gib(count) == text

    def test_every_way_to_train_has_a_label(self):
        modes = {run.config["mode"] for run in grids.table1("gpu") if "mode" in run.config}
        assert modes | {"lms"} == set(reading.LABELS)


class TestMadeUp:
    """The made-up records themselves: they are of all runs, and of the shape of real ones."""

    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu", "paper"])
    def test_the_batch_sizes_are_the_grids(self, profile):
        sizes = {
            (run.experiment, run.config["role"], run.config.get("batch"))
            for run in itertools.chain(grids.table1(profile), grids.figures4_5(profile))
        }
        places = [(MEASURED, profile), (SIMULATED, SIMULATED)][: 1 if profile == "smoke" else 2]
        for (where, key), role in itertools.product(places, ROLES):
            looked_for = (where, role) == (SIMULATED, RESNET)
            assert {(where, role, n) for n in REACH[key][role][: 2 if looked_for else 3]} <= sizes

    def test_a_gpus_have_no_reference(self):
        for profile, names in (("quick", {"iteration", "reference"}), ("gpu", {"iteration"})):
            results = made_results("table1", World(profile), profile)
            timed = [r for r in results.select(MEASURED) if r.status == "ok"]
            assert {frozenset(r.timings) for r in timed} == {frozenset(names)}
            between = {"limit_between" in r.config for r in results.select(MEASURED)}
            assert between == {profile == "quick"}

    def test_rules(self):
        world = replace(World(), relative={("schedule",): 0.5, ("schedule", 59): 0.25})
        found = reading.points(made_results("table1", world), MEASURED, RESNET, "schedule")
        assert found[59].relative == pytest.approx(0.25)
        assert found[32].relative == pytest.approx(0.5) and found[71] is None
