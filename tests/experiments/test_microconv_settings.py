"""What μ-cuDNN runs under each profile, how records are read, and what the paper reports."""

import json
import math
import re
from collections import Counter
from itertools import product
from typing import ClassVar

import made_microconv as made
import pytest
import torch
from made import WHOLE
from made_microconv import FAILED, MIB, OUT_OF_MEMORY, entry, plausible

from repro import report
from repro.experiments import arguments, load_paper
from repro.experiments.design import Run, claims_of, reported
from repro.experiments.microconv import building, deepbench, describing, settings
from repro.experiments.story import promises
from repro.microconv import Convolution, backends
from repro.report import DASH

PAPER = load_paper("microconv")

# Copied from the paper by hand: Table IV.
TABLE_IV = {
    "DeepSpeech": ({"10×5", "20×5"}, {4, 8, 16, 32}, 8),
    "OCR": ({"3×3"}, {16}, 4),
    "Face recognition": ({"1×1", "3×3"}, {8, 16}, 23),
    "Vision": ({"1×1", "3×3", "5×5", "7×7"}, {8, 16}, 19),
    "Speaker ID": ({"3×3", "5×5"}, {16}, 8),
    "ResNet": ({"1×1", "3×3"}, {8, 16}, 32),
}


def runs_of(artefact: str, profile: str) -> list[Run]:
    return PAPER.artefacts[artefact].runs(profile, {})


def planned(profile: str) -> list[Run]:
    return arguments.plan(PAPER, PAPER.artefacts.values(), profile, {})


