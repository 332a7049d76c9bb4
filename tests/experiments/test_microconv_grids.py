"""What μ-cuDNN runs under each profile, DeepBench's layers, and the numbers the paper reports."""

import json
import re
from collections import Counter
from itertools import product

import pytest
import torch

from repro.experiments import load_paper, running
from repro.experiments.design import COMPUTING_PROFILES, Run, reported
from repro.experiments.microconv import deepbench, grids
from repro.microconv import Convolution, backends

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
    return running.plan(PAPER, PAPER.artefacts.values(), profile, {})


class TestPlan:
    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_every_plan_builds(self, profile):
        for run in planned(profile):
            assert json.loads(json.dumps(run.config)) == run.config
            modules = PAPER.experiments[run.experiment].modules(run.config)
            assert len(set(modules)) == len(modules)
            assert "dataset" not in run.config
        assert {run.experiment for run in planned(profile)} == set(PAPER.experiments)

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_no_artefact_asks_for_a_run_twice_and_shared_ones_run_once(self, profile):
        everything = []
        for name in PAPER.artefacts:
            runs = runs_of(name, profile)
            assert runs and len(set(runs)) == len(runs), name
            everything += runs
        plan = planned(profile)
        assert len(set(plan)) == len(plan) < len(everything)
        texts = [json.dumps([run.experiment, run.config], sort_keys=True) for run in plan]
        assert len(set(texts)) == len(plan)

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_how_many(self, profile):
        settings, with_all = {"gpu": (3, 1), "quick": (1, 1)}.get(profile, (1, 3))
        counts = {name: len(runs_of(name, profile)) for name in PAPER.artefacts}
        assert counts == {
            "figure1": 1,
            "figure6": 2,
            "figure8": 6 * settings,
            "figure9": 3 * 3 * settings,
            "figure10": 1,
            "figure11": 3 * 3 + (9 if profile == "paper" else 3) + 5,
            "figure12": 1,
            "figure13": 1,
            "table5": settings * (3 * 2 + with_all),
            "optimisation": 3,
        }

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_kernels_are_measured_before_networks_use_the_times(self, profile):
        """The first measurement is timed from an empty cache, and then shared."""
        plan = planned(profile)
        first = [run.experiment for run in plan].index("network")
        (whole,) = runs_of("figure1", profile)
        assert plan.index(whole) < first
        assert whole.config["policy"] == "all" and "layer" not in whole.config

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_one_seed_where_times_are_measured(self, profile):
        for run in planned(profile):
            assert run.seeds == (0,)

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_wd_has_15_and_159_times_the_limit(self, profile):
        networks = [run.config for run in planned(profile) if run.experiment == "network"]
        times = {"AlexNet": 15, "ResNet-50": 159}
        found = {(c["role"], c["limit_mib"]) for c in networks if c["mode"] == "WD"}
        limits = (8, 64, 512) if profile == "paper" else (8, 64)
        alexnet = {("AlexNet", 15 * limit) for limit in limits}
        assert found == alexnet | {("ResNet-50", 159 * 8), ("ResNet-50", 159 * 16)}
        assert {c["limit_mib"] for c in networks if c["mode"] == "WR"} == {8, 32, 64, 512}
        for role, kernels in times.items():
            run = grids.network(profile, role, "WD", 7, "undivided")
            assert run.config["limit_mib"] == 7 * kernels
            run = grids.network(profile, role, "WR", 7, "undivided")
            assert run.config["limit_mib"] == 7

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
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
        assert 159 * 32 == 5088

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_table5_is_at_64_mib_and_figure9_at_three_limits(self, profile):
        table5 = [run.config for run in runs_of("table5", profile)]
        assert {(c["mode"], c["limit_mib"]) for c in table5} == {("WR", 64)}
        roles = ("AlexNet", "ResNet-50", "DenseNet-40")
        assert {(c["role"], c["policy"]) for c in table5} >= set(
            product(roles, ("undivided", "powerOfTwo"))
        )
        figure9 = [run.config for run in runs_of("figure9", profile)]
        assert {c["role"] for c in figure9} == {"AlexNet"}
        assert {(c["limit_mib"], c["policy"]) for c in figure9} == set(
            product((8, 64, 512), ("undivided", "powerOfTwo", "all"))
        )

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_conv2_is_alexnets_second_convolution_forward(self, profile):
        (run,) = runs_of("figure10", profile)
        assert run in runs_of("figure6", profile)
        config = run.config
        assert (config["role"], config["layer"], config["kinds"]) == (
            "AlexNet",
            "conv2",
            ["forward"],
        )
        assert config["batch"] == {"smoke": 4, "quick": 64}.get(profile, 256)
        assert config["policy"] == ("powerOfTwo" if profile == "quick" else "all")

    @pytest.mark.parametrize("profile", ["gpu", "paper"])
    def test_the_papers_networks_and_batch_sizes(self, profile):
        found = {
            run.config["role"]: run.config
            for run in planned(profile)
            if run.experiment in ("network", "cluster")
        }
        sizes = {role: (c["image"], c["batch"]) for role, c in found.items()}
        assert sizes == {
            "AlexNet": (224, 256),
            "ResNet-50": (224, 64),
            "DenseNet-40": (32, 256),
            "ResNet-18": (224, 32),
        }
        assert found["AlexNet"]["model"] == {"name": "torchvision/alexnet"}
        assert found["ResNet-50"]["model"] == {"name": "torchvision/resnet50"}
        assert found["DenseNet-40"]["model"] == {"name": "densenet40", "growth": 40}
        assert found["ResNet-18"]["model"] == {"name": "torchvision/resnet18"}

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_settings(self, profile):
        expected = {"fp32": ("float32", "ieee")}
        if profile == "gpu":
            expected |= {"tf32": ("float32", "tf32"), "bf16": ("bfloat16", "ieee")}
        assert grids.settings(profile) == tuple(expected)
        for run in planned(profile):
            config = run.config
            if "setting" in config:
                assert (config["dtype"], config["math"]) == expected[config["setting"]]
                assert hasattr(torch, config["dtype"])
        for name in ("figure8", "figure9", "table5"):
            assert {run.config["setting"] for run in runs_of(name, profile)} == set(expected)
        for name in ("figure1", "figure6", "figure10", "figure11", "figure12"):
            assert {run.config["setting"] for run in runs_of(name, profile)} == {"fp32"}

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_algorithms_of_the_device(self, profile):
        cpu = profile in ("smoke", "quick")
        for run in planned(profile):
            config = run.config
            if "algorithms" not in config:
                assert run.experiment in ("cluster", "solver")
                continue
            *own, library = config["algorithms"]
            assert library == ("nnpack" if cpu else "cudnn")
            if run.experiment == "deepbench":
                assert own and all(name.partition(":")[0] == "torch" for name in own)
            else:
                assert own == ["torch:native"]
            backends.check_names([name for name in config["algorithms"] if name != "cudnn"])
            assert config["threads"] == {"smoke": 1, "quick": 2}.get(profile)

    def test_the_paper_measures_50_times(self):
        repeats = {run.config["repeats"] for run in runs_of("table5", "paper")}
        assert repeats == {50}

    def test_unknown_ones(self):
        for make in (
            lambda: grids.base("fast", "AlexNet"),
            lambda: grids.base("quick", "VGG"),
            lambda: grids.base("quick", "AlexNet", "bf16"),
        ):
            with pytest.raises(KeyError):
                make()


