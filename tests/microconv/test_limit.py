"""A limit that is kept by whole networks, a gain that reaches them, and operators that are seen."""

import copy
import gc
import io
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from tuned_nets import InventedTimes, kernels_in, reference, relative_error, tuned_layers
from tuned_nets import images as make_images

from repro import microconv
from repro.measure.allocations import peak_allocation, peak_inside
from repro.microconv import BenchmarkCache, Candidate, TunedConv2d, WorkspaceLimitError, tune
from repro.microconv.backends import NATIVE
from repro.microconv.measuring import Bench, Trial
from repro.microconv.results import TuningReport
from repro.microconv.tuner import Tuner

OURS = ("convolution", "data_gradient", "filter_gradient")
WATCHED = (*(f"repro_microconv::{name}" for name in OURS), "aten::convolution")
WATCHED = (*WATCHED, "aten::convolution_backward")
BATCH = 8


class Net(nn.Module):
    """Convolutions whose temporary bytes differ, one in groups and one transposed.

    Those that can be divided take most, whatever layout a CPU has the transposed one compute in.
    """

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(3, 48, 5, padding=2)
        self.grouped = nn.Conv2d(48, 16, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, 2, 2, stride=2)
        self.strided = nn.Conv2d(2, 8, 3, stride=2)

    def forward(self, x):
        x = torch.tanh(self.norm(self.grouped(torch.tanh(self.wide(x)))))
        return self.strided(torch.tanh(self.up(x))).mean((2, 3))


def images(num_samples=BATCH, side=20, seed=0):
    return make_images(num_samples, (side, side), seed=seed)


def net():
    torch.manual_seed(0)
    return Net()


def step(model, x):
    """A step whose gradients are laid out as a convolution's are."""
    loss = F.cross_entropy(model(x), torch.arange(len(x)) % 8)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def held(model, x):
    """Return what the convolutions of a step take at most, seen from outside, and all together."""
    step(model, x)
    gc.collect()  # what an earlier error holds is not freed inside a call
    taken = [peak for _, peak in peak_inside(lambda: step(model, x), WATCHED)]
    assert len(taken) >= 8
    return max(taken), sum(taken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "policy"), [(0.0, "all"), (0.1, "powerOfTwo"), (0.4, "all"), (1.0, "powerOfTwo")]
)
def test_no_convolution_of_a_network_takes_more_than_the_limit(share, policy):
    plain, model, x = net(), net(), images()
    most, _ = held(plain, x)
    options = {"policy": policy, "cache": None, "min_gain": 0.5}
    with pytest.raises(WorkspaceLimitError) as refused:
        tune(model, x, 0, **options)
    least = refused.value.least_bytes
    assert 0 < least < most and not any(isinstance(m, TunedConv2d) for m in model.modules())
    limit = least + int(share * (most - least))
    report = tune(model, x, limit, **options)
    assert report.workspace_bytes <= limit and report.allocated_bytes <= limit
    taken, _ = held(model, x)
    # A buffer that is given is not allocated inside.
    given = max((kernel.segment_bytes for kernel in kernels_in(model)), default=0)
    assert max(taken, given) <= limit
    assert share == 1.0 or any(entry.needed for entry in report.kernels)
    for got, want in zip(step(model, x), step(plain, x), strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)
    for num_samples in (7, 2):  # smaller last batches
        assert share or held(model, images(num_samples))[0] <= limit
    with pytest.raises(WorkspaceLimitError, match=f"would do is {least} bytes"):
        tune(net(), x, least - 1, **options)


class Alternating(InventedTimes):
    """Torch's own convolution is the fastest of one sample, another of two."""

    def times(self, key, micro_batch):
        listing = self.listing(key, micro_batch)
        fast = {1: NATIVE, 2: "torch:direct"}.get(micro_batch)
        if listing is None:
            return self.trial
        return {name: [0.1 if name == fast else 100.0] for name, _ in listing}


