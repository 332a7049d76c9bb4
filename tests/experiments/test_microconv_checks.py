"""Every claim about μ-cuDNN, judged on records made up; the tests of its tables use them too."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from invented import make_record

from repro.experiments import load_paper
from repro.experiments.design import SEEDS, Results, Run, Verdict
from repro.experiments.microconv import checks, costs, layers, reading

MIB = 2**20
PAPER = load_paper("microconv")
FAILED = {"status": "failed", "error": "ValueError: wrong"}
OUT_OF_MEMORY = {"status": "out_of_memory", "error": "OutOfMemoryError: no room"}
KINDS = ("forward", "backward_data", "backward_filter")

# Given a run: the changes to its record, None for no record.
Maker = Callable[[Run], Mapping[str, Any] | None]


def made_results(artefact: str, make: Maker, profile: str = "quick") -> Results:
    runs = PAPER.artefacts[artefact].runs(profile, {})
    records = []
    for run in runs:
        changes = make(run)
        if changes is None:
            continue
        for seed in run.seeds if run.seeds is not None else SEEDS[profile]:
            values = {"paper": "microconv", "config": run.config, "seed": seed, "dataset": None}
            records.append(make_record(run.experiment, **values | changes))
    return Results(runs, SEEDS[profile], records)


def verdict(artefact: str, beginning: str, results: Results) -> Verdict:
    """Return the verdict on the artefact's claim that begins so."""
    claims = [c for c in PAPER.artefacts[artefact].claims if c.text.startswith(beginning)]
    assert len(claims) == 1, [c.text for c in PAPER.artefacts[artefact].claims]
    return claims[0].check(results)


def timing(seconds: float, n: int = 3) -> dict[str, Any]:
    """Return samples with this median, the first one far off."""
    return {"samples_s": [9 * seconds] + [seconds] * (n - 1), "warmup": 1}


def entry(
    layer: str = "conv2",
    kind: str = "forward",
    batch: int = 8,
    gain: float = 2.0,
    fast_mib: float = 2.0,
    slow_mib: float = 0.0,
    native: tuple[float, float] = (4e-3, 3.0),
) -> dict[str, Any]:
    """Return a kernel with two algorithms at every micro-batch size.

    The slow one takes 1 ms and `slow_mib` for each sample, the fast one is `gain` times as fast,
    plus 1 μs a call, with `fast_mib` for each sample.
    """
    ways = {
        str(b): [
            ["slow", 1e-3 * b, int(slow_mib * b * MIB)],
            ["fast", 1e-3 * b / gain + 1e-6, int(fast_mib * b * MIB)],
        ]
        for b in range(1, batch + 1)
    }
    return {
        "layer": layer,
        "kind": kind,
        "batch": batch,
        "shape": "64×27×27 to 192, 5×5, stride 1, padding 2",
        "native_s": native[0],
        "native_bytes": int(native[1] * MIB),
        "candidates": ways,
    }


