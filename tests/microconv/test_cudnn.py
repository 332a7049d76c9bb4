"""The cuDNN backend: against cuDNN where there is a GPU, and against `cudnn_stub.c` anywhere."""

import ctypes
import itertools
import math
import re
import shutil
import subprocess
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tuned_nets import reference

from repro import microconv
from repro.microconv import BenchmarkCache, Convolution, Division, Kernel, backends, cudnn
from repro.microconv.backends import BACKENDS, run_division
from repro.microconv.cudnn import CuDNNBackend, UnsupportedError
from repro.microconv.kernels import KINDS, aligned
from repro.microconv.measuring import Bench
from repro.microconv.tuned_kernel import TunedKernel, Workspace

BACKEND = CuDNNBackend()
GUARD = 256

# The numbers of cuDNN's enumerations, from its documentation.
NUMBERS = {
    "forward": {
        "IMPLICIT_GEMM": 0, "IMPLICIT_PRECOMP_GEMM": 1, "GEMM": 2, "DIRECT": 3, "FFT": 4,
        "FFT_TILING": 5, "WINOGRAD": 6, "WINOGRAD_NONFUSED": 7,
    },
    "backward_data": {
        "ALGO_0": 0, "ALGO_1": 1, "FFT": 2, "FFT_TILING": 3, "WINOGRAD": 4, "WINOGRAD_NONFUSED": 5,
    },
    "backward_filter": {
        "ALGO_0": 0, "ALGO_1": 1, "FFT": 2, "ALGO_3": 3, "WINOGRAD_NONFUSED": 5, "FFT_TILING": 6,
    },
}  # fmt: skip
NONDETERMINISTIC = {"ALGO_0", "ALGO_3"}  # of backward kernels


def run_guarded(algorithm, kernel, operands, size, times=1):
    """Run with garbage in result and workspace, and check what lies around the workspace."""
    first, second, out = operands
    if kernel.kind == "backward_filter":
        out.zero_()
    else:
        out.fill_(math.nan)
    memory = torch.full((GUARD + size + GUARD,), 0xFF, dtype=torch.uint8, device=kernel.device)
    copies = first.clone(), second.clone()
    for _ in range(times):
        workspace = memory[GUARD : GUARD + size]
        BACKEND.run(algorithm, kernel, operands, workspace)
    assert bool((memory[:GUARD] == 0xFF).all() & (memory[GUARD + size :] == 0xFF).all())
    assert torch.equal(first, copies[0]) and torch.equal(second, copies[1])
    return out


def assert_near(out, expected, kernel, algorithm):
    out = out.cpu().double()
    assert out.isfinite().all()
    error = float((out - expected).abs().max() / expected.abs().max())
    # In 16 bits what is stated says little; sums are in float32, and rounded at the end.
    allowed = min(microconv.stated_error(f"cudnn:{algorithm}", kernel), 0.05)
    assert error <= allowed, (algorithm, kernel, error)


def check_all(kernel, b):
    """Run all algorithms that are listed; return those that cuDNN supports."""
    operands, ran = kernel.tensors(b, seed=b), []
    expected = reference(kernel, operands[0], operands[1])
    for algorithm, size in BACKEND.algorithms(kernel, b):
        with suppress(UnsupportedError):
            out = run_guarded(algorithm, kernel, operands, size)
            assert_near(out, expected, kernel, algorithm)
            if kernel.kind == "backward_filter":  # micro-batches are added up
                out = run_guarded(algorithm, kernel, operands, size, times=3)
                assert_near(out, 3 * expected, kernel, algorithm)
            ran.append(algorithm)
    return ran