@pytest.mark.parametrize("profile", WHOLE)
class TestPlan:
    def test_every_plan_builds(self, profile):
        plan = planned(profile)
        for run in plan:
            assert json.loads(json.dumps(run.config)) == run.config
            assert "dataset" not in run.config and run.seeds == (0,)
        assert {run.experiment for run in plan} == set(PAPER.experiments)
        assert set(Counter(map(str, plan)).values()) == {1}  # labels tell runs apart

    def test_no_artefact_asks_for_a_run_twice_and_shared_ones_run_once(self, profile):
        everything = []
        for name in PAPER.artefacts:
            runs = runs_of(name, profile)
            assert runs and len(set(runs)) == len(runs), name
            everything += runs
        plan = planned(profile)
        assert len(set(plan)) == len(plan) < len(everything)

    def test_how_many(self, profile):
        with_all = {"gpu": 0, "quick": 1}.get(profile, 3)
        whole = 5 if profile == "gpu" else 1  # layer by layer
        more = {"gpu": 5 + 3, "paper": 7 + 3, "quick": 4}  # torch's own settings
        counts = {name: len(runs_of(name, profile)) for name in PAPER.artefacts}
        assert counts == {
            "figure1": whole,
            "figure6": whole if profile == "gpu" else 2,
            "figure8": 6 * (1 + (profile in ("gpu", "paper"))),
            "figure9": 3 * 3 + (2 * 3 * 2 if profile == "gpu" else 0),
            "figure10": 1,
            "figure11": 3 * 3 + (9 if profile == "paper" else 3) + 5,
            "figure12": whole,
            "figure13": 1,
            "table5": 3 * 2 + with_all,
            "iterations": more.get(profile, 7),
            "optimisation": 3 + whole,
            "tables": 7 + 6 * (profile in ("gpu", "paper")),
        }

    def test_kernels_are_measured_before_networks_use_the_times(self, profile):
        """The first measurement is timed from an empty cache, and then shared."""
        plan = planned(profile)
        first = [run.experiment for run in plan].index("network")
        whole = runs_of("figure1", profile)
        assert max(map(plan.index, whole)) < first
        assert {run.config["policy"] for run in whole} == {"all"}
        layers = [run.config.get("layer") for run in whole]
        assert layers == ([f"conv{n}" for n in range(1, 6)] if profile == "gpu" else [None])

    def test_wd_has_15_and_159_times_the_limit(self, profile):
        networks = [run.config for run in planned(profile) if run.experiment == "network"]
        found = {(c["role"], c["limit_mib"]) for c in networks if c["mode"] == "WD"}
        limits = (8, 64, 512) if profile == "paper" else (8, 64)
        alexnet = {("AlexNet", 15 * limit) for limit in limits}
        assert found == alexnet | {("ResNet-50", 159 * 8), ("ResNet-50", 159 * 16)}
        assert {c["limit_mib"] for c in networks if c["mode"] == "WR"} == {8, 32, 64, 512}

    def test_figure11_has_the_pairs_of_its_claims(self, profile):
        cells = {
            tuple(run.config[name] for name in ("role", "mode", "limit_mib", "policy"))
            for run in runs_of("figure11", profile)
        }
        for limit in (8, 64):
            assert ("AlexNet", "WR", limit, "undivided") in cells
            assert ("AlexNet", "WD", 15 * limit, "all") in cells
        assert {
            ("ResNet-50", "WR", 8, "undivided"),
            ("ResNet-50", "WD", 1272, "powerOfTwo"),
            ("ResNet-50", "WR", 32, "undivided"),  # 5,088 MiB in all
            ("ResNet-50", "WD", 2544, "powerOfTwo"),
        } <= cells

    def test_mini_batches_of_resnet50(self, profile):
        ours = {"smoke": (2, 2), "quick": (4, 4)}.get(profile, (32, 64))
        for name, batch in zip(("figure11", "table5"), ours, strict=True):
            configs = [run.config for run in runs_of(name, profile)]
            assert {c["batch"] for c in configs if c["role"] == "ResNet-50"} == {batch}

    def test_table5_is_at_64_mib_and_figure9_at_three_limits(self, profile):
        table5 = [run.config for run in runs_of("table5", profile)]
        assert {(c["mode"], c["limit_mib"]) for c in table5} == {("WR", 64)}
        letter = profile in ("gpu", "paper")  # Table V's AlexNet is not the figures'
        roles = ("AlexNet, Table V" if letter else "AlexNet", "ResNet-50", "DenseNet-40")
        pairs = set(product(roles, ("undivided", "powerOfTwo")))
        assert {(c["role"], c["policy"]) for c in table5} >= pairs
        figure9 = [run.config for run in runs_of("figure9", profile)]
        assert {c["role"] for c in figure9} == {"AlexNet"}
        cells = set(product((8, 64, 512), ("undivided", "powerOfTwo", "all")))
        assert {(c["limit_mib"], c["policy"]) for c in figure9} == cells

    def test_conv2_is_alexnets_second_convolution_forward(self, profile):
        (run,) = runs_of("figure10", profile)
        assert run in runs_of("figure6", profile)
        config = run.config
        named = config["role"], config["layer"], config["kinds"]
        kinds = list(settings.KINDS) if profile == "gpu" else ["forward"]
        assert named == ("AlexNet", "conv2", kinds)
        assert config["batch"] == {"smoke": 4, "quick": 64}.get(profile, 256)
        assert config["policy"] == ("powerOfTwo" if profile == "quick" else "all")

    def test_settings(self, profile):
        expected = {"fp32": ("float32", "ieee")}
        if profile == "gpu":
            expected |= {"tf32": ("float32", "tf32"), "bf16": ("bfloat16", "ieee")}
        assert settings.settings(profile) == tuple(expected)
        for run in planned(profile):
            config = run.config
            if "setting" in config:
                known = expected | {"fp16": ("float16", "ieee")}
                assert (config["dtype"], config["math"]) == known[config["setting"]]
                assert hasattr(torch, config["dtype"])
        half = {"fp16"} if profile in ("gpu", "paper") else set()
        found = {run.config["setting"] for run in runs_of("figure8", profile)}
        assert found == {"fp32"} | half
        assert {run.config["setting"] for run in runs_of("figure9", profile)} == set(expected)
        for name in ("figure1", "figure6", "figure10", "figure11", "figure12", "table5"):
            assert {run.config["setting"] for run in runs_of(name, profile)} == {"fp32"}

    def test_algorithms_of_the_device(self, profile):
        libraries = {"smoke": [], "quick": ["nnpack"]}.get(profile, ["cudnn"])
        for run in planned(profile):
            config = run.config
            if "algorithms" not in config:
                assert run.experiment in ("cluster", "solver")
                continue
            if config.get("setting") == "fp16":  # summed in float32 and in float16
                assert config["algorithms"] == ["torch:native", "cudnn", "cudnn_half"]
                assert config["max_error"] == 1e-2
                continue
            own = [name for name in config["algorithms"] if name.partition(":")[0] == "torch"]
            assert sorted(config["algorithms"]) == sorted(
                own + libraries
            )  # smoke is for any device
            if run.experiment == "iterations":
                assert own[0] == "torch:native"
            elif run.experiment != "deepbench":
                assert own == ["torch:native", *["torch:im2col"] * (profile == "smoke")]
            backends.check_names(config["algorithms"])
            assert config["threads"] == {"smoke": 1, "quick": 2}.get(profile)


