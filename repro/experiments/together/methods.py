"""All methods to compute one mini-batch under a memory limit, each by its public functions.

Methods do not know each other: they are combined here, as a user would.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from repro.experiments.saving import save_pinned
from repro.experiments.together.networks import Config, Problem, build_model, recompute
from repro.mbs import MicroBatchStreamer
from repro.measure import accelerator
from repro.microconv import tune
from repro.outofcore import OutOfCore

RATE, MOMENTUM = 1e-3, 0.9
WORKSPACE = 8 * 2**20  # bytes of each tuned convolution's kernels
OUT_OF_CORE_SHARE = 0.8  # of an accelerator's limit: kernels and gaps take the rest

ACCUMULATES = "accumulation"
STREAMS = {"mbs", "mbs_deferred", "checkpointing_mbs", "mbs_in_outofcore", "tuned_mbs"}
SWAPS = {"outofcore", "outofcore_file", "mbs_in_outofcore", "tuned_outofcore"}
RECOMPUTES = {"checkpointing", "checkpointing_mbs"}
TUNES = {"tuned_mbs", "tuned_outofcore"}


class Refused(Exception):
    """A method that is not for this device; the text says why."""


@dataclass
class Method:
    """One method on one network: a model of its own, its passes and its step.

    `micro` is None for methods that take the mini-batch whole; the limit is in bytes.
    """

    mode: str
    problem: Problem
    model: nn.Module
    device: str
    micro: int | None
    limit: int
    block: OutOfCore | None = None
    host_bytes: int = 0
    _passes: Callable[[], object] = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        loss = self.problem.loss
        if self.mode in STREAMS:
            rule = "deferred" if self.mode == "mbs_deferred" else "micro"
            # The loss is torch's own, and a check's cost is not to be timed.
            streamer = MicroBatchStreamer(
                self.model, loss, self.micro or 1, device=self.device, batchnorm=rule, check="off"
            )
            self._passes = partial(streamer.backward, self.problem.inputs, self.problem.targets)
        elif self.mode == ACCUMULATES:
            self._passes = self._accumulate
        else:
            self._passes = self._whole

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.problem.loss(self.model(inputs.to(self.device)), targets.to(self.device))

    def _whole(self) -> None:
        with self._saving():
            loss = self._loss(self.problem.inputs, self.problem.targets)
        loss.backward()

    def _accumulate(self) -> None:
        inputs, targets = self.problem.inputs, self.problem.targets
        size = self.micro or len(inputs)
        for some, wanted in zip(inputs.split(size), targets.split(size), strict=True):
            loss = self._loss(some, wanted)
            (loss * (len(some) / len(inputs))).backward()

    def _saving(self) -> Any:
        if self.mode != "save_on_cpu":
            return nullcontext()
        self.host_bytes = 0
        if accelerator.is_accelerator(self.device):
            return save_pinned(self.device)
        return saved_tensors_hooks(self._to_host, torch.clone)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Copy as `save_on_cpu` does, where a simulated limit does not count it: to the host."""
        with _disable_current_modes():
            copied = tensor.detach().clone()
        self.host_bytes += copied.nbytes
        return copied

    def passes(self) -> None:
        """Leave the gradients of the mini-batch in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        self._passes()

    def step(self) -> None:
        """Train one step."""
        self.passes()
        self.optimizer.step()
        if self.block is not None:
            self.block.step()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Enter the method's block: out-of-core's, or none.

        Raises:
            BudgetTooSmall: An operation alone needs more than the limit.
            Refused: It is not for this device.
        """
        if self.mode not in SWAPS:
            yield
            return
        queued = accelerator.is_accelerator(self.device)
        with ExitStack() as stack:
            folder = None
            if self.mode == "outofcore_file":
                if queued:
                    raise Refused("a file takes what a CPU swaps; an accelerator swaps to the host")
                folder = stack.enter_context(tempfile.TemporaryDirectory())
            block = OutOfCore(
                int(OUT_OF_CORE_SHARE * self.limit) if queued else self.limit,
                device=self.device,
                swap_folder=folder,
                # In host memory for all methods.
                exclude=(self.problem.inputs, self.problem.targets),
                model=self.model,
                optimizer=self.optimizer,
            )
            self.block = stack.enter_context(block)
            yield


def make_method(
    config: Config, problem: Problem, micro: int | None, limit: int, device: str
) -> Method:
    """Return a method by its name, its convolutions tuned where it says so."""
    mode = config["mode"]
    model = build_model(config, device)
    if mode in RECOMPUTES:
        recompute(model)
    if mode in TUNES:
        some = problem.inputs[: micro or len(problem.inputs)]
        torch.manual_seed(0)
        tune(model, some.to(device), WORKSPACE, config["policy"], strict=False, cache=None)
    return Method(mode, problem, model, device, micro, limit)


def micro_batches(mode: str, fits: int, batch: int) -> Sequence[int | None]:
    """Return the sizes of micro-batches to try, largest first; [None] for methods without.

    `fits` is the largest mini-batch that fits undivided, `batch` the mini-batch.
    """
    if mode not in STREAMS and mode != ACCUMULATES:
        return [None]
    # Recomputing and swapping make room for larger ones.
    most = {"checkpointing_mbs": 8.0, "mbs_in_outofcore": 2.0}.get(mode, 1.0)
    shares = [most / 2**n for n in range(math.ceil(math.log2(most * fits)) + 1)]
    shares += [0.75] if most == 1 else []
    sizes = {max(1, int(share * fits)) for share in shares}
    return sorted({min(size, batch) for size in sizes}, reverse=True)
