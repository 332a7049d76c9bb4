"""A check that the micro-batches of a mini-batch add up to it."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from repro.mbs.batches import own_memory
from repro.mbs.collecting import Collector
from repro.mbs.errors import LossCheckError, MixedSamplesError, check_loss
from repro.measure import is_out_of_memory
from repro.measure.batches import call_model, leaves_of, map_leaves, replaced, to_device
from repro.measure.precision import rounds_to_tf32

# What two ways of computing the same may differ by, relative to its size. Rounding differs by a
# few eps (the parts have other shapes, and so other kernels), amplified by the model's depth;
# what the check is for differs by its first or second digit.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TF32 = 1e-2
# Of losses computed from the very same outputs, or of values alone, which are sums of many terms.
_NARROW = {torch.float64: 1e-8, torch.float32: 2e-4}

_WAYS = (
    "If it is a mean over something else than samples, such as tokens, give weights= (one per "
    "sample; token_counts counts tokens); if it is a sum, normalization='none'; if it needs the "
    "mini-batch as a whole (a ratio, a root, pairs of samples), two_pass=True. What the loss "
    "knows of single samples (a teacher's outputs, weights of samples) belongs in targets. "
)
_WEIGHTED = (
    "With weights= a micro-batch's loss has to be divided by the sum of its own samples' weights, "
    "as F.cross_entropy(..., weight=) does; a loss divided by its samples needs no weights=. "
)
_INSIDE = (
    "The loss is computed inside the model: with Hugging Face's models pass num_items_in_batch "
    "among the inputs with normalization='none', or weights=token_counts(labels), shifted for a "
    "causal language model; with others let the model return what the loss needs, and compute it "
    "in loss_fn. Detection models, which divide by their numbers of boxes or anchors, cannot be "
    "divided exactly: normalization='paper' is the mean over micro-batches, unchecked. "
)
_ONE_BY_ONE = (
    "Name in shared= what belongs to the whole mini-batch (a tensor whose first dimension is as "
    "long by chance was divided), give samples first (batch_first=True of torch's recurrent layers "
    "and transformers), or let the model treat samples one by one"
)
_OFF = "check='off' computes it all the same"


@dataclass(frozen=True)
class Sample:
    """Two groups of samples of a mini-batch, and both together.

    Each of `parts` is (inputs, targets), as is `whole`, whose inputs are None where they cannot be
    put together; `beside` is the inputs of the first group twice, None where there are none.
    `factors` is what the gradient of each part counts in the gradient of both.
    """

    parts: tuple[Any, Any]
    whole: Any
    beside: Any
    counts: tuple[int, int]
    factors: tuple[float, float]
    weighted: bool = False


class SelfCheck:
    """Compares the loss of samples as a whole with that of their parts, and the model's outputs.

    Compared are the values and the gradients by the model's outputs, since values alone can agree
    by chance: with all outputs zero, as a fresh last layer often gives, a mean over any selection
    of samples is the same. `compare_collected` takes the outputs that the micro-batches had. `run`
    computes a few samples itself, for losses that take more than outputs and targets, and for the
    outputs themselves: in evaluation mode as a whole and in parts, where a tensor that was divided
    although all samples need it shows; and in training mode beside other samples, with the same
    random numbers, where a model that compares samples shows. No backward pass through the model
    is made.

    Args:
        module: The model.
        modules: It and the loss, if that is a module, with all that they contain.
        loss_fn: The loss.
        undone: Makes a context that leaves no trace.
        device: The device.
        precision: Makes the context of the forward pass.
        autocast: The dtype of autocast, None without.

    Attributes:
        hidden_state: Whether a forward pass changed what the next one computed from the same
            samples, buffers and random numbers.
    """

    def __init__(
        self,
        module: nn.Module,
        modules: Sequence[nn.Module],
        loss_fn: Callable[..., torch.Tensor],
        undone: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
        autocast: torch.dtype | None,
    ) -> None:
        # Compiled for other shapes and for evaluation, a model would be compiled twice more.
        self._module = getattr(module, "_orig_mod", module)
        self._modules = modules
        self._loss_fn = loss_fn
        self._undone = undone
        self._device = device
        self._precision = precision
        self._autocast = autocast
        self.hidden_state = False

    def run(self, sample: Sample, loss: bool, mixing: bool, through: bool = False) -> bool:
        """Return whether the check could be made.

        Args:
            sample: What to compute.
            loss: Whether to check the loss.
            mixing: Whether to check that the model treats samples one by one.
            through: Whether the loss takes more from the model than its outputs.

        Raises:
            LossCheckError: The losses do not add up.
            MixedSamplesError: The outputs depend on how the samples were divided.
        """
        mixing = mixing and not self._normalises_by_batch()
        if loss and not any(isinstance(m, _NormBase) and m.training for m in self._modules):
            # As in training, if that is the same twice; dropout is not.
            loss = not self._attempt(self._compare, sample, True, False, through)
        made = not (loss or mixing) or any(
            self._attempt(self._compare, sample, loss, mixing, through, kinds=kinds)
            for kinds in (nn.Module, (_DropoutNd, _NormBase))
        )
        # Batch statistics are the paper's, and no reason to refuse a model.
        beside = mixing and self._attempt(self._compare_neighbours, sample, kinds=_NormBase)
        return made or (beside and not loss)

    def _attempt(self, check: Callable[..., bool], *arguments: Any, kinds: Any = ()) -> bool:
        """Return whether a check could be made, with modules of these kinds in evaluation mode."""
        try:
            with self._undone(), self._evaluating(kinds):
                return check(*arguments)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, LossCheckError | MixedSamplesError):
                raise
            return False

    def _normalises_by_batch(self) -> bool:
        """Whether a layer without running statistics mixes samples in evaluation mode, too."""
        return any(
            isinstance(module, _NormBase)
            and not isinstance(module, _InstanceNorm)
            and module.running_mean is None
            for module in self._modules
        )

    @contextmanager
    def _evaluating(self, kinds: Any) -> Iterator[None]:
        modes = [(m, m.training) for m in self._modules if isinstance(m, kinds)]
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _compare(self, sample: Sample, loss: bool, mixing: bool, through: bool) -> bool:
        outputs = [self._forward(inputs) for inputs, _ in sample.parts]
        joined = _joined(outputs, None if sample.whole[0] is None else sample.counts)
        if mixing and sample.whole[0] is not None:
            self._compare_outputs(sample, outputs, joined)
        if not loss:
            return True
        targets = [part[1] for part in sample.parts]
        whole_targets = sample.whole[1]
        parts = [self._evaluated(*pair) for pair in zip(outputs, targets, strict=True)]
        inside = any(part.inside for part in parts)
        if not inside and not through and joined is not None:

            def evaluate() -> _Evaluated:
                return self._evaluated(joined, whole_targets)

        elif sample.whole[0] is None:
            return False
        else:
            # Computed in the model: with the graph from its outputs to the loss, and no further.
            parts = [self._with_graph(*part) for part in sample.parts]

            def evaluate() -> _Evaluated:
                return self._with_graph(*sample.whole)

        return self._compare_losses(
            sample.counts, sample.factors, parts, evaluate, inside or through, sample.weighted
        )

    def _compare_outputs(self, sample: Sample, outputs: list[Any], joined: Any) -> None:
        try:
            whole = self._forward(sample.whole[0])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise MixedSamplesError(
                f"the model can be called with {sample.counts[0]} samples, but not with "
                f"{sum(sample.counts)} ({error}): something was divided that belongs to the whole "
                f"mini-batch, because its first dimension is as long, and is to be named in "
                f"shared=; or it takes only as many at once. {_OFF}"
            ) from error
        _refuse_pairs(outputs, whole, sample.counts)
        if joined is None:
            return
        difference = _difference(_floats(joined), _floats(whole))
        tolerance = self._tolerance(_floats(whole))
        if difference is None or difference <= tolerance:
            return
        again = _difference(_floats(self._forward(sample.whole[0])), _floats(whole))
        if again is None or again > tolerance:
            return  # it draws random numbers: nothing can be compared
        raise MixedSamplesError(
            f"the model's outputs for {sum(sample.counts)} samples differ by "
            f"{100 * difference:.2g} % when they are computed in two parts: a sample's output "
            f"depends on the others. {_ONE_BY_ONE}. {_OFF}"
        )

    def _compare_neighbours(self, sample: Sample) -> bool:
        """Refuse outputs of samples that depend on which others are computed with them.

        In training mode, with the same random numbers and buffers each time.
        """
        if sample.beside is None:
            return False
        # What has rows of samples, and not as many of something else by chance.
        count = sample.counts[0]
        alone = [len(leaf) == count for leaf in self._rows(sample.parts[0][0])]
        whole, beside = (self._first(i, alone, count) for i in (sample.whole[0], sample.beside))
        difference = _difference(whole, beside)
        tolerance = self._tolerance(whole)
        if difference is None or difference <= tolerance:
            return True
        again = _difference(self._first(sample.whole[0], alone, count), whole)
        if again is None or again > tolerance:
            self.hidden_state = True
            return False
        raise MixedSamplesError(
            f"in training mode the model's outputs for {count} samples differ by "
            f"{100 * difference:.2g} % with which others are computed beside them, and a "
            f"micro-batch has only its own. {_ONE_BY_ONE}, or return what loss_fn compares, with "
            f"two_pass=True. If it is a normalisation by the batch that may be one by the "
            f"micro-batch, as BatchNorm's is, {_OFF}"
        )

    def _rows(self, inputs: Any) -> list[torch.Tensor]:
        with self._undone():
            return _floats(self._forward(inputs))

    def _first(self, inputs: Any, alone: Sequence[bool], count: int) -> list[torch.Tensor]:
        """Return the rows of the first `count` of twice as many samples, of what has such rows."""
        rows = zip(self._rows(inputs), alone, strict=True)
        return [leaf[:count] for leaf, of_samples in rows if of_samples and len(leaf) == 2 * count]

    def compare_collected(
        self,
        collector: Collector,
        targets: list[Any],
        whole_targets: Any,
        exact: bool,
        scale: float,
        weighted: bool,
        uneven: bool,
    ) -> bool:
        """Compare the losses of micro-batches, as they were computed, with that of all of them.

        Return whether that could be done: not where the loss takes something else than the outputs
        and the targets, such as what the model left in an attribute, or random numbers.

        Args:
            collector: What the micro-batches computed.
            targets: Of each micro-batch kept.
            whole_targets: Of all of them.
            exact: Whether they are weighed; else they are summed.
            scale: What a loss was multiplied by in the backward pass, over its weight.
            weighted: Whether the user gave weights.
            uneven: Whether samples may have different numbers of rows.

        Raises:
            LossCheckError: The losses do not add up.
        """
        kept = collector.parts
        counts = tuple(part.count for part in kept)
        outputs = [replaced(collector.template, part.leaves) for part in kept]
        joined = _joined(outputs, None if uneven else counts)
        total = sum(part.weight for part in kept)
        scalars = [n for n, leaf in enumerate(kept[0].leaves) if _is_float(leaf) and not leaf.dim()]
        inside = any(n in part.gradients for part in kept for n in scalars)
        first = next((n for n, part in enumerate(kept) if part.loss is not None), None)
        if len(kept) < 2 or joined is None or inside or total == 0 or first is None:
            return False
        probed = sorted({n for part in kept for n in part.probed})
        recorded = kept[first].loss
        assert recorded is not None
        again = self._evaluated(outputs[first], targets[first], probed)
        if again.inside or not _close(again.loss, recorded, again.size):
            return False
        parts: list[_Evaluated] = []
        wide = self._is_half(joined)
        if wide:
            # Rounded to half precision, a loss differs by more than what is looked for.
            try:
                parts = [
                    self._evaluated(*pair, probed, wide=True)
                    for pair in zip(outputs, targets, strict=True)
                ]
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                wide = False
        if not wide:
            positions = [n for n in probed if kept[first].leaves[n].dim() > 0]
            for part in kept:
                gradients = [
                    part.gradients[n].to(self._device) / (scale * part.weight)
                    if n in part.gradients
                    else torch.zeros_like(part.leaves[n], device=self._device)
                    for n in positions
                ]
                loss = torch.zeros(()) if part.loss is None else part.loss
                loss = loss.double().to(self._device)
                parts.append(_Evaluated(loss, gradients, again.size, False))
        factors = [part.weight / total if exact else 1.0 for part in kept]

        def evaluate() -> _Evaluated:
            try:
                return self._evaluated(joined, whole_targets, probed, wide)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise LossCheckError(
                    f"the loss can be computed over {counts[0]} samples, but not over "
                    f"{sum(counts)} ({error}): the model returned, or the loss was given, "
                    f"something that belongs to the whole mini-batch and was divided; name it in "
                    f"shared=. {_OFF}"
                ) from error

        return self._compare_losses(counts, factors, parts, evaluate, False, weighted, True, wide)

    def _compare_losses(
        self,
        counts: Sequence[int],
        factors: Sequence[float],
        parts: list["_Evaluated"],
        evaluate: Callable[[], "_Evaluated"],
        inside: bool,
        weighted: bool,
        same_outputs: bool = False,
        wide: bool = False,
    ) -> bool:
        whole = evaluate()
        if not torch.isfinite(whole.loss):
            return False  # the mini-batch itself will say so
        pairs = [
            (f, part) for f, part in zip(factors, parts, strict=True) if f > 0
        ]  # a part of no weight does not count, and may be 0 / 0
        combined = sum(factor * part.loss for factor, part in pairs)
        assert isinstance(combined, torch.Tensor)
        value = _relative(combined, whole.loss, [part.loss for _, part in pairs], whole.size)
        gradient = 0.0
        if whole.gradients and all(len(p.gradients) == len(whole.gradients) for p in parts):
            columns = zip(*(part.gradients for part in parts), strict=True)
            expected = [
                torch.cat([f * g if f > 0 else 0 * torch.nan_to_num(g)
                           for f, g in zip(factors, column, strict=True)])
                for column in columns
            ]  # fmt: skip
            difference = _difference(expected, whole.gradients)
            gradient = 0.0 if difference is None else difference
        kinds = [whole.loss, *whole.gradients]
        narrow = self._tolerance(kinds, narrow=True, wide=wide)
        tolerance = narrow if same_outputs else self._tolerance(kinds)
        if value <= narrow and gradient <= tolerance:
            return True
        again = evaluate()
        spread = _relative(again.loss, whole.loss, [], whole.size)
        if spread > narrow or (_difference(again.gradients, whole.gradients) or 0.0) > tolerance:
            return False
        raise LossCheckError(
            f"the loss of {sum(counts)} samples is {float(whole.loss):.6g}, that of its "
            f"{len(counts)} parts together {float(combined):.6g}; their gradients by the outputs "
            f"differ by {100 * gradient:.3g} %. "
            f"{'It is no sum' if set(factors) == {1.0} else 'It is no mean'} over samples. "
            f"{_INSIDE if inside else ''}{_WEIGHTED if weighted else ''}{_WAYS}{_OFF}"
        )

    def _is_half(self, outputs: Any) -> bool:
        half = (torch.float16, torch.bfloat16)
        autocast = torch.is_autocast_enabled(self._device.type) or self._autocast is not None
        return autocast or any(leaf.dtype in half for leaf in _floats(outputs))

    def compute(self, inputs: Any) -> Any:
        """Return the outputs in evaluation mode, without a graph."""
        with self._evaluating(nn.Module):
            return self._forward(inputs)

    def _forward(self, inputs: Any) -> Any:
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # Of a checkpoint, which has nothing to do here.
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                return self._outputs(inputs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
        with torch.enable_grad():  # the model may differentiate, or hook its activations
            return map_leaves(_detached, self._outputs(inputs))

    def _outputs(self, inputs: Any) -> Any:
        inputs = _fresh(inputs, self._device)
        with self._precision():
            return own_memory(call_model(self._module, inputs), inputs)

    def _evaluated(
        self,
        outputs: Any,
        targets: Any,
        probed: Sequence[int] | None = None,
        wide: bool = False,
    ) -> "_Evaluated":
        """Return the loss of outputs without a graph, and its gradient by them.

        Args:
            outputs: In host memory or on the device.
            targets: Of the same samples.
            probed: Positions of the leaves by which to differentiate, None for all.
            wide: Whether to compute in float32, whatever the precision.
        """
        half = (torch.float16, torch.bfloat16)
        with torch.enable_grad():
            leaves = leaves_of(to_device(outputs, self._device))
            wanted = []
            for position, leaf in enumerate(leaves):
                if _is_float(leaf):
                    leaf = leaf.detach().float() if wide and leaf.dtype in half else leaf.detach()
                    leaf = leaf.requires_grad_(probed is None or position in probed)
                wanted.append(leaf)
            copies = [leaf.clone() if _is_float(leaf) else leaf for leaf in wanted]
            with self._no_autocast() if wide else self._precision():
                loss = self._loss(replaced(outputs, copies), _fresh(targets, self._device))
            floats = [leaf for leaf in wanted if _is_float(leaf) and leaf.requires_grad]
            gradients = _gradients(loss, floats)
        scalars = [g for leaf, g in zip(floats, gradients, strict=True) if leaf.dim() == 0]
        inside = not loss.requires_grad or any(g is not None for g in scalars)
        return _Evaluated.of(loss, floats, gradients, inside)

    def _no_autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, enabled=False)

    def _with_graph(self, inputs: Any, targets: Any) -> "_Evaluated":
        with torch.enable_grad(), self._precision():
            outputs = call_model(self._module, _fresh(inputs, self._device))
            loss = self._loss(outputs, _fresh(targets, self._device))
            floats = [
                leaf
                for leaf in leaves_of(outputs)
                if _is_float(leaf) and leaf.requires_grad and leaf.dim() > 0
            ]
            gradients = _gradients(loss, floats)
        return _Evaluated.of(loss, floats, gradients, True)

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        if targets is None:
            return check_loss(self._loss_fn(outputs))
        return check_loss(self._loss_fn(outputs, targets))

    def _tolerance(
        self, tensors: Sequence[torch.Tensor], narrow: bool = False, wide: bool = False
    ) -> float:
        """Return what may differ, for these dtypes and the model's; `wide` for float32 alone."""
        kinds = {tensor.dtype for tensor in tensors} | {self._autocast}
        if torch.is_autocast_enabled(self._device.type):
            kinds.add(torch.get_autocast_dtype(self._device.type))
        for parameter in self._module.parameters():
            kinds.add(parameter.dtype)
        if wide:
            kinds = {torch.float32}
        table = {**_TOLERANCE, **_NARROW} if narrow else _TOLERANCE
        worst = max(table.get(kind, 0.0) for kind in kinds if kind is not None)
        tf32 = self._device.type == "cuda" and (rounds_to_tf32("matmul") or rounds_to_tf32("conv"))
        return max(worst or table[torch.float32], _TF32 if tf32 else 0.0)


