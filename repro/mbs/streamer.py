"""Micro-Batch Streaming: the gradient of a mini-batch that does not fit into memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from repro.mbs.batches import (
    Piece,
    as_piece,
    concatenate,
    mark_last,
    own_memory,
    pieces_of,
)
from repro.mbs.batchnorm import DeferredBatchNorm, Moments
from repro.mbs.distributed import Processes
from repro.mbs.errors import (
    EmptyBatchError,
    MicroBatchError,
    check_choice,
    check_finite,
    check_headroom,
    check_loss,
    check_prefetch,
    check_weights_usable,
    checked_size,
    resolve_device,
)
from repro.mbs.results import StreamResult, Totals
from repro.mbs.sizing import AutoSizer, Sizing, release_memory
from repro.mbs.staging import Span, Stager
from repro.mbs.transaction import (
    Transaction,
    copy_tensors,
    get_rng,
    set_rng,
    tensors_of,
    write_tensors,
)
from repro.measure import MemoryMeter, is_out_of_memory
from repro.measure.batches import call_model, to_device


class MicroBatchStreamer:
    """Computes a mini-batch's gradient in micro-batches that are streamed to the device.

    Section 3 and Algorithm 1 of Piao et al., "Micro Batch Streaming". After `backward` the
    parameters hold the gradient of the whole mini-batch, added to what they held before; an
    optimizer step follows as always. A call that raises leaves gradients, buffers and random
    number generators as they were.

    Example:
        >>> streamer = MicroBatchStreamer(model, loss_fn, micro_batch_size="auto", device="cuda")
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad(set_to_none=True)
        ...     result = streamer.backward(inputs, targets)
        ...     optimizer.step()

    Differs from the paper: the default normalisation weighs each micro-batch by its samples,
    n_μ / N_B, which also holds where N_μ does not divide N_B; Algorithm 1's 1 / N_Sμ is
    ``normalization="paper"``.

    Args:
        model: The model, on `device` already. It is called with the inputs: a tuple or list as
            positional arguments, a dictionary as keyword arguments, anything else as one. A
            `DistributedDataParallel` model synchronises once per mini-batch; its gradient is the
            mean over all processes' samples (weights), with `two_pass` over their losses.
        loss_fn: Called as ``loss_fn(outputs, targets)``, or ``loss_fn(outputs)`` where targets
            are None; returns a scalar, the plain mean over its micro-batch's samples (weighted by
            `weights` where those are given; a sum needs ``normalization="none"``, class weights
            or an ignored class need `two_pass`), or with `two_pass` any function of the
            mini-batch. If it has parameters to train it must be a module.
        micro_batch_size: A whole number, or ``"auto"``: the largest that fits by a linear memory
            model (which knows nothing of the outputs that `two_pass` holds), halved on an
            out-of-memory error, grown back when memory allows.
        device: Where the model computes; the device of its parameters by default.
        normalization: ``"exact"``, ``"paper"`` (equation 14), or ``"none"``: the sum of the
            micro-batches' gradients (equation 13). Not used by `two_pass`, which is exact.
        batchnorm: ``"micro"``, each micro-batch updates the running statistics (the paper's), or
            ``"deferred"``, one update with the pooled statistics; see `DeferredBatchNorm`.
        two_pass: Exact for a loss that is no mean over samples, such as Dice over the batch: a
            first pass without graph collects all outputs, the loss and its gradient are taken
            there, and a second pass per micro-batch carries that gradient to the parameters.
            Costs one more forward pass; the mini-batch's outputs stay on the device.
        prefetch: Micro-batches copied ahead of the one that computes, on CUDA.
        scaler: A `torch.amp.GradScaler` whose scale is applied to the loss; call its `step` and
            `update` as usual.
        autocast: A dtype for the forward pass; autocast around `backward` works too.
        headroom: With ``"auto"``, the share of free memory left unused; by default 0 under a
            CPU `MemoryBudget` or 0.05 elsewhere.
        trace: Record when each micro-batch was copied and computed, for `timeline`.

    Raises:
        MicroBatchSizeError: `micro_batch_size` is neither ``"auto"`` nor at least 1.
        ValueError: Another argument is not one of its choices.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        micro_batch_size: int | str = "auto",
        *,
        device: torch.device | str | None = None,
        normalization: str = "exact",
        batchnorm: str = "micro",
        two_pass: bool = False,
        prefetch: int = 2,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        headroom: float | None = None,
        trace: bool = False,
    ) -> None:
        check_choice("normalization", normalization, ("exact", "paper", "none"))
        check_choice("batchnorm", batchnorm, ("micro", "deferred"))
        check_choice("autocast", autocast, (None, torch.bfloat16, torch.float16))
        check_prefetch(prefetch)
        check_headroom(headroom)
        self._size = checked_size(micro_batch_size)
        self.model = model
        self.loss_fn = loss_fn
        self.device = resolve_device(model, device)
        self._normalization = normalization
        self._batchnorm = batchnorm
        self._two_pass = two_pass
        self._scaler = scaler
        self._autocast = autocast
        self._sizer = AutoSizer(self.device, headroom) if self._size is None else None
        self._stager = Stager(self.device, prefetch, trace)
        self._trace = trace
        self._processes = Processes(model, self.device)
        self._module = self._processes.module
        roots = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        self._modules = [module for root in roots for module in root.modules()]
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[torch.Tensor] = []

    @property
    def sizing(self) -> Sizing | None:
        """How ``"auto"`` chose its first size; None before the first mini-batch."""
        return self._sizer.sizing if self._sizer else None

    def timeline(self) -> list[Span]:
        """Return when each micro-batch of the last mini-batch was copied and computed.

        With `two_pass` each appears twice. Waits for the device.

        Raises:
            ValueError: The streamer was made without ``trace=True``.
        """
        if not self._trace:
            raise ValueError("there is no timeline to return; make the streamer with trace=True")
        return self._stager.spans()

    def backward(self, inputs: Any, targets: Any = None, *, weights: Any = None) -> StreamResult:
        """Add the gradient of a mini-batch to the parameters' gradients.

        The host waits for the device once, at the end, to see whether the loss is finite.

        Args:
            inputs: A tensor or pytree of tensors (samples first; other leaves are passed on as
                they are), on any device, or an iterable that yields the mini-batch piece by
                piece as (inputs, targets) or (inputs, targets, weights), of which no more than
                two are held at a time. Inputs receive no gradient themselves.
            targets: Likewise.
            weights: What each sample, or each micro-batch, counts, such as its tokens; each
                micro-batch then contributes by its share of their sum.

        Raises:
            EmptyBatchError: No sample.
            BatchSizeMismatchError: First dimensions differ.
            LossShapeError: The loss is not a scalar tensor.
            NonFiniteLossError: The mini-batch's loss is infinite or not a number, here or, under
                `DistributedDataParallel`, in another process.
            MicroBatchError: Inputs or weights of another unusable form.
            torch.OutOfMemoryError: The micro-batch size does not fit; with ``"auto"``, not even 1.
        """
        pieces = pieces_of(inputs, targets, weights)
        if weights is not None:
            check_weights_usable(self._two_pass, self._normalization)
        if pieces is not None and self._two_pass:
            raise MicroBatchError("two_pass takes a whole mini-batch, not an iterable of pieces")
        self._stager.reset()
        # Anew for each mini-batch: layers are frozen and thawed, buffers replaced.
        self._parameters, self._buffers = tensors_of(self._modules)
        totals = Totals()
        if pieces is None:
            piece = as_piece(inputs, targets, weights)
            self._with_retries(piece, partial(self._run_whole, piece), totals)
        else:
            with self._transaction():
                self._run_pieces(pieces, totals)
        return totals.result(self._divisor(totals.weight))

    # A mini-batch, whole or piece by piece

    def _run_whole(self, piece: Piece, size: int) -> Totals:
        bounds = piece.bounds(size)
        with self._transaction(), self._batchnorm_updates() as updates:
            if self._two_pass:
                totals = self._two_passes(piece, bounds, updates)
            else:
                weights = self._weights(piece, bounds)
                divisor = self._shared_divisor(sum(weights))
                totals = self._accumulate(self.model, piece, bounds, weights, divisor)
                self._check_finite(totals)
            updates.update()
        return totals

    def _run_pieces(self, pieces: Iterator[Piece], totals: Totals) -> None:
        with self._batchnorm_updates() as updates:
            # Only processes that synchronise have to know which piece is the last.
            several = self._processes.several
            marked = mark_last(pieces) if several else ((piece, True) for piece in pieces)
            for piece, is_last in marked:
                run = partial(self._run_piece, piece, is_last, updates, dict(updates.moments))
                self._with_retries(piece, run, totals)
                del piece, run  # before the next one is made
            if totals.loss is None:
                raise EmptyBatchError("the iterable yielded no piece; give at least one sample")
            # The total weight is known only now: the gradients so far are sums.
            divisor = self._shared_divisor(totals.weight)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, divisor)
            self._check_finite(totals)
            updates.update()

    def _run_piece(
        self,
        piece: Piece,
        is_last: bool,
        updates: DeferredBatchNorm,
        moments: dict[nn.Module, Moments],
        size: int,
    ) -> Totals:
        updates.moments = dict(moments)  # without what a failed try gathered
        bounds = piece.bounds(size)
        weights = self._weights(piece, bounds)
        # Only a size that may shrink needs a piece that can be undone on its own. Several
        # processes do not try again, and synchronise the gradients of all pieces with the last.
        alone = self._sizer is not None and not self._processes.several
        with self._transaction() if alone else nullcontext():
            return self._accumulate(self.model, piece, bounds, weights, 1.0, is_last)

    def _with_retries(self, piece: Piece, run: Callable[[int], Totals], totals: Totals) -> None:
        """Run at the size given or chosen, smaller where memory runs out; add to `totals`."""
        if self._sizer is None:
            assert self._size is not None
            totals.merge(run(self._size))
            return
        marks = len(self._stager.marks)
        first = self._sizer.needs_probe(piece.num_samples)
        if first:
            self._sizer.probe(piece.num_samples, partial(self._measure, piece))
        while True:
            del self._stager.marks[marks:]  # what probes and failed tries left
            size = self._sizer.size_for(piece.num_samples)
            try:
                if first:
                    with MemoryMeter(self.device, resident=self._module) as meter:
                        done = run(size)
                    self._sizer.observed(size, meter.peak_bytes)
                else:
                    done = run(size)
                break
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
                if self._processes.several:
                    error.add_note(
                        "micro_batch_size='auto' cannot try again under DistributedDataParallel, "
                        "where the other processes would wait; give a smaller whole number"
                    )
                    raise
            # Outside the except block: the error's traceback holds the failed try's tensors.
            release_memory(self.device)
            self._sizer.failed(size)
            totals.retries += 1
        self._sizer.succeeded()
        totals.merge(done)

    def _measure(self, piece: Piece, size: int) -> tuple[int, int]:
        """Return live bytes before, and the peak of, micro-batches that leave no trace.

        From the second on they find gradients in memory, as most of a mini-batch's do, and as
        many are streamed as are ever on the device at once.
        """
        inputs, targets = piece.slice(0, size)
        sample = as_piece(inputs, targets, None)
        count = max(2, self._stager.ring_length)
        with (
            MemoryMeter(self.device, resident=self._module) as meter,
            self._transaction(keep=False),
        ):
            self._accumulate(self._module, sample, [(0, size)] * count, [1.0] * count, 1.0)
        return meter.start_bytes, meter.peak_bytes

    # Micro-batches

    def _accumulate(
        self,
        model: nn.Module,
        piece: Piece,
        bounds: list[tuple[int, int]],
        weights: list[float],
        divisor: float | torch.Tensor,
        synchronize: bool = True,
    ) -> Totals:
        """Algorithm 1, lines 7 to 14: each loss counts by its weight over `divisor`."""
        totals = Totals.over(bounds)
        last = max(index for index, weight in enumerate(weights) if weight > 0)
        micro_batches = self._stager.stream(piece.slice(*bound) for bound in bounds)
        for index, (inputs, targets) in enumerate(micro_batches):
            if weights[index] == 0:
                # The loss of no tokens is 0 / 0. It does not count; BatchNorm still sees the
                # samples, and dropout draws.
                with self._precision():
                    call_model(self._module, inputs)
                continue
            with self._processes.synchronization(synchronize and index == last):
                with self._precision():
                    loss = self._loss(call_model(model, inputs), targets)
                self._backward(loss * (weights[index] / divisor))
            totals.add(loss.detach(), weights[index])
            del loss, inputs, targets  # with what its graph still holds
        return totals

    def _two_passes(
        self, piece: Piece, bounds: list[tuple[int, int]], updates: DeferredBatchNorm
    ) -> Totals:
        buffers = copy_tensors(self._buffers)
        rng_states, outputs = [], []
        with torch.no_grad(), self._precision():
            for inputs, _ in self._stager.stream(piece.slice(*bound) for bound in bounds):
                rng_states.append(get_rng(self.device))
                outputs.append(own_memory(call_model(self._module, inputs), inputs))
        # The second pass updates buffers and moments, and needs weights cast with a graph.
        write_tensors(self._buffers, buffers)
        updates.moments.clear()
        torch.clear_autocast_cache()

        whole = concatenate(outputs, bounds)
        del outputs
        with self._precision():
            loss = self._loss(whole, to_device(piece.targets, self.device))
        totals = Totals.over(bounds)
        totals.add(loss.detach(), 1.0)
        self._check_finite(totals)
        self._backward(loss)
        gradients = [getattr(leaf, "grad", None) for leaf in tree_flatten(whole)[0]]
        del whole, loss

        micro_batches = self._stager.stream(piece.slice(*bound) for bound in bounds)
        for index, (inputs, _) in enumerate(micro_batches):
            set_rng(self.device, rng_states[index])  # so that dropout repeats
            with self._processes.synchronization(index == len(bounds) - 1):
                with self._precision():
                    leaves = tree_flatten(call_model(self.model, inputs))[0]
                pairs = [
                    (leaf, gradient[slice(*bounds[index])])
                    for leaf, gradient in zip(leaves, gradients, strict=True)
                    if gradient is not None and leaf.requires_grad
                ]
                with self._no_autocast():
                    torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
                del leaves, pairs
        return totals

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return check_loss(
            self.loss_fn(outputs) if targets is None else self.loss_fn(outputs, targets)
        )

    def _backward(self, loss: torch.Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        with self._no_autocast():
            loss.backward()

    def _check_finite(self, totals: Totals) -> None:
        loss = totals.loss
        assert loss is not None
        check_finite(loss, self._processes.sum_losses(loss), totals.num_samples)

    def _weights(self, piece: Piece, bounds: list[tuple[int, int]]) -> list[float]:
        return piece.weights_of(bounds) if self._normalization == "exact" else [1.0] * len(bounds)

    def _divisor(self, weight: float) -> float:
        return 1.0 if self._normalization == "none" and not self._two_pass else weight

    def _shared_divisor(self, weight: float) -> float | torch.Tensor:
        if self._normalization != "exact":
            return self._divisor(weight)
        return self._processes.mean_weight(weight)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def _no_autocast(self) -> AbstractContextManager[Any]:
        # The backward pass repeats the forward pass's precisions without autocast around it.
        if not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def _transaction(self, keep: bool = True) -> Transaction:
        views = self._processes.gradients_are_views
        return Transaction(self._parameters, self._buffers, self.device, keep, views)

    def _batchnorm_updates(self) -> DeferredBatchNorm:
        # Without layers it gathers nothing and updates nothing.
        return DeferredBatchNorm(self._module if self._batchnorm == "deferred" else nn.Module())