class TestWithoutData:
    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_no_dataset_is_chosen(self, profile):
        assert running.choose_datasets(PAPER, profile) == {}

    def test_a_dataset_for_another_paper_is_passed_over(self):
        assert running.choose_datasets(PAPER, "quick", ["digits"]) == {}
        assert running.choose_datasets(PAPER, "quick", ["camvid", "synthetic"]) == {}

    def test_a_name_that_is_none_and_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(running.UsageError, match="unknown dataset 'mnist'"):
            running.choose_datasets(PAPER, "quick", ["mnist"])
        with pytest.raises(running.UsageError, match="does not exist"):
            running.choose_datasets(PAPER, "quick", root=str(tmp_path / "absent"))

    def test_nothing_is_loaded(self, monkeypatch):
        def refuse(*arguments, **options):
            raise AssertionError("a dataset was loaded")

        monkeypatch.setattr(running.datasets, "load", refuse)
        running.load_data(planned("smoke"), None)

    def test_the_command_names_none(self):
        setting = running.Setting("smoke", "cpu")
        assert "--dataset" not in setting.command("microconv", None)

    def test_mini_batches_cannot_be_chosen(self):
        with pytest.raises(running.UsageError, match="none of these runs has one"):
            running.only_mini_batches(planned("quick"), [16])
        assert running.only_mini_batches(planned("quick"), []) == planned("quick")

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_labels_tell_runs_apart(self, profile):
        labels = Counter(running._label(run) for run in planned(profile))
        assert set(labels.values()) == {1}
        run = grids.network(profile, "AlexNet", "WD", 8, "all")
        assert running._label(run) == (
            "network role AlexNet setting fp32 mode WD limit-mib 120 policy all"
        )
        assert running._label(grids.conv2(profile)) == (
            "candidates role AlexNet layer conv2 setting fp32 policy "
            + ("powerOfTwo" if profile == "quick" else "all")
        )
        assert running._label(grids.cluster(profile)) == "cluster role ResNet-18"


def size_text(layer: deepbench.Layer) -> str:
    """Return the kernel size as the paper writes it: the larger side first."""
    return "×".join(str(n) for n in sorted(layer.conv.kernel_size, reverse=True))


