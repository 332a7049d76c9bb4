"""The algorithms on a CPU, against PyTorch's convolution in float64 and its autograd."""

import math
import random
from dataclasses import replace

import pytest
import torch
from tuned_nets import reference, relative_error

from repro.microconv import Convolution, Kernel, backends, stated_error, torch_backend
from repro.microconv.backends import BACKENDS, BackendMissingError, run_division
from repro.microconv.kernels import ALIGNMENT, KINDS

GUARD = 256
NNPACK = BACKENDS["nnpack"].missing("cpu") is None


def draw(seed, family):
    """A random convolution of a family, and a micro-batch size."""
    rng = random.Random(f"{family} {seed}")

    def pair(low, high):
        return rng.randint(low, high), rng.randint(low, high)

    channels = rng.randint(1, 6), rng.randint(1, 6)
    while True:
        size, filters = pair(4, 17), pair(1, 5)
        stride, padding, dilation = pair(1, 3), pair(0, 3), pair(1, 3)
        if family == "3x3":  # what Winograd takes
            filters, stride, padding, dilation = (3, 3), (1, 1), pair(0, 2), (1, 1)
        elif family == "plain":  # what NNPACK takes
            stride = dilation = (1, 1)
            padding = tuple(rng.randint(0, k - 1) for k in filters)
        elif family == "1x1":
            filters, dilation = (1, 1), (1, 1)
            stride, padding = rng.choice([((1, 1), (0, 0)), (stride, padding)])
        fields = (*size, channels[1], filters, stride, padding, dilation)
        try:
            return Convolution(channels[0], *fields), rng.randint(1, 5)
        except ValueError:
            continue


def listing(kernel, b):
    """BACKEND:ALGORITHM of all on this CPU, and the bytes to give to each."""
    listed = backends.listing(kernel, b)
    return [(name, backends.given_bytes(name, kernel, b)) for name, _ in listed]


@pytest.fixture(autouse=True)
def native_is_not_measured(monkeypatch):
    monkeypatch.setattr(torch_backend, "native_workspace", lambda *_: 0)


def run_guarded(algorithm, kernel, b, size, seed=0):
    """Run with garbage in workspace and result; check that nothing else was written.

    Return the operands, what was in the result before, and the result.
    """
    first, second, result = kernel.tensors(b, seed)
    memory = torch.full((GUARD + size + GUARD,), 0xFF, dtype=torch.uint8)  # all NaN
    workspace = memory[GUARD : GUARD + size]
    accumulates = kernel.kind == "backward_filter"
    whole = torch.full((len(result) + 2, *result.shape[1:]), math.nan, dtype=result.dtype)
    out = whole[1:-1]
    if accumulates:
        out.copy_(torch.linspace(-3, 3, out.numel()).view(out.shape))
    before, copies = out.clone(), [tensor.clone() for tensor in (first, second)]
    backends.run(algorithm, kernel, (first, second, out), workspace)
    assert (memory[:GUARD] == 0xFF).all() and (memory[GUARD + size :] == 0xFF).all()
    assert whole[0].isnan().all() and whole[-1].isnan().all()
    assert torch.equal(first, copies[0]) and torch.equal(second, copies[1])
    return first, second, before, out


def check(algorithm, kernel, b, size, seed=0):
    first, second, before, out = run_guarded(algorithm, kernel, b, size, seed)
    expected = reference(kernel, first, second)
    stated, eps = stated_error(algorithm, kernel), torch.finfo(out.dtype).eps
    narrow = out.dtype.itemsize < 4  # computed in float32, and rounded at the end
    if kernel.kind == "backward_filter":
        rounded = eps * float(out.double().abs().max())
        error = float((out.double() - before.double() - expected).abs().max())
        allowed = stated * float(expected.abs().max()) + rounded
        allowed = min(allowed, 4 * rounded) if narrow else allowed
    else:
        error, allowed = relative_error(out, expected), min(stated, 2 * eps) if narrow else stated
    assert error <= allowed, (algorithm, kernel, b, error, allowed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["any", "3x3", "plain", "1x1"])
def test_every_algorithm_against_float64(family, kind):
    seen = set()
    for seed in range(20):
        conv, b = draw(seed, family)
        for dtype in ("float32", "float64"):
            kernel = Kernel(kind, conv, dtype)
            for algorithm, size in listing(kernel, b):
                check(algorithm, kernel, b, size, seed)
                seen.add((algorithm, dtype))
    wanted = {f"torch:{name}" for name in BACKENDS["torch"].names}
    wanted -= set() if family == "3x3" else {"torch:winograd"}
    assert wanted <= {name for name, dtype in seen if dtype == "float64"}
    if family == "3x3" and kind != "backward_filter" and NNPACK:
        wanted |= {"nnpack:ft8x8", "nnpack:ft16x16", "nnpack:wt8x8"}
    assert wanted <= {name for name, dtype in seen if dtype == "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", BACKENDS["torch"].names)
