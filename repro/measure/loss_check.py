"""Whether a loss adds up over the parts of a mini-batch, and a model treats samples one by one.

The loss of the whole is compared with the weighted sum of its parts' losses, and so are their
gradients by the model's outputs: values alone can agree by chance. If all outputs are zero, as
often from a fresh last layer, the mean over any samples is the same. Where no output shows a
gradient, as of a model that returns its loss alone, gradients by the parameters are compared.
"""

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from repro.measure import accelerator
from repro.measure.batches import Sample, call_model, leaves_of, map_leaves, to_device
from repro.measure.containers import holds_tensors
from repro.measure.loss_parts import (
    OFF,
    Evaluated,
    LossCheckError,
    MixedSamplesError,
    alike,
    compare,
    difference,
    differentiated,
    evaluate,
    fails_as,
    gradients_apart,
    mixed,
    relative,
    tolerance,
)
from repro.measure.memory import is_out_of_memory
from repro.measure.outputs import (
    can_be_joined,
    floats,
    fresh,
    joined,
    near,
    rows_of_part,
    some_as_long,
)
from repro.measure.precision import HALF, Widening, rounds, widened
from repro.measure.untouched import (
    WithoutGraph,
    detached,
    own_statistics,
    running_statistics,
    uncached,
    untouched,
)

_BY_PARAMETERS = 1e-2  # allowed relative difference; the faults to be found are larger
_LEAST = 1e-4  # sum of a gradient's absolute values; smaller ones may be rounding errors
_REPEATS = 8  # of what draws random numbers, to see whether it uses them


