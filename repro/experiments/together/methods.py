"""All methods to compute one mini-batch under a memory limit, each by its public functions.

Methods do not know each other: they are combined here, as a user would.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
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


class Method:
    """One method on one network: a model of its own, its passes and its step.

    Args:
        config: Names the method and the network.
        problem: The mini-batch.
        micro: Most samples of a micro-batch, None for methods that take the mini-batch whole.
        limit: In bytes.
        device: Where it computes.
    """

    def __init__(
        self, config: Config, problem: Problem, micro: int | None, limit: int, device: str
    ) -> None:
        self.mode, self.problem, self.device = config["mode"], problem, device
        self.size, self.limit = micro or len(problem.inputs), limit
        self.block: OutOfCore | None = None
        self.host_bytes = 0
        self.model = build_model(config, device)
        if self.mode in RECOMPUTES:
            recompute(self.model)
        if self.mode in TUNES:
            some = problem.inputs[: self.size].to(device)
            torch.manual_seed(0)
            tune(self.model, some, WORKSPACE, config["policy"], strict=False, cache=None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        if self.mode in STREAMS:
            rule = "deferred" if self.mode == "mbs_deferred" else "micro"
            # The loss is torch's own, and a check's cost is not to be timed.
            self._streamer = MicroBatchStreamer(
                self.model, problem.loss, self.size, device=device, batchnorm=rule, check="off"
            )

    def passes(self) -> None:
        """Leave the gradients of the mini-batch in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets, device = self.problem.inputs, self.problem.targets, self.device
        if self.mode in STREAMS:
            self._streamer.backward(inputs, targets)
            return
        for some, wanted in zip(inputs.split(self.size), targets.split(self.size), strict=True):
            with self._saving():
                loss = self.problem.loss(self.model(some.to(device)), wanted.to(device))
            share = len(some) / len(inputs)
            (loss if share == 1 else loss * share).backward()

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
        queued, to_file = accelerator.is_accelerator(self.device), self.mode == "outofcore_file"
        if queued and to_file:
            raise Refused("a file takes what a CPU swaps; an accelerator swaps to the host")
        with (
            tempfile.TemporaryDirectory() if to_file else nullcontext() as folder,
            OutOfCore(
                int(OUT_OF_CORE_SHARE * self.limit) if queued else self.limit,
                device=self.device,
                swap_folder=folder,
                # In host memory for all methods.
                exclude=(self.problem.inputs, self.problem.targets),
                model=self.model,
                optimizer=self.optimizer,
            ) as self.block,
        ):
            yield


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