class TestProfiles:
    @pytest.mark.parametrize("profile", ["gpu", "paper"])
    def test_the_papers_networks_and_batch_sizes(self, profile):
        found = {
            run.config["role"]: run.config
            for run in planned(profile)
            if run.experiment in ("network", "cluster")
        }
        sizes = {role: (c["image"], c["batch"]) for role, c in found.items()}
        assert sizes == {
            "AlexNet": (227, 256),
            "AlexNet, Table V": (224, 256),
            "ResNet-50": (224, 64),
            "DenseNet-40": (32, 256),
            "ResNet-18": (224, 32),
        }
        assert found["AlexNet"]["model"] == {"name": "alexnet"}  # of two groups
        assert found["AlexNet, Table V"]["model"] == {"name": "torchvision/alexnet"}
        assert found["ResNet-50"]["model"] == {"name": "torchvision/resnet50"}
        assert found["DenseNet-40"]["model"] == {"name": "densenet40", "growth": 40}
        assert found["ResNet-18"]["model"] == {"name": "torchvision/resnet18"}

    def test_the_paper_measures_50_times(self):
        assert {run.config["repeats"] for run in runs_of("iterations", "paper")} == {50}

    def test_unknown_ones(self):
        for given in (("fast", "AlexNet"), ("quick", "VGG"), ("quick", "AlexNet", "bf16")):
            with pytest.raises(KeyError):
                settings.base(*given)

    def test_no_dataset_is_chosen(self):
        assert arguments.choose_datasets(PAPER, "quick") == {}
        assert arguments.choose_datasets(PAPER, "quick", ["digits"]) == {}  # for another paper

    def test_every_claim_was_expected_and_nothing_else(self):
        claims = {
            name: set(artefact.exhibit.claims)
            for name, artefact in PAPER.artefacts.items()
            if artefact.exhibit.claims
        }
        assert {name: set(rows) for name, rows in claims_of("microconv").items()} == claims
        assert (
            sum(not row.own for rows in claims_of("microconv").values() for row in rows.values())
            <= 20
        )

    def test_promises_are_claims_of_the_paper(self):
        for _, target in promises("microconv"):
            artefact, _, key = target.partition(".")
            assert not claims_of("microconv")[artefact][key].own


