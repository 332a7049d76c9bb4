"""The pieces that a tuned convolution is made of."""

import copy
import itertools
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.microconv import Candidate, Convolution, Division, Kernel, best_division
from repro.microconv.backends import given_bytes
from repro.microconv.conv import compute_dtype, install, layout_of, signature
from repro.microconv.torch_backend import TorchBackend
from repro.microconv.tuned_kernel import TunedKernel, Workspace, kernels_of, segment_bytes

NATIVE = "torch:native"


def images(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Workspace


def test_a_workspace_is_as_large_as_what_was_reserved_and_made_once():
    workspace = Workspace("cpu", 100)
    workspace.reserve(700)
    workspace.reserve(300)
    assert workspace.size == 700
    buffer = workspace.allocate()
    assert buffer.dtype == torch.uint8 and buffer.shape == (700,) and buffer.count_nonzero() == 0
    assert workspace.allocate() is buffer
    with workspace.segment(256, 100) as segment:
        assert segment.shape == (100,) and segment.data_ptr() == buffer.data_ptr() + 256
        segment.fill_(1)
    assert buffer.sum() == 100 and buffer[256:356].all()


def test_an_empty_workspace():
    with Workspace("cpu").segment(0, 0) as segment:
        assert segment.numel() == 0


def test_an_error_inside_frees_the_workspace():
    workspace = Workspace("cpu", 8)
    with pytest.raises(KeyError), workspace.segment(0, 8):
        raise KeyError
    with workspace.segment(0, 8) as segment:
        assert len(segment) == 8


def test_a_second_thread_waits_for_its_turn():
    workspace = Workspace("cpu", 8)
    order, inside = [], threading.Event()

    def work():
        inside.wait(timeout=10)
        with workspace.segment(0, 8):
            order.append("second")

    thread = threading.Thread(target=work)
    thread.start()
    with workspace.segment(0, 8):
        inside.set()
        thread.join(timeout=0.1)
        assert thread.is_alive()
        order.append("first")
    thread.join(timeout=10)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]
)
def test_a_copy_of_a_workspace_allocates_its_own(copied):
    workspace = Workspace("cpu", 64)
    with workspace.segment(0, 64) as segment:
        segment.fill_(7)
        other = copied(workspace)  # also while it is in use
    assert (other.size, other.device) == (64, "cpu")
    with other.segment(0, 64) as segment:
        assert segment.count_nonzero() == 0
    assert other.allocate().data_ptr() != workspace.allocate().data_ptr()
    assert workspace.allocate().eq(7).all()


# Divisions of other batch sizes

CONV = Convolution(2, 5, 6, 3, (3, 3), padding=(1, 1))


def candidates_of(sizes):
    """Times that grow faster than the batch, the algorithms' workspace; native needs a bit."""
    kernel = Kernel("forward", CONV)
    return {
        b: [
            Candidate(NATIVE, 3.0 * b, 64 * b),
            Candidate("torch:im2col", 4.0 + 0.5 * b**1.5, given_bytes("torch:im2col", kernel, b)),
            Candidate("torch:direct", 5.0 + 0.4 * b**1.5, given_bytes("torch:direct", kernel, b)),
        ]
        for b in sizes
    }


def make_kernel(batch=8, sizes=(1, 2, 4, 8), limit=2**20, algorithms=None, kind="forward"):
    candidates = {
        b: [way for way in ways if algorithms is None or way.algorithm in algorithms]
        for b, ways in candidates_of(sizes).items()
    }
    division = best_division(batch, candidates, limit)
    size = segment_bytes(Kernel(kind, CONV), division)
    return TunedKernel(
        Kernel(kind, CONV), batch, division.parts, candidates, division.workspace_bytes, size, 0,
        Workspace("cpu", size),
    )  # fmt: skip


def least_time(batch, candidates, segment, limit, tuned):
    """Return the least time of any division of another than the tuned batch, by trying all."""
    best = {0: 0.0}
    for total in range(1, batch + 1):
        best[total] = min(
            (
                best[total - size] + way.time_s
                for size, ways in candidates.items()
                for way in ways
                if size <= total
                and way.workspace_bytes <= limit
                and (size != tuned if way.algorithm == NATIVE else way.workspace_bytes <= segment)
            ),
            default=float("inf"),
        )
    return best[batch]


@pytest.mark.parametrize("limit", [600, 6000, 12_000, 30_000, 2**20])
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_another_batch_size_is_divided_best_within_the_same_workspace(sizes, limit):
    kernel = make_kernel(sizes=sizes, limit=limit)
    time = {(b, way.algorithm): way.time_s for b, ways in kernel.candidates.items() for way in ways}
    need = {
        (b, way.algorithm): way.workspace_bytes
        for b, ways in kernel.candidates.items()
        for way in ways
    }
    for batch in (1, 3, 5, 7, 8, 9, 16, 31):
        parts = kernel.division(batch)
        assert sum(size for size, _ in parts) == batch
        workspaces = [need[part] for part in parts if part[1] != NATIVE]
        assert max(workspaces, default=0) <= kernel.segment_bytes == kernel.workspace.size
        assert max(need[part] for part in parts) <= kernel.limit_bytes <= limit
        if batch != 8:
            within = (kernel.segment_bytes, kernel.limit_bytes)
            expected = least_time(batch, kernel.candidates, *within, tuned=8)
            assert sum(time[part] for part in parts) == pytest.approx(expected)
        assert kernel.division(batch) is parts  # remembered
    assert kernel.division(8) is kernel.parts