@dataclass(frozen=True)
class _Evaluated:
    loss: torch.Tensor
    gradients: list[torch.Tensor]  # by the outputs that have samples
    size: float  # of the outputs: what rounding is relative to where a loss cancels
    inside: bool

    @classmethod
    def of(
        cls,
        loss: torch.Tensor,
        floats: list[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        inside: bool,
    ) -> "_Evaluated":
        pairs = [(leaf, g) for leaf, g in zip(floats, gradients, strict=True) if leaf.dim() > 0]
        filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in pairs]
        sizes = [float(leaf.detach().abs().max()) for leaf, _ in pairs if leaf.numel()]
        return cls(loss.detach().double(), filled, max(sizes, default=0.0), inside)


def _fresh(tree: Any, device: torch.device) -> Any:
    """Return a structure whose tensors are copies on a device, which may be changed in place."""

    def copied(leaf: Any) -> Any:
        moved = to_device(leaf, device)
        return moved.clone() if moved is leaf and isinstance(leaf, torch.Tensor) else moved

    return map_leaves(copied, tree)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    if not loss.requires_grad or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _floats(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(tree) if _is_float(leaf) and leaf.dim() > 0]


def _joined(outputs: Sequence[Any], counts: Sequence[int] | None) -> Any:
    """Return the parts' outputs as those of one, None where they do not go together.

    Without `counts`, their samples, they may have any number of rows.
    """
    every = [leaves_of(output) for output in outputs]
    if len({len(leaves) for leaves in every}) != 1:
        return None
    joined: list[Any] = []
    for column in zip(*every, strict=True):
        tensors = all(isinstance(leaf, torch.Tensor) for leaf in column)
        if not tensors or column[0].dim() == 0:
            joined.append(column[0])
            continue
        if any(
            leaf.dim() == 0
            or (counts is not None and len(leaf) != counts[number])
            or leaf.shape[1:] != column[0].shape[1:]
            for number, leaf in enumerate(column)
        ):
            return None
        joined.append(torch.cat(list(column)))
    return replaced(outputs[0], joined)