@pytest.mark.gpu
@pytest.mark.cuda_only("cuDNN")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "layout", "math_"),
    [
        *itertools.product(("float32",), ("nchw", "nhwc"), ("ieee", "tf32")),
        *itertools.product(("float64", "float16", "bfloat16"), ("nchw",), ("ieee",)),
        ("bfloat16", "nhwc", "ieee"),
    ],
)
@pytest.mark.parametrize(
    "conv",
    [
        Convolution(16, 20, 18, 24, (3, 3), padding=(1, 1)),
        Convolution(8, 27, 27, 16, (5, 5), padding=(2, 2)),
        Convolution(8, 21, 20, 16, (3, 1), (2, 1), (1, 0), (1, 2)),
        Convolution(3, 35, 35, 8, (7, 7), (2, 2), (3, 3)),
        Convolution(16, 9, 9, 16, (3, 3), padding=(1, 1), groups=4),
    ],
    ids=str,
)
def test_every_algorithm_on_a_gpu(conv, dtype, layout, math_, kind):
    kernel = Kernel(kind, conv, dtype, "cuda", layout, math_)
    if not [*check_all(kernel, 1), *check_all(kernel, 6)]:
        assert (dtype, layout) != ("float32", "nchw")
        pytest.skip(f"this cuDNN has no algorithm for {dtype} in {layout}")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make the stub of cuDNN with")
    made = tmp_path_factory.mktemp("cudnn") / "stub.so"
    source = Path(__file__).with_name("cudnn_stub.c")
    command = [compiler, "-std=c99", "-O2", "-shared", "-fPIC", str(source), "-o", str(made), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    library = cudnn.declare(ctypes.CDLL(str(made)))
    library.stub_log.restype = ctypes.c_char_p
    return library


@pytest.fixture
def stub(library, monkeypatch):
    """The stub in cuDNN's place, with one device that is the host."""
    devices = []
    monkeypatch.setattr(cudnn, "_load", lambda: (library, None))
    monkeypatch.setattr(CuDNNBackend, "missing", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda d: devices.append(d) or nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = SimpleNamespace(cuda_stream=4711)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    cudnn._descriptors.cache_clear()
    of_this_thread = dict(cudnn._handles.__dict__)
    cudnn._handles.__dict__.clear()
    library.stub_reset()
    yield SimpleNamespace(library=library, devices=devices, stream=stream)
    library.stub_reset()
    cudnn._descriptors.cache_clear()
    cudnn._handles.__dict__.clear()
    cudnn._handles.__dict__.update(of_this_thread)


def log(stub, start):
    """The stub's log as dictionaries, of the calls that begin so."""
    lines = stub.library.stub_log().decode().splitlines()
    chosen = [line for line in lines if line.startswith(start)]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) | {"kind": line.split()[1]} for line in chosen]


CONVS = [
    Convolution(3, 7, 6, 4, (3, 3), padding=(1, 1)),
    Convolution(2, 9, 8, 3, (3, 2), (2, 1), (1, 2), (1, 3)),
    Convolution(1, 6, 9, 5, (1, 4), (1, 3), (0, 1), (2, 1)),
    Convolution(4, 5, 5, 6, (2, 3), groups=2),
]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conv", CONVS, ids=str)
def test_every_algorithm_in_the_stub(stub, conv, kind, dtype, layout):
    kernel = Kernel(kind, conv, dtype, layout=layout)
    for b in (1, 3):
        assert check_all(kernel, b) == list(NUMBERS[kind])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_algorithm_stream_and_workspace(stub, kind, dtype):
    kernel = Kernel(kind, CONVS[0], dtype)
    operands = kernel.tensors(2)
    for algorithm, size in BACKEND.algorithms(kernel, 2):
        run_guarded(algorithm, kernel, operands, size)
    runs, queries, numbers = log(stub, "run"), log(stub, "query"), list(NUMBERS[kind].values())
    assert [int(run["algo"]) for run in runs] == [int(q["algo"]) for q in queries] == numbers
    for run, size in zip(runs, dict(BACKEND.algorithms(kernel, 2)).values(), strict=True):
        assert run["kind"] == kind and run["n"] == "2" and run["alpha"] == "1"
        assert run["beta"] == ("1" if kind == "backward_filter" else "0")
        assert run["stream"] == "4711" and run["workspace"] == str(size)
    stub.stream.cuda_stream = 42  # set before each call
    run_guarded(algorithm, kernel, operands, size)
    assert log(stub, "run")[-1]["stream"] == "42" and set(stub.devices) == {"cpu"}
    for b in (1, 5, 64):  # the workspace is asked for by micro-batch
        listed = dict(BACKEND.algorithms(kernel, b))
        sizes = {name: b * 1000 * n + 7 if n else 0 for name, n in NUMBERS[kind].items()}
        assert listed == {name: aligned(size) for name, size in sizes.items()}
        assert {name: BACKEND.given_bytes(name, kernel, b) for name in listed} == listed