@pytest.mark.parametrize("less", [0, 1])
def test_torchs_own_parts_keep_to_the_limit_beside_the_held_workspace(less):
    model, x = nn.Conv2d(8, 16, 3, padding=1).requires_grad_(False), torch.randn(3, 8, 12, 12)
    options = {"algorithms": [NATIVE, "torch:direct"], "training": False, "cache": Alternating()}
    report = tune(model, x, min_gain=-math.inf, **options)
    assert {name for _, name in report.kernels[0].division.parts} == {NATIVE, "torch:direct"}
    limit = report.workspace_bytes - less
    tune(model, x, limit, min_gain=-math.inf, **options)
    copied = copy.deepcopy(model)  # which allocates its workspace inside its first call
    assert peak_allocation(lambda: copied(x), "cpu") - copied(x).nbytes <= limit


@pytest.mark.parametrize(
    ("policy", "algorithm", "mode"),
    [
        ("undivided", "torch:implicit", "WR"),
        ("powerOfTwo", "torch:native", "WR"),
        ("powerOfTwo", "torch:native", "WD"),
    ],
)
def test_smaller_mini_batches_keep_to_the_limit_too(policy, algorithm, mode):
    model, x = nn.Conv2d(16, 16, 3, padding=1), torch.randn(32, 16, 16, 16)

    @torch.no_grad()
    def taken(num_samples):
        return max(peak for _, peak in peak_inside(lambda: model(x[:num_samples]), WATCHED))

    limit = taken(32) // 2
    tune(model, x, limit, policy, mode, algorithms=[algorithm], training=False, cache=None)
    assert max(map(taken, (32, 31, 17))) <= limit


def test_under_wd_each_kernel_has_its_own_share_at_every_batch_size():
    model, options = net(), {"min_gain": -math.inf, "cache": None}
    tune(model, images(4), algorithms=["torch:im2col"], mode="WD", **options)
    divided = [kernel for kernel in kernels_in(model) if kernel.division]
    assert len(divided) > 2
    assert [k.limit_bytes for k in divided] == [k.division.workspace_bytes for k in divided]


def test_bytes_that_wd_assigned_to_no_kernel_are_given_once():
    key = microconv.Kernel("forward", microconv.Convolution(3, 8, 8, 4, (3, 3))), 8
    tuner = Tuner(TuningReport("WD", "all", 1000), Bench(None, BenchmarkCache()), 0.0, {})
    tuner.measured[key], tuner.spare = {8: [Candidate(NATIVE, 1.0, 90)]}, 100
    # Torch's own takes 80 bytes more than the division: of two kernels, from one.
    assert [tuner._needed(key, microconv.Division(1.0, 10, [])) for _ in range(2)] == [False, True]


def test_frozen_filters_take_no_more():
    model, x = nn.Conv2d(16, 16, 3, padding=1).requires_grad_(False), torch.randn(8, 16, 40, 40)
    x.requires_grad_()
    report = tune(model, x, algorithms=["torch:implicit"], cache=None, min_gain=-math.inf)
    taken = [peak for _, peak in peak_inside(lambda: model(x).square().sum().backward(), WATCHED)]
    assert len(taken) == 2 and max(taken) <= report.workspace_bytes < x.nbytes


@pytest.mark.slow
def test_wd_holds_all_convolutions_together():
    _, whole = held(net(), images())
    for share in (0.0, 0.3):
        model, x = net(), images()
        with pytest.raises(WorkspaceLimitError, match="in all, such as: ") as refused:
            tune(model, x, 0, mode="WD", cache=None)
        least, kernels = refused.value.least_bytes, refused.value.kernels
        assert sum(kernels.values()) == least and "up backward" in kernels
        limit = least + int(share * max(0, whole - least))
        report = tune(model, x, limit, mode="WD", cache=None, min_gain=0.5)
        assert report.workspace_bytes <= limit
        _, taken = held(model, x)
        assert taken + report.allocated_bytes <= limit
        with pytest.raises(WorkspaceLimitError):
            tune(net(), x, least - 1, mode="WD", cache=None)


@pytest.mark.parametrize("mode", ["WR", "WD"])
def test_a_limit_that_is_not_strict(mode):
    """Torch's own takes what it likes, and the report says so."""
    model = net()
    report = tune(model, images(), 0, mode=mode, strict=False, cache=None)
    assert not any(isinstance(module, TunedConv2d) for module in model.modules())
    assert report.workspace_bytes > 0 and "NOT held to the limit" in str(report)