def _refuse_pairs(outputs: Sequence[Any], whole: Any, counts: Sequence[int]) -> None:
    """Refuse outputs with an entry for each pair of samples."""
    columns = [_floats(output) for output in (*outputs, whole)]
    if len({len(column) for column in columns}) != 1:
        return
    sizes = [*counts, sum(counts)]
    for leaves in zip(*columns, strict=True):
        dims = min(leaf.dim() for leaf in leaves)
        if any(len(leaf) != size for leaf, size in zip(leaves, sizes, strict=True)):
            continue
        for axis in range(1, dims):
            if all(leaf.shape[axis] == size for leaf, size in zip(leaves, sizes, strict=True)):
                raise MixedSamplesError(
                    f"the model returns a tensor of shape {tuple(leaves[-1].shape)} for "
                    f"{sizes[-1]} samples: it compares each with every other, and micro-batches "
                    f"would compare only their own. Return embeddings, one row for each sample, "
                    f"compare them in loss_fn, and give two_pass=True; or name in shared= what "
                    f"samples are compared with and was divided (a codebook with as many rows). "
                    f"{_OFF}"
                )


def _close(one: torch.Tensor, other: torch.Tensor, size: float) -> bool:
    """Whether two computations of the same loss by the same operations agree."""
    a, b = float(one), float(other)
    if not (np.isfinite(a) and np.isfinite(b)):
        return True
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-6 * size)


def _difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float | None:
    """Return the difference relative to the size, None where there is nothing to compare."""
    if len(ours) != len(theirs) or any(
        a.shape != b.shape for a, b in zip(ours, theirs, strict=True)
    ):
        return None  # fmt: skip
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        a, b = one.double(), other.double()
        size = float(torch.maximum(a.norm(), b.norm()))
        if not np.isfinite(size):
            return None
        largest = max(largest, float((a - b).norm()) / size if size > 0 else 0.0)
    return largest


def _relative(
    one: torch.Tensor, other: torch.Tensor, more: Sequence[torch.Tensor], size: float
) -> float:
    if not torch.isfinite(one):
        return float("inf")
    scale = max(abs(float(value)) for value in (one, other, *more))
    # A mean of outputs that cancel is exact to their rounding only.
    return max(0.0, abs(float(one - other)) - 1e-6 * size) / scale if scale > 0 else 0.0
