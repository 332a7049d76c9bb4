"""`tune` on an accelerator: cuDNN's algorithms, precisions, no waiting, streams, the workspace."""

import copy
import gc
import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tuned_nets import images as images_of
from tuned_nets import kernels_in, tuned_layers

from repro.measure import accelerator
from repro.microconv import BenchmarkCache, measuring, tune, untune
from repro.microconv.tuned_kernel import Workspace

pytestmark = pytest.mark.gpu
cuda_only = pytest.mark.cuda_only

# The simulated device computes on the host.
BATCH, WIDTH, SIDE = (13, 32, 32) if torch.cuda.is_available() else (6, 8, 16)
MIB = 2**20


@pytest.fixture(scope="module")
def cache():
    return BenchmarkCache(None)


@pytest.fixture(autouse=True)
def short(monkeypatch, device):
    """Measure little where times mean nothing."""
    if device.type != "cuda":
        monkeypatch.setattr(measuring, "_ROUNDS", (1, 1))
        monkeypatch.setattr(measuring, "_TRIAL_ROUNDS", 1)


@pytest.fixture
def precision():
    """Choose ieee or tf32 for one test."""
    setting = torch.backends.cudnn.conv
    before = setting.fp32_precision

    def choose(name):
        setting.fp32_precision = name

    yield choose
    setting.fp32_precision = before


def make_net(device):
    """An AlexNet's layers, small: a large filter with a stride, 5×5, 3×3, dilation, 1×1."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 7, stride=2, padding=3), nn.Tanh(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 5, padding=2, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.Tanh(),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1), nn.Tanh(),
        nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=2, dilation=2), nn.Conv2d(WIDTH, 5, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).to(device)  # fmt: skip


def images(device, num_samples=BATCH):
    return images_of(num_samples, (SIDE, SIDE)).to(device)


def loss_and_gradients(model, x):
    labels = torch.arange(len(x), device=x.device) % 5
    x = x.detach().clone().requires_grad_()
    loss = F.cross_entropy(model(x).float(), labels)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


def relative_errors(got, want):
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def divided(model, x, cache, algorithms=(), **options):
    """A copy, and the report of tuning the model with cuDNN's algorithms where there are any."""
    algorithms = algorithms or (("cudnn",) if x.is_cuda else ("torch:im2col", "torch:direct"))
    reference = copy.deepcopy(model)
    report = tune(model, x, algorithms=algorithms, min_gain=-math.inf, cache=cache, **options)
    return reference, report


@pytest.mark.parametrize("mode", ["WR", "WD"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("math_", "tolerance"),
    # As much as `max_error` allows, or TF32 loses.
    [("ieee", 1e-3), pytest.param("tf32", 1e-2, marks=cuda_only("TF32"))],
)
def test_loss_and_gradients_in_float32(math_, tolerance, layout, mode, cache, precision, device):
    precision(math_)
    model, x = make_net(device), images(device)
    if layout == "nhwc":
        model, x = (part.to(memory_format=torch.channels_last) for part in (model, x))
    limit = 8 * MIB
    options = {"workspace_limit": limit, "mode": mode, "max_error": 1e-3}
    reference, report = divided(model, x, cache, **options)
    assert {entry.kernel.math for entry in report.kernels} == {math_}
    assert layout in {entry.kernel.layout for entry in report.kernels}
    assert tuned_layers(model) or layout == "nhwc"  # for which cuDNN may have none
    needs = [e.division.workspace_bytes for e in report.kernels if e.division]
    assert (max(needs, default=0) if mode == "WR" else sum(needs)) <= limit
    assert report.allocated_bytes <= limit
    for num_samples in (BATCH, 5):
        got = loss_and_gradients(model, images(device, num_samples))
        want = loss_and_gradients(reference, images(device, num_samples))
        assert max(relative_errors(got, want)) <= tolerance
    _, again = divided(copy.deepcopy(reference), x, cache, **options)
    assert again.measured == 0
    assert [str(e.division) for e in again.kernels] == [str(e.division) for e in report.kernels]
    got = loss_and_gradients(model.cpu(), x.cpu())  # is left to torch
    assert relative_errors(got, loss_and_gradients(reference.cpu(), x.cpu())) == [0.0] * len(got)
    assert tuned_layers(untune(model)) == []


@pytest.mark.parametrize(
    "algorithms", [pytest.param(("cudnn",), marks=cuda_only("cuDNN")), ("torch:im2col",), None]
)
def test_a_step_never_waits_for_the_device(algorithms, cache, device, no_waits):
    model, x = make_net(device), images(device)
    divided(model, x, cache, algorithms=algorithms)
    labels = torch.arange(BATCH, device=device) % 5
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(num_samples):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:num_samples]), labels[:num_samples]).backward()
        optimizer.step()

    step(BATCH), step(3)
    accelerator.synchronize(device)
    with no_waits():
        for num_samples in (BATCH, 3, 5):  # 5 is divided in here
            step(num_samples)
    accelerator.synchronize(device)


