"""This machine, whether each method agrees with torch on it, and which runs fit.

A tiny computation by each method is compared with plain torch on the CPU. The findings are JSON
values (`examine`), which `text` lays out for a terminal.
"""

import copy
import importlib.util
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from repro import datasets, terminal
from repro.experiments import arguments
from repro.measure import accelerator, describe_device, memory_state
from repro.measure.host import cores
from repro.measure.precision import without_tf32
from repro.records import commit_state, library_versions

GIB = 2**30
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
_OPTIONAL = {"jupyterlab": "notebooks", "papermill": "notebooks", "ray": "cluster"}  # extras
# The memory of the papers' cards, to which runs of profile `gpu` are held; others set no limit.
LARGEST_GIB = {"mbs": 24.0, "dualbatch": 24.0, "outofcore": 16.0}

Facts = dict[str, Any]
LR = 0.05  # of the self-tests


def examine(
    device: str, root: str | None = None, tell: Callable[[str], None] = lambda line: None
) -> Facts:
    """Find out all about this machine, as JSON values; less than two minutes on two free cores."""
    start, problems = time.perf_counter(), []
    facts: Facts = {"software": software(), "host": host(), "selftests": []}
    for name, find, otherwise in (
        ("device", lambda: device_facts(device), {"device": device, "name": "unknown"}),
        ("data", lambda: data_found(root), {"found": {}, "missing": []}),
    ):
        try:
            facts[name] = find()
        except Exception as error:  # of a device or driver; all else is still reported
            facts[name] = otherwise
            problems.append({"part": name, "why": first_line(error)})
    for test in TESTS:
        tell(f"self-test of {test.paper}: {test.text}")
        facts["selftests"].append(self_test(test, device))
    facts["failed"] = sum(one["status"] == "failed" for one in facts["selftests"])
    free = facts["device"].get("free_bytes")  # of an accelerator; `quick` holds less than 1 GiB
    facts["largest"] = [
        {"paper": paper, "largest run of profile gpu": f"{gib:g} GiB", "fits": gib <= free / GIB}
        for paper, gib in (LARGEST_GIB.items() if free else ())
    ]
    facts["problems"] = problems
    facts["to_do"] = [{"what": what, "do": do} for what, do in _to_do(facts, device)]
    facts["seconds"] = time.perf_counter() - start
    return facts


def broken(facts: Facts) -> bool:
    """Return whether a self-test failed, or something could not even be found out."""
    return bool(facts["failed"] or facts["problems"])


def software() -> Facts:
    """Return versions, torch's build, and which extras are missing."""
    commit, dirty = commit_state()
    built = {name: getattr(torch.version, name, None) for name in ("cuda", "hip")}
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": library_versions(),
        "torch_built_for": next((f"{name} {v}" for name, v in built.items() if v), "CPU only"),
        "commit": commit,
        "dirty": dirty,
        "missing_modules": [name for name in _OPTIONAL if importlib.util.find_spec(name) is None],
    }


def host() -> Facts:
    """Return the host's cores and memory; the available part minds a container's limit."""
    described = describe_device("cpu")
    return {
        "cores": cores(),
        "processor": described["name"],
        "memory_bytes": described["memory_bytes"],
        "available_bytes": memory_state("cpu").limit_bytes,
        # There is a GPU's driver, even where torch sees no GPU.
        "nvidia_driver": any(path.exists() for path in _NVIDIA),
        "accelerator": accelerator.present(),
    }


def device_facts(device: str) -> Facts:
    """Return the facts of a device that a record keeps, and an accelerator's free bytes."""
    facts = {"device": device} | describe_device(device)
    if accelerator.is_accelerator(device):
        facts["free_bytes"] = accelerator.free_and_total_bytes(device)[0]
    return facts


def data_found(root: str | None) -> Facts:
    """Return the datasets that can be loaded, by name, and those that are not there."""
    present = arguments.data_at_hand(root)
    known = (*datasets.NAMES, datasets.TIMES)
    return {"found": present, "missing": [name for name in known if name not in present]}


def _to_do(facts: Facts, device: str) -> Iterator[tuple[str, str]]:
    """Yield each thing missing or broken, and a command or an action for it."""
    host, software = facts["host"], facts["software"]
    for one in facts["selftests"]:
        if one["status"] == "failed":
            what = f"self-test of {one['paper']} failed: {one['text']}: {one['why']}"
            yield what, f"python -m pytest tests/{one['paper']} in a checkout shows where"
        elif one["status"] == "not run":  # which only the allocator is, for lack of a compiler
            yield one["why"], "apt-get install g++, or set $CXX"
    for one in facts["problems"]:
        yield f"{one['part']}: {one['why']}", "mend that, then run doctor again"
    if kind := host["accelerator"]:
        if device == "cpu":
            yield f"a {kind} device is here, and was not looked at", f"doctor --device {kind}"
    elif host["nvidia_driver"]:
        do = (
            f"torch is built for {software['torch_built_for']}; pytorch.org/get-started, nvidia-smi"
        )
        yield "an NVIDIA driver is here, and torch finds no device", do
    else:
        yield "no accelerator: gpu and paper would take days", "use --profile quick here"
    if missing := facts["data"]["missing"]:
        yield f"datasets not here: {', '.join(missing)}", "python -m repro data; see data/README.md"
    for name in software["missing_modules"]:
        do = f"make setup, or pip install '.[{_OPTIONAL[name]}]' in a checkout"
        yield f"not installed: {name}", do
    for one in facts["largest"]:
        if not one["fits"]:
            do = "it ends as out of memory, which is recorded; the others run"
            yield f"{one['paper']}: its largest run needs more than is free", do