@pytest.mark.parametrize("mode", ["WR", "WD"])
def test_a_layer_of_two_shapes_is_refused_with_both(mode):
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1))
    model.forward = lambda x: model[0](x).mean() + model[0](x[:, :, :10]).mean()
    options = {"mode": mode, "cache": None, "training": False}
    with pytest.raises(WorkspaceLimitError) as refused:
        tune(model, images(), 0, **options)
    least = refused.value.least_bytes
    assert refused.value.kernels == {"0 forward": least}
    tune(model, images(), least, **options)
    with pytest.raises(WorkspaceLimitError):
        tune(model, images(), least - 1, **options)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(64, 64, 9, padding=4), (16, 64, 300)),
        (nn.Conv3d(8, 8, 3, padding=1), (4, 8, 6, 10, 10)),
        (nn.ConvTranspose2d(8, 8, 3), (4, 8, 12, 12)),
    ],
    ids=["Conv1d", "Conv3d", "ConvTranspose2d"],
)
def test_other_convolutions_are_left_reported_and_held_to_the_limit(layer, shape):
    model, x = nn.Sequential(layer), torch.randn(shape)
    for mode, together in (("WR", max), ("WD", sum)):
        options = {"mode": mode, "cache": None}
        with pytest.raises(WorkspaceLimitError, match=r"0 (forward|backward) needs ") as refused:
            tune(model, x, 0, **options)
        assert refused.value.least_bytes == together(refused.value.kernels.values())
        report = tune(model, x, refused.value.least_bytes, **options)
        assert type(model[0]) is type(layer) and not report.kernels
        assert f"it is a {type(layer).__name__}; " in report.skipped["0"]


def test_other_convolutions_count_as_they_are_called():
    class Half(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    layers, needs = (nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 8, 3)), []
    for kind, context in ((Half, nullcontext), (nn.Sequential, nullcontext), (Half, torch.no_grad)):
        with context(), pytest.raises(WorkspaceLimitError) as refused:
            tune(kind(*layers), images(), 0, cache=None)
        needs.append([refused.value.kernels[f"1 {name}"] for name in ("forward", "backward")])
    assert needs[0] == needs[2] != needs[1]


@pytest.mark.parametrize("bad", [(), ("2",), ("0", "2"), ("0", "2", "4")])
def test_layers_of_which_the_model_is_not_faster_are_untied(bad, monkeypatch):
    first, second, third = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    model = nn.Sequential(first, nn.BatchNorm2d(4), second, nn.Dropout(), third)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()

    def compare(one, forms, run):
        seconds = []
        for form in forms:
            form()
            run()
            seconds.append(10.0 + sum(1.0 if n in bad else -1.0 for n in tuned_layers(model)))
        return Trial((seconds[0],) * 5, (seconds[1],) * 5)

    monkeypatch.setattr("repro.microconv.tuner.compare_models", compare)
    report = tune(model, images(4, 12), algorithms=["torch:im2col"], cache=InventedTimes())
    good = [name for name in ("0", "2", "4") if name not in bad]
    tied = tuned_layers(model)
    # The best of all, or everything where that pays as a whole.
    assert tied == (["0", "2", "4"] if len(good) > len(bad) else good)
    assert set(report.untied) == {"0", "2", "4"} - set(tied)
    for name in report.untied:
        assert "do not make the whole model faster" in report.skipped[name]
    assert (report.model is None) == (not tied)
    if tied:
        assert report.model.pays and "the whole model, measured: " in str(report)
    # The trials leave nothing behind.
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_keeps_to_the_limit_is_not_untied(monkeypatch):
    model, x = net(), images()
    with pytest.raises(WorkspaceLimitError) as refused:
        tune(model, x, 0, cache=None)
    never = Trial((2.0,) * 5, (1.0,) * 5)
    monkeypatch.setattr("repro.microconv.tuner.compare_models", lambda *a: never)
    report = tune(model, x, refused.value.least_bytes, cache=None)
    assert held(model, x)[0] <= refused.value.least_bytes
    assert report.model is never and any(entry.needed for entry in report.kernels)