def test_sizes_that_do_not_sum_to_a_batch_are_left_to_torch():
    kernel = make_kernel(sizes=(8,), algorithms=["torch:im2col"])
    assert kernel.division(16) == [(8, "torch:im2col")] * 2
    assert kernel.division(7) is None and kernel.division(7) is None
    assert kernel.division(12) is None
    weight, x = images(3, 2, 3, 3), images(7, 2, 5, 6)
    out = kernel.run(x, weight, (7, 3, 5, 6))
    assert torch.equal(out, F.conv2d(x, weight, padding=1))


def test_a_kernel_left_to_torch_is_left_to_it_at_every_size():
    kernel = make_kernel()
    kernel.parts = None
    assert kernel.division(8) is None and kernel.division(3) is None


def test_dividing_again_leaves_alone_what_was_measured():
    kernel = make_kernel()
    before = copy.deepcopy(kernel.candidates)
    for batch in range(1, 20):
        kernel.division(batch)
    assert kernel.candidates == before and kernel.parts == make_kernel().parts


def test_threads_that_ask_for_a_new_size_at_once():
    kernel = make_kernel(sizes=range(1, 65), batch=64)
    weight, x = images(3, 2, 3, 3), images(50, 2, 5, 6)
    expected = F.conv2d(x, weight, padding=1)
    results, barrier = [], threading.Barrier(4)

    def work():
        barrier.wait(timeout=10)
        results.append(kernel.run(x, weight, tuple(expected.shape)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3, 8, 11])
@pytest.mark.parametrize("kind", ["forward", "backward_data", "backward_filter"])
@pytest.mark.parametrize("algorithms", [["torch:im2col"], ["torch:direct"], [NATIVE], None])
def test_a_kernel_computes_every_batch_size(algorithms, kind, batch):
    kernel = make_kernel(kind=kind, algorithms=algorithms)
    x, weight, y = (images(*shape) for shape in Kernel("forward", CONV).shapes(batch))
    bias = images(3, seed=1)
    x.requires_grad_(), weight.requires_grad_()
    output = F.conv2d(x, weight, bias, padding=1)
    gradients = torch.autograd.grad(output, (x, weight), y)
    operands, expected = {
        "forward": ((x, weight), output),
        "backward_data": ((y, weight), gradients[0]),
        "backward_filter": ((x, y), gradients[1]),
    }[kind]
    with torch.no_grad():
        extra = {"bias": bias} if kind == "forward" else {}
        for _ in range(2):  # a filter gradient starts from zero each time
            got = kernel.run(*operands, tuple(expected.shape), **extra)
            torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-4)


def test_the_workspace_of_a_division():
    kernel = Kernel("forward", CONV)
    needs = {b: dict(TorchBackend().algorithms(kernel, b)) for b in (1, 4)}

    def of(*parts):
        return segment_bytes(kernel, Division(1.0, 2**20, list(parts)))

    assert segment_bytes(kernel, None) == 0
    assert of((1, NATIVE)) == 0  # it allocates by itself
    assert of((4, "torch:im2col"), (1, NATIVE)) == needs[4]["im2col"]
    largest = max(needs[4]["direct"], needs[1]["im2col"])
    assert of((4, "torch:direct"), (1, "torch:im2col"), (1, "torch:im2col")) == largest
    assert 0 < of((4, "torch:fft")) < needs[4]["fft"]  # the rest is torch.fft's own


# What a call is


FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("of_input", FORMATS)
@pytest.mark.parametrize("of_weight", FORMATS)
@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 4, 5, 6), (2, 4, 1, 5), (3, 2, 7, 7)])
def test_the_layout_is_that_of_torchs_output(shape, of_input, of_weight):
    x = images(*shape).to(memory_format=of_input)
    weight = images(3, shape[1], 1, 2).to(memory_format=of_weight)
    output = F.conv2d(x, weight)
    expected = "nhwc" if not output.is_contiguous() else "nchw"
    assert layout_of(x, weight) == expected
    if expected == "nhwc":
        assert output.is_contiguous(memory_format=torch.channels_last)


def test_strides_of_neither_layout_count_as_torchs_default():
    x, weight = images(2, 4, 6, 5), images(3, 4, 2, 2)
    for other in (x.transpose(2, 3), x[:, :, ::2], x[:1].expand(3, 4, 6, 5)):
        assert layout_of(other, weight) == "nchw"
        assert F.conv2d(other, weight).is_contiguous()