def text(facts: Facts) -> str:
    """Lay findings out for a terminal."""
    tests = facts["selftests"]
    tables = (
        [{"": name, "this machine": value} for name, value in _machine(facts)],
        [
            {"result": one["status"], "method": one["paper"], "compared": one["text"]}
            | {"difference": one["difference"], "allowed": one["tolerance"]}
            for one in tests
        ],
        [one | {"fits": "yes" if one["fits"] else "no"} for one in facts["largest"]],
        [{"what": one["what"], "what to do": one["do"]} for one in facts["to_do"]],
    )
    passed = sum(one["status"] == "ok" for one in tests)
    last = "Next: make reproduce-all, or python -m repro run all."
    if broken(facts):
        last = "Do not trust what this machine computes before the failures are mended."
    verdict = f"{passed} of {len(tests)} self-tests passed, in {facts['seconds']:.0f} s. {last}"
    return "\n\n".join([*(terminal.table(rows) for rows in tables if rows), verdict])


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    for part in ("software", "host", "device"):
        for key, value in facts[part].items():
            name = f"{part} {key.removesuffix('_bytes').replace('_', ' ')}"
            if isinstance(value, dict):
                value = ", ".join(f"{library} {version}" for library, version in value.items())
            elif key.endswith("_bytes"):
                value = f"{value / GIB:.3g} GiB"
            if value and not isinstance(value, list):
                yield name, str(value)
    yield "datasets", ", ".join(facts["data"]["found"]) or "none"