@pytest.mark.parametrize(
    ("kind", "conv", "b"),
    [
        ("forward", Convolution(2048, 6, 6, 64, (3, 3), padding=(1, 1)), 1),
        ("backward_data", Convolution(64, 6, 6, 2048, (3, 3), padding=(1, 1)), 1),
        ("backward_filter", Convolution(3, 32, 32, 16, (3, 3), padding=(1, 1)), 128),
    ],
    ids=["channels", "data", "images"],
)
def test_stated_errors_hold_where_sums_are_long(kind, conv, b, algorithm):
    kernel, name = Kernel(kind, conv), f"torch:{algorithm}"
    check(name, kernel, b, backends.given_bytes(name, kernel, b))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "conv",
    [
        Convolution(3, 35, 36, 8, (11, 11), (4, 4), (2, 2)),  # AlexNet conv1
        Convolution(2, 1, 9, 3, (1, 7), padding=(0, 3)),
        Convolution(2, 5, 5, 3, (5, 5)),  # one output pixel
        Convolution(1, 1, 1, 1, (1, 1), padding=(3, 3)),  # mostly padding
        Convolution(2, 4, 4, 2, (2, 2), (3, 3)),  # inputs that no filter reads
        Convolution(2, 7, 7, 2, (2, 2), (5, 5), (1, 1)),
        Convolution(2, 3, 3, 2, (3, 3), padding=(2, 2)),
        Convolution(2, 6, 5, 2, (3, 3), padding=(3, 1)),  # more than Winograd takes
        Convolution(2, 5, 6, 2, (3, 3), padding=(0, 4)),
        Convolution(2, 9, 6, 3, (3, 2), (1, 2), (4, 2), (4, 3)),
    ],
    ids=str,
)
def test_shapes_at_the_borders(kind, conv):
    kernel = Kernel(kind, conv)
    for algorithm, size in listing(kernel, 3):
        check(algorithm, kernel, 3, size)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_computed_one_by_one(kind, groups, dtype):
    """Sums of 16 bits in float32, within the rounding of the result."""
    seen = set()
    for seed, family in enumerate(("any", "3x3", "plain", "1x1")):
        one, b = draw(seed, family)
        channels = {"in_channels": groups * one.in_channels, "groups": groups}
        conv = replace(one, **channels, out_channels=groups * one.out_channels)
        kernel = Kernel(kind, conv, dtype)
        for algorithm, size in listing(kernel, b):
            check(algorithm, kernel, b, size, seed)
            seen.add(algorithm)
    wanted = {f"torch:{name}" for name in BACKENDS["torch"].names}
    if NNPACK and dtype != "float64" and kind != "backward_filter":
        wanted |= {"nnpack:ft8x8", "nnpack:ft16x16", "nnpack:wt8x8"}
    assert wanted <= seen


@pytest.mark.parametrize("kind", KINDS)
def test_native_runs_in_many_groups_and_channels_last_alone(kind):
    depthwise = Kernel(kind, Convolution(9, 7, 7, 9, (3, 3), padding=(1, 1), groups=9))
    last = Kernel(kind, Convolution(4, 7, 7, 6, (3, 3)), layout="nhwc")
    for kernel in (depthwise, last):
        assert [name for name, _ in listing(kernel, 2)] == ["torch:native"]
    check("torch:native", depthwise, 2, 0)
    first, second, out = last.tensors(2)
    assert first.is_contiguous(memory_format=torch.channels_last)
    backends.run("torch:native", last, (first, second, out), torch.empty(0, dtype=torch.uint8))
    assert relative_error(out, reference(last, first, second)) <= stated_error("torch:native", last)


def test_a_workspace_that_is_too_small_is_refused():
    kernel = Kernel("forward", Convolution(3, 8, 8, 4, (3, 3)))
    for algorithm, size in listing(kernel, 2):
        if algorithm == "torch:native":
            continue
        first, second, out = kernel.tensors(2)
        short = torch.zeros(size - ALIGNMENT, dtype=torch.uint8)
        with pytest.raises((ValueError, RuntimeError), match=r"the workspace|status 53"):
            backends.run(algorithm, kernel, (first, second, out), short)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["any", "3x3", "plain"])