def test_the_data_type_of_a_call():
    x = images(1, 1, 2, 2)
    assert compute_dtype(x) == torch.float32 and compute_dtype(x.half()) == torch.float16
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert compute_dtype(x) == compute_dtype(x.bfloat16()) == dtype
            assert F.conv2d(x, x).dtype == dtype
            assert compute_dtype(x.double()) == torch.float64
            with torch.autocast("cpu", enabled=False):
                assert compute_dtype(x) == torch.float32


def test_a_signature_holds_all_but_the_batch():
    weight = images(3, 4, 2, 2)
    x = images(5, 4, 6, 7)
    assert signature(x, weight) == (6, 7, "float32", "cpu", "nchw", "ieee")
    same = [x[:2], x + 1, x.clone().requires_grad_(), images(0, 4, 6, 7), x[::2]]
    assert {signature(other, weight) for other in same} == {signature(x, weight)}
    channels_last = x.to(memory_format=torch.channels_last)
    others = [x[:, :, :5], x[:, :, :, :5], x.transpose(2, 3), x.double(), channels_last]
    signatures = [signature(other, weight) for other in others]
    with torch.autocast("cpu", torch.bfloat16):
        signatures.append(signature(x, weight))
    assert len({*signatures, signature(x, weight)}) == len(others) + 2
    assert hash(signatures[0]) == hash(signature(others[0], weight))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": (1, 4), "stride": (2, 3), "padding": (1, 2)},
        {"kernel_size": (3, 2), "dilation": (2, 4), "padding": (5, 0)},
        {"kernel_size": (3, 5), "padding": "same", "dilation": (3, 1)},
        {"kernel_size": 1, "padding": "same"},
        {"kernel_size": (2, 3), "padding": "same", "dilation": (2, 1)},
        {"kernel_size": 5, "padding": "valid", "stride": 3},
    ],
)
def test_the_kernels_of_a_layer_have_torchs_shapes(options):
    module = nn.Conv2d(4, 6, **options)
    for size in ((11, 12), (9, 16)):
        x = images(3, 4, *size)
        y = module(x)
        kernels = kernels_of(module, signature(x, module.weight))
        assert list(kernels) == ["forward", "backward_data", "backward_filter"]
        for kind, kernel in kernels.items():
            assert kernel.kind == kind and kernel.dtype == "float32" and kernel.device == "cpu"
        shapes = (tuple(x.shape), tuple(module.weight.shape), tuple(y.shape))
        assert kernels["forward"].shapes(3) == shapes
        assert kernels["backward_data"].shapes(3) == (shapes[2], shapes[1], shapes[0])
        assert kernels["backward_filter"].shapes(3) == (shapes[0], shapes[2], shapes[1])
        first, second, result = kernels["forward"].tensors(3)
        made = F.conv2d(
            first, second, None, module.stride, kernels["forward"].conv.padding, module.dilation
        )
        assert made.shape == result.shape


def test_what_has_no_kernel():
    uneven = nn.Conv2d(3, 3, (3, 4), padding="same")
    with pytest.raises(ValueError, match="'same' is not symmetric for 3×4"):
        kernels_of(uneven, (8, 8, "float32", "cpu", "nchw", "ieee"))
    with pytest.raises(ValueError, match="larger than the padded input"):
        kernels_of(nn.Conv2d(3, 3, 9), (8, 8, "float32", "cpu", "nchw", "ieee"))
    with pytest.raises(ValueError, match="dtype of a kernel is 'complex64'"):
        kernels_of(nn.Conv2d(3, 3, 3), (8, 8, "complex64", "cpu", "nchw", "ieee"))


# The layer, made by hand


@pytest.mark.parametrize(
    "kinds",
    [
        kinds
        for count in range(4)
        for kinds in itertools.combinations(("forward", "backward_data", "backward_filter"), count)
    ],
)
def test_any_subset_of_the_kernels_may_be_divided(kinds):
    torch.manual_seed(0)
    reference = nn.Conv2d(2, 3, 3, padding=1)
    module = copy.deepcopy(reference)
    x = images(8, 2, 5, 6)
    tuned = {}
    for kind in ("forward", "backward_data", "backward_filter"):
        tuned[kind] = make_kernel(kind=kind, algorithms=["torch:im2col"])
        if kind not in kinds:
            tuned[kind].parts = None
    install(module, signature(x, module.weight), tuned)
    for num_samples in (8, 5):
        results = []
        for m in (module, reference):
            piece = x[:num_samples].clone().requires_grad_()
            output = m(piece)
            results.append([output, *torch.autograd.grad(output.square().sum(), (piece, m.weight))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert module.untuned_calls == 0


def test_calls_that_no_tuning_is_for_are_counted():
    module = nn.Conv2d(2, 3, 3, padding=1)
    reference = copy.deepcopy(module)
    install(module, signature(images(9, 2, 7, 7), module.weight), {})
    for x in (images(2, 2, 4, 4), images(2, 5, 6), images(0, 2, 4, 4)):
        assert torch.equal(module(x), reference(x))
    assert module.untuned_calls == 3
    with pytest.raises(RuntimeError, match="to have 2 channels, but got 4"):
        module(images(2, 4, 5, 5))