class TestReading:
    def test_the_whole_network_with_the_most_sizes(self):
        results = made.results("figure6", plausible)
        found = settings.best_candidates(results, "AlexNet")
        assert "layer" not in found.config and found.config["policy"] == "all"

        def make(run):
            return plausible(run) if run.config.get("policy") == "powerOfTwo" else FAILED

        results = made.results("optimisation", make)
        assert settings.best_candidates(results, "AlexNet").config["policy"] == "powerOfTwo"
        assert settings.best_candidates(results, "ResNet-50") is None
        assert settings.best_candidates(results, "AlexNet", "bf16") is None

    def test_layers_that_were_measured_one_by_one_are_one_network(self):
        results = made.results("optimisation", plausible, "gpu")
        found = settings.best_candidates(results, "AlexNet")
        layers = [(entry["layer"], entry["kind"]) for entry in found.metrics["kernels"]]
        assert len(layers) == len(set(layers)) == 14 and "layer" not in found.config
        assert found.metrics["benchmark_s"] == 5 * 2.0 and found.metrics["measured"] == 5 * 34
        (whole,) = settings.tunings(results, "all")
        assert whole == found and len(settings.tunings(results, "powerOfTwo")) == 1
        assert settings.conv2_entry(results)["kind"] == "forward"

        def without_one(run):
            return None if run.config.get("layer") == "conv4" else plausible(run)

        results = made.results("optimisation", without_one, "gpu")
        assert settings.best_candidates(results, "AlexNet").config["policy"] == "powerOfTwo"
        assert settings.tunings(results, "all") == []

    def test_candidates_of_a_policy(self):
        for policy, sizes in (
            ("all", range(1, 13)),
            ("powerOfTwo", (1, 2, 4, 8, 12)),
            ("undivided", (12,)),
        ):
            assert list(settings.candidates_of(entry(batch=12), policy)) == list(sizes)

    def test_where_nothing_fits(self):
        kernel = entry(slow_mib=1.0)
        assert settings.divide(kernel, 0.5) is None and settings.front(kernel, 0.5) == []
        assert settings.divide(kernel, 1.0).parts == [(1, "slow")] * 8

    def test_what_a_limit_stands_for(self):
        results = made.results("figure1", plausible)
        (record,) = results.records
        assert settings.stands_for_mib(record, 8) == 256
        record = made.results("figure1", plausible, "gpu").records[0]
        assert settings.stands_for_mib(record, 8) == 8

    @pytest.mark.parametrize(
        ("role", "caffe", "batch"),
        [
            ("AlexNet", False, 256),
            ("AlexNet", True, 256),
            ("ResNet-50", False, 64),
            ("ResNet-50", True, 32),  # Figure 11's
            ("DenseNet-40", False, 256),
        ],
    )
    def test_long_gives_a_sample_what_the_paper_gives_it(self, role, caffe, batch):
        for limit in settings.LIMITS_MIB:
            run = settings.network("long", role, "WR", limit, "undivided", caffe=caffe)
            assert run.config["limit_mib"] / run.config["batch"] == limit / batch
            for profile in ("quick", "gpu", "paper"):
                same = settings.network(profile, role, "WR", limit, "undivided", caffe=caffe)
                assert same.config["limit_mib"] == limit

    def test_torchs_own_against_itself(self):
        def row(own, native, parts):
            return {"batch": 8, "parts": parts, "time_s": own, "native_s": native}

        alone = [[8, "torch:native"]]
        rows = [
            row(1.1, 1.0, alone),
            row(1.0, 1.1, alone),
            row(1.1, 1.0, alone),  # the very same measurement, shared by another record
            row(9.0, 1.0, [[8, "fast"]]),
            row(9.0, 1.0, [[4, "torch:native"], [4, "torch:native"]]),
            {"batch": 8},
        ]
        scatter = settings.own_scatter(rows)
        assert scatter.dof == 2 and scatter.sd == pytest.approx(math.log(1.1))
        unknown = settings.own_scatter(rows[3:])
        assert unknown.dof == 0 and math.isnan(settings.compared(0.5, 1.0, unknown).error)

    @pytest.mark.parametrize(
        ("parts", "ours"),
        [
            ([[8, "torch:implicit"]], ("torch:implicit",)),
            ([[4, "torch:im2col"], [4, "torch:implicit"]], ("torch:im2col", "torch:implicit")),
            ([[4, "torch:native"], [4, "torch:implicit"]], ()),
            ([[8, "cudnn:GEMM"]], ()),
        ],
    )
    def test_algorithms_that_no_library_has(self, parts, ours):
        assert settings.ours_alone({"parts": parts}) == ours and settings.ours_alone({}) == ()

    def test_words(self):
        assert settings.ms(1.23456) == "1,234.6" and settings.ms(None) == DASH
        assert settings.mib(3 * MIB / 2) == "1.5" and settings.mib(None) == DASH
        assert settings.times(2.345) in ("2.34×", "2.35×") and settings.times(None) == DASH
        labels = [settings.label({"layer": "conv2", "kind": kind}) for kind in settings.KINDS]
        assert labels == ["conv2 F", "conv2 BD", "conv2 BF"]