@pytest.mark.parametrize("kind", KINDS)
def test_types_and_math(stub, kind):
    for dtype, math_, type_, number, compute in (
        ("float32", "ieee", 0, 3, 0),  # no tensor cores, which round to TF32
        ("float32", "tf32", 0, 0, 0),
        ("float64", "ieee", 1, 0, 1),
        ("float16", "ieee", 2, 1, 0),
        ("bfloat16", "ieee", 9, 1, 0),
    ):
        for layout, format_ in (("nchw", 0), ("nhwc", 1)):
            stub.library.stub_reset()
            BACKEND.algorithms(Kernel(kind, CONVS[0], dtype, layout=layout, math=math_), 1)
            queries = log(stub, "query")
            assert len(queries) == len(NUMBERS[kind])
            for query in queries:
                facts = [query[f] for f in ("type", "math", "compute", "format", "groups")]
                assert [*map(int, facts)] == [type_, number, compute, format_, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_true_half_computes_in_half_and_pseudo_half_in_float32(stub, kind):
    true_half = CuDNNBackend(half=True)
    kernel = Kernel(kind, Convolution(32, 6, 6, 8, (3, 3), padding=(1, 1)), "float16")
    first, second, out = kernel.tensors(4)
    expected, errors = reference(kernel, first, second), {}
    for backend, compute in ((BACKEND, "0"), (true_half, "2")):
        (name, size), *_ = backend.algorithms(kernel, 4)
        workspace = torch.empty(size, dtype=torch.uint8)
        backend.run(name, kernel, (first, second, out.zero_()), workspace)
        run = log(stub, "run")[-1]
        assert (run["compute"], run["math"]) == (compute, "1") and backend.name in BACKENDS
        errors[compute] = float((out.double() - expected).abs().max() / expected.abs().max())
    assert errors["0"] <= 2**-10 and 2 * errors["0"] < errors["2"] <= 0.05
    # Nothing but float16 is computed in less than float32.
    for dtype in ("float32", "bfloat16", "float64"):
        assert true_half.algorithms(Kernel(kind, CONVS[0], dtype), 1) == []
    # It is taken where its error is admitted alone.
    kernel = Kernel(kind, CONVS[0], "float16")
    for max_error, wanted in ((1e-4, {"torch"}), (1e-2, {"torch", "cudnn_half"})):
        bench = Bench(["cudnn_half"], BenchmarkCache(), max_error)
        candidates = bench.candidates(kernel, 2, [2])[2]
        assert {way.algorithm.partition(":")[0] for way in candidates} == wanted


@pytest.mark.parametrize(
    ("status", "word"), [(3000, "STUB_NOT_SUPPORTED"), (3002, "STUB_NOT_SUPPORTED_SHAPE"),
                         (2000, None), (3009, None), (5000, None)],
)  # fmt: skip
def test_what_cudnn_lists_and_then_refuses(stub, status, word):
    # Since cuDNN 9 all of 3000 to 3999 say that something is not supported, but for 3009: a library
    # of its own is missing.
    for kind in KINDS:
        stub.library.stub_refuse(KINDS.index(kind), NUMBERS[kind]["FFT"], status)
        kernel = Kernel(kind, CONVS[0])
        size = dict(BACKEND.algorithms(kernel, 2))["FFT"]
        message = rf"cudnn: FFT failed for {kind} of .* of 2: {word or ''}.* \({status}\)"
        with pytest.raises(RuntimeError, match=message) as caught:
            run_guarded("FFT", kernel, kernel.tensors(2), size)
        assert isinstance(caught.value, UnsupportedError) == (word is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_parts_accumulate(stub, kind):
    kernel = Kernel(kind, CONVS[1])
    first, second, out = kernel.tensors(8)
    parts = [(3, "cudnn:FFT"), (3, "cudnn:FFT_TILING"), (1, "torch:direct"), (1, "cudnn:FFT")]
    workspace = torch.full((2**16,), 0xFF, dtype=torch.uint8)
    run_division(parts, kernel, first, second, out.fill_(math.nan), workspace)
    assert_near(out, reference(kernel, first, second), kernel, "FFT")
    assert [run["n"] for run in log(stub, "run")] == ["3", "3", "1"]


@pytest.mark.parametrize("ask", ["cudnn", "torch"])
def test_deterministic_algorithms_alone(stub, ask, monkeypatch):
    cache = BenchmarkCache()

    def names(kind):  # with and without what was listed before
        kernel = Kernel(kind, CONVS[0])
        every = (name.partition(":") for name, _ in backends.listing(kernel, 2))
        listed = {name for backend, _, name in every if backend == "cudnn"}
        ways = Bench(["cudnn"], cache).candidates(kernel, 2, [2])[2]
        found = {n.removeprefix("cudnn:") for n in (way.algorithm for way in ways)}
        assert {name for name in found if not name.startswith("torch")} == listed
        return listed

    before = {kind: names(kind) for kind in KINDS}
    assert before["backward_filter"] > NONDETERMINISTIC
    kernel = Kernel("backward_data", CONVS[0])
    first, second, out = kernel.tensors(2)
    division = Division(0.0, 0, [(2, "cudnn:ALGO_0")])
    tuned = TunedKernel(kernel, 2, Workspace("cpu"), 0, division)
    tuned.run(first, second, like=out)
    assert len(log(stub, "run")) > 0
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", ask == "cudnn")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: ask == "torch")
    stub.library.stub_reset()
    tuned.run(first, second, like=out)  # is left to torch
    assert log(stub, "run") == []
    for kind in KINDS:
        assert names(kind) == before[kind] - NONDETERMINISTIC


def test_where_it_is_missing(monkeypatch):
    assert BACKEND.missing("cpu") == "cudnn: runs on a CUDA device only, not on cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BACKEND.missing("cuda:0") == "cudnn: no CUDA device is present"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cudnn, "_load", lambda: (None, "cudnn: why"))
    assert BACKEND.missing("cuda:0") == "cudnn: why"
    with pytest.raises(RuntimeError, match="cudnn: why"):
        BACKEND.version("cuda:0")