def candidates(*entries: dict[str, Any], checked: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    metrics = {"benchmark_s": 2.0, "optimise_s": 0.5, "measured": 34, "infeasible_at_64_mib": 0}
    return {"metrics": metrics | {"kernels": list(entries), "checked": list(checked)}}


def alexnet(**of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the 14 kernels of AlexNet, with changes to those of a layer."""
    names = [f"conv{n}" for n in range(1, 6)]
    return candidates(
        *(
            entry(layer, kind, **of.get(layer, {}))
            for layer, kind in itertools.product(names, KINDS)
            if (layer, kind) != ("conv1", "backward_data")
        )
    )


def network(
    relative: float | None = 1.0,
    mib: float = 1.0,
    native_s: float = 0.010,
    unfit: Sequence[str] = (),
    tuned_s: float = 0.5,
    **metrics: Any,
) -> dict[str, Any]:
    """Return a network of two layers, its kernels `relative` times as slow as torch's own.

    Args:
        relative: Of the kernels' times to those of torch's own; None where none of them fits.
        mib: Workspace of each kernel.
        native_s: Of each kernel.
        unfit: Kernels that do not fit, such as ``conv2 F``.
        tuned_s: Of a whole iteration; untuned it takes 0.6 s.
        metrics: Others.
    """
    rows = []
    for layer, kind in itertools.product(("conv1", "conv2"), ("forward", "backward_filter")):
        row: dict[str, Any] = {"layer": layer, "kind": kind, "batch": 8}
        if relative is not None and reading.label(row) not in unfit:
            row |= {
                "parts": [[4, "fast"], [4, "slow"]],
                "workspace_bytes": int(mib * MIB),
                "time_s": relative * native_s,
                "native_s": native_s,
                "predicted_s": relative * native_s,
            }
        rows.append(row)
    errors = {"loss_error": 1e-7, "gradient_error": 1e-6, "own_gradient_error": 0.0}
    sizes = {"variables": 0, "optimise_s": 0.002, "tuned_kernels": 1, "allocated_bytes": MIB}
    return {
        "metrics": {"kernels": rows, **sizes, **errors, **metrics},
        "timings": {"tuned": timing(tuned_s), "plain": timing(0.6)},
    }


def bench(*rows: tuple[str, float | None, float | None], left_out: int = 3) -> dict[str, Any]:
    """Return layers: kernel size, and time over torch's own of undivided and divided."""

    def way(relative: float, native_s: float) -> dict[str, Any]:
        return {
            "parts": [[8, "fast"]],
            "workspace_bytes": MIB,
            "time_s": relative * native_s,
            "native_s": native_s,
        }

    made = []
    for size, undivided, divided in rows:
        row: dict[str, Any] = {"shape": "a shape", "kernel_size": size, "batch": 16}
        # Torch's own took twice as long while the divided one was measured: a slow spell.
        if undivided is not None:
            row["undivided"] = way(undivided, 0.01)
        if divided is not None:
            row["divided"] = way(divided, 0.02)
        made.append(row)
    return {"metrics": {"layers": made, "left_out": left_out}}


def cluster(fast: Callable[[int], float], slow: Callable[[int], float]) -> dict[str, Any]:
    """Return devices' seconds at the batch sizes of the plan."""
    sizes = (1, 2, *range(4, 33, 4))
    times = {"fast": {str(b): fast(b) for b in sizes}, "slow": {str(b): slow(b) for b in sizes}}
    return {
        "metrics": {"times": times, "devices": {"fast": "CPU, 2 threads", "slow": "CPU, 1 thread"}}
    }


def solved(small_s: float = 0.1, large_s: float = 0.5) -> dict[str, Any]:
    timings = {
        "WD, 562 variables": timing(small_s),
        "WD, 2500 variables": timing(large_s),
        "front, B = 256, 6 algorithms, all": timing(0.02),
    }
    return {"metrics": {"fronts": "made up at random"}, "timings": timings}


def checked(limit: int, policy: str, relative: float, native_s: float = 0.02) -> dict[str, Any]:
    """Return conv2 as it ran under a limit with a policy."""
    return {
        "limit_mib": limit,
        "policy": policy,
        "parts": [[16, "fast"], [16, "fast"]],
        "workspace_bytes": 3 * MIB,
        "predicted_s": 0.9 * relative * native_s,
        "time_s": relative * native_s,
        "native_s": native_s,
    }


def conv2(**relative: float) -> dict[str, Any]:
    """Return conv2's record, given times over torch's own by policy and limit: ``all_64=0.5``."""
    rows = []
    for number, (name, value) in enumerate(relative.items()):
        policy, limit = name.rsplit("_", 1)
        rows.append(checked(int(limit), policy, value, 0.01 * (number + 1)))
    return candidates(entry(batch=32), checked=rows)


def plausible(run: Run) -> dict[str, Any]:
    """Return an outcome of any run, as the paper has it."""
    divided = run.config.get("policy") != "undivided"
    if run.experiment == "candidates":
        if run.config.get("layer"):
            return conv2(
                undivided_8=1.0, powerOfTwo_8=1.0, all_8=0.9,
                undivided_64=1.0, powerOfTwo_64=0.6, all_64=0.5,
            )  # fmt: skip
        late = {"gain": 0.5}
        return alexnet(conv1=late, conv4=late, conv5=late)
    if run.experiment == "network":
        variables = 30 if run.config["mode"] == "WD" else 0
        return network(0.5 if divided else 1.0, variables=variables)
    if run.experiment == "deepbench":
        return bench(("3×3", 1.0, 0.5), ("5×5", 1.0, 0.8), ("1×1", None, 2.0))
    if run.experiment == "cluster":
        return cluster(lambda b: 1e-3 * b, lambda b: 2e-3 * b)
    return solved()


class TestEveryClaim:
    def test_each_check_is_a_claim_and_each_claim_has_a_check(self):
        written = {
            name
            for name, value in vars(checks).items()
            if name.startswith("check_") and value.__module__ == checks.__name__
        }
        used = {c.check.__name__ for a in PAPER.artefacts.values() for c in a.claims}
        assert written == used

    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu", "paper"])
    def test_without_records_it_is_not_run(self, profile):
        for artefact in PAPER.artefacts.values():
            assert artefact.claims
            results = made_results(artefact.name, lambda run: None, profile)
            for claim in artefact.claims:
                found = claim.check(results)
                assert (found.word, found.evidence != "") == ("not run", True), claim.text
                assert claim.text and claim.source

    @pytest.mark.parametrize("outcome", [FAILED, OUT_OF_MEMORY])
    def test_where_nothing_worked_it_is_not_reproduced(self, outcome):
        for artefact in PAPER.artefacts.values():
            results = made_results(artefact.name, lambda run: outcome)
            for claim in artefact.claims:
                assert claim.check(results).word in ("not run", "not reproduced"), claim.text

    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu", "paper"])
    def test_as_in_the_paper_each_is_judged_with_numbers(self, profile):
        for artefact in PAPER.artefacts.values():
            results = made_results(artefact.name, plausible, profile)
            assert results.missing == 0
            for claim in artefact.claims:
                found = claim.check(results)
                assert found.word != "not run", claim.text
                assert any(c.isdigit() for c in found.evidence) and "nan" not in found.evidence

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_any_single_record_alone_or_missing_is_no_exception(self, artefact):
        runs = PAPER.artefacts[artefact].runs("quick", {})
        for one in runs:
            alone = made_results(
                artefact, lambda run, one=one: plausible(run) if run == one else None
            )
            without = made_results(
                artefact, lambda run, one=one: None if run == one else plausible(run)
            )
            for claim, results in itertools.product(
                PAPER.artefacts[artefact].claims, (alone, without)
            ):
                assert claim.check(results).evidence

    def test_where_no_kernel_fits_nothing_is_reproduced(self):
        """But for conv2's front and the claims that nothing is gained."""
        kernels = {f"conv{n}": {"slow_mib": 1e4, "fast_mib": 2e4} for n in range(1, 6)}

        def make(run):
            if run.experiment == "network":
                return network(None)
            if run.experiment == "deepbench":
                return bench(("3×3", None, None))
            if run.config.get("layer"):
                return candidates(entry(slow_mib=1e4, fast_mib=2e4))
            return alexnet(**kernels) if run.experiment == "candidates" else None

        indifferent = (
            checks.check_front_size,
            checks.check_accuracy,
            checks.check_optimisation,
            checks.check_small,
            checks.check_ample,
        )
        for artefact in PAPER.artefacts.values():
            results = made_results(artefact.name, make)
            for claim in artefact.claims:
                if claim.check not in indifferent:
                    found = claim.check(results)
                    assert found.word in ("not run", "not reproduced"), (claim.text, found)


class TestGain:
    @pytest.mark.parametrize(
        ("ratio", "paper", "word"),
        [
            (1.06, None, "reproduced"),
            (1.06, 4.54, "reproduced"),
            (1.04, 4.54, "partly"),
            (1.04, 1.03, "reproduced"),  # the paper's own is small
            (1.02, 1.03, "partly"),
            (1.0, None, "not reproduced"),
            (0.5, 1.6, "not reproduced"),
            (None, 1.6, "not run"),
        ],
    )
    def test_words(self, ratio, paper, word):
        found, evidence = checks.gain("conv2", ratio, paper, "of a whole iteration")
        assert found == word and "conv2" in evidence
        if ratio is not None:
            assert f"{ratio:.2f}×" in evidence
            assert ("of a whole" in evidence) == (paper is not None)
            assert paper is None or f"(paper {paper:.2f}×, of a whole iteration)" in evidence


class TestFigure1:
    BEGINNING = "Fast undivided"

    def judge(self, *entries):
        results = made_results("figure1", lambda run: candidates(*entries))
        return verdict("figure1", self.BEGINNING, results)

    # The fast one needs 16 MiB undivided; at 0.5 MiB a sample 4, at 100 MiB a sample 800.
    GAINS = entry()
    SAME = entry(fast_mib=0.5)
    SLIGHT = entry(gain=1.04)
    UNFIT_8 = entry(slow_mib=3.0, fast_mib=4.0)
    UNFIT = entry(slow_mib=100.0, fast_mib=200.0)

    @pytest.mark.parametrize(
        ("entries", "word", "counts"),
        [
            ([GAINS, SAME], "reproduced", "1 of 2"),
            ([GAINS, SLIGHT, SAME], "partly", "1 of 3"),
            ([SLIGHT, SAME], "not reproduced", "0 of 2"),
            ([UNFIT_8], "reproduced", "1 of 1"),
            ([UNFIT_8, SAME, SAME], "partly", "1 of 3"),
            ([UNFIT, GAINS], "reproduced", "1 of 1"),
            ([UNFIT], "not run", "no kernel fits"),
        ],
    )
    def test_words(self, entries, word, counts):
        found = self.judge(*entries)
        assert found.word == word and counts in found.evidence

    def test_the_largest_gain(self):
        # Undivided, 8 samples: 8 ms against 4 ms and a microsecond.
        assert f"the most {8 / 4.001:.2f}×; 0 of them" in self.judge(self.GAINS).evidence
        assert "1 of them fit into 512 and not into 8" in self.judge(self.UNFIT_8).evidence


class TestFigure6:
    def judge(self, beginning, of_conv2, whole=None):
        def make(run):
            return candidates(of_conv2) if run.config.get("layer") else whole

        return verdict("figure6", beginning, made_results("figure6", make))

    def test_divided_configurations(self):
        # By hand: slow alone, then up to 1, ..., 7 fast samples at once: 8, 4, 3, 2, 2, 2, 2 calls
        # at best, of which those with as many calls as a smaller workspace has drop out; then 1.
        found = self.judge("Divided configurations", entry())
        assert (found.word, found.evidence) == (
            "reproduced",
            "4 of 6 desirable divisions are divided",
        )
        found = self.judge("Divided configurations", entry(gain=0.5))
        assert (found.word, found.evidence[:6]) == ("not reproduced", "0 of 1")

    def test_only_up_to_the_figures_workspace(self):
        # 100 MiB a sample: one fast sample at a time still fits into 120 MiB, two do not.
        found = self.judge("Divided configurations", entry(fast_mib=100.0))
        assert found.evidence.startswith("1 of 2")

    @pytest.mark.parametrize(("count", "word"), [(68, "reproduced"), (69, "not reproduced")])
    @pytest.mark.parametrize("place", ["conv2", "whole"])
    def test_the_size_of_fronts(self, count, word, place):
        ways = [[f"a{k}", 1.0 / (k + 1), k * MIB] for k in range(count)]
        large = entry(batch=1) | {"candidates": {"1": ways}}
        of_conv2, whole = (large, None) if place == "conv2" else (entry(), candidates(large))
        found = self.judge("Few configurations", of_conv2, whole)
        assert found.word == word
        assert f"{count} points, paper 68" in found.evidence


class TestFigure8:
    def judge(self, beginning, *rows):
        def make(run):
            return bench(*rows) if run.config["role"] == "OCR" else bench()

        return verdict("figure8", beginning, made_results("figure8", make))

    @pytest.mark.parametrize(
        ("rows", "word", "numbers"),
        [
            ([("3×3", 1.0, 0.5), ("5×5", 1.0, 1.0)], "reproduced", "mean 1.50×"),
            ([("3×3", 1.2, 0.5)], "reproduced", "up to 2.40× (paper 4.54×) on 1 layers"),
            ([("3×3", 1.0, 1 / 1.04)], "partly", "mean 1.04× (paper 1.60×, V100"),
            ([("3×3", 1.0, 1.0), ("1×1", None, 0.1)], "not reproduced", "on 1 layers"),
            ([("1×1", None, 0.1)], "not run", "no records"),
            ([("1×1", None, None)], "not run", "no records"),
        ],
    )
    def test_layers(self, rows, word, numbers):
        found = self.judge("Dividing makes", *rows)
        assert found.word == word and numbers in found.evidence

    @pytest.mark.parametrize(
        ("threes", "fives", "word"),
        [
            (0.5, 0.5, "reproduced"),
            (0.5, None, "partly"),
            (0.5, 1.0, "partly"),
            (0.97, 0.97, "partly"),
            (1.0, 1.1, "not reproduced"),
            (None, None, "not run"),
        ],
    )
    def test_kernel_sizes(self, threes, fives, word):
        rows = [("3×3", 1.0, threes), ("5×5", 1.0, fives), ("7×7", 1.0, 0.1)]
        found = self.judge("3×3 and 5×5", *rows)
        assert found.word == word
        if threes:
            assert f"3×3 {1 / threes:.2f}× (paper 1.16×, P100" in found.evidence

    @pytest.mark.parametrize(
        ("relative", "word"),
        [
            ((0.5, 0.9, 1.0), "reproduced"),
            ((0.5, 0.97, 1.0), "partly"),
            ((0.97, 1.0, 2.0), "not reproduced"),
            ((None,), "not run"),
        ],
    )
    def test_over_torch_today(self, relative, word):
        rows = [("3×3", None, value) for value in relative]
        found = self.judge("Dividing is faster than what", *rows)
        assert found.word == word
        if relative[0] is not None:
            mean = sum(1 / value for value in relative) / len(relative)
            won = sum(1 / value > 1.05 for value in relative)
            assert f"fp32: on {won} of 3 layers, {mean:.2f}× on average" in found.evidence

    def test_only_float32_is_judged(self):
        def make(run):
            return bench(("3×3", 1.0, 0.5 if run.config["setting"] == "fp32" else 9.0))

        found = verdict("figure8", "Dividing makes", made_results("figure8", make, "gpu"))
        assert found.word == "reproduced" and "mean 2.00×" in found.evidence
        found = verdict("figure8", "Dividing is", made_results("figure8", make, "gpu"))
        assert "tf32: on 0 of 6 layers, 0.11×" in found.evidence


MISSING, UNFIT = "missing", "unfit"


def limits(artefact, beginning, cells, profile="quick", otherwise=1.0):
    """Judge by (limit, policy): the time over torch's own, MISSING or UNFIT."""

    def make(run):
        if run.config["setting"] != "fp32":
            return network(9.0)
        value = cells.get((run.config["limit_mib"], run.config["policy"]), otherwise)
        if value == MISSING:
            return None
        # Each run met another speed of the machine: only ratios to torch's own count.
        native_s = 0.001 * run.config["limit_mib"]
        return network(None) if value == UNFIT else network(value, native_s=native_s)

    return verdict(artefact, beginning, made_results(artefact, make, profile))


class TestFigure9:
    @pytest.mark.parametrize(
        ("undivided", "every", "words"),
        [
            (1.0, 0.5, ["reproduced"]),
            (1.0, 0.97, ["partly"]),
            (1.0, 1.0, ["not reproduced"]),
            (1.0, 1.2, ["not reproduced"]),
            (UNFIT, 0.5, ["partly"]),
            (MISSING, 0.5, ["not run"]),
            (1.0, MISSING, ["not run"]),
            (UNFIT, MISSING, ["not run"]),
            (UNFIT, UNFIT, ["not reproduced", "not run"]),
        ],
    )
    def test_a_moderate_limit(self, undivided, every, words):
        cells = {(64, "undivided"): undivided, (64, "all"): every}
        found = limits("figure9", "With a moderate", cells, otherwise=0.1)
        assert found.word in words
        if words == ["reproduced"]:
            assert "convolutions 2.00× (paper 1.63×)" in found.evidence
        if words == ["partly"] and undivided == UNFIT:
            assert "conv1 F, conv1 BF, conv2 F, conv2 BF do not fit into 64" in found.evidence

    @pytest.mark.parametrize(
        ("undivided", "every", "word"),
        [
            (1.0, 1.0, "reproduced"),
            (1.0, 2.0, "reproduced"),
            (1.0, 0.97, "reproduced"),
            (1.0, 0.9, "not reproduced"),
            (UNFIT, 0.9, "not reproduced"),
            (UNFIT, MISSING, "not run"),
            (1.0, MISSING, "not run"),
            (MISSING, 1.0, "not run"),
        ],
    )
    def test_a_small_limit(self, undivided, every, word):
        cells = {(8, "undivided"): undivided, (8, "all"): every}
        assert limits("figure9", "With 8 MiB", cells, otherwise=0.1).word == word

    @pytest.mark.parametrize(
        ("undivided", "every", "word"),
        [
            (1.0, 1.0, "reproduced"),
            (1.0, 1.04, "reproduced"),
            (1.0, 0.97, "reproduced"),
            (1.0, 0.9, "not reproduced"),
            (1.0, 1.2, "not reproduced"),
            (1.0, MISSING, "not run"),
        ],
    )
    def test_an_ample_limit(self, undivided, every, word):
        cells = {(512, "undivided"): undivided, (512, "all"): every}
        assert limits("figure9", "With 512 MiB", cells, otherwise=0.1).word == word

    @pytest.mark.parametrize(
        ("large_mib", "small", "word"),
        [
            (4.2, 1.04, "reproduced"),
            (4.2, 0.5, "reproduced"),
            (4.0, 1.04, "partly"),
            (4.2, 1.06, "not reproduced"),
            (1.0, 1.0, "not reproduced"),
            (0.5, 0.9, "not reproduced"),
            (None, 1.0, "not run"),
        ],
    )
    def test_memory(self, large_mib, small, word):
        def make(run):
            cell = run.config["limit_mib"], run.config["policy"]
            if cell == (512, "undivided"):
                return None if large_mib is None else network(1.0, large_mib, native_s=0.5)
            return network(small if cell == (64, "all") else 0.1)

        found = verdict("figure9", "Divided at 64", made_results("figure9", make))
        assert found.word == word
        if large_mib is not None:
            numbers = (
                f"{large_mib:.2f} times less workspace (paper 4.10) for {100 * small - 100:+.1f}"
            )
            assert numbers in found.evidence

    @pytest.mark.parametrize(
        ("cells", "word"),
        [
            ({}, "reproduced"),
            ({(8, "all"): 0.9, (64, "all"): 0.9, (512, "all"): 0.9}, "not reproduced"),
            ({(64, "all"): 0.9}, "partly"),
            ({(64, "powerOfTwo"): 0.5}, "reproduced"),
            ({(limit, "all"): MISSING for limit in (8, 64, 512)}, "not run"),
            ({(8, "all"): UNFIT, (64, "all"): 0.9, (512, "all"): MISSING}, "not reproduced"),
        ],
    )
    def test_policies(self, cells, word):
        found = limits("figure9", "powerOfTwo is as good", cells)
        assert found.word == word

    @pytest.mark.parametrize(
        ("errors", "word"),
        [
            ([(1e-7, 1e-6, 0.0)], "reproduced"),
            ([(1e-7, 1e-6, 0.0), (1e-4, 1e-4, 0.0)], "reproduced"),
            ([(1e-7, 2e-2, 2e-2)], "reproduced"),  # as far as torch's own are apart
            ([(1e-7, 2e-2, 1e-2)], "partly"),
            ([(1e-7, 2e-2, 2e-2), (1e-7, 1e-2, 0.0)], "partly"),
            ([(2e-4, 1e-6, 0.0)], "not reproduced"),
            ([(2e-4, 2e-2, 0.0)], "not reproduced"),
        ],
    )
    def test_accuracy(self, errors, word):
        names = ("loss_error", "gradient_error", "own_gradient_error")
        given = itertools.cycle(errors)
        results = made_results(
            "table5", lambda run: network(**dict(zip(names, next(given), strict=True)))
        )
        found = verdict("table5", "Results do not", results)
        assert found.word == word
        assert "over 7 networks, 7 of them with divided" in found.evidence
        assert ("edge of its ReLU" in found.evidence) == any(gap > 1e-4 for _, gap, _ in errors)

    def test_accuracy_says_nothing_where_all_is_left_to_torch(self):
        results = made_results("table5", lambda run: network(tuned_kernels=0))
        assert verdict("table5", "Results do not", results).word == "not run"

    @pytest.mark.parametrize("name", ["loss_error", "gradient_error"])
    def test_results_that_are_no_numbers_are_not_the_same(self, name):
        def make(run):
            wrong = {name: float("nan")} if run.config["limit_mib"] == 64 else {}
            return network(**wrong)

        found = verdict("table5", "Results do not", made_results("table5", make))
        assert found.word != "reproduced"

    def test_other_precisions_are_not_judged(self):
        def make(run):
            return network(loss_error=0.1 if run.config["setting"] != "fp32" else 0.0)

        found = verdict("table5", "Results do not", made_results("table5", make, "gpu"))
        assert found.word == "reproduced" and "over 7 networks" in found.evidence
        for beginning in ("With 8", "With 512"):
            assert limits("figure9", beginning, {}, "gpu").word == "reproduced"


class TestFigure10:
    @pytest.mark.parametrize(
        ("relative", "word"),
        [
            ({"undivided_8": 1, "all_8": 0.9, "undivided_64": 1, "all_64": 0.5}, "reproduced"),
            ({"undivided_8": 1, "all_8": 1.0, "undivided_64": 1, "all_64": 0.5}, "partly"),
            ({"undivided_8": 1, "all_8": 1.1, "undivided_64": 1, "all_64": 1.0}, "not reproduced"),
            ({"all_8": 0.9, "undivided_64": 1, "all_64": 0.5}, "partly"),
            ({"all_8": 0.9, "undivided_64": 1, "all_64": 1.0}, "partly"),
            ({"undivided_64": 1, "all_64": 0.5}, "partly"),
            ({"undivided_64": 1}, "not run"),
        ],
    )
    def test_words(self, relative, word):
        found = verdict(
            "figure10", "Dividing admits", made_results("figure10", lambda run: conv2(**relative))
        )
        assert found.word == word
        if relative.get("all_64") == 0.5:
            assert "conv2 at 64 MiB, all 2.00× (paper 2.33×)" in found.evidence
        if "all_8" in relative and "undivided_8" not in relative:
            assert "conv2 at 8 MiB, all: fits divided only" in found.evidence


class TestFigure11:
    def judge(self, check, cells, otherwise=1.0):
        """Judge by (network, mode, limit in MiB, policy)."""

        def make(run):
            c = run.config
            value = cells.get((c["role"], c["mode"], c["limit_mib"], c["policy"]), otherwise)
            native_s = 0.001 * c["limit_mib"]
            if value == MISSING:
                return None
            return network(None) if value == UNFIT else network(value, native_s=native_s)

        return check(made_results("figure11", make))

    WR = ("AlexNet", "WR", 8, "undivided")
    WD = ("AlexNet", "WD", 15 * 8, "all")
    RESNET_WR = ("ResNet-50", "WR", 8, "undivided")
    RESNET_WD = ("ResNet-50", "WD", 159 * 8, "powerOfTwo")

    @pytest.mark.parametrize(
        ("cells", "word"),
        [
            ({WD: 0.5, RESNET_WD: 0.5}, "reproduced"),
            ({WD: 0.5, RESNET_WD: 1.0}, "partly"),
            ({WD: 0.98, RESNET_WD: 0.98}, "partly"),
            ({WD: 1.0, RESNET_WD: 1.1}, "not reproduced"),
            ({WR: UNFIT}, "partly"),
            ({WR: UNFIT, WD: UNFIT, RESNET_WD: 1.0}, "not reproduced"),
            ({WD: 0.5, RESNET_WD: MISSING}, "partly"),
            ({WD: MISSING, RESNET_WR: MISSING}, "not run"),
        ],
    )
    def test_the_same_workspace(self, cells, word):
        found = self.judge(checks.check_wd, cells)
        assert found.word == word
        if cells.get(self.WD) == 0.5:
            assert "AlexNet 2.00× (paper 1.38×)" in found.evidence
        if cells == {self.WR: UNFIT}:
            assert "AlexNet: WD fits, 4 kernels of WR do not" in found.evidence

    @pytest.mark.parametrize(
        ("wr", "wd", "words"),
        [
            (1.0, 0.5, ["reproduced"]),
            (1.0, 0.98, ["partly"]),
            (1.0, 1.0, ["not reproduced"]),
            (UNFIT, 0.5, ["partly"]),
            (UNFIT, MISSING, ["not run"]),
            (UNFIT, UNFIT, ["not reproduced", "not run"]),
            (MISSING, 0.5, ["not run"]),
            (1.0, MISSING, ["not run"]),
        ],
    )
    @pytest.mark.parametrize(
        ("check", "wr_cell", "wd_cell"),
        [
            (checks.check_wd_saves, ("AlexNet", "WR", 64, "undivided"), WD),
            (
                checks.check_wd_resnet,
                ("ResNet-50", "WR", 32, "undivided"),
                ("ResNet-50", "WD", 2544, "powerOfTwo"),
            ),
        ],
    )
    def test_less_workspace(self, check, wr_cell, wd_cell, wr, wd, words):
        found = self.judge(check, {wr_cell: wr, wd_cell: wd}, 0.1)
        assert found.word in words


class TestFigure12:
    def judge(self, **of):
        results = made_results("figure12", lambda run: alexnet(**of))
        return verdict("figure12", "WD gives", results)

    NONE: Mapping[str, Any] = {"gain": 0.5}  # its fast algorithm is slower: no workspace wanted

    @pytest.mark.parametrize(
        ("mib", "word", "share", "late"),
        [
            # Undivided, for 8 samples: workspace of conv2 and conv3's kernels, of conv5's.
            ((2.0, 0.0), "reproduced", 100.0, 0.0),
            ((2.0, 0.3), "reproduced", 100 * 6 * 16 / (6 * 16 + 3 * 2.4), 2.4),
            ((1.0, 0.4), "partly", 100 * 6 * 8 / (6 * 8 + 3 * 3.2), 3.2),
            ((0.2, 0.3), "partly", 100 * 6 * 1.6 / (6 * 1.6 + 3 * 2.4), 2.4),
            ((0.1, 0.3), "not reproduced", 100 * 6 * 0.8 / (6 * 0.8 + 3 * 2.4), 2.4),
        ],
    )
    def test_words(self, mib, word, share, late):
        main = {"fast_mib": mib[0]}
        last = {"fast_mib": mib[1]} if mib[1] else self.NONE
        found = self.judge(conv1=self.NONE, conv2=main, conv3=main, conv4=self.NONE, conv5=last)
        assert found.word == word
        assert f"hold {share:.1f} % (paper 93.7 %)" in found.evidence
        assert f"at most {late:.1f} MiB (paper 3)" in found.evidence

    def test_no_workspace_at_all(self):
        found = self.judge(**{f"conv{n}": self.NONE for n in range(1, 6)})
        assert found == Verdict("not reproduced", "WD takes no workspace")

    def test_what_is_judged_is_within_the_total_and_the_fastest(self):
        """Against all choices of a small case: three kernels of which the total admits some."""
        small = [entry("conv2", batch=3, gain=gain, fast_mib=20.0) for gain in (2.0, 3.0, 4.0)]
        results = made_results("figure12", lambda run: candidates(*small))
        chosen = [division for _, division in layers.assignment(results)]
        fronts = [reading.front(kernel) for kernel in small]
        fitting = [
            choice
            for choice in itertools.product(*fronts)
            if sum(d.workspace_bytes for d in choice) <= 120 * MIB
        ]
        best = min(sum(d.time_s for d in choice) for choice in fitting)
        assert sum(d.workspace_bytes for d in chosen) <= 120 * MIB
        assert sum(d.time_s for d in chosen) == pytest.approx(best)


def fastest_split(batch: int, seconds: Sequence[Mapping[int, float]]) -> float:
    """Return the least time of the slowest device, trying all batch sizes."""
    best = float("inf")
    for sizes in itertools.product(*([0, *times] for times in seconds)):
        if sum(sizes) == batch:
            used = [t[size] for t, size in zip(seconds, sizes, strict=True) if size]
            best = min(best, max(used))
    return best


class TestFigure13:
    def judge(self, beginning, fast, slow):
        results = made_results("figure13", lambda run: cluster(fast, slow))
        return verdict("figure13", beginning, results)

    @pytest.mark.parametrize(
        ("fast", "slow", "word"),
        [
            (lambda b: 1e-3 * b, lambda b: 1.5e-3 * b, "reproduced"),
            (lambda b: 1 + 1e-3 * b, lambda b: 1 + 1e-3 * b, "partly"),  # three, but little gained
            (lambda b: 1e-3 * b, lambda b: 1e3 * b, "partly"),  # the slow one is left out
            (lambda b: 1.0, lambda b: 1.0, "not reproduced"),
        ],
    )
    def test_together(self, fast, slow, word):
        found = self.judge("Unequal devices", fast, slow)
        assert found.word == word
        sizes = (1, 2, *range(4, 33, 4))
        times = [{b: device(b) for b in sizes} for device in (fast, fast, slow)]
        base = min(fast(32), slow(32))
        assert (
            f"2 fast + slow {base / fastest_split(32, times):.2f}× (paper 2.12×)" in found.evidence
        )

    def test_the_better_single_device_is_the_baseline(self):
        # The second device is the faster one here, whatever it is called.
        found = self.judge("Unequal devices", lambda b: 4e-3 * b, lambda b: 1e-3 * b)
        # 32 ms alone; 24 there and 4 on each of the others takes 24.
        assert f"{32 / 24:.2f}×" in found.evidence

    @pytest.mark.parametrize(
        ("slow", "word", "ratio"),
        [
            (lambda b: 2e-3 * b, "reproduced", 32 / 24),  # 8 and 24 at best; 16 take it 32 ms
            (lambda b: 1e-3 * b, "partly", 1.0),
        ],
    )
    def test_an_even_split(self, slow, word, ratio):
        found = self.judge("An even split", lambda b: 1e-3 * b, slow)
        assert found.word == word
        assert f"measured here {ratio:.2f}×" in found.evidence

    def test_the_papers_two_times(self):
        """750Ti and K20Xm take 168.43 and 83.03 ms for 16 each: the best split, by trying all."""
        times = [{b: ms * b / 16 for b in range(4, 33, 4)} for ms in (168.43, 83.03)]
        best = fastest_split(32, times)
        split, even_s = costs.published_split()
        assert 1e3 * costs.slowest(split) == pytest.approx(best)
        assert even_s == pytest.approx(0.16843)
        assert sum(size for size, _ in split.values()) == 32
        assert even_s / costs.slowest(split) == pytest.approx(1.37, rel=0.02)  # the paper's
        found = self.judge("An even split", lambda b: 1e-3 * b, lambda b: 2e-3 * b)
        assert f"{168.43 / best:.2f}× (paper 1.37×)" in found.evidence


class TestTable5:
    def judge(self, *values):
        """Judge by the time with powerOfTwo over undivided's: AlexNet, ResNet-50, DenseNet-40."""
        relative = dict(zip(("AlexNet", "ResNet-50", "DenseNet-40"), values, strict=True))

        def make(run):
            value = relative[run.config["role"]]
            if value == MISSING:
                return None
            if run.config["policy"] == "undivided":
                return network(None) if value == UNFIT else network(1.0, native_s=0.5)
            return network(0.5 if value == UNFIT else value)

        return verdict("table5", "All three", made_results("table5", make))

    @pytest.mark.parametrize(
        ("values", "word"),
        [
            ((0.9, 0.9, 0.9), "reproduced"),
            ((0.9, 0.9, 0.96), "partly"),
            ((0.9, 0.9, MISSING), "partly"),
            ((0.9, 0.9, UNFIT), "partly"),
            ((0.9, 1.0, 1.1), "partly"),
            ((1.0, 1.0, 1.1), "not reproduced"),
            ((1.0, MISSING, MISSING), "not reproduced"),
            ((MISSING,) * 3, "not run"),
        ],
    )
    def test_words(self, values, word):
        found = self.judge(*values)
        assert found.word == word
        if values[0] == 0.9:
            assert f"AlexNet's convolutions 1.11× (paper {229 / 186:.2f}×" in found.evidence
        if values[-1] == UNFIT:
            assert "DenseNet-40: fits divided only" in found.evidence

    def test_a_network_that_fits_neither_way_gains_nothing(self):
        def make(run):
            return network(None)

        assert verdict("table5", "All three", made_results("table5", make)).word in (
            "not run",
            "not reproduced",
        )


class TestOptimisation:
    @pytest.mark.parametrize(
        ("seconds", "word", "ratio"),
        [((10.0, 1.0), "reproduced", "10.0"), ((1.5, 1.0), "partly", "1.5"),
         ((1.0, 1.0), "not reproduced", "1.0"), ((10.0, None), "not run", "")],
    )  # fmt: skip
    def test_tuning(self, seconds, word, ratio):
        by_policy = dict(zip(("all", "powerOfTwo"), seconds, strict=True))

        def make(run):
            given = by_policy.get(run.config.get("policy"))
            if given is None:
                return None
            made = candidates(entry())
            made["metrics"] |= {"benchmark_s": 0.9 * given, "optimise_s": 0.1 * given}
            return made

        found = verdict("optimisation", "powerOfTwo takes", made_results("optimisation", make))
        assert found.word == word
        if ratio:
            assert f"{ratio} times less (paper {34.16 / 3.82:.1f}," in found.evidence

    @pytest.mark.parametrize(
        ("small_s", "large_s", "word"),
        [(0.1, 0.5, "reproduced"), (0.25, 0.716, "reproduced"), (0.3, 0.5, "partly"),
         (0.1, 0.8, "partly"), (0.3, 0.8, "not reproduced")],
    )  # fmt: skip
    def test_solver(self, small_s, large_s, word):
        results = made_results(
            "optimisation",
            lambda run: solved(small_s, large_s) if run.experiment == "solver" else None,
        )
        found = verdict("optimisation", "The 0-1 programme", results)
        assert found.word == word
        assert f"562 variables: {1e3 * small_s:.0f} ms" in found.evidence
        assert "5.46 ms for 562, at most 716 ms" in found.evidence