class TestWhateverThereIs:
    """Tables, captions and figures of records that are missing, failed or fit nowhere."""

    MAKERS: ClassVar = {
        "plausible": plausible,
        "nothing": lambda run: None,
        "all failed": lambda run: FAILED,
        "all out of memory": lambda run: OUT_OF_MEMORY,
        "nothing fits": made.nowhere,
        "divided alone": lambda run: (
            None if run.config.get("policy") == "undivided" else plausible(run)
        ),
        "undivided alone": lambda run: (
            plausible(run) if run.config.get("policy") == "undivided" else None
        ),
    }

    @pytest.mark.parametrize("kind", MAKERS)
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    def test_tables_and_verdicts(self, kind, profile):
        for name, artefact in PAPER.artefacts.items():
            results = made.results(name, self.MAKERS[kind], profile)
            frame = artefact.table(results)
            assert len(set(frame.columns)) == len(frame.columns)
            text = frame.to_string()
            assert "nan" not in text.lower() and "None" not in text, name
            assert report.to_html(frame) and artefact.caption(results)
            for key in artefact.exhibit.claims:
                word, evidence = made.judge(f"{name}/{key}", self.MAKERS[kind], profile)
                assert evidence and "nan" not in evidence, key
                if kind in ("nothing", "all failed", "all out of memory"):
                    assert word == "not run", key
            assert all(check.row(results)["holds"] for check in artefact.checks)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "kind",
        [
            "plausible",
            *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("nothing", "nothing fits")),
        ],
    )
    def test_figures(self, kind):
        import matplotlib.pyplot as plt
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        before = dict(plt.rcParams)
        for name, artefact in PAPER.artefacts.items():
            if artefact.draws:
                drawn = artefact.figure(made.results(name, self.MAKERS[kind]))
                FigureCanvasAgg(drawn).draw()  # a glyph or a layout that does not fit warns
                texts = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
                assert len(texts) == len(set(texts)), name
        assert plt.get_fignums() == [] and dict(plt.rcParams) == before

    def test_every_comparison_has_the_papers_column(self):
        drawn_only = {"figure1", "figure6", "figure12"}  # whose bars have no numbers
        for name, artefact in PAPER.artefacts.items():
            columns = [str(c) for c in artefact.table(made.results(name, plausible)).columns]
            assert any("paper" in column for column in columns) == (name not in drawn_only), name


def caption(artefact, make=plausible, profile="quick"):
    return PAPER.artefacts[artefact].caption(made.results(artefact, make, profile))


class TestCaptions:
    def test_nothing_run(self):
        for name in PAPER.artefacts:
            said = caption(name, lambda run: None)
            assert said.endswith("Not run yet.") and "STAND-IN" not in said
        assert "SIMULATED" in caption("figure13", lambda run: None)
        assert "SYNTHETIC" in caption("optimisation", lambda run: None)

    def test_what_is_not_the_papers_is_marked(self):
        for name in PAPER.artefacts:
            said = caption(name)
            assert "SYNTHETIC inputs" in said, name
            assert ("SIMULATED" in said) == (name == "figure13")
            # AlexNet is torchvision's, which is the paper's in Table V alone.
            caffes = name in ("figure1", "figure6", "figure9", "figure10", "figure11", "figure12")
            assert ("STAND-IN for the paper's AlexNet;" in said) == caffes, name
        assert "SYNTHETIC ones of the paper's sizes" in caption("optimisation")
        assert "STAND-IN for the paper's DenseNet-40;" in caption("table5")
        told = "STAND-IN for the paper's AlexNet, ResNet-50, DenseNet-40;"
        assert told in caption("table5", profile="smoke")
        assert "STAND-IN" not in caption("table5", profile="gpu")
        assert "STAND-IN" not in caption("figure9", profile="gpu")
        told = "STAND-IN for the paper's ResNet-50, DenseNet-40, ResNet-18;"
        assert told in caption("iterations")
        assert "STAND-IN" not in caption("iterations", profile="gpu")

    def test_layers(self):
        said = caption("figure8")  # three layers of each network type, and three left out
        assert "18 of DeepBench's 36 layers at 4 times their batch size." in said
        assert "at 1 times" in caption("figure8", profile="smoke")
        assert " 18 of DeepBench's" in caption("figure8", profile="gpu")  # of four settings

    def test_missing_and_failed(self):
        def make(run):
            return {8: None, 64: FAILED}.get(run.config["limit_mib"], plausible(run))

        said = caption("figure9", make)
        assert "3 of 9 runs are missing." in said and "3 runs FAILED." in said
        for word in ("missing", "FAILED"):
            assert word not in caption("figure9")