class TestDeepBench:
    def test_94_layers_as_in_table_iv(self):
        assert set(deepbench.NETWORK_TYPES) == set(TABLE_IV)
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

    @pytest.mark.parametrize("network_type", TABLE_IV)
    def test_multiplications_by_counting(self, network_type):
        """Output positions from torch itself, on tensors without memory."""
        for layer in deepbench.layers(network_type):
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

    @pytest.mark.parametrize("network_type", TABLE_IV)
    def test_all_are_chosen_where_nothing_is_left_out(self, network_type):
        for factor in (1, 4):
            chosen = deepbench.choose(network_type, factor, None, None)
            assert chosen == deepbench.layers(network_type)

    @pytest.mark.parametrize("network_type", TABLE_IV)
    @pytest.mark.parametrize("largest", [None, 60, 4000])
    @pytest.mark.parametrize("of_each", [None, 1, 2])
    def test_the_cheapest_of_each_size(self, network_type, largest, of_each):
        factor = 4
        every = deepbench.layers(network_type)
        chosen = deepbench.choose(network_type, factor, largest, of_each)
        assert chosen == sorted(chosen, key=every.index)
        for size in {layer.conv.kernel_size for layer in every}:
            costs = sorted(x.macs(factor) for x in every if x.conv.kernel_size == size)
            small = [cost for cost in costs if largest is None or cost <= largest * 1e6]
            kept = sorted(x.macs(factor) for x in chosen if x.conv.kernel_size == size)
            assert kept == small[:of_each]

    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
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
        assert r["figure6"] == {"max_workspace_mib": 120, "largest_front": 68}
        assert (r["figure8"]["mean"], r["figure8"]["largest"]) == (1.60, 4.54)
        assert r["figure8"]["three_by_three"] == {"P100": 1.16, "V100": 1.73}
        assert r["figure9"]["speedup_64"] == {
            "K80": [1.81, 2.10], "P100": [1.40, 1.63], "V100": [1.45, 1.60],
        }  # fmt: skip
        assert r["figure9"]["undivided_512_gib"] == 2.87
        assert r["figure9"]["all_64_gib"] == 0.70
        assert r["figure9"]["overhead_percent"] == 4
        assert r["figure10"] == {
            "limit_mib": 64, "undivided_kib": 4.3, "fft_mib": 213, "power_of_two_mib": 48.9,
            "speedup_all": 2.33,
        }  # fmt: skip
        assert r["figure11"] == {
            "kernels": {"AlexNet": 5 * 3, "ResNet-50": 53 * 3},
            "alexnet_120": [1.24, 1.38],
            "alexnet_120_over_960": 1.24,
            "resnet50_2544": [1.05, 1.14],
        }
        assert r["figure12"] == {
            "total_mib": 120, "conv2_conv3_percent": 93.7, "conv4_conv5_mib": 3,
        }  # fmt: skip
        assert r["figure13"] == {
            "batch": 32,
            "speedup_k80_k20": 2.12,
            "speedup_all": 2.20,
            "split_k80_k20": {"K20Xm": 8, "GK210 (1)": 12, "GK210 (2)": 12},
            "even_ms": {"GTX 750Ti": 168.43, "Tesla K20Xm": 83.03},
            "even_slowdown": 1.37,
        }
        assert r["optimisation"] == {
            "all_s": 34.16, "power_of_two_s": 3.82, "resnet50": [562, 5.46], "resnet152_ms": 716,
        }  # fmt: skip
        assert "P100-SXM2" in r["device"]

    def test_table5_and_the_speedups_printed_beside_it(self):
        table = reported("microconv")["table5"]
        printed = {
            "AlexNet": (229.0, (186.0, 1.23), (185.0, 1.24)),
            "ResNet-50": (318.0, (302.0, 1.05), (302.0, 1.05)),
            "DenseNet-40": (639.0, (579.0, 1.10), (574.0, 1.11)),
        }
        assert set(table) == set(printed) == set(grids.ROLES)
        for role, (undivided, two, every) in printed.items():
            assert table[role]["undivided"] == undivided
            for policy, (ms, speedup) in (("powerOfTwo", two), ("all", every)):
                assert table[role][policy] == ms
                assert undivided / ms == pytest.approx(speedup, abs=0.0051)

    def test_the_batch_of_figure13_is_the_splits(self):
        paper = reported("microconv")["figure13"]
        assert sum(paper["split_k80_k20"].values()) == paper["batch"] == 32

    def test_53_convolutions_of_resnet50(self):
        from repro.models import build

        with torch.device("meta"):
            for role, kernels in reported("microconv")["figure11"]["kernels"].items():
                model = build(grids.NETWORKS["paper"][role]["model"]["name"])
                convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
                assert 3 * len(convolutions) == kernels

    def test_captions_name_the_papers_batch_sizes(self):
        from repro.experiments.microconv.captions import _PUBLISHED

        assert set(_PUBLISHED) == {*grids.ROLES, "ResNet-18"}
        for role, size in (("AlexNet", 256), ("DenseNet-40", 256), ("ResNet-18", 32)):
            assert re.search(rf"\b{size}\b", _PUBLISHED[role])
        assert re.findall(r"at (\d+)|or (\d+)", _PUBLISHED["ResNet-50"]) == [("64", ""), ("", "32")]