@dataclass(eq=False)
class LossCheck:
    """Compares losses and outputs of samples computed together and in parts.

    A backward pass through the model is made only where the model computes the loss, and no output
    shows its gradient. Parameters, gradients, buffers, attributes and random numbers are restored.
    A loss that does not add up is a `LossCheckError`; outputs that depend on the division are a
    `MixedSamplesError`.
    """

    model: nn.Module
    modules: Sequence[nn.Module]  # of model and loss
    loss_fn: Callable[..., Tensor]  # without targets that are None it is called with outputs alone
    device: torch.device  # of the model
    undone: Callable[[], AbstractContextManager[Any]]  # restores buffers and random numbers
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # of a forward pass
    advice: tuple[str, str] = ("", "")  # for any loss; for one that the model computes
    off: str = OFF  # what computes it unchecked
    named: str = "; name it in shared="  # what tells of a tensor that belongs to all samples
    multiplied_by: Sequence[Any] = ("matmul", "conv")  # see `tolerance`
    # Whether two passes of the same samples, buffers and random numbers differed, and whether
    # an output has as many rows for a part as for several; whether the model is to compute wider.
    hidden_state: bool = field(default=False, init=False)
    fixed_rows: bool = field(default=False, init=False)
    _wide: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # The uncompiled module: other shapes and evaluation mode would compile it twice more.
        self.model = getattr(self.model, "_orig_mod", self.model)

    def outputs_add_up(self, sample: Sample, room: float) -> bool:
        """Compare the losses of the groups' outputs; return whether that was possible.

        The first groups are used, as far as `room` in host memory, in bytes, holds outputs. These
        are computed once, so that layers' random numbers and batch statistics do not matter.
        """
        # Training SyncBatchNorm would wait for processes that check nothing.
        return self._attempt(self._compare_outputs, sample, room, evaluating=nn.SyncBatchNorm)

    def loss_adds_up(self, sample: Sample) -> bool:
        """Compare the losses of a few samples; return whether that was possible.

        They are computed as a whole, too: a loss may depend on more than outputs and targets.
        """
        # In training mode first, as far as that is repeatable.
        ways: tuple[tuple[Callable[..., bool], Any], ...] = (
            (self._compare_outputs, nn.SyncBatchNorm),
            (self._compare_inside, (_DropoutNd, _NormBase)),
            (self._compare_outputs, nn.Module),
            (self._compare_inside, nn.Module),
        )
        return any(self._attempt(check, sample, evaluating=kinds) for check, kinds in ways)

    def loss_reads_outputs(self, sample: Sample) -> bool:
        """Refuse a loss that reads what a forward pass leaves elsewhere; return whether it ran."""
        return self._attempt(self._compare_reached, sample, evaluating=nn.SyncBatchNorm)

    def samples_stay_apart(self, sample: Sample) -> bool:
        """Compare the outputs of a few samples; return whether that was possible.

        They are computed beside other samples and, where there are any, beside copies of themselves
        with the same random numbers, and alone unless numbers are drawn: outputs differ if a tensor
        that all samples need was divided, or if the model compares or counts samples.
        """
        # A layer of one's own without running statistics mixes samples in evaluation mode, too.
        if any(own_statistics(module) for module in self.modules):
            return False
        # Micro-batch statistics are the papers' behaviour, so that no model is refused for them.
        # RReLU draws as many random numbers as there are negative elements; a recurrent layer's
        # dropout of packed sequences depends on the lengths of all.
        kinds: tuple[Any, ...] = ((_NormBase, nn.RReLU, nn.RNNBase), nn.Module)

        def made(check: Callable[[Sample], bool]) -> bool:
            again = partial(self._again_wide, partial(check, sample), sample.inputs)
            return any(self._attempt(again, evaluating=kind) for kind in kinds)

        if sample.twice is None:
            return made(self._compare_alone)
        if compared := made(self._compare_neighbours):
            made(self._compare_alone)  # no alarm if that is impossible, as with random numbers
        return compared or self.hidden_state

    def compute(self, inputs: Any, evaluating: Any = nn.Module) -> Any:
        """The outputs, without a graph, with modules of these kinds in evaluation mode."""
        with self._evaluating(evaluating):
            return self._forward(inputs)

    def _attempt(self, check: Callable[..., bool], *arguments: Any, evaluating: Any) -> bool:
        """Run a check with modules of some kinds in evaluation mode; return whether it ran."""
        given = untouched(*self.modules, tensors=False)
        try:
            with given, self.undone(), self._evaluating(evaluating):
                return check(*arguments)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, LossCheckError | MixedSamplesError):
                raise
            return False  # any other failure is raised by the training step itself

    @contextmanager
    def _evaluating(self, kinds: Any) -> Iterator[None]:
        modes = [(m, m.training) for m in self.modules if isinstance(m, kinds)]
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    # The loss

    def _compare_outputs(self, sample: Sample, room: float = math.inf) -> bool:
        if self.fixed_rows:  # such an output cannot be joined, even if it is as long as its part
            return False
        pairs: list[tuple[Any, Any]] = []
        recorded = None  # the first loss, with the state that the forward pass changed
        for inputs, targets in sample.parts:
            outputs = self._forward(inputs)
            leaves = leaves_of(outputs)
            room -= sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            # A list may have an item for each sample.
            listed = isinstance(outputs, list) and len(outputs) == sample.counts[len(pairs)]
            if listed or not all(map(can_be_joined, leaves)):
                return False
            if room < 0:
                break
            recorded = recorded or self._evaluated(outputs, targets)
            pairs.append((to_device(outputs, torch.device("cpu")), targets))
        if recorded is None or len(pairs) < 2:
            return False
        rows = None if sample.inputs is None else sample.counts  # else samples may have several
        together = joined([outputs for outputs, _ in pairs], rows)
        with warnings.catch_warnings():  # of shapes that do not fit
            warnings.simplefilter("ignore")
            # A loss that reads what the forward pass left has another value after later passes.
            again = relative(self._evaluated(*pairs[0]).loss, recorded)
        if together is None or (torch.isfinite(recorded.loss) and again > 1e-6):
            return False
        kinds = {leaf.dtype for leaf in floats(together)} | self._autocast()
        # Rounding to half precision changes a loss by more than the faults to be found.
        wide = {torch.float32 if kind in HALF else kind for kind in kinds}
        try:
            return self._compare_joined(sample, pairs, together, wide, True)
        except LossCheckError:
            if (half := self._half_within(together, sample.targets(len(pairs)))) is None:
                raise
            return self._compare_joined(sample, pairs, together, kinds | half, False)

    def _compare_joined(
        self, sample: Sample, pairs: Any, together: Any, kinds: set[torch.dtype], wide: bool
    ) -> bool:
        counts, rows = sample.counts[: len(pairs)], None if sample.inputs is None else sample.counts

        def whole(outputs: Any) -> Evaluated:
            with fails_as(
                LossCheckError,
                f"the loss can be computed over {counts[0]} samples, but not over {sum(counts)}: "
                f"the model returned, or the loss was given, something that belongs to the whole "
                f"mini-batch and was divided{self.named}",
                self.off,
            ):
                return self._evaluated(outputs, sample.targets(len(pairs)), wide)

        if not sum(float(g.abs().sum()) for g in whole(together).gradients) > _LEAST:
            # Rounding errors alone, as of a student that is its teacher's copy: compare near by.
            moved = near([outputs for outputs, _ in pairs])
            pairs = [(outputs, targets) for outputs, (_, targets) in zip(moved, pairs, strict=True)]
            together = joined(moved, rows)
        parts = [partial(self._evaluated, outputs, given, wide) for outputs, given in pairs]
        return self._compare(sample, parts, partial(whole, together), False, kinds)

    def _compare_inside(self, sample: Sample) -> bool:
        """Compare losses, with a graph from the model's outputs to the loss only."""
        parts = [partial(self._with_graph, *part) for part in sample.parts]
        whole = partial(self._with_graph, sample.inputs, sample.targets(len(sample.counts)))
        check = partial(self._compare, sample, parts, whole, True)
        return self._again_wide(check, sample.inputs)

    def _compare(
        self,
        sample: Sample,
        evaluate_parts: Sequence[Callable[[], Evaluated]],
        evaluate_whole: Callable[[], Evaluated],
        inside: bool,
        kinds: set[torch.dtype] | None = None,
    ) -> bool:
        parts = [evaluate_part() for evaluate_part in evaluate_parts]
        if not inside and all(part.inside for part in parts):
            return False
        whole = evaluate_whole()
        if not torch.isfinite(whole.loss):
            return False  # the mini-batch itself will raise the error
        weights = sample.weights[: len(parts)]
        factors = [w / sum(weights) if sample.exact else 1.0 for w in weights]
        combined, value, gradient = compare(whole, parts, factors)
        narrow = self._tolerance(whole.gradients, narrow=True, kinds=kinds)
        # Of the very same outputs, or not.
        allowed = self._tolerance(whole.gradients, kinds=kinds) if inside else narrow
        if value <= narrow and gradient <= allowed:
            silent = inside and not any(bool(g.any()) for g in whole.gradients)
            return not silent or self._compare_by_parameters(sample, factors)
        rows = zip(sample.counts, parts, strict=False)
        if inside and value <= narrow and any(len(g) != n for n, p in rows for g in p.gradients):
            # Rows may be in another order.
            return self._compare_by_parameters(sample, factors, otherwise=False)
        drawn = self._generators()
        same = alike([whole], [evaluate_whole()], narrow, allowed)
        if drawn != self._generators():  # whole and parts had other random numbers
            every = [evaluate_whole, *evaluate_parts]
            again = ([evaluate_one() for evaluate_one in every] for _ in range(_REPEATS))
            same = same and all(alike([whole, *parts], e, narrow, allowed) for e in again)
        if not same:
            return False
        apart = f"; their gradients by the outputs differ by {100 * gradient:.3g} %"
        raise LossCheckError(
            f"the loss of {sum(sample.counts[: len(parts)])} samples is {float(whole.loss):.6g}, "
            f"that of its {len(parts)} parts together {combined:.6g}"
            f"{apart if gradient > allowed else ''}. "
            f"It is no {'mean' if sample.exact else 'sum'} over samples. "
            f"{self.advice[1] if inside else ''}{self.advice[0]}{self.off}"
        )

    def _compare_by_parameters(
        self, sample: Sample, factors: Sequence[float], otherwise: bool = True
    ) -> bool:
        """Refuse a loss with gradients by the parameters that do not add up.

        They are computed in float32, without autocast, and leave out parameters of half precision,
        with hooks or with sparse gradients. Where that fails, as behind a reentrant checkpoint,
        values alone were compared: returns `otherwise`.
        """
        every = [*nn.ModuleList(self.modules).parameters()]
        own = [
            p for p in every if p.requires_grad and not p._backward_hooks and p.dtype not in HALF
        ]
        whole = [(1.0, (sample.inputs, sample.targets(len(sample.counts))))]
        parts = [pair for pair in zip(factors, sample.parts, strict=True) if pair[0] > 0]
        allowed = max(_BY_PARAMETERS, 2 * self._tolerance((), kinds=[torch.float32]))
        apart = partial(gradients_apart, self._loss_in_float32, own)
        try:
            # A state may settle in the first calls.
            if not own:  # of half precision alone, if any, which are not compared
                return otherwise and not any(p.requires_grad and p.dtype in HALF for p in every)
            if any(not apart(whole, parts) > allowed for _ in range(2)):
                return True
            if max(apart(whole, whole), apart(parts, parts)) > allowed:
                return False  # of random numbers, for example
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return otherwise
        raise LossCheckError(
            f"the loss of {sum(sample.counts)} samples has another gradient by the parameters than "
            f"its {len(parts)} parts together, by more than {100 * allowed:.3g} %. It is no "
            f"{'mean' if sample.exact else 'sum'} over samples, or a hook or function changes "
            f"gradients by their size. {self.advice[1]}{self.advice[0]}{self.off}"
        )

    def _compare_reached(self, sample: Sample) -> bool:
        (inputs, targets), *_ = sample.parts
        every = [p for p in nn.ModuleList(self.modules).parameters() if p.requires_grad]
        reached: list[set[int]] = []
        for forward in (self._forward, self._outputs):  # the second with a graph
            with self.undone(), torch.enable_grad(), self.context():
                outputs = map_leaves(detached, forward(inputs))
                others = [x for x in leaves_of(outputs) if not isinstance(x, Tensor)]
                if any(holds_tensors(other, 3) for other in others):
                    return False  # two passes refuse a loss that reads what cannot be detached
                loss = self._loss(outputs, targets)
                loss = loss + torch.zeros_like(loss).requires_grad_()  # which has a graph
                found = torch.autograd.grad(loss, every, allow_unused=True)
                reached.append({n for n, g in enumerate(found) if g is not None})
        if reached[1] - reached[0]:
            raise LossCheckError(
                f"the loss reads a tensor that the model's forward pass leaves elsewhere than in "
                f"its outputs, such as in an attribute or a hook's list. In two passes that tensor "
                f"has no gradient, and is the last micro-batch's. Let forward return it, with a "
                f"row for each sample. {OFF}"
            )
        return True

    def _generators(self) -> Any:
        torchs = [s.tolist() for s in accelerator.get_rng(self.device) if s is not None]
        return random.getstate(), repr(np.random.mtrand.get_bit_generator().state), torchs

    # The samples

    def _compare_neighbours(self, sample: Sample) -> bool:
        """Refuse a model with outputs that depend on the other samples in the batch."""
        count, total = sample.counts[1], sum(sample.counts)
        _, (inputs, _) = sample.parts
        own = self._apart(inputs)

        def last(outputs: Any) -> list[Tensor]:
            return rows_of_part(floats(own), floats(outputs), total - count, count, total)[1]

        try:
            together = self._apart(sample.inputs)
        except Exception as error:
            if is_out_of_memory(error) or sample.batch is None:
                raise
            # Samples may have an order, such as that of falling lengths.
            groups = list(range(sample.counts[0])), list(range(sample.counts[0], total))
            ordered = Sample.of(sample.batch, groups, sample.weights, sample.exact)
            with fails_as(
                MixedSamplesError,
                f"the model can be called with {count} samples, but not with {total}: something "
                f"was divided that belongs to the whole mini-batch, because its first dimension is "
                f"as long, and is to be named in shared=; or it takes only as many at once",
            ):
                self._apart(ordered.inputs)
            return self._compare_alone(ordered)
        self.fixed_rows, whole = some_as_long(own, together), last(together)
        off = difference(whole, last(self._apart(sample.twice)))
        allowed = self._tolerance(whole)
        if off is None or off <= allowed:
            return True
        with self.undone():
            for _ in range(_REPEATS):  # by values or lengths, which draw as many by chance
                if self._numbers_after(sample.inputs) != self._numbers_after(sample.twice):
                    return False
                self._forward(sample.inputs)
        again = (difference(last(self._apart(sample.inputs)), whole) for _ in range(_REPEATS))
        if any(other is None or other > allowed for other in again):
            self.hidden_state = True
            return False
        raise mixed(off, count)

    def _compare_alone(self, sample: Sample) -> bool:
        """Refuse a model that computes other outputs for a part alone than in the whole."""
        whole, total, start = floats(self._apart(sample.inputs)), sum(sample.counts), 0
        for (inputs, _), count in zip(sample.parts, sample.counts, strict=True):
            own = floats(self._apart(inputs))
            ours, theirs = rows_of_part(own, whole, start, count, total)
            off, allowed, start = difference(ours, theirs), self._tolerance(theirs), start + count
            if off is not None and off > allowed:
                if any(self._draws(sample.inputs, allowed) for _ in range(_REPEATS)):
                    return False  # other numbers for another number of samples
                raise mixed(off, count)
        return True

    def _draws(self, inputs: Any, allowed: float) -> bool:
        """Whether a call draws random numbers, or leaves a state that the next one reads."""
        with self.undone():
            before = self._generators()
            first = floats(self._forward(inputs))
            drawn = before != self._generators()
            off = difference(first, floats(self._forward(inputs)))
            return drawn or off is None or off > allowed

    def _numbers_after(self, inputs: Any) -> Any:
        with self.undone():
            self._forward(inputs)
            return self._generators()

    def _apart(self, inputs: Any) -> Any:
        """Outputs of a call that is undone, with BatchNorm in evaluation by running statistics."""
        with self.undone(), running_statistics(self.modules):
            return self._forward(inputs)

    # Forward passes and losses

    def _forward(self, inputs: Any) -> Any:
        return WithoutGraph()(partial(self._outputs, inputs))

    def _outputs(self, inputs: Any) -> Any:
        with self.context(), uncached(), Widening() if self._wide else nullcontext():
            return call_model(self.model, fresh(inputs, self.device))

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        given = () if targets is None else (fresh(targets, self.device),)
        return self.loss_fn(outputs, *given)

    def _evaluated(self, outputs: Any, targets: Any, wide: bool = False) -> Evaluated:
        """The loss of outputs (on host or device), and its gradient by the outputs."""
        with torch.autocast(self.device.type, enabled=False) if wide else self.context():
            there = to_device(outputs, self.device)
            targets = map_leaves(widened, targets) if wide else targets
            return evaluate(lambda copies: self._loss(copies, targets), there, wide=wide)

    def _half_within(self, outputs: Any, targets: Any) -> set[torch.dtype] | None:
        """The half precision that a loss rounds to of itself; None if it can do without any."""
        for wide in (True, False):  # kernels of its own may need their dtypes
            rounding = self._rounds(partial(self._evaluated, outputs, targets, wide))
            if rounding is not None:
                return {torch.bfloat16} if rounding else None if wide else set()
        return None

    def _again_wide(self, check: Callable[[], bool], inputs: Any) -> bool:
        """Run a check, and again in float32 if the model itself has rounded to half precision."""
        try:
            return check()
        except (LossCheckError, MixedSamplesError):
            with self.undone():
                if not self._rounds(partial(self._forward, inputs)):
                    raise
        self._wide = True
        try:
            return check()
        finally:
            self._wide = False

    def _rounds(self, call: Callable[[], Any]) -> bool | None:
        """Whether a call computes in half precision; None if it fails."""
        try:
            return rounds(call)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    def _with_graph(self, inputs: Any, targets: Any) -> Evaluated:
        with torch.enable_grad(), self.context(), Widening() if self._wide else nullcontext():
            outputs = call_model(self.model, fresh(inputs, self.device))
            loss = self._loss(outputs, targets)
            return differentiated(loss, [leaf for leaf in floats(outputs) if leaf.requires_grad])

    def _loss_in_float32(self, inputs: Any, targets: Any) -> Tensor:
        with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
            outputs = call_model(self.model, fresh(inputs, self.device))
            with Widening():
                return self._loss(outputs, targets)

    def _tolerance(self, tensors: Any, narrow: bool = False, kinds: Any = None) -> float:
        """Tolerance for dtypes; if none are given, for those of the tensors and of the model."""
        if kinds is None:
            kinds = {x.dtype for x in (*tensors, *self.model.parameters())} | self._autocast()
        return tolerance(kinds, self.device, narrow=narrow, multiplied_by=self.multiplied_by)

    def _autocast(self) -> set[torch.dtype]:
        kind = self.device.type
        with self.context():
            return {torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set()