class TestSetup:
    def told(self, profile="quick", make=plausible):
        every = [made.results(name, make, profile) for name in PAPER.artefacts]
        records = [record for results in every for record in results.records]
        return " ".join(describing.setup(records))

    def test_networks_beside_the_papers_each_once(self):
        said = self.told()
        assert "The paper measured on P100-SXM2" in said
        told = (
            "AlexNet: torchvision's AlexNet, 224×224 pixels, mini-batch 8 and 64 (the paper's: 256"
        )
        assert said.count(told) == 1
        assert "DenseNet-40: DenseNet-40 of growth 16, 16×16 pixels, mini-batch 4" in said
        said = self.told("smoke")
        assert "AlexNet: ResNet for CIFAR of depth 8, width 4, 16×16 pixels, mini-batch 4" in said

    def test_algorithms_and_limits(self):
        said = self.told()
        assert "Divisions are made of nnpack, torch:direct, torch:im2col, torch:implicit, " in said
        assert "every temporary byte" in said and "in turns" in said and "page faults" in said
        gpu = {"type": "cuda", "name": "NVIDIA X", "slug": "x", "memory_bytes": 1}
        said = self.told("gpu", lambda run: plausible(run) | {"device": gpu})
        assert "page faults" not in said and "cudnn" in said

    def test_nothing_run(self):
        assert "Networks" not in self.told(make=lambda run: FAILED)


def size_text(layer: deepbench.Layer) -> str:
    """Return the kernel size as the paper writes it: the larger side first."""
    return "×".join(str(n) for n in sorted(layer.conv.kernel_size, reverse=True))