def relative_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference over all tensors, relative to each one's largest value.

    Another number of tensors, another shape or a NaN is infinitely different.
    """
    ours, theirs = ([t.detach().cpu().double() for t in some] for some in (actual, expected))
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return math.inf
    differences = [
        float((one - other).abs().max()) / (float(other.abs().max()) or 1.0)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 10))


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, 16, 16), torch.randint(10, (samples,))


def _plain_sgd(batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for images, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return list(model.parameters())


def _streamed(device: str) -> float:
    from repro.mbs import MicroBatchStreamer

    images, labels = _batch(11)
    whole, model = _model(), _model().to(device)
    cross_entropy(whole(images), labels).backward()
    MicroBatchStreamer(model, nn.CrossEntropyLoss(), 3, device=device).backward(images, labels)
    gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, whole)]
    return relative_difference(*gradients)


def _two_workers(device: str) -> float:
    """Parallel SGD at a barrier (Lu et al., section 2.3): a mean of weights by the factors."""
    from repro.dualbatch import CyclicProgressiveSchedule as Schedule
    from repro.dualbatch import DualBatchPlan, Share, Stage, train_dual_batch
    from repro.measure import TimeModel

    images, labels = _batch(24)
    plan = DualBatchPlan.solve(TimeModel(a=1e-3, b=1e-2), 1.1, 1, 1, 8, len(images))
    shares = []

    def batches(share: Share, where: str = device) -> list[tuple[Tensor, Tensor]]:
        chosen = share.indices.cpu().split(share.batch_size)
        return [(images[some].to(where), labels[some].to(where)) for some in chosen]

    def given(share: Share) -> list[tuple[Tensor, Tensor]]:
        shares.append(share)
        return batches(share)

    train = partial(train_dual_batch, sync="bsp", optimizer_fn=torch.optim.SGD, device=device)
    trained = train(_model, given, plan, Schedule([Stage(1, LR)]))
    factors = [commit.factor for commit in trained.log]
    workers = [_plain_sgd(batches(share, "cpu")) for share in shares]
    means = [
        sum(f * w for f, w in zip(factors, weights, strict=True)) / sum(factors)
        for weights in zip(*workers, strict=True)
    ]
    return relative_difference(list(trained.state.values()), means)


def _averagings(device: str) -> float:
    from repro.adaptive import METHODS, DataParallel

    images, labels = _batch(10)
    expected, differences = _plain_sgd(3 * [(images, labels)]), []
    for averaging in METHODS:
        model = _model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        training = DataParallel(
            model, nn.CrossEntropyLoss(), optimizer, averaging, micro_batch=4, bucket_bytes=2**10
        )
        for _ in range(3):
            training.step(images.to(device), labels.to(device))
        training.finish()
        differences.append(relative_difference(list(model.parameters()), expected))
    return max(differences)


def _swapped(device: str) -> float:
    from repro.outofcore import OutOfCore

    def trained(budget: int) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6)]
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
        images = torch.randn(4, 8, 16, 16).to(device)
        with OutOfCore(budget, window_bytes=None, device=device) as block:
            for _ in range(4):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(images), images).backward()
                optimizer.step()
            done = block.statistics
        return list(model.parameters()), done

    whole, watched = trained(2**40)  # which swaps nothing
    swapped, done = trained(int(0.6 * watched.peak_bytes))
    if not (done.bytes_out and done.replayed):
        raise ValueError(f"nothing was swapped by a plan: {done.bytes_out} bytes out")
    return relative_difference(swapped, whole)


def _chunks(device: str) -> float:
    from repro.outofcore.native import ChunkedMemory

    kind, _, number = device.partition(":")
    mib, backend = 2**20, "cuda" if kind == "cuda" else "posix"
    with ChunkedMemory(backend, 2 * mib, 8 * mib, int(number or 0)) as memory:
        for address in [memory.malloc(4 * mib) for _ in range(2)]:
            memory.free(address)
        memory.free(memory.malloc(8 * mib))
        return 0.0 if memory.counters().peak_reserved_bytes == 8 * mib else math.inf


def _tuned(device: str) -> float:
    from repro.microconv import tune

    torch.manual_seed(0)
    plain, images = nn.Conv2d(4, 8, 3, padding=1), torch.randn(8, 4, 12, 12)
    outcomes: list[list[Any]] = [[], []]
    # In parts by one algorithm, then by the fastest ones.
    for limit_bytes, algorithms, parts in ((2**16, ["torch:im2col"], 2), (2**20, None, 1)):
        tuned = nn.Sequential(copy.deepcopy(plain)).to(device)
        options: dict[str, Any] = {"algorithms": algorithms, "min_gain": -math.inf, "cache": None}
        report = tune(tuned, images.to(device), limit_bytes, **options)
        chosen = [len(k.division.parts) if k.division else 1 for k in report.kernels]
        if not chosen or min(chosen) < parts:
            raise ValueError(f"kernels run in {chosen} parts, expected {parts}; {report.skipped}")
        for found, model, inputs in zip(
            outcomes, (tuned, plain), (images.to(device), images), strict=True
        ):
            inputs = inputs.clone().requires_grad_()
            model.zero_grad()
            outputs = model(inputs)
            outputs.square().mean().backward()
            found += [outputs, inputs.grad, *(p.grad for p in model.parameters())]
    return relative_difference(*outcomes)


class SelfTest(NamedTuple):
    """One comparison: its text, the largest difference that passes (0: to the bit), the function.

    The function takes the device, and returns the `relative_difference`.
    """

    paper: str
    text: str
    tolerance: float
    compare: Callable[[str], float]


TESTS = (
    SelfTest("mbs", "gradients in micro-batches = undivided pass on the CPU", 1e-4, _streamed),
    SelfTest("dualbatch", "weights of two workers = plain SGD on the CPU", 1e-4, _two_workers),
    SelfTest("adaptive", "weights by all averagings = plain SGD on the CPU", 1e-4, _averagings),
    SelfTest("outofcore", "weights while swapping = in core, bit for bit", 0.0, _swapped),
    SelfTest("outofcore", "the chunked allocator builds, and reuses its chunks", 0.0, _chunks),
    SelfTest(
        "microconv",
        "convolutions in parts and by the fastest algorithms = torch's on the CPU",
        1e-3,
        _tuned,
    ),
)


def self_test(test: SelfTest, device: str) -> Facts:
    """Run a self-test, whose error is a result, in JSON values."""
    from repro.outofcore.native import NoCompilerError

    difference, status = math.nan, "failed"
    try:
        with (
            without_tf32(),  # which differs from a CPU's float32 by 1e-3
            accelerator.forked_rng(device),
            accelerator.on(device),
            warnings.catch_warnings(action="ignore"),
        ):
            difference = test.compare(device)
            accelerator.synchronize(device)
        why = f"differs by {difference:.2g}, allowed is {test.tolerance:.2g}"
        if difference <= test.tolerance:  # not so for NaN
            status, why = "ok", ""
    except NoCompilerError as lacking:
        status, why = "not run", str(lacking)
    except Exception as error:
        why = first_line(error)
    with suppress(Exception):  # after an error of the device this may fail again
        accelerator.empty_cache(device)
    return {
        "paper": test.paper,
        "text": test.text,
        "status": status,
        "tolerance": test.tolerance,
        "difference": float(f"{difference:.2g}") if math.isfinite(difference) else None,
        "why": why,
    }


def first_line(error: Exception) -> str:
    """Return an error's kind and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