def test_streams_that_share_a_workspace_wait_for_each_other(cache, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, WIDTH, 5, padding=2), nn.Conv2d(WIDTH, 16, 3, padding=1))
    model.to(device)
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(16, 16, SIDE, SIDE, generator=generator).to(device) for _ in range(2)]
    reference, _ = divided(model, inputs[0], cache, algorithms=("torch:im2col",))
    assert tuned_layers(model) == ["0", "1"]
    expected = [loss_and_gradients_of_sum(reference, x) for x in inputs]
    streams = [accelerator.new_stream(device) for _ in inputs]
    for stream in streams:
        stream.wait_stream(accelerator.current_stream(device))
    results = []
    for _ in range(5):
        for stream, x in zip(streams, inputs, strict=True):
            with accelerator.use_stream(stream):
                accelerator.module(device)._sleep(1_000_000)  # the streams would overlap
                results.append(loss_and_gradients_of_sum(model, x))
    accelerator.synchronize(device)
    for index, got in enumerate(results):
        assert max(relative_errors(got, expected[index % 2])) <= 1e-2  # TF32 on either side


def test_a_workspace_is_zeroed_before_it_is_used_and_used_before_it_is_freed(device):
    first, second = accelerator.new_stream(device), accelerator.new_stream(device)
    workspace = Workspace(str(device), 1024)
    with accelerator.use_stream(first):
        workspace.allocate()
    with accelerator.use_stream(second), workspace.segment(0, 1024) as segment:
        segment.add_(1)
    del segment, workspace
    with accelerator.use_stream(first):
        again = torch.zeros(1024, dtype=torch.uint8, device=device)
    first.synchronize()
    assert not again.any()


def loss_and_gradients_of_sum(model, x):
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output.square().mean(), model.parameters())]


@pytest.mark.parametrize("mode", ["WR", "WD"])
def test_the_workspace_is_allocated_once_and_a_step_leaves_nothing(mode, cache, device):
    model, x = make_net(device), images(device)
    _, report = divided(model, x, cache, mode=mode)
    (workspace,) = {id(kernel.workspace): kernel.workspace for kernel in kernels_in(model)}.values()
    assert workspace.size == report.allocated_bytes
    # Some of cuDNN's algorithms need none; the buffer's address is what must not change.
    address = workspace.allocate().data_ptr()
    loss_and_gradients(model, x), loss_and_gradients(model, x[:4])
    accelerator.synchronize(device)
    gc.collect()
    allocated = accelerator.memory_allocated(device)
    for num_samples in (BATCH, 4, BATCH, 5):
        loss_and_gradients(model, x[:num_samples])
        assert workspace.allocate().data_ptr() == address
    accelerator.synchronize(device)
    gc.collect()
    until = time.monotonic() + 5  # autograd's thread lets go of its tensors after it has answered
    while accelerator.memory_allocated(device) > allocated and time.monotonic() < until:
        time.sleep(0.01)
    assert accelerator.memory_allocated(device) <= allocated