class TestDeepBench:
    def test_94_layers_as_in_table_iv(self):
        assert set(settings.NETWORK_TYPES) == set(deepbench._LAYERS) == set(TABLE_IV)
        found = {
            name: (
                {size_text(layer) for layer in deepbench.layers(name)},
                {layer.batch for layer in deepbench.layers(name)},
                len(deepbench.layers(name)),
            )
            for name in TABLE_IV
        }
        assert found == TABLE_IV
        assert sum(count for *_, count in found.values()) == 94

    @pytest.mark.parametrize(
        ("network_type", "number", "shape", "batch"),
        [
            # Lines of conv_problems.h: width, height, channels, filters; kernel; padding; stride.
            ("DeepSpeech", 3, (700, 161, 1, 32, 20, 5, 0, 2), 32),
            ("DeepSpeech", 4, (341, 79, 32, 32, 10, 5, 0, 2), 4),
            ("OCR", 3, (60, 6, 64, 128, 3, 3, 1, 1), 16),
            ("Face recognition", 22, (7, 7, 2048, 512, 1, 1, 3, 2), 16),
            ("Vision", 12, (224, 224, 3, 64, 7, 7, 3, 2), 16),
            ("Speaker ID", 4, (175, 40, 128, 256, 5, 5, 1, 2), 16),
            ("ResNet", 30, (7, 7, 2048, 512, 1, 1, 0, 1), 8),
        ],
    )
    def test_layers_copied_by_hand(self, network_type, number, shape, batch):
        width, height, channels, filters, columns, rows, padding, stride = shape
        layer = deepbench.layers(network_type)[number]
        assert layer.batch == batch
        assert layer.conv == Convolution(
            channels, height, width, filters, (rows, columns), (stride,) * 2, (padding,) * 2
        )

    def test_one_layer_is_listed_twice_in_resnet(self):
        repeated = {
            layer.conv.out_channels
            for layer, count in Counter(deepbench.layers("ResNet")).items()
            if count == 2
        }
        assert repeated == {1024}
        assert max(Counter(deepbench.layers("ResNet")).values()) == 2

    def test_multiplications_by_counting(self):
        """Output positions from torch itself, on tensors without memory."""
        for layer in (layer for name in TABLE_IV for layer in deepbench.layers(name)):
            c = layer.conv
            with torch.device("meta"):
                own = torch.nn.Conv2d(
                    c.in_channels, c.out_channels, c.kernel_size, c.stride, c.padding, bias=False
                )
                out = own(torch.empty(1, c.in_channels, c.height, c.width))
            each = out.numel() * own.weight[0].numel()
            for factor in (1, 4):
                assert layer.macs(factor) == factor * layer.batch * each

    def test_multiplications_by_brute_force(self):
        conv = Convolution(2, 5, 4, 3, (3, 2), (2, 2), (1, 1))
        count = 0
        for _sample, _filter, row, column in product(
            range(6), range(3), range(-1, 6), range(-1, 5)
        ):
            inside = row + 3 <= 6 and column + 2 <= 5
            if inside and (row + 1) % 2 == 0 and (column + 1) % 2 == 0:
                count += 2 * 3 * 2
        assert deepbench.Layer(conv, 3).macs(2) == count

    def test_all_are_chosen_where_nothing_is_left_out(self):
        for name in TABLE_IV:
            assert deepbench.choose(name, 4, None, None) == deepbench.layers(name)

    @pytest.mark.parametrize("largest", [None, 60, 4000])
    @pytest.mark.parametrize("of_each", [None, 1, 2])
    def test_the_cheapest_of_each_size(self, largest, of_each):
        factor = 4
        for name in TABLE_IV:
            every = deepbench.layers(name)
            chosen = deepbench.choose(name, factor, largest, of_each)
            assert chosen == sorted(chosen, key=every.index)
            for size in {layer.conv.kernel_size for layer in every}:
                costs = sorted(x.macs(factor) for x in every if x.conv.kernel_size == size)
                small = [cost for cost in costs if largest is None or cost <= largest * 1e6]
                kept = sorted(x.macs(factor) for x in chosen if x.conv.kernel_size == size)
                assert kept == small[:of_each]

    @pytest.mark.parametrize("profile", WHOLE)
    def test_what_profiles_run(self, profile):
        configs = [run.config for run in runs_of("figure8", profile)]
        assert {c["role"] for c in configs} == set(TABLE_IV)
        assert {(c["limit_mib"], c["policy"]) for c in configs} == {(64, "powerOfTwo")}
        rules = [(c["role"], c["factor"], c["largest_mmacs"], c["of_each_size"]) for c in configs]
        chosen = {rule[0]: deepbench.choose(*rule) for rule in rules}
        count = sum(map(len, chosen.values()))
        if profile in ("gpu", "paper"):
            assert count == 94 and {rule[1] for rule in rules} == {4}
        else:
            assert 0 < count < 40
            sizes = {size_text(layer) for found in chosen.values() for layer in found}
            assert "3×3" in sizes  # what is claimed of
            assert profile == "smoke" or {"1×1", "5×5"} <= sizes


