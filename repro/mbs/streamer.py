"""Micro-Batch Streaming: the gradient of a mini-batch that does not fit into memory.

The paper's Algorithm 1 is `MicroBatchStreamer._accumulate`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from repro.mbs import errors
from repro.mbs.batches import Piece, Plan, Reader
from repro.mbs.batchnorm import DeferredBatchNorm
from repro.mbs.checking import Verification
from repro.mbs.distributed import Processes
from repro.mbs.hooks import DeferredHooks
from repro.mbs.oom_retry import Retries
from repro.mbs.setting import Precision, Setting
from repro.mbs.sizing import Sizing
from repro.mbs.staging import Span, Stager
from repro.mbs.transaction import Ledger
from repro.mbs.two_pass import run_two_passes
from repro.mbs.weighing import StreamResult, Totals, Weighing
from repro.measure.batches import EmptyBatchError, SplitFunction, call_model, leaves_of
from repro.measure.checks import choice, is_whole
from repro.measure.loss_parts import connected, leaves_of_graph, one_backward, same_gradients
from repro.measure.precision import warn_of_sums
from repro.measure.untouched import generator_state, modules_in, random_numbers, uncached


class MicroBatchStreamer:
    """Computes a mini-batch's gradient in micro-batches that are streamed to the device.

    Section 3 and Algorithm 1 of Piao et al., "Micro Batch Streaming". `backward` adds the gradient
    of the whole mini-batch to the parameters' gradients; an optimizer step follows as always. A
    call that raises leaves gradients, buffers and random number generators unchanged (except that
    after an error in a parameter's hook, or while processes average, the parameter keeps the new
    gradient, as in torch).

    Example:
        >>> streamer = MicroBatchStreamer(model, loss_fn, micro_batch_size="auto", device="cuda")
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad(set_to_none=True)
        ...     result = streamer.backward(inputs, targets)
        ...     optimizer.step()

    A hook on a parameter is called once per mini-batch, module hooks for each micro-batch. A model
    that treats samples together gets another gradient than the whole mini-batch's: BatchNorm
    normalises by its micro-batch.

    Differs from the paper: the default normalisation weighs each micro-batch by its loss's divisor,
    n_μ / N_B for a mean over samples, which is also right if N_μ does not divide N_B; and
    micro-batches differ in size by at most one sample, whereas Algorithm 1 leaves a rest, which may
    be one sample, on which BatchNorm cannot train. ``normalization="paper"`` follows Algorithm 1
    exactly in both.

    Args:
        model: The model, on `device` already; called as by `repro.measure.batches.call_model`. Of
            a `DistributedDataParallel` model gradients are averaged once per mini-batch, as the
            mean over all processes' samples (weights), with `two_pass` over their losses. A fully
            sharded model (FSDP) takes equally many micro-batches in each process; where one runs
            out of memory nothing is tried again.
        loss_fn: Called as ``loss_fn(outputs, targets)``, or ``loss_fn(outputs)`` if targets are
            None; returns a scalar. The divisor of torch's own losses is known, a sum is summed. Any
            other loss is treated as the mean over its micro-batch's samples (or by `weights`),
            which `check` verifies; with `two_pass` it may be any function of the mini-batch.
            docs/losses.md lists the arguments for each kind of loss.
        micro_batch_size: Most samples of a micro-batch: a whole number, or ``"auto"``: the largest
            that fits by a linear memory model (which leaves out the outputs that `two_pass` holds),
            halved on an out-of-memory error, grown back when memory allows.
        device: The device that computes; by default the model parameters' device.
        normalization: ``"exact"``, ``"paper"`` (equation 14), or ``"none"``: the sum of the
            micro-batches' gradients (equation 13). Not used by `two_pass`, which is exact.
        batchnorm: ``"micro"``, each micro-batch updates the running statistics (the paper's), or
            ``"deferred"``, one update with the pooled statistics; see `DeferredBatchNorm`.
        two_pass: Exact for a loss that is no mean over samples, such as Dice over the batch. Costs
            one more forward pass; the outputs stay on the device.
        prefetch: Micro-batches copied ahead of the one that computes, on an accelerator.
        scaler: A `torch.amp.GradScaler`; its scale is applied to the loss. Call its `step` and
            `update` as usual.
        autocast: A dtype for the forward pass; autocast around `backward` works too.
        trace: Record when each micro-batch was copied and computed, for `timeline`.
        check: When to verify that the micro-batches' losses add up to the mini-batch's, and that
            the model's outputs do not depend on the division: ``"first"``, in the first divided
            mini-batch and whenever targets have new values; ``"always"``; or ``"off"``.
        shared: The tensors that belong to all samples, see `repro.measure.batches.read_batch`.
        split: A function ``split((inputs, targets), micro_batch_size)`` for mini-batches of another
            form; returns the list of micro-batches, each (inputs, targets) or (inputs, targets,
            number of samples). Together they must have every sample once.
        generators: The model's or the loss's own random number generators (of torch, numpy or
            Python). Like the global ones, `two_pass` repeats and a failed try restores them.

    Raises:
        MicroBatchError, ValueError: An argument is not one of its choices.
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
        trace: bool = False,
        check: str = "first",
        shared: Sequence[Any] = (),
        split: SplitFunction | None = None,
        generators: Sequence[Any] = (),
    ) -> None:
        choice("normalization", normalization, ("exact", "paper", "none"))
        choice("batchnorm", batchnorm, ("micro", "deferred"))
        choice("autocast", autocast, (None, torch.bfloat16, torch.float16))
        choice("check", check, ("first", "always", "off"))
        if not is_whole(prefetch, 0):
            raise ValueError(
                f"prefetch is {prefetch!r}; give 0 (no overlap) or a whole number of micro-batches"
            )
        self._size = size = errors.checked_size(micro_batch_size)
        self._model, self.loss_fn = model, loss_fn
        self.device = device = errors.resolve_device(model, device)
        self._batchnorm, self._two_pass, self._trace = batchnorm, two_pass, trace
        self._modules: list[nn.Module] = []
        self._hooks = DeferredHooks([])
        self._connected = False
        # The loss of two passes is computed of all targets at once, with their graph.
        self._reader = Reader(shared, split, graph_of_targets=two_pass)
        self._weighing = Weighing(normalization, two_pass, loss_fn)
        self._precision = Precision(device, autocast, scaler)
        self._stager = Stager(device, prefetch, trace)
        self._processes = processes = Processes(model, device)
        kept = [generators] if generator_state(generators) else list(generators)
        for generator in kept:
            if not generator_state(generator):
                raise ValueError(
                    f"generators holds {type(generator).__name__}; known are torch.Generator, "
                    f"numpy.random.Generator, numpy.random.RandomState and random.Random"
                )
        random_state = partial(random_numbers, [device], kept)
        self._ledger = Ledger(random_state, processes.gradients_are_views, processes.sharded)
        self._setting = setting = Setting(
            *(processes.module, device, self._precision, self._stager),
            *(processes, self._ledger, self._weighing),
        )
        given = setting, self._modules, self._call_loss
        self._verification = Verification(check, two_pass, *given)
        self._retries = Retries(setting, size, self._accumulate)

    @property
    def model(self) -> nn.Module:
        """The model; another model needs another streamer."""
        return self._model

    def __copy__(self) -> "MicroBatchStreamer":
        raise TypeError(
            "copy.copy of a MicroBatchStreamer would share what the original remembers; use "
            "copy.deepcopy, which copies the model too, or make another streamer"
        )

    @property
    def sizing(self) -> Sizing | None:
        """The choice of the first size by ``"auto"``; None before the first mini-batch."""
        return self._retries.sizer.sizing if self._retries.sizer else None

    def timeline(self) -> list[Span]:
        """Return the times of copying and computing each micro-batch of the last mini-batch.

        With `two_pass` each micro-batch appears twice. Waits for the device.
        """
        if not self._trace:
            raise ValueError("there is no timeline to return; make the streamer with trace=True")
        return self._stager.spans()

    def backward(self, inputs: Any, targets: Any = None, *, weights: Any = None) -> StreamResult:
        """Add the gradient of a mini-batch to the parameters' gradients.

        The host waits for the device once, at the end, to see whether the loss is finite.

        Args:
            inputs: Tensors, arrays or packed sequences (samples first), or tuples, lists,
                dictionaries or dataclasses of them (numbers, texts and tensors without dimensions
                are passed on unchanged), on any device; or, with a given `micro_batch_size`, an
                iterator that yields the mini-batch in pieces (inputs, targets). A list may hold one
                item for each sample. Inputs receive no gradient, and are refused if they require
                one.
            targets: Likewise.
            weights: Weight of each sample, such as its number of tokens, or with `split` of each
                micro-batch. A sample contributes by its share of the sum of weights.

        Raises:
            LossCheckError, MixedSamplesError: The micro-batches' losses do not add up to the
                loss, or the model's outputs depend on how the mini-batch is divided.
            NonFiniteLossError: The loss is infinite or NaN, here or in another process; unless
                gradients are, too, and an enabled `scaler` skips the step.
            NondeterministicModelError: What is computed twice cannot be repeated.
            MicroBatchError: The mini-batch, the loss or a hook cannot be used; base class of all
                errors above.
            torch.OutOfMemoryError: The micro-batch size does not fit; with ``"auto"``, not even 1.
        """
        pieces = self._reader.pieces_of(inputs, targets, weights)
        self._check_form(pieces is not None, weights is not None)
        self._stager.reset()
        # Read for each mini-batch: layers are added, frozen and thawed, buffers replaced.
        found = list(dict.fromkeys(m for root in self._roots() for m in root.modules()))
        new_loss, new_layers = self._weighing.read(self.loss_fn), found != self._modules
        self._modules[:] = found  # in place: the check holds the same list
        self._verification.begin(new_loss, new_layers)
        self._processes.reshard()
        piece = self._reader.read(inputs, targets, weights) if pieces is None else None
        self._run_lazy_layers(piece)
        self._ledger.begin(self._modules)
        self._hooks = DeferredHooks(self._ledger.parameters, self._processes.sharded)
        self._connected = False
        with self._hooks, uncached():
            if piece is not None:
                run = partial(self._run_whole, piece)
                totals, touched = self._retries.run(piece, run, self._roots())
            elif pieces is not None:
                totals, touched = self._run_pieces(pieces)
            if self._processes.replicated:  # with those that `no_sync` has left, as torch does
                self._processes.synchronize()
                touched = self._ledger.touched()
        self._ledger.begin([])  # holds no tensor of this mini-batch
        self._hooks.on_parameters(touched)
        if len(totals.sizes) > 1:
            self._verification.warn()
        warn_of_sums(touched, len(totals.sizes), stacklevel=3)
        return totals.result(self._weighing.divisor(totals.weight), self._retries.count)

    def _check_form(self, in_pieces: bool, weighed: bool) -> None:
        normalization = self._weighing.normalization
        if weighed and (self._two_pass or normalization != "exact"):
            raise errors.MicroBatchError(
                f"weights are used by normalization='exact' in a single pass; normalization is "
                f"{normalization!r}, two_pass {self._two_pass} (a two-pass loss sees the whole "
                f"mini-batch: weigh its samples there)"
            )
        if in_pieces and (self._two_pass or self._size is None or self._processes.sharded):
            raise errors.MicroBatchError(
                "a mini-batch in pieces needs a whole number as micro_batch_size, a single pass "
                "and a model that is not fully sharded; give the whole mini-batch, not an iterator"
            )

    def _accumulate(self, plan: Plan, divisor: float | torch.Tensor) -> Totals:
        """Algorithm 1 of the paper: the gradient of one mini-batch, cut as in `Weighing.plan`.

        Each loss counts by its weight over `divisor`: 1 / N_Sμ in the paper, n_μ / N_B by default.
        """
        # Lines 1 to 6, in `Weighing.plan`: N_B samples make N_Sμ micro-batches of at most N_μ.
        totals = Totals(sizes=tuple(stop - start for start, stop in plan.bounds))
        # Lines 7, 8 and 13: micro-batch i, streamed to the device.
        for index, micro_batch in enumerate(self._stager.stream(plan.parts())):
            weight = plan.weights[index]
            # Lines 9 and 10: forward propagation, and the loss.
            loss = self._pass(micro_batch, plan, index)
            if loss is not None and loss.requires_grad:
                self._ledger.meet([loss])
                # Lines 11 and 12: normalise it, and accumulate gradients.
                with one_backward():
                    self._precision.backward(loss * (weight / divisor))
            if loss is not None:
                totals.add(loss.detach(), weight)
            del loss, micro_batch  # and tensors that the graph still holds
        # Line 15 is the caller's `optimizer.step()`.
        totals.loss = torch.as_tensor(totals.loss, device=self.device)
        return totals

    def _pass(self, micro_batch: Any, plan: Plan, index: int) -> torch.Tensor | None:
        """Return the loss of a micro-batch.

        None if it has no weight, such as padding alone, whose loss would be 0 / 0.
        """
        (inputs, targets), weight = micro_batch, plan.weights[index]
        with self._precision.forward(), errors.explained(plan.bounds[index], plan.bounds[-1][1]):
            with same_gradients(self._verification.watched(index)):
                # Always, for BatchNorm's statistics and dropout's random numbers.
                outputs = call_model(self._processes.module, inputs)
                # A sharded model computes in all processes, also in one without weight.
                if weight == 0 and not self._processes.sharded:
                    return None
                loss = self._loss(outputs, targets)
            self._verification.note_state()
        if weight == 0:
            tensors = [x for x in leaves_of(outputs) if isinstance(x, torch.Tensor)]
            of_outputs = {id(leaf) for leaf in leaves_of_graph(tensors)}
            own = {id(leaf) for leaf in leaves_of_graph([loss])} - of_outputs
            # All processes exchange the parameters of a loss that has some. Of any other not the
            # loss times 0: the gradient of 0 / 0 is NaN whatever it is multiplied by.
            loss = loss.nan_to_num() * 0 if own else torch.zeros((), device=self.device)
        return connected(loss, outputs)

    def _roots(self) -> list[nn.Module]:
        return [self.model, *modules_in(self.loss_fn)]

    def _run_lazy_layers(self, piece: Piece | None) -> None:
        """Let lazy layers make their parameters, as the first forward pass would."""

        def lazy() -> list[str]:
            kinds = (m for m in self._modules if isinstance(m, LazyModuleMixin))
            return [type(m).__name__ for m in kinds if m.has_uninitialized_params()]

        if piece is not None and lazy():
            part = next(self._weighing.plan(piece, self._size or 2).parts())
            self._verification.compare.compute(part[0])
        if names := lazy():
            raise errors.MicroBatchError(
                f"the model has a {names[0]} that has no parameters yet; call the model once on a "
                f"few samples, under torch.no_grad()"
            )

    # A mini-batch, whole or piece by piece

    def _run_whole(self, piece: Piece, size: int) -> tuple[Totals, list[nn.Parameter]]:
        problem: Exception | None = None
        try:
            self._verification.verify(piece, size)
        except Exception as error:
            if not self._processes.replicated:
                raise
            problem = error  # raised in all processes together
        plan = self._weighing.plan(piece, size)
        if self._processes.sharded:  # all processes take equally many micro-batches
            count = len(plan.bounds)
            # The number is fixed if the caller makes the micro-batches.
            free = self._weighing.normalization != "paper" and piece.batch is not None
            agreed = self._processes.agreed_count(count, piece.num_samples if free else count)
            if agreed > count:
                plan = self._weighing.plan(piece, size, fewest=agreed)
        self._verification.start(len(plan.bounds) > 1)
        with self._ledger.transaction(), self._batchnorm_updates() as updates:
            divisor = self._weighing.shared_divisor(sum(plan.weights), self._processes)
            run = partial(self._accumulate, plan, divisor)
            if self._two_pass:
                check = partial(self._check_finite, early=True)
                own = self._loss, check, self._verification
                run = partial(run_two_passes, self._setting, piece, plan, updates, *own)

            def checked() -> Totals:
                if problem is not None:
                    raise problem
                return run()

            # No process waits for one that ran out of memory.
            largest = max(stop - start for start, stop in plan.bounds)
            totals = self._retries.together(checked, largest)
            self._finish(totals, updates)
            touched = self._ledger.touched()
        return totals, touched

    def _run_pieces(self, pieces: Iterator[Piece]) -> tuple[Totals, list[nn.Parameter]]:
        with self._ledger.transaction(), self._batchnorm_updates() as updates:
            totals = self._retries.together(partial(self._each_piece, pieces, updates))
            # The total weight is known only now.
            divisor = self._weighing.shared_divisor(totals.weight, self._processes)
            self._ledger.divide(divisor / totals.divided)
            self._finish(totals, updates)
            return totals, self._ledger.touched()

    def _each_piece(self, pieces: Iterator[Piece], updates: DeferredBatchNorm) -> Totals:
        totals, size = Totals(), self._size or 1
        for piece in pieces:
            moments = dict(updates.moments)
            self._verification.verify(piece, size, alone=False)
            updates.moments = moments  # without those of a check
            plan = self._weighing.plan(piece, size)
            self._verification.start(len(plan.bounds) > 1 or bool(totals.sizes))
            if not totals.sizes:  # sums over all samples would overflow in half precision
                totals.divided = max(self._weighing.divisor(sum(plan.weights)), 1.0)
            totals += self._accumulate(plan, totals.divided)
            del piece, plan  # before the next piece is made
        if not totals.sizes:
            raise EmptyBatchError("the iterator yielded no piece; give at least one sample")
        return totals

    def _finish(self, totals: Totals, updates: DeferredBatchNorm) -> None:
        """End a mini-batch: call hooks on gradients, and refuse unusable losses."""
        self._hooks.on_gradients()  # which see gradients before averaging
        self._check_finite(totals)
        if self._processes.replicated:  # as long as the loss of one of them depends on something
            self._connected = self._processes.most(self._connected)[0] > 0
        if not self._connected and totals.weight > 0:
            raise errors.MicroBatchError(
                "the loss depends on nothing that requires a gradient: the model is frozen, its "
                "outputs were detached, gradients are off (torch.no_grad), or no sample of the "
                "mini-batch takes part in the loss"
            )
        updates.update()

    def _call_loss(self, *arguments: Any) -> torch.Tensor:
        return self.loss_fn(*arguments)  # the current loss, which may be replaced

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        known = self._weighing.known
        if known is not None and tensors and not self._two_pass:
            known.check(outputs, targets)
        loss = errors.loss_of(self.loss_fn, outputs, targets)
        self._connected |= loss.requires_grad
        return loss

    def _overflowed(self) -> bool:
        """Whether a process has a gradient that is not finite, so that a scaler skips the step."""
        gradients = [p.grad for p in self._ledger.touched() if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        own = any(not bool(value.isfinite().all()) for value in values)
        return self._processes.most(own)[0] > 0 if self._processes.several else own

    def _check_finite(self, totals: Totals, early: bool = False) -> None:
        """Refuse an infinite or NaN loss, also of another process; waits for the device.

        An enabled scaler skips its step. With `early` there are no gradients yet.
        """
        loss = totals.loss
        if totals.weight == 0 and not self._processes.several:
            loss = loss * torch.nan  # no weight at all: 0 / 0, as for the whole mini-batch
        of_all, scaler = float(self._processes.sum(loss)), self._precision.scaler
        if math.isfinite(of_all):
            return
        if scaler is not None and scaler.is_enabled() and (early or self._overflowed()):
            return
        others = math.isfinite(float(loss))
        where = "of another process" if others else f"of {sum(totals.sizes)} samples"
        raise errors.NonFiniteLossError(
            f"the loss of the mini-batch {where} is {of_all}; gradients and buffers are as before "
            f"the call; check the inputs, whether any target counts, or lower the learning rate"
        )

    def _batchnorm_updates(self) -> DeferredBatchNorm:
        deferred = self._batchnorm == "deferred"  # for an empty module nothing is updated
        return DeferredBatchNorm(self._processes.module if deferred else nn.Module())