def test_no_model_is_told_the_times_of_another(tmp_path):
    times = []
    for wait_s in (0.2, 0.0):  # which no representation of the model shows
        model, x = net(), images()
        model.register_forward_hook(lambda *given, wait_s=wait_s: time.sleep(wait_s))
        with pytest.raises(WorkspaceLimitError) as refused:
            tune(model, x, 0, cache=tmp_path / "times")
        report = tune(model, x, refused.value.least_bytes, cache=tmp_path / "times")
        times.append(report.model.medians_s[1])
    assert times[1] < 0.2 < times[0]


def tied(algorithm="torch:im2col", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 8, 3, **options))
    plain = copy.deepcopy(model)
    tune(model, images(4, 9), algorithms=[algorithm], min_gain=-math.inf, cache=None)
    assert isinstance(model[0], TunedConv2d)
    return model, plain


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_make_fx_sees_what_a_tuned_model_does(mode):
    model, plain = tied("nnpack:ft8x8")
    names = [name for name, _ in model.named_parameters()]

    def gradients(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        loss = torch.func.functional_call(model, given, (x,)).square().sum()
        return torch.autograd.grad(loss, parameters)

    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    graph = make_fx(gradients, tracing_mode=mode)(images(4, 9), *parameters)
    # On other values than it was traced with.
    other = [p.detach() * 1.5 for p in parameters]
    computed = graph(images(4, 9, seed=1), *other)
    for parameter, value in zip(plain.parameters(), other, strict=True):
        parameter.data.copy_(value)
    loss = plain(images(4, 9, seed=1)).square().sum()
    wanted = torch.autograd.grad(loss, list(plain.parameters()))
    for got, want in zip(computed, wanted, strict=True):
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-2)


def test_operands_of_another_type_are_torchs_to_compute():
    model, _ = tied("nnpack:ft8x8")
    tuned = next(k for k in kernels_in(model) if k.kernel.kind == "forward" and k.division)
    first, second, _ = replace(tuned.kernel, dtype="float64").tensors(tuned.batch)
    result = tuned.run(first, second)
    assert result.dtype == torch.float64
    assert relative_error(result, reference(tuned.kernel, first, second)) <= 1e-12


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_traced_model_computes_any_input_and_says_where_its_layers_are_gone():
    model, plain = tied("nnpack:ft8x8")
    traced = torch.jit.trace(model, images(4, 9))
    for x in (images(4, 9, seed=1), images(3, 9), images(2, 14)):  # the last was not tuned for
        assert torch.allclose(traced(x), plain(x), rtol=1e-4, atol=1e-4)
    grown = torch.autograd.grad(traced(images(4, 9)).sum(), list(traced.parameters()))
    expected = torch.autograd.grad(plain(images(4, 9)).sum(), list(plain.parameters()))
    for got, want in zip(grown, expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-2)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    del model, traced
    gc.collect()
    gone = microconv.LayerGoneError, RuntimeError
    with pytest.raises(gone, match=r"tuned layer \d+, which is not"):
        loaded(images(4, 9))


def test_layers_have_other_numbers_in_another_process():
    code = "from repro.microconv.operators import TunedLayer; print(TunedLayer({}).number)"
    told = [subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)]
    assert told[0] != told[1]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_operators_keep_torchs_rules_and_its_count_of_operations(groups):
    model, plain = tied(groups=groups)
    layer = next(iter(model[0].tuned.values()))
    arguments = (images(4, 9).requires_grad_(), model[0].weight, model[0].bias, layer.number)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.repro_microconv.convolution.default
    torch.library.opcheck(operator, arguments, test_utils=tests)
    counts = []
    for one in (model, plain):
        with FlopCounterMode(display=False) as counter:
            one(images(4, 9).requires_grad_()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_graph_of_a_tuned_model_leaves_the_batch_size_free():
    model, plain = tied()
    graph, batch = make_fx(model)(images(4, 9)), torch.export.Dim("batch")
    exported = torch.export.export(graph, (images(4, 9),), dynamic_shapes=[{0: batch}])
    assert "repro_microconv" in str(exported.graph)
    assert torch.allclose(exported.module()(images(3, 9)), plain(images(3, 9)), atol=1e-5)
