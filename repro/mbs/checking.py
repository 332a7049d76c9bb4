"""Comparisons of a mini-batch as a whole with its micro-batches."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from repro.mbs.batches import own_memory
from repro.mbs.errors import LossCheckError, MicroBatchError, MixedSamplesError, loss_of
from repro.mbs.setting import Setting
from repro.measure import is_out_of_memory
from repro.measure.batches import call_model, leaves_of, map_leaves, to_device
from repro.measure.containers import holds_tensors
from repro.measure.loss_parts import (
    HALF,
    Evaluated,
    compare,
    difference,
    differentiated,
    evaluate,
    floats,
    fresh,
    joined,
    kinds_of,
    normalises_by_batch,
    relative,
    tolerance,
)
from repro.measure.untouched import Snapshot

_WAYS = (
    "If it is a mean over something else than samples, such as tokens, give weights= (one per "
    "sample; token_counts counts tokens); if it is a sum, normalization='none'; if it needs the "
    "mini-batch as a whole (a ratio, a root, pairs of samples), two_pass=True. What the loss "
    "knows of single samples (a teacher's outputs, weights of samples) belongs in targets. "
)
_WEIGHTED = (
    "With weights= a micro-batch's loss has to be divided by the sum of its own samples' weights. "
)
_INSIDE = (
    "The loss is computed inside the model: with Hugging Face's models pass num_items_in_batch "
    "among the inputs with normalization='none', or weights=token_counts(labels), shifted for a "
    "causal language model; with others compute it in loss_fn. "
)
_OFF = "check='off' computes it all the same"


@dataclass(frozen=True)
class Sample:
    """Groups of samples of a mini-batch, such as its micro-batches, and all groups as one."""

    parts: Iterable[Any]  # (inputs, targets) of each group
    counts: Sequence[int]
    weights: Sequence[float]  # of each group
    exact: bool  # whether a group's share is its weight over the total weight
    targets: Callable[[int], Any]  # of the first groups, concatenated
    inputs: Any = None  # of all groups, concatenated; None if that is impossible
    twice: Any = None  # inputs of the second group, repeated; None without a second group
    weighted: bool = False  # whether the caller gave the weights

    def factors(self, count: int) -> list[float]:
        """Return each share of the first `count` groups in their joint loss."""
        total = sum(self.weights[:count])
        return [weight / total if self.exact else 1.0 for weight in self.weights[:count]]


class SelfCheck:
    """Compares the losses of samples' parts with the loss of the whole, and the model's outputs.

    No backward pass through the model is made. `hidden_state` says whether two forward passes with
    the same samples, buffers and random numbers computed different outputs.
    """

    def __init__(
        self,
        setting: Setting,
        modules: Sequence[nn.Module],
        loss_fn: Callable[..., torch.Tensor],
    ) -> None:
        # The uncompiled module: other shapes and evaluation mode would compile it twice more.
        self._module = getattr(setting.module, "_orig_mod", setting.module)
        self._modules, self._loss_fn = modules, loss_fn
        self._undone = partial(setting.ledger.transaction, keep=False)
        self._device, self._precision = setting.device, setting.precision
        self.hidden_state = False

    def outputs_add_up(self, sample: Sample, room: float) -> bool:
        """Compare the losses of the groups' outputs; return whether that was possible.

        Outputs are computed once, so that layers' random numbers and batch statistics do not
        matter. The first groups are used, as far as `room` in host memory, in bytes, holds outputs.

        Raises:
            LossCheckError: The losses do not add up.
        """
        # Training SyncBatchNorm would wait for processes that check nothing.
        return self._attempt(self._compare_outputs, sample, room, evaluating=nn.SyncBatchNorm)

    def loss_adds_up(self, sample: Sample) -> bool:
        """Compare the losses of a few samples; return whether that was possible.

        They are computed as a whole, too: a loss may depend on more than outputs and targets.

        Raises:
            LossCheckError: The losses do not add up.
        """
        normalises = any(isinstance(m, _NormBase) and m.training for m in self._modules)
        every: tuple[Any, ...] = (nn.SyncBatchNorm, nn.Module, (_DropoutNd, _NormBase))
        for kinds in every:
            if self._attempt(self._compare_outputs, sample, math.inf, evaluating=kinds):
                return True
            # In training mode, if repeatable; dropout is not.
            if normalises and kinds is nn.SyncBatchNorm:
                continue
            if self._attempt(self._compare_inside, sample, evaluating=kinds):
                return True
        return False

    def samples_stay_apart(self, sample: Sample) -> bool:
        """Compare the outputs of a few samples; return whether that was possible.

        They are computed once beside other samples and once beside copies of themselves, with the
        same random numbers: outputs differ if a tensor that all samples need was divided, or if the
        model compares samples.

        Raises:
            MixedSamplesError: The outputs depend on how the samples were divided.
        """
        if normalises_by_batch(self._modules):
            return True
        # Micro-batch statistics are the paper's behaviour, so that no model is refused for them.
        kinds: tuple[Any, ...] = (_NormBase, nn.Module)
        made = any(self._attempt(self._compare_neighbours, sample, evaluating=k) for k in kinds)
        return made or self.hidden_state

    def _attempt(self, check: Callable[..., bool], *arguments: Any, evaluating: Any = ()) -> bool:
        """Run a check with modules of some kinds in evaluation mode; return whether it ran."""
        attributes = Snapshot(self._module, tensors=False)
        try:
            with self._undone(), self._evaluating(evaluating):
                return check(*arguments)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, LossCheckError | MixedSamplesError):
                raise
            return False
        finally:
            attributes.restore()

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

    # The loss

    def _compare_outputs(self, sample: Sample, room: float) -> bool:
        pairs: list[tuple[Any, Any]] = []
        recorded = None  # the first loss, with the state that the forward pass changed
        for inputs, targets in sample.parts:
            outputs = self._forward(inputs)
            leaves = leaves_of(outputs)
            room -= sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            if not all(map(_can_be_joined, leaves)):
                return False
            if room < 0:
                break
            recorded = recorded or self._evaluated(outputs, targets)
            pairs.append((to_device(outputs, torch.device("cpu")), targets))
        if recorded is None or len(pairs) < 2:
            return False
        counts, factors = sample.counts[: len(pairs)], sample.factors(len(pairs))
        uneven = sample.inputs is None  # samples may have different numbers of rows
        together = joined([outputs for outputs, _ in pairs], None if uneven else counts)
        parts = [self._evaluated(*pair) for pair in pairs]
        inside = all(part.inside for part in parts)
        if together is None or inside or not _repeats(parts[0], recorded):
            return False
        # Rounding to half precision changes a loss by more than the faults to be found.
        half = any(leaf.dtype in HALF for leaf in floats(together))
        wide = half or self._precision.dtype is not None
        if wide:
            parts = [self._evaluated(*pair, wide=True) for pair in pairs]

        def whole() -> Evaluated:
            with _fails_as(
                LossCheckError,
                f"the loss can be computed over {counts[0]} samples, but not over {sum(counts)}: "
                f"the model returned, or the loss was given, something that belongs to the whole "
                f"mini-batch and was divided; name it in shared=",
            ):
                return self._evaluated(together, sample.targets(len(pairs)), wide)

        note = _WEIGHTED if sample.weighted else ""
        return self._compare_losses(counts, factors, parts, whole, note, True, wide)

    def _compare_inside(self, sample: Sample) -> bool:
        """Compare losses, with a graph from the model's outputs to the loss only."""
        parts = [self._with_graph(*part) for part in sample.parts]
        whole = partial(self._with_graph, sample.inputs, sample.targets(len(parts)))
        note = _INSIDE + (_WEIGHTED if sample.weighted else "")
        return self._compare_losses(
            sample.counts, sample.factors(len(parts)), parts, whole, note, False, False
        )

    def _compare_losses(
        self,
        counts: Sequence[int],
        factors: Sequence[float],
        parts: list[Evaluated],
        evaluate_whole: Callable[[], Evaluated],
        note: str,
        same_outputs: bool,
        wide: bool,
    ) -> bool:
        whole = evaluate_whole()
        if not torch.isfinite(whole.loss):
            return False  # the mini-batch itself will raise the error
        found = compare(whole, parts, factors)
        kinds = [whole.loss, *whole.gradients]
        narrow = self._tolerance(kinds, narrow=True, wide=wide)
        allowed = narrow if same_outputs else self._tolerance(kinds)
        if found.value <= narrow and found.gradient <= allowed:
            return True
        again = evaluate_whole()
        spread = relative(again.loss, whole)
        if spread > narrow or (difference(again.gradients, whole.gradients) or 0.0) > allowed:
            return False
        raise LossCheckError(
            f"the loss of {sum(counts)} samples is {found.whole:.6g}, that of its "
            f"{len(counts)} parts together {found.combined:.6g}; their gradients by the outputs "
            f"differ by {100 * found.gradient:.3g} %. "
            f"{'It is no sum' if set(factors) == {1.0} else 'It is no mean'} over samples. "
            f"{note}{_WAYS}{_OFF}"
        )

    # The samples

    def _compare_neighbours(self, sample: Sample) -> bool:
        """Refuse a model with outputs that depend on the other samples in the batch.

        Random numbers and buffers are the same each time.
        """
        # Outputs with one row per sample, told from outputs that happen to be of that length.
        count = sample.counts[1]
        _, (inputs, _) = sample.parts
        alone = [len(leaf) == count for leaf in self._rows(inputs)]

        def last(inputs: Any) -> list[torch.Tensor]:
            rows = zip(self._rows(inputs), alone, strict=True)
            return [leaf[-count:] for leaf, own in rows if own and len(leaf) == 2 * count]

        with _fails_as(
            MixedSamplesError,
            f"the model can be called with {count} samples, but not with {2 * count}: something "
            f"was divided that belongs to the whole mini-batch, because its first dimension is as "
            f"long, and is to be named in shared=; or it takes only as many at once",
        ):
            whole = last(sample.inputs)
        off, allowed = difference(whole, last(sample.twice)), self._tolerance(whole)
        if off is None or off <= allowed:
            return True
        again = difference(last(sample.inputs), whole)
        if again is None or again > allowed:
            self.hidden_state = True
            return False
        raise MixedSamplesError(
            f"the model's outputs for {count} samples differ by {100 * off:.2g} % with which "
            f"others are computed beside them, and a micro-batch has only its own. Name in shared= "
            f"what belongs to the whole mini-batch, give samples first (batch_first=True of "
            f"torch's recurrent layers and transformers), or let the model treat samples one by "
            f"one. If it is to compare them, return embeddings, one row for each sample, compare "
            f"them in loss_fn, and give two_pass=True. If it is a normalisation by the batch that "
            f"may be one by the micro-batch, as BatchNorm's is, {_OFF}"
        )

    def _rows(self, inputs: Any) -> list[torch.Tensor]:
        with self._undone():
            return floats(self._forward(inputs))

    # Forward passes and losses

    def compute(self, inputs: Any) -> Any:
        """Return the outputs in evaluation mode, without a graph."""
        with self._evaluating(nn.Module):
            return self._forward(inputs)

    def _forward(self, inputs: Any) -> Any:
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # Raised by checkpointing, which has no effect here.
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                return self._outputs(inputs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
        with torch.enable_grad():  # the model may differentiate, or hook its activations
            outputs = self._outputs(inputs)
        return map_leaves(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, outputs)

    def _outputs(self, inputs: Any) -> Any:
        inputs = fresh(inputs, self._device)
        with self._precision.forward():
            return own_memory(call_model(self._module, inputs), inputs)

    def _evaluated(self, outputs: Any, targets: Any, wide: bool = False) -> Evaluated:
        """Return the loss of outputs (on host or device), and its gradient by the outputs."""

        def of_copies(copies: Any) -> torch.Tensor:
            kind = self._device.type
            wider = torch.autocast(kind, enabled=False) if wide else self._precision.forward()
            with wider:
                return loss_of(self._loss_fn, copies, fresh(targets, self._device))

        return evaluate(of_copies, to_device(outputs, self._device), wide=wide)

    def _with_graph(self, inputs: Any, targets: Any) -> Evaluated:
        with torch.enable_grad(), self._precision.forward():
            outputs = call_model(self._module, fresh(inputs, self._device))
            loss = loss_of(self._loss_fn, outputs, fresh(targets, self._device))
            wanted = [leaf for leaf in floats(outputs) if leaf.requires_grad]
            return replace(differentiated(loss, wanted), inside=True)

    def _tolerance(
        self, tensors: Sequence[torch.Tensor], narrow: bool = False, wide: bool = False
    ) -> float:
        """Return the tolerance for the tensors' and the model's dtypes; `wide`: for float32."""
        kinds: set[torch.dtype | None] = {torch.float32}
        if not wide:
            kinds = {*kinds_of(self._module, tensors, self._device), self._precision.autocast}
        return tolerance(kinds, self._device, narrow=narrow)


@contextmanager
def _fails_as(kind: type[MicroBatchError], why: str) -> Iterator[None]:
    """Raise an error of this kind for one of the model or the loss, but for lack of memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise kind(f"{why} ({error}). {_OFF}") from error


def _can_be_joined(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout == torch.strided and not leaf.is_nested
    return not holds_tensors(leaf, 3)


def _repeats(again: Evaluated, recorded: Evaluated) -> bool:
    """Whether a loss computed again by the same operations equals the recorded one."""
    a, b = float(again.loss), float(recorded.loss)
    if not (math.isfinite(a) and math.isfinite(b)):
        return True
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-6 * again.size)