class TestReported:
    """Copied from the text and Table V of the paper by hand."""

    def test_units_and_values(self):
        r = reported("microconv")
        assert r["limits"] == {"each_mib": [8, 64, 512]}
        assert r["batches"] == {
            "AlexNet": 256,
            "ResNet-50": 64,
            "ResNet-50, Caffe": 32,
            "ResNet-152": 128,
            "DenseNet-40": 256,
            "ResNet-18": 32,
        }
        assert r["figure6"] == {"max_workspace_mib": 120, "largest_front": 68}
        assert (r["figure8"]["mean"], r["figure8"]["largest"]) == (1.60, 4.54)
        assert r["figure8"]["three_by_three"] == {"P100": 1.16, "V100": 1.73}
        assert r["figure9"]["speedup_64"] == {
            "K80": [1.81, 2.10],
            "P100": [1.40, 1.63],
            "V100": [1.45, 1.60],
        }
        assert r["figure9"]["undivided_512_gib"] == 2.87
        assert r["figure9"]["all_64_gib"] == 0.70
        assert r["figure9"]["overhead_percent"] == 4
        assert r["figure10"] == {
            "limit_mib": 64,
            "undivided_kib": 4.3,
            "fft_mib": 213,
            "power_of_two_mib": 48.9,
            "power_of_two_batch": 32,
            "speedup_all": 2.33,
        }
        assert r["figure11"] == {
            "kernels": {"AlexNet": 5 * 3, "ResNet-50": 53 * 3},
            "alexnet_120": [1.24, 1.38],
            "alexnet_120_over_960": 1.24,
            "resnet50_2544": [1.05, 1.14],
            "resnet50_each_mib": [2544 // 159, 5088 // 159],
        }
        assert r["figure12"] == {
            "total_mib": 120,
            "conv2_conv3_percent": 93.7,
            "conv4_conv5_mib": 3,
        }
        assert r["figure13"] == {
            "batch": 32,
            "speedup_k80_k20": 2.12,
            "speedup_all": 2.20,
            "split_k80_k20": {"K20Xm": 8, "GK210 (1)": 12, "GK210 (2)": 12},
            "even_ms": {"GTX 750Ti": 168.43, "Tesla K20Xm": 83.03},
            "even_slowdown": 1.37,
        }
        assert r["optimisation"] == {
            "all_s": 34.16,
            "power_of_two_s": 3.82,
            "resnet50": [562, 5.46],
            "resnet152_ms": 716,
            "largest_mib": 5088,
        }
        assert "P100-SXM2" in r["device"]

    def test_table5_and_the_speedups_printed_beside_it(self):
        table = reported("microconv")["table5"]
        printed = {
            "AlexNet": (229.0, (186.0, 1.23), (185.0, 1.24)),
            "ResNet-50": (318.0, (302.0, 1.05), (302.0, 1.05)),
            "DenseNet-40": (639.0, (579.0, 1.10), (574.0, 1.11)),
        }
        assert set(table) == set(printed) == set(settings.ROLES)
        for role, (undivided, two, every) in printed.items():
            assert table[role]["undivided"] == undivided
            for policy, (ms, speedup) in (("powerOfTwo", two), ("all", every)):
                assert table[role][policy] == ms
                assert undivided / ms == pytest.approx(speedup, abs=0.0051)

    def test_the_batch_of_figure13_is_the_splits(self):
        paper = reported("microconv")["figure13"]
        assert sum(paper["split_k80_k20"].values()) == paper["batch"] == 32

    def test_53_convolutions_of_resnet50(self):
        with torch.device("meta"):
            for role, kernels in reported("microconv")["figure11"]["kernels"].items():
                config = settings.base("paper", role) | {"batch": 1}
                model, _, _ = building.build_network(config, "meta")
                convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
                assert 3 * len(convolutions) == kernels

    def test_the_setup_names_the_papers_batch_sizes(self):
        published = describing._PUBLISHED
        alexnets = (settings.CAFFE, settings.TABLE5_ALEXNET)
        others = ("ResNet-18", "ResNet-152", *alexnets, *settings.ALONE)
        assert set(published) == {*settings.ROLES, *others}
        for role, size in (("AlexNet", 256), ("DenseNet-40", 256), ("ResNet-18", 32)):
            assert re.search(rf"\b{size}\b", published[role])
        assert re.findall(r"(\d+) in", published["ResNet-50"]) == ["64", "32"]
