"""Micro-Batch Streaming: the gradient of a mini-batch that does not fit into memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from repro.mbs.batches import (
    Piece,
    Plan,
    Reader,
    Sketch,
    concatenate,
    joined_targets,
    mark_last,
    own_memory,
)
from repro.mbs.batchnorm import DeferredBatchNorm, Moments
from repro.mbs.checking import SelfCheck
from repro.mbs.collecting import Collector
from repro.mbs.distributed import Processes
from repro.mbs.errors import (
    DistributedModelError,
    EmptyBatchError,
    MicroBatchError,
    NondeterministicModelError,
    check_choice,
    check_finite,
    check_headroom,
    check_loss,
    check_no_graph,
    check_no_parameter,
    check_prefetch,
    check_weights_usable,
    checked_size,
    explained,
    resolve_device,
)
from repro.mbs.hooks import DeferredHooks, gradients_present, refuse_unknown_leaves
from repro.mbs.losses import known_loss, normalization_of
from repro.mbs.randomness import Randomness
from repro.mbs.results import StreamResult, Totals
from repro.mbs.sizing import AutoSizer, Sizing, release_memory
from repro.mbs.staging import Span, Stager
from repro.mbs.transaction import Buffers, Transaction, parameters_of
from repro.mbs.verification import Verification
from repro.measure import MemoryMeter, is_out_of_memory
from repro.measure.batches import SplitFunction, call_model, leaves_of, to_device


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

    A hook on a parameter (`Tensor.register_hook`, `register_post_accumulate_grad_hook`) is called
    once per mini-batch, at its end, as without micro-batches; module hooks are called for each
    micro-batch. A model that treats samples together (BatchNorm by its micro-batch's statistics)
    gives another gradient than on the whole mini-batch, and no mode can undo that.

    Differs from the paper: the default normalisation weighs each micro-batch by what its loss was
    divided by, n_μ / N_B for a mean over samples, which also holds where N_μ does not divide N_B;
    and micro-batches differ in size by at most one sample, where Algorithm 1 leaves a rest, with
    which BatchNorm could not train if it were one sample. ``normalization="paper"`` is Algorithm 1
    to the letter, in both.

    Args:
        model: The model, on `device` already. It is called with the inputs: a tuple or list as
            positional arguments, a dictionary as keyword arguments, anything else as one. A
            `DistributedDataParallel` model synchronises once per mini-batch; its gradient is the
            mean over all processes' samples (weights), with `two_pass` over their losses, and
            ``"auto"`` agrees on one size and tries again in all processes. A fully sharded model
            (FSDP) exchanges parameters with each micro-batch, of which all processes take as
            many; it needs a whole number as `micro_batch_size`.
        loss_fn: Called as ``loss_fn(outputs, targets)``, or ``loss_fn(outputs)`` where targets
            are None; returns a scalar. Of torch's own losses, as modules, functions or a
            `functools.partial` of them, it is read what they divide by: samples, or the class
            weights of the targets that are not ignored; a sum is summed. Any other is taken for
            the plain mean over its micro-batch's samples (weighted by `weights` where those are
            given), which `check` verifies; with `two_pass` it may be any function of the
            mini-batch. docs/losses.md lists what to give for which loss. If it has parameters to
            train it must be a module.
        micro_batch_size: Most samples of a micro-batch: a whole number, or ``"auto"``: the largest
            that fits by a linear memory model (which knows nothing of the outputs that `two_pass`
            holds), halved on an out-of-memory error, grown back when memory allows.
        device: Where the model computes; the device of its parameters by default.
        normalization: ``"exact"``, ``"paper"`` (equation 14), or ``"none"``: the sum of the
            micro-batches' gradients (equation 13). Not used by `two_pass`, which is exact.
        batchnorm: ``"micro"``, each micro-batch updates the running statistics (the paper's), or
            ``"deferred"``, one update with the pooled statistics; see `DeferredBatchNorm`.
        two_pass: Exact for a loss that is no mean over samples, such as Dice over the batch: a
            first pass without graph collects all outputs, the loss and its gradient are taken
            there, and a second pass per micro-batch carries that gradient to the parameters.
            Costs one more forward pass; the mini-batch's outputs stay on the device. The second
            pass repeats the first one's random numbers, and its outputs are compared.
        prefetch: Micro-batches copied ahead of the one that computes, on an accelerator.
        scaler: A `torch.amp.GradScaler` whose scale is applied to the loss; call its `step` and
            `update` as usual.
        autocast: A dtype for the forward pass; autocast around `backward` works too.
        headroom: With ``"auto"``, the share of free memory left unused; by default 0 under a
            CPU `MemoryBudget` or 0.05 elsewhere.
        trace: Record when each micro-batch was copied and computed, for `timeline`.
        check: When to verify that the loss of a mini-batch is the combination of its
            micro-batches' losses, and that the model's outputs do not depend on how it is divided:
            ``"first"``, in the first mini-batch that is divided and where targets have values that
            they had not before; ``"always"``; or ``"off"``. For the loss the outputs of the
            micro-batches' own forward passes are kept in host memory (the first that fit into 256
            MiB), and the loss of all of them is computed twice more at most, once for each
            micro-batch where outputs are of half precision; a loss that counts its calls counts
            these. Where the loss takes more than outputs and targets, or the model computes it, a
            few samples are computed as a whole and in two parts. For the outputs a few samples go
            through the model in evaluation mode, whole and in two parts. The loss is not checked
            for torch's own losses and for the paper's normalisation, and nothing for a single
            micro-batch or a fully sharded model.
        shared: What belongs to all samples although it is a tensor: names ("mask", "graph.edges",
            "targets.table"), positions among the arguments, or the tensors themselves; see
            `repro.measure.batches.read_batch`.
        split: A function ``split((inputs, targets), micro_batch_size)`` that returns the list of
            micro-batches, each (inputs, targets) or (inputs, targets, number of samples), for
            mini-batches of a form of their own.
        generators: Random number generators of the model's or the loss's own (`torch.Generator`,
            `numpy.random.Generator` or `RandomState`, `random.Random`). They are repeated by
            `two_pass` and put back by a failed try, as Python's, numpy's and torch's global ones.

    Raises:
        MicroBatchSizeError: `micro_batch_size` is neither ``"auto"`` nor at least 1.
        LossReductionError: The loss has ``reduction="none"``.
        UnsupportedLossError: The loss weighs each element of the whole mini-batch, or sums with
            ``normalization="paper"``.
        DistributedModelError: A fully sharded model with ``"auto"`` or on a mesh of more than one
            dimension.
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
        check: str = "first",
        shared: Sequence[Any] = (),
        split: SplitFunction | None = None,
        generators: Sequence[Any] = (),
    ) -> None:
        check_choice("normalization", normalization, ("exact", "paper", "none"))
        check_choice("batchnorm", batchnorm, ("micro", "deferred"))
        check_choice("autocast", autocast, (None, torch.bfloat16, torch.float16))
        check_choice("check", check, ("first", "always", "off"))
        check_prefetch(prefetch)
        check_headroom(headroom)
        self._size = checked_size(micro_batch_size)
        self.model = model
        self.loss_fn = loss_fn
        self.device = resolve_device(model, device)
        self._batchnorm = batchnorm
        self._two_pass = two_pass
        self._given_normalization = normalization
        self._modules: list[nn.Module] = []
        self._collector: Collector | None = None
        self._leaves_due = self._leaves_seen = False
        self._read_loss_fn: Any = None
        self._read_loss()
        self._scaler = scaler
        self._autocast = autocast
        self._sizer = AutoSizer(self.device, headroom) if self._size is None else None
        self._stager = Stager(self.device, prefetch, trace)
        self._trace = trace
        self._reader = Reader(shared, split)
        self._randomness = Randomness(self.device, generators)
        self._processes = Processes(model, self.device)
        if self._processes.sharded and self._sizer is not None:
            raise DistributedModelError(
                "micro_batch_size='auto' would try sizes in each process by itself, but a fully "
                "sharded model computes in all processes together; give a whole number"
            )
        self._module = self._processes.module
        self._read_modules()
        self._parameters: list[nn.Parameter] = []
        self._buffers = Buffers([])
        self._hooks = DeferredHooks([])
        compare = SelfCheck(
            self._module,
            self._modules,
            lambda *arguments: self.loss_fn(*arguments),  # the one there is then
            self.device,
            self._precision,
            autocast,
        )
        self._verification = Verification(
            check,
            self._known is not None,
            two_pass,
            self._normalization,
            self._processes.sharded,
            compare,
            self._plan,
            partial(self._transaction, keep=False),
            self.device,
        )
        self._too_large: int | None = None
        self._sketches: dict[torch.dtype | None, Sketch] = {}

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
            inputs: Tensors, arrays or packed sequences (samples first), or tuples, lists,
                dictionaries or dataclasses of them (numbers, texts and tensors without dimensions
                are passed on as they are), on any device; or an iterable that yields the
                mini-batch piece by piece as (inputs, targets) or (inputs, targets, weights), of
                which no more than two are held at a time. A list may hold one item for each
                sample. Inputs receive no gradient themselves, and are refused if they wait for one.
            targets: Likewise.
            weights: What each sample, or each micro-batch, counts, such as its tokens; each
                micro-batch then contributes by its share of their sum. One for each micro-batch
                makes all but the last of the full size.

        Raises:
            EmptyBatchError: No sample.
            BatchSizeMismatchError: First dimensions differ.
            UnsplittableBatchError: It cannot be told which parts belong to which sample.
            LossShapeError: The loss is not a scalar tensor.
            LossCheckError: The loss is not what the micro-batches' losses add up to.
            MixedSamplesError: The model's outputs depend on how the mini-batch is divided.
            NondeterministicModelError: The second of two passes had other outputs.
            InputGradientError: An input requires a gradient.
            UnsupportedLossError: The loss has parameters that neither it, as a module, nor the
                model has, and the mini-batch comes piece by piece.
            HookError: A parameter has a hook that cannot be called once per mini-batch.
            NonFiniteLossError: The mini-batch's loss is infinite or not a number, here or, under
                `DistributedDataParallel`, in another process.
            MicroBatchError: Inputs or weights of another unusable form.
            torch.OutOfMemoryError: The micro-batch size does not fit; with ``"auto"``, not even 1.
        """
        pieces = self._reader.pieces_of(inputs, targets, weights)
        if weights is not None:
            check_weights_usable(self._two_pass, self._normalization)
        if pieces is not None and self._two_pass:
            raise MicroBatchError("two_pass takes a whole mini-batch, not an iterable of pieces")
        if pieces is not None and self._processes.sharded:
            raise DistributedModelError(
                "a fully sharded model computes in all processes together, which have to know how "
                "many micro-batches there are; give the whole mini-batch, not an iterable"
            )
        self._stager.reset()
        changed = self._read_loss()
        if changed:
            self._read_modules()
        self._verification.begin(self._known is not None, self._normalization, changed)
        # Anew for each mini-batch: layers are frozen and thawed, buffers replaced.
        self._parameters, self._buffers = parameters_of(self._modules), Buffers(self._modules)
        self._hooks = DeferredHooks([] if self._processes.sharded else self._parameters)
        totals = Totals()
        self._leaves_due = pieces is not None and (changed or not self._leaves_seen)
        with self._hooks:
            if pieces is None:
                piece = self._reader.read(inputs, targets, weights)
                self._check_inputs(piece)
                touched = self._with_retries(piece, partial(self._run_whole, piece), totals)
            else:
                with self._transaction():
                    self._run_pieces(pieces, totals)
                    touched = gradients_present(self._parameters)
                self._leaves_seen = True
        self._hooks.on_parameters(touched or [])
        if totals.num_micro_batches > 1:
            self._verification.warn_if_unchecked()
        return totals.result(self._divisor(totals.weight))

    def _check_inputs(self, piece: Piece) -> None:
        check_no_parameter(piece.batch, self._parameters)
        check_no_graph(piece.inputs)

    def _read_loss(self) -> bool:
        """Read what the loss divides by, as it is now; return whether it is another function."""
        self._known = known_loss(self.loss_fn)
        self._normalization = normalization_of(
            self._known, self._given_normalization, self._two_pass
        )
        changed = self.loss_fn is not self._read_loss_fn
        self._read_loss_fn = self.loss_fn
        return changed

    def _read_modules(self) -> None:
        loss = [self.loss_fn] if isinstance(self.loss_fn, nn.Module) else []
        # The very list that the check was given.
        self._modules[:] = [module for root in (self.model, *loss) for module in root.modules()]

    # A mini-batch, whole or piece by piece

    @property
    def _local(self) -> bool:
        """Whether gradients are accumulated in each process by itself and averaged at the end.

        So that a process that runs out of memory keeps none waiting, and that hooks see gradients
        before they are averaged.
        """
        several = self._processes.several and not self._processes.sharded
        return several and (self._sizer is not None or self._hooks.change_gradients)

    def _run_whole(self, piece: Piece, size: int) -> tuple[Totals, list[nn.Parameter]]:
        self._verification.verify(piece, size)
        plan = self._plan(piece, size, fewest=self._agreed_count(piece, size))
        with self._transaction(), self._batchnorm_updates() as updates:
            divisor = self._shared_divisor(sum(plan.weights))
            run = partial(self._two_passes, piece, plan, updates)
            if not self._two_pass:
                run = partial(self._accumulate_checked, piece, plan, divisor)
            totals = self._together(run, max(stop - start for start, stop in plan.bounds))
            self._average()
            self._check_finite(totals)
            updates.update()
            touched = gradients_present(self._parameters)
        return totals, touched

    def _run_pieces(self, pieces: Iterator[Piece], totals: Totals) -> None:
        with self._batchnorm_updates() as updates:
            self._together(partial(self._each_piece, pieces, totals, updates))
            # The total weight is known only now: the gradients so far are sums.
            divisor = self._shared_divisor(totals.weight)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, divisor)
            self._average()
            self._check_finite(totals)
            updates.update()

    def _each_piece(
        self, pieces: Iterator[Piece], totals: Totals, updates: DeferredBatchNorm
    ) -> Totals:
        # Only processes that synchronise have to know which piece is the last.
        several = self._processes.several and not self._local
        marked = mark_last(pieces) if several else ((piece, True) for piece in pieces)
        for piece, is_last in marked:
            run = partial(self._run_piece, piece, is_last, updates, dict(updates.moments))
            self._with_retries(piece, run, totals)
            del piece, run  # before the next one is made
        if totals.loss is None:
            raise EmptyBatchError("the iterable yielded no piece; give at least one sample")
        return totals

    def _run_piece(
        self,
        piece: Piece,
        is_last: bool,
        updates: DeferredBatchNorm,
        moments: dict[nn.Module, Moments],
        size: int,
    ) -> tuple[Totals, None]:
        self._check_inputs(piece)
        updates.moments = dict(moments)  # without what a failed try gathered
        self._verification.verify(piece, size, alone=False)
        plan = self._plan(piece, size)
        # Only a size that may shrink needs a piece that can be undone on its own.
        with self._transaction() if self._sizer is not None else nullcontext():
            return self._accumulate_checked(piece, plan, 1.0, is_last), None

    def _with_retries(self, piece: Piece, run: Callable[[int], Any], totals: Totals) -> Any:
        """Run at the size given or chosen, smaller where memory runs out; add to `totals`."""
        if self._sizer is None:
            assert self._size is not None
            done, touched = run(self._size)
            totals.merge(done)
            return touched
        together = self._local and run.func == self._run_whole  # type: ignore[attr-defined]
        marks = len(self._stager.marks)
        self._too_large = None
        first = self._sizer.needs_probe(piece.num_samples)
        problem: Exception | None = None
        if first:
            try:
                self._sizer.probe(piece.num_samples, partial(self._measure, piece))
            except Exception as error:
                if not together:
                    raise
                problem = error
        while True:
            del self._stager.marks[marks:]  # what probes and failed tries left
            size = self._sizer.size_for(piece.num_samples)
            if together:
                size = self._smallest(size, piece.num_samples, problem)
            try:
                if first:
                    with MemoryMeter(self.device, resident=self._module) as meter:
                        done, touched = run(size)
                    self._sizer.observed(done.micro_batch_size, meter.peak_bytes)
                else:
                    done, touched = run(size)
                break
            except Exception as error:
                size = self._too_large or size  # in the process that ran out
                if not is_out_of_memory(error) or size == 1:
                    raise
            # Outside the except block: the error's traceback holds the failed try's tensors.
            self._stager.release()
            release_memory(self.device)
            self._sizer.failed(size)
            totals.retries += 1
        self._sizer.succeeded()
        totals.merge(done)
        return touched

    def _measure(self, piece: Piece, size: int) -> tuple[int, int, int]:
        """Return what `AutoSizer.probe` asks for, of micro-batches that leave no trace.

        From the second on they find gradients in memory, as most of a mini-batch's do, and as
        many are streamed as are ever on the device at once.
        """
        first = next(self._plan(piece.without_weights(), size, as_in_paper=True).parts())
        count = max(2, self._stager.ring_length)
        sample = Plan([(0, size)] * count, [1.0] * count, lambda number: first)
        with (
            MemoryMeter(self.device, resident=self._module) as meter,
            self._transaction(keep=False),
        ):
            self._accumulate(self._module, sample, 1.0)
        return meter.start_bytes, meter.peak_bytes, meter.peak_reserved_bytes

    def _plan(self, piece: Piece, size: int, as_in_paper: bool = False, fewest: int = 1) -> Plan:
        as_in_paper = as_in_paper or self._normalization == "paper"
        exact = self._normalization == "exact" and not self._two_pass
        plan = piece.plan(size, as_in_paper, self._known if exact else None, fewest)
        if len(plan.bounds) < fewest:
            raise self._unequal(len(plan.bounds), fewest)
        return plan if exact else Plan(plan.bounds, [1.0] * len(plan.bounds), plan._part)

    # Several processes

    def _agreed_count(self, piece: Piece, size: int) -> int:
        """Return how many micro-batches each process of a fully sharded model takes."""
        if not self._processes.sharded:
            return 1
        own = len(self._plan(piece, size).bounds)
        # With weights or micro-batches of the caller's their number is given.
        free = piece.batch is not None and self._normalization != "paper"
        free = free and (piece.weights is None or len(piece.weights) == piece.num_samples)
        room = piece.num_samples if free else own
        most, negative = self._processes.most(own, -room)
        if most > -negative:
            raise self._unequal(int(-negative), int(most))
        return int(most)

    def _unequal(self, room: int, wanted: int) -> Exception:
        return DistributedModelError(
            f"a process can make {room} micro-batches of its samples, another has {wanted}; a "
            f"fully sharded model computes as many in each: give each process as many samples"
        )

    def _smallest(self, size: int, num_samples: int, problem: Exception | None) -> int:
        """Return the smallest size that a process can take, unless it takes all its samples."""
        bound = -float("inf") if size >= num_samples else -float(size)
        failed, negative, most = self._processes.most(problem is not None, bound, num_samples)
        if failed:
            raise problem or self._of_a_peer(False)
        return int(min(-negative, most))

    def _together(self, run: Callable[[], Totals], largest: int = 1) -> Totals:
        """Run, and where it failed in any process that computes by itself, fail in all.

        Args:
            run: The micro-batches.
            largest: Samples of the largest.
        """
        if not self._local:
            return run()
        problem: Exception | None = None
        try:
            totals = run()
        except Exception as error:
            problem = error
        kind = 0 if problem is None else 1 if is_out_of_memory(problem) else 2
        worst, negative = self._processes.most(kind, -largest if kind == 1 else -float("inf"))
        self._too_large = int(-negative) if worst == 1 else None
        if worst:
            raise problem if kind == worst and problem else self._of_a_peer(worst == 1)
        return totals

    def _of_a_peer(self, memory: bool) -> Exception:
        if memory:
            return torch.OutOfMemoryError("another process ran out of memory")
        return DistributedModelError("another process failed; its own error says why")

    def _average(self) -> None:
        self._hooks.on_gradients()
        if self._local:
            self._processes.synchronize(self._parameters)

    # Micro-batches

    def _accumulate_checked(
        self,
        piece: Piece,
        plan: Plan,
        divisor: float | torch.Tensor,
        synchronize: bool = True,
    ) -> Totals:
        """Accumulate, and compare with the whole where that is due."""
        self._collector = self._verification.collector()
        try:
            totals = self._accumulate(self.model, plan, divisor, synchronize)
            collector = self._collector
        finally:
            self._collector = None
        if collector is not None:
            scale = self._scaler.get_scale() if self._scaler is not None else 1.0
            self._verification.conclude(piece, plan, collector, scale / float(divisor))
        return totals

    def _accumulate(
        self,
        model: nn.Module,
        plan: Plan,
        divisor: float | torch.Tensor,
        synchronize: bool = True,
    ) -> Totals:
        """Algorithm 1, lines 7 to 14: each loss counts by its weight over `divisor`."""
        totals = Totals.over(plan.bounds)
        # A sharded model computes in all processes, and so also where nothing counts.
        counts = [weight > 0 or self._processes.sharded for weight in plan.weights]
        last = max((index for index, counted in enumerate(counts) if counted), default=-1)
        synchronize = synchronize and not self._local
        total = plan.bounds[-1][1]
        for index, (inputs, targets) in enumerate(self._stager.stream(plan.parts())):
            weight = plan.weights[index]
            if not counts[index]:
                # The loss of no tokens is 0 / 0. It does not count; BatchNorm still sees the
                # samples, and dropout draws.
                with self._precision():
                    outputs = call_model(self._module, inputs)
                if self._collector is not None:
                    self._collector.watch(outputs, _count(plan.bounds[index]), 0.0)
                del outputs
                continue
            with self._processes.synchronization(synchronize and index == last):
                with self._precision(), explained(plan.bounds[index], total):
                    outputs = call_model(model, inputs)
                    if self._collector is not None:
                        count = _count(plan.bounds[index])
                        outputs = self._collector.watch(outputs, count, weight)
                    loss = self._loss(outputs, targets)
                    del outputs
                if self._collector is not None:
                    self._collector.note(loss)
                if self._leaves_due:
                    refuse_unknown_leaves(loss, self._parameters)
                    self._leaves_due = False
                if weight == 0:
                    loss = loss.nan_to_num() * 0
                self._backward(loss * (weight / divisor))
            totals.add(loss.detach(), weight)
            del loss, inputs, targets  # with what its graph still holds
        if last < 0:
            totals.add(torch.zeros((), device=self.device), 0.0)
            if synchronize and self._processes.several:
                self._processes.synchronize(self._parameters)
        return totals

    def _two_passes(self, piece: Piece, plan: Plan, updates: DeferredBatchNorm) -> Totals:
        buffers = self._buffers.copies()
        states, outputs, sketches = [], [], []
        ambient = torch.is_autocast_enabled(self.device.type)
        dtype = torch.get_autocast_dtype(self.device.type) if ambient else self._autocast
        sketch = self._sketches.setdefault(dtype, Sketch(dtype))
        with torch.no_grad(), self._precision():
            for (inputs, _), bound in zip(
                self._stager.stream(plan.parts()), plan.bounds, strict=True
            ):
                states.append(self._randomness.get())
                with explained(bound, plan.bounds[-1][1]):
                    outputs.append(own_memory(call_model(self._module, inputs), inputs))
                sketches.append(sketch.of(outputs[-1]))
        # The second pass updates buffers and moments, and needs weights cast with a graph.
        self._buffers.write(buffers)
        updates.moments.clear()
        torch.clear_autocast_cache()

        whole = concatenate(outputs, plan.bounds)
        del outputs
        targets = piece.targets
        if piece.split is not None:  # in the order of the outputs
            targets = joined_targets([part[1] for part in plan.parts()], plan.bounds)
        with self._precision():
            loss = self._loss(whole, to_device(targets, self.device))
        totals = Totals.over(plan.bounds)
        totals.add(loss.detach(), 1.0)
        if not self._processes.several:
            self._check_finite(totals)
        self._backward(loss)
        gradients = [getattr(leaf, "grad", None) for leaf in leaves_of(whole)]
        del whole, loss

        after = self._randomness.get()
        differences = []
        synchronize = not self._local
        for index, (inputs, _) in enumerate(self._stager.stream(plan.parts())):
            self._randomness.set(states[index])  # so that dropout repeats
            with self._processes.synchronization(synchronize and index == len(plan.bounds) - 1):
                with self._precision():
                    found = call_model(self.model, inputs)
                    differences.append(sketch.differ(sketches[index], sketch.of(found)))
                    leaves = leaves_of(found)
                    del found
                pairs = [
                    (leaf, gradient[slice(*plan.bounds[index])])
                    for leaf, gradient in zip(leaves, gradients, strict=True)
                    if gradient is not None and leaf.requires_grad
                ]
                with self._no_autocast():
                    torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
                del leaves, pairs
        self._randomness.set(after)  # what the loss drew comes after the first pass
        worst = [difference for difference in differences if difference is not None]
        if worst and float(torch.stack(worst).max()) > 1:
            raise NondeterministicModelError(
                "the second pass computed other outputs than the first, so that gradients would "
                "be wrong: the model draws from a random number generator of its own, which "
                "generators= takes, or keeps a state between calls outside its buffers, such as a "
                "counter; register it as a buffer"
            )
        return totals

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        if self._known is not None and tensors and not self._two_pass:
            self._known.check(outputs, targets)
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
        if totals.weight == 0 and not self._processes.several:
            loss = loss * torch.nan  # nothing counts: 0 / 0, as for the whole mini-batch
        check_finite(loss, self._processes.sum_losses(loss), totals.num_samples)

    def _divisor(self, weight: float) -> float:
        return 1.0 if self._normalization == "none" and not self._two_pass else weight

    def _shared_divisor(self, weight: float) -> float | torch.Tensor:
        if self._normalization != "exact" or self._two_pass:
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
        return Transaction(self._parameters, self._buffers, self._randomness, keep, views)

    def _batchnorm_updates(self) -> DeferredBatchNorm:
        # Without layers it gathers nothing and updates nothing.
        return DeferredBatchNorm(self._module if self._batchnorm == "deferred" else nn.Module())


def _count(bound: tuple[int, int]) -> int:
    return bound[1] - bound[0]