def test_a_division_equals_the_whole(kind, family):
    for seed in range(8):
        conv, _ = draw(seed, family)
        rng = random.Random(seed)
        batch = rng.randint(2, 9)
        kernel, parts, size = Kernel(kind, conv), [], 0
        while left := batch - sum(b for b, _ in parts):
            b = rng.randint(1, left)
            algorithm, need = rng.choice(listing(kernel, b))
            parts.append((b, algorithm))
            size = max(size, need)
        first, second, out = kernel.tensors(batch, seed)
        out.fill_(math.nan)  # overwritten, a filter gradient too
        bias = torch.arange(conv.out_channels).float() if kind == "forward" else None
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
        run_division(parts, kernel, first, second, out, workspace, bias)
        expected = reference(kernel, first, second)
        if bias is not None:
            expected = expected + bias.double().view(-1, 1, 1)
        stated = max(stated_error(name, kernel) for _, name in parts)
        assert relative_error(out, expected) <= stated, (parts, kernel)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_bias_of_16_bits_is_added_before_rounding(dtype, groups):
    kernel = Kernel("forward", Convolution(8, 9, 9, 4, (3, 3), groups=groups), dtype)
    first, second, out = kernel.tensors(3)
    first, second = 128 + first, second.abs()
    bias = -128 * second.sum((1, 2, 3))  # centres pixels of 0 to 255
    expected = reference(kernel, first, second) + bias.double().view(-1, 1, 1)
    for algorithm, need in listing(kernel, 3):
        workspace = torch.empty(need, dtype=torch.uint8)
        run_division([(3, algorithm)], kernel, first, second, out, workspace, bias)
        assert relative_error(out, expected) <= torch.finfo(out.dtype).eps, algorithm


def test_products_are_unrounded_whatever_is_set_for_others(monkeypatch):
    seen, matmul = [], torch.backends.mkldnn.matmul
    monkeypatch.setattr(torch_backend.Im2col, "run", lambda *_: seen.append(matmul.fp32_precision))
    matmul.fp32_precision = "bf16"
    for dtype in ("float32", "bfloat16"):
        kernel = Kernel("forward", Convolution(3, 8, 8, 4, (1, 1)), dtype)
        run_guarded("torch:im2col", kernel, 2, backends.given_bytes("torch:im2col", kernel, 2))
        seen.append(matmul.fp32_precision)
    matmul.fp32_precision = "none"
    assert seen == ["ieee", "bf16"] * 2


def test_parts_must_sum_to_the_mini_batch():
    kernel = Kernel("forward", Convolution(1, 3, 3, 1, (1, 1)))
    first, second, out = kernel.tensors(7)
    out.fill_(5)
    for sizes, told in (([], r"\[\]"), ([4, 4], r"\[4, 4\]")):
        parts = [(size, "torch:im2col") for size in sizes]
        with pytest.raises(ValueError, match=rf"parts of {told} samples, .* 7"):
            run_division(parts, kernel, first, second, out, torch.empty(0, dtype=torch.uint8))
    assert (out == 5).all()


def test_filter_gradients_of_16_bits_are_summed_in_float32():
    # Every sample adds 1; in bfloat16 the sum would stand still at 256.
    kernel = Kernel("backward_filter", Convolution(1, 1, 1, 2, (1, 1)), "bfloat16")
    ones = torch.ones(600, 1, 1, 1, dtype=torch.bfloat16)
    out = torch.full((2, 1, 1, 1), math.nan, dtype=torch.bfloat16)
    gradient = ones.expand(-1, 2, -1, -1).contiguous()
    workspace = torch.empty(0, dtype=torch.uint8)
    run_division([(1, "torch:native")] * 600, kernel, ones, gradient, out, workspace)
    assert out.dtype == torch.bfloat16 and (out == 600).all()


def test_backends_and_single_algorithms_are_chosen():
    assert any(line.startswith("cudnn: ") for line in backends.check_names(None, "cpu"))
    assert backends.check_names(["torch:im2col", "torch"], "cpu") == []
    for names, error, message in (
        (["mkl"], BackendMissingError, "unknown backend 'mkl'; choose among torch, nnpack, cu"),
        (["cudnn:FFT"], BackendMissingError, "cudnn: runs on a CUDA device only, not on cpu; lea"),
        (["torch:fft8"], ValueError, "torch has no algorithm 'fft8'; choose among native, dir"),
        ([], ValueError, r"algorithms is \[\]; give a list of names, or None for all"),
    ):
        with pytest.raises(error, match=message):
            backends.check_names(names, "cpu")


def test_values_out_of_range():
    conv = Convolution(3, 8, 7, 4, (3, 3))
    for changes, message in (
        ({"stride": (0, 1)}, "sizes, strides and dilations start at 1, paddings at 0"),
        ({"groups": 2}, "groups must divide both numbers of channels"),
        ({"kernel_size": (3, 5), "dilation": (1, 2)}, "larger than the padded input"),
        ({"height": 6.0}, "'float' object cannot be interpreted as an integer"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            replace(conv, **changes)
    with pytest.raises(ValueError, match="dtype of a kernel is 'int8'; choose among float32, "):
        Kernel("forward", conv, "int8")
