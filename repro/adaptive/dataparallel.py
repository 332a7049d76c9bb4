"""Data-parallel training under torchrun: a fixed number of processes, a batch that grows.

Source: Lee et al., section IV. Every process is given the same mini-batch and takes its share of
it, so that the batch size does not depend on the number of processes.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, get_args
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import TensorWeakRef

from repro.adaptive.averaging import METHODS, Allreduce, Method, OverlappedAverager, StepTiming
from repro.adaptive.controller import checked_number
from repro.adaptive.loss_check import Checks, Choice, parts_of, warn, weighted
from repro.adaptive.model_guards import ModelGuard, check_initialized, check_layers
from repro.adaptive.optimizers import check_hooks, check_in_parts, check_optimizer, no_gradient
from repro.adaptive.processes import (
    MAKING,
    PeerError,
    broadcast,
    check_alike,
    described,
    gathered,
    share,
    with_peers,
)
from repro.measure import accelerator
from repro.measure.batches import (
    Batch,
    bounds,
    call_model,
    check_no_graph,
    leaves_of,
    read_batch,
    to_device,
)
from repro.measure.checks import choice, whole
from repro.measure.loss_parts import (
    LossCheckError,
    connected,
    leaves_of_graph,
    one_backward,
    same_gradients,
)
from repro.measure.precision import warn_of_sums, without_autocast
from repro.measure.untouched import bits, stored

LossFunction = Callable[..., Tensor]
_COMPARED = 16  # samples of the first mini-batch, between processes
_BUCKET_BYTES = {False: 2**20, True: 25 * 2**20}  # by whether the model is on an accelerator


class DataParallel:
    """One training step over all processes, with gradients averaged in one of three ways.

    - ``"allreduce"``: torch's DistributedDataParallel.
    - ``"all_to_all"``: the paper's: all-to-all, local sum, allgather (section IV-B).
    - ``"reduce_scatter"``: a reduce-scatter instead of the first two, then an allgather.

    All give the same weights. The gradient is that of the mean loss over the whole mini-batch, even
    if shares differ. BatchNorm sees only each process's share, as in DistributedDataParallel; a
    process without a share of a mini-batch computes its first sample with a gradient of zero.
    Hooks on tensors (`Tensor.register_hook`) see this process's gradient before averaging.

    The latter two finish an update during the next forward pass, layer by layer: when a parameter
    is read from its module, by its layer or any other code (tied weights, the loss, a moving
    average, a clamp, `state_dict`, a copy), or the optimizer's `state_dict`. A compiled layer is
    updated in `step`, and so is a parameter that a module also holds in another attribute. Code
    that holds parameters outside the model (a list made before, the optimizer's groups) must call
    `finish` before reading or changing them, or give ``overlap=False``: `step` then has all
    gradients before it steps the optimizer once. Optimizers that do not treat every parameter
    separately (LAMB, LARS, any that is not torch's), a replaced `step` and hooks around it
    need that. Clipping and a `GradScaler` have the same effect.

    Differs from the paper: gradients are averaged per bucket, not per layer, and the communicating
    thread is not pinned to a core. This thread also sums, so that an allgather does not overlap the
    sums of other layers: all processes must communicate in one order.

    Args:
        model: On its device. Parameters and buffers are set to rank 0's.
        loss_fn: Mean loss over its samples, ``loss_fn(outputs, targets)``, or ``loss_fn(outputs)``
            without targets; of torch's own losses also a sum, and a mean by class weights or over
            targets that are not ignored.
        optimizer: Optimizer of the model's parameters.
        averaging: One of the three.
        micro_batch: Most samples that a process computes at a time; gradients of a larger share
            add up over pieces. None, in all processes, for no limit.
        bucket_bytes: Bytes of gradients communicated together. None for 1 MiB on a CPU, and 25 MiB
            on an accelerator, where each bucket costs the host an optimizer's call.
        overlap: Whether updates may end in the next forward pass; False ends them in `step`.
        timeout_s: Seconds after which a process that does not answer counts as lost.
        scaler: A `torch.amp.GradScaler`; its `step` and `update` are called here.
        clip_grad_norm: Largest l2-norm of the whole mini-batch's gradient, after unscaling.
        shared: The parts of a mini-batch that belong to all samples, see
            `repro.measure.batches.read_batch`.
        check: ``"first"`` compares the loss of a few samples of the first mini-batch with the loss
            of their parts before the step; for losses other than torch's again when a mini-batch
            has new values, such as padding, for which each step waits for targets, masks and small
            inputs that lie on an accelerator: give them on the host. It also warns of a model that
            compares samples, or changes buffers outside BatchNorm. ``"off"`` checks nothing.

    Attributes:
        rank: This process, from 0.
        processes: Number of processes; 1 without torchrun.
        timings: One `StepTiming` for each step on a CPU; may be cleared at any time.
        grad_norm: Norm of the last step's gradient before clipping; None without clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        averaging: Method = "all_to_all",
        *,
        micro_batch: int | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        timeout_s: float = 120.0,
        scaler: torch.amp.GradScaler | None = None,
        clip_grad_norm: float | None = None,
        shared: Sequence[Any] = (),
        check: Choice = "first",
    ) -> None:
        if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"model is a {type(model).__name__}; give the module itself, and micro_batch= to "
                "compute a mini-batch in parts"
            )
        choice("averaging", averaging, METHODS)
        choice("check", check, get_args(Choice))
        check_initialized(model, trained=True)
        self._device = next(model.parameters()).device
        if bucket_bytes is None:
            bucket_bytes = _BUCKET_BYTES[accelerator.is_accelerator(self._device)]
        whole("bucket_bytes", bucket_bytes, 0)
        checked_number("timeout_s", timeout_s, lambda x: x > 0, "above 0")
        if micro_batch is not None:
            whole("micro_batch", micro_batch, 1)
        if clip_grad_norm is not None:
            checked_number("clip_grad_norm", clip_grad_norm, lambda x: x > 0, "above 0")
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.averaging, self.micro_batch, self.overlap = averaging, micro_batch, overlap
        self.grad_norm: Tensor | None = None
        self._clip = clip_grad_norm
        self._scaler = scaler or torch.amp.GradScaler(enabled=False)
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.processes = dist.get_world_size() if joined else 1
        alone = loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ()
        check_optimizer(optimizer, model, alone if self.processes == 1 else ())
        if self.processes > 1:
            check_layers(model)
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.timings: list[StepTiming] = []
        self._averager: OverlappedAverager | None = None
        self._allreduce: Allreduce | None = None
        self._group: dist.ProcessGroup | None = None
        self._asked = self._closed = False  # asked: whether mini-batches were compared
        self._checked = model, self._device, self.processes > 1, micro_batch is not None
        self._checks = Checks(*self._checked) if check == "first" else None
        self._reached: list[TensorWeakRef] | None = []  # by the first pass, outside the model
        self._shared, self._known = tuple(shared), dict[Any, str]()
        if self.processes == 1:
            return
        if self._in_parts:
            check_in_parts(optimizer)
        with with_peers(MAKING):
            self._connect(bucket_bytes, timeout_s)
        self._guard = ModelGuard(model, optimizer, by_nodes=averaging == "allreduce")

    def _connect(self, bucket_bytes: int, timeout_s: float) -> None:
        """Connect to the other processes; make model and averaging the same in all."""
        # A separate group, so that the averager's thread never mixes with the caller's collectives.
        timeout = timedelta(seconds=float(timeout_s))
        group = dist.new_group(timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        # gloo ends a process that is sent anything but the gradients that it waits for.
        self._asking = dist.new_group(timeout=timeout) if self._device.type == "cpu" else group
        self._group, model = group, self.model
        pieces = "no micro-batches" if self.micro_batch is None else "micro-batches"
        lines = [f"averaging {self.averaging!r}", f"bucket_bytes {bucket_bytes}", pieces]
        remedy = "make the same model with the same options in every process"
        check_alike(lines + described(model), group, remedy)
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor.detach(), group)
        if self.averaging == "allreduce":
            self._allreduce = Allreduce(model, group, bucket_bytes)
        else:
            given = model, self.optimizer, self.averaging, group
            self._averager = OverlappedAverager(*given, bucket_bytes, timeout_s)

    def step(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        weights: Any = None,
        shares: Sequence[int] | None = None,
    ) -> Tensor:
        """Train on one mini-batch; return this process's part of its mean loss, see `mean`.

        Gradients from before are dropped: a penalty has to be a term of `loss_fn`. Afterwards
        ``p.grad`` may be None, since parameters are updated one by one.

        Args:
            inputs: The whole mini-batch, the same in every process: a tensor (B, ...), or any
                structure that `repro.measure.batches.read_batch` can divide; see its `call_model`.
            targets: Likewise, for `loss_fn`; None if `loss_fn` takes only the model's output.
            weights: Weight of each sample in a loss that is no plain mean over samples, (B,), such
                as its number of tokens; torch's own losses need none.
            shares: Samples of each process, by rank, in the order of the mini-batch, the same in
                every process; `repro.microconv.split_batch` computes them for unequal devices.
                None for shares that differ by at most one.

        Raises:
            PeerError: Another process was lost.
            LossCheckError: The loss is no mean over samples (or by `weights`), in all processes.
            InputGradientError: An input or target requires a gradient, which it would not get.
            ValueError: The mini-batch is empty, lacks a target for an input, gave a parameter no
                gradient, or has other shares or class labels in another process (checked in the
                first step, and the first after an error); `shares` do not sum to it; the model, the
                optimizer or its hooks have changed.
            RuntimeError: `close` was called; or a gradient's norm to be clipped without a scaler is
                not finite, in all processes, before any update.
        """
        start = time.perf_counter()
        if self._closed:
            raise RuntimeError("this DataParallel is closed; make another one to go on")
        # Until all is done that this process alone may raise.
        asked, self._asked = self._asked, False
        check_no_graph(inputs, "an input")
        check_no_graph(targets, "a target")
        batch = read_batch(inputs, targets, shared=self._shared, known=self._known)
        number = batch.num_samples
        mine = share(number, self.rank, self.processes, shares)
        count = mine.stop - mine.start
        ranges = bounds(count, self.micro_batch or count) if count else []
        pieces = [(mine.start + a, mine.start + b) for a, b in ranges] or [(0, 0)]
        parts: Sequence[float | Tensor] = [1.0]  # one backward pass covers the mini-batch
        if self._group is not None or len(pieces) > 1:
            parts = parts_of(self.loss_fn, batch.targets, weights, number, pieces)
            check_hooks(self._names, expected=self._averager is not None)
        if self._group is not None:
            self._guard.check()
            if self._in_parts:
                check_in_parts(self.optimizer)
            self._check_alike(asked, batch, shares)
        self._asked = True
        if self._group is not None or len(pieces) > 1:
            self._check_loss(batch, weights)
            start = time.perf_counter()
        try:
            with with_peers(len(self.timings) + 1):
                losses = self._train(batch, pieces, parts)
        except PeerError:
            raise
        except Exception:
            self._asked = False  # so that others, which may not have failed, are not out of step
            if engine := self._averager or self._allreduce:
                engine.abandon()
            raise
        total_s = time.perf_counter() - start
        # Communications of an averager that ended in this step are mostly the previous step's.
        engine = self._averager or self._allreduce
        timing = engine.take_timing(total_s) if engine else StepTiming(total_s, 0.0, 0.0, 0.0)
        if self._device.type == "cpu":
            self.timings.append(timing)
        return torch.stack(losses).sum()

    def _check_alike(self, asked: bool, batch: Batch, shares: Sequence[int] | None) -> None:
        """Refuse mini-batches that differ between processes."""
        if not asked:  # once, since it takes time
            lines = [f"a mini-batch of {batch.num_samples} samples"]
            lines.append(f"shares of {shares and [*shares]}")
            labels = batch.targets
            whole = isinstance(labels, Tensor) and not labels.is_floating_point()
            if self._checks is not None and whole and labels.dim() == 1:  # which nothing augments
                lines.append(f"labels of checksum {crc32(bytes(bits(labels).cpu().numpy())):08x}")
            remedy = "give the same in every process: the whole mini-batch, and a share for each"
            check_alike(lines, self._asking, remedy, "comparing mini-batches")
            if self._checks is not None:
                every = gathered(_checksums(batch), self._asking, "comparing mini-batches")
                for rank, theirs in enumerate(every):
                    pairs = [(a, b) for a, b in zip(every[0], theirs, strict=False) if a or b]
                    if pairs and all(a != b for a, b in pairs):
                        warn(
                            f"no tensor of the first mini-batch is the same in rank {rank} as in "
                            f"rank 0; {remedy} (no DistributedSampler, one order); all is well if "
                            f"each process augments the same samples in its own way",
                            stacklevel=4,
                        )
                        break

    def _check_reached(self, loss: Tensor) -> None:
        """Warn, once, of a loss that trains what is not averaged here.

        Tensors that the second pass does not meet again, such as inputs of a gradient penalty, were
        made within the first.
        """
        before, self._reached = self._reached, None
        if before is None or self._checks is None or self._group is None:
            return
        others = [leaf for leaf in leaves_of_graph([loss]) if leaf not in self._names]
        if not before:
            self._reached = [TensorWeakRef(leaf) for leaf in others] or None
            return
        met = {id(ref()) for ref in before}
        if shapes := sorted(str(tuple(leaf.shape)) for leaf in others if id(leaf) in met):
            warn(
                f"the loss also has gradients by tensors outside the model (of shape "
                f"{', '.join(shapes[:3])}{', ...' if shapes[3:] else ''}), which are of this "
                "process's samples alone: where they are trained average them over the processes "
                "before their optimizer steps, or make them parameters of the model; "
                "requires_grad_(False) leaves them out",
                stacklevel=6,
            )

    def _check_loss(self, batch: Batch, weights: Any) -> None:
        """Compare the loss with its parts', if due; all processes refuse it, or none."""
        if self._checks is None or not self._checks.due(self.loss_fn, batch):
            return
        self.finish()
        error, compared = None, None
        try:
            compared = self._checks.make(self.loss_fn, batch, weights)
            text = "?" if compared is False else ""
        except Exception as own:
            error, text = own, str(own) or repr(own)
        group = self._group
        texts = [text] if group is None else gathered(text, group, "checking the loss")
        if refused := [(rank, text) for rank, text in enumerate(texts) if text not in ("", "?")]:
            self._checks = Checks(*self._checked)  # similar mini-batches are refused, too
            raise error or LossCheckError("rank {}: {}".format(*refused[0]))
        if compared is not None:
            self._checks.settle(self.loss_fn, "?" not in texts)

    def _train(
        self, batch: Batch, pieces: Sequence[tuple[int, int]], parts: Sequence[float | Tensor]
    ) -> list[Tensor]:
        """Compute pieces and update; return their losses."""
        losses = []
        if engine := self._averager or self._allreduce:
            engine.begin()
        self.optimizer.zero_grad(set_to_none=True)
        for number, ((a, b), part) in enumerate(zip(pieces, parts, strict=True)):
            # A process without a share takes part with a gradient of zero.
            piece = batch.slice(a, max(b, 1))
            # The second piece would change what the first has left.
            watched = self._names if number == 1 and self._checks is not None else ()
            last = number == len(pieces) - 1
            losses.append(self._pass(*piece, part * self.processes, last, watched))
        warn_of_sums(self.model.parameters(), len(pieces), stacklevel=4)
        if self._allreduce is not None:
            averaged = self._allreduce.end()  # not those of layers that the last piece leaves out
            trained = {p: name for p, name in self._names.items() if p.requires_grad}
            without = [name for p, name in trained.items() if p.grad is None]
            if lacking := without or [name for p, name in trained.items() if p not in averaged]:
                raise ValueError(no_gradient(lacking))
        if self._averager is not None:
            self._averager.end()
            if self._in_parts:
                self._averager.defer()
                return losses
            self._averager.gather()
        with without_autocast(self._device.type):
            self._update()
        return losses

    @property
    def _in_parts(self) -> bool:
        """Whether the optimizer is stepped bucket by bucket."""
        whole = self._clip is not None or self._scaler.is_enabled() or not self.overlap
        return self.processes > 1 and self.averaging != "allreduce" and not whole

    def _update(self) -> None:
        """Apply the update of the whole mini-batch at once."""
        if self._clip is not None:
            self._scaler.unscale_(self.optimizer)
            strict = not self._scaler.is_enabled()  # a scaler skips such a step
            parameters = self.model.parameters()
            self.grad_norm = nn.utils.clip_grad_norm_(
                parameters, self._clip, error_if_nonfinite=strict
            )
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def _pass(
        self,
        inputs: Any,
        targets: Any,
        part: float | Tensor,
        last: bool,
        watched: Iterable[Tensor],
    ) -> Tensor:
        ddp = self._allreduce.network if self._allreduce is not None else None
        engine = self._averager or self._allreduce
        network = ddp or self.model
        with nullcontext() if last or ddp is None else ddp.no_sync():
            with same_gradients(watched):
                outputs = call_model(network, to_device(inputs, self._device))
                given = () if targets is None else (to_device(targets, self._device),)
                loss = self.loss_fn(outputs, *given)
            # The loss of a piece without weight, and its gradient, may be 0 / 0.
            known = not isinstance(part, Tensor) or part.device.type == "cpu"
            if known and part == 0 and not loss.isfinite():
                loss = torch.zeros_like(loss.detach())
            loss = connected(weighted(loss, part), outputs)
            if self._averager is not None:
                self._averager.check_read()
            if engine is not None:
                engine.gathering = last
            self._check_reached(loss)
            with without_autocast(self._device.type), one_backward():
                self._scaler.scale(loss).backward()
        return loss.detach()

    def finish(self) -> None:
        """Wait until the parameters have the last step's update."""
        averager = self._averager
        if averager is None or not any(bucket.pending for bucket in averager.buckets):
            return
        start, averager.blocked_s = time.perf_counter(), 0.0
        averager.finish()
        if self.timings:
            self.timings[-1] += averager.take_timing(time.perf_counter() - start)

    def mean(self, value: float | Tensor) -> float:
        """Return the mean of a number over all processes; each must call it."""
        self.finish()
        number = torch.as_tensor(value, dtype=torch.float64)
        if self._group is None:
            return float(number)
        number = number.detach().to(self._device, copy=True)
        self._sum(number)
        return float(number) / self.processes

    def average_buffers(self) -> None:
        """Average real and complex buffers, such as BatchNorm's statistics, over processes.

        Each process's buffers have seen only its share; call this before evaluating or saving.
        """
        self.finish()
        for buffer in self.model.buffers() if self._group is not None else ():
            if buffer.is_floating_point() or buffer.is_complex():
                # gloo sums only few types, in contiguous memory.
                whole = stored(buffer.detach())
                kind = torch.complex128 if buffer.is_complex() else torch.float64
                wide = whole.to(kind).contiguous().resolve_conj()
                self._sum(torch.view_as_real(wide) if wide.is_complex() else wide)
                whole.copy_(wide / self.processes)

    def _sum(self, tensor: Tensor) -> None:
        with with_peers(len(self.timings) or MAKING):
            dist.all_reduce(tensor, group=self._group)

    def close(self) -> None:
        """Finish, and remove all hooks from the model, even if finishing fails."""
        self._closed = True
        try:
            if self._averager is None or not self._averager.lost:
                self.finish()
        finally:
            if self._averager is not None:
                self._averager.close()
            self._averager = self._allreduce = None


def _checksums(batch: Batch) -> list[int]:
    """Of each tensor of the first samples; 0 where it is alike in all samples."""
    leaves = leaves_of(batch.slice(0, min(_COMPARED, batch.num_samples)))
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided and x.dim()]
    return [crc32(bytes(bits(x).cpu().numpy())) if bool((x != x[:1]).any()) else 0 for x in tensors]
