"""A check, before the first mini-batch is computed, that micro-batches add up to it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from repro.mbs.batches import own_memory
from repro.mbs.errors import LossCheckError, MicroBatchError, MixedSamplesError, check_loss
from repro.measure import is_out_of_memory
from repro.measure.batches import Batch, call_model, leaves_of, replaced, to_device

# What two ways of computing the same may differ by, relative to its size. Rounding differs by a
# few eps (the parts have other shapes, and so other kernels), amplified by the model's depth;
# what the check is for differs by its first or second digit.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TF32 = 1e-2

_WAYS = (
    "If it is a mean over something else than samples, such as tokens, give weights= (one per "
    "sample; token_counts counts tokens); if it is a sum, normalization='none'; if it needs the "
    "mini-batch as a whole (a ratio, a root, pairs of samples), two_pass=True. "
)
_INSIDE = (
    "The loss is computed inside the model: with Hugging Face's models pass num_items_in_batch "
    "among the inputs with normalization='none', or weights=token_counts(labels), shifted for a "
    "causal language model; or compute the loss from the outputs, in loss_fn. "
)
_OFF = "check='off' computes it all the same"


@dataclass(frozen=True)
class Sample:
    """Two groups of samples of a mini-batch, and both together.

    Each of `parts` is (inputs, targets), as is `whole`, whose inputs are None where they cannot be
    put together.
    `factors` is what the gradient of each part counts in the gradient of both.
    """

    parts: tuple[Any, Any]
    whole: Any
    counts: tuple[int, int]
    factors: tuple[float, float]


class SelfCheck:
    """Computes the loss of a few samples as a whole and in two parts, and compares.

    Compared are the values and the gradients by the model's outputs, since values alone can agree
    by chance: with all outputs zero, as a fresh last layer often gives, a mean over any selection
    of samples is the same. No backward pass through the model is made. With `mixing` the outputs
    themselves are compared, of the model in evaluation mode: a tensor that was divided although
    all samples need it shows there.

    Where the model cannot be evaluated so, or draws random numbers even then, the check says
    nothing.

    Args:
        module: The model.
        modules: It and the loss, if that is a module, with all that they contain.
        loss_fn: The loss.
        device: The device.
        precision: Makes the context of the forward pass.
        autocast: The dtype of autocast, None without.
    """

    def __init__(
        self,
        module: nn.Module,
        modules: Sequence[nn.Module],
        loss_fn: Callable[..., torch.Tensor],
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
        autocast: torch.dtype | None,
    ) -> None:
        # Compiled for other shapes and for evaluation, a model would be compiled twice more.
        self._module = getattr(module, "_orig_mod", module)
        self._modules = modules
        self._loss_fn = loss_fn
        self._device = device
        self._precision = precision
        self._autocast = autocast

    def run(self, sample: Sample, loss: bool, mixing: bool) -> bool:
        """Return whether the check could be made.

        Args:
            sample: What to compute.
            loss: Whether to check the loss.
            mixing: Whether to check that the model treats samples one by one.

        Raises:
            LossCheckError: The losses do not add up.
            MixedSamplesError: The outputs depend on how the samples were divided.
        """
        for kinds in (nn.Module, (_DropoutNd, _NormBase)):
            try:
                with self._evaluating(kinds):
                    return self._compare(sample, loss, mixing)
            except MicroBatchError as error:
                if isinstance(error, LossCheckError | MixedSamplesError):
                    raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
        return False

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

    def _compare(self, sample: Sample, loss: bool, mixing: bool) -> bool:
        outputs = [self._forward(inputs) for inputs, _ in sample.parts]
        joined = _joined(outputs, sample.counts)
        if mixing and sample.whole[0] is not None and joined is not None:
            self._compare_outputs(sample, joined)
        if not loss:
            return True
        targets = [part[1] for part in sample.parts]
        whole_targets = sample.whole[1]
        parts = [self._evaluated(*pair) for pair in zip(outputs, targets, strict=True)]
        inside = any(part.inside for part in parts)
        if not inside and joined is not None:

            def evaluate() -> _Evaluated:
                return self._evaluated(joined, whole_targets)

        elif sample.whole[0] is None:
            return False
        else:
            # Computed in the model: with the graph from its outputs to the loss, and no further.
            parts = [self._with_graph(*part) for part in sample.parts]

            def evaluate() -> _Evaluated:
                return self._with_graph(*sample.whole)

        return self._compare_losses(sample, parts, evaluate, inside)

    def _compare_outputs(self, sample: Sample, joined: Any) -> None:
        whole = self._forward(sample.whole[0])
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
            f"depends on the others. Name in shared= what belongs to the whole mini-batch (a "
            f"tensor whose first dimension is as long by chance was divided), or let the model "
            f"treat samples one by one. {_OFF}"
        )

    def _compare_losses(
        self,
        sample: Sample,
        parts: list["_Evaluated"],
        evaluate: Callable[[], "_Evaluated"],
        inside: bool,
    ) -> bool:
        whole = evaluate()
        if not torch.isfinite(whole.loss):
            return False  # the mini-batch itself will say so
        pairs = [
            (f, part) for f, part in zip(sample.factors, parts, strict=True) if f > 0
        ]  # a part of no weight does not count, and may be 0 / 0
        combined = sum(factor * part.loss for factor, part in pairs)
        assert isinstance(combined, torch.Tensor)
        value = _relative(combined, whole.loss, [part.loss for _, part in pairs], whole.size)
        gradient = 0.0
        if whole.gradients and all(len(p.gradients) == len(whole.gradients) for p in parts):
            columns = zip(*(part.gradients for part in parts), strict=True)
            expected = [
                torch.cat([f * g if f > 0 else 0 * torch.nan_to_num(g)
                           for f, g in zip(sample.factors, column, strict=True)])
                for column in columns
            ]  # fmt: skip
            found = _difference(expected, whole.gradients)
            gradient = 0.0 if found is None else found
        tolerance = self._tolerance([whole.loss, *whole.gradients])
        if value <= tolerance and gradient <= tolerance:
            return True
        again = evaluate()
        spread = _relative(again.loss, whole.loss, [], whole.size)
        if spread > tolerance or (_difference(again.gradients, whole.gradients) or 0.0) > tolerance:
            return False
        raise LossCheckError(
            f"the loss of {sum(sample.counts)} samples is {float(whole.loss):.6g}, that of its "
            f"two parts together {float(combined):.6g}; their gradients by the outputs differ by "
            f"{100 * gradient:.3g} %. "
            f"{'It is no sum' if sample.factors == (1.0, 1.0) else 'It is no mean'} over samples. "
            f"{_INSIDE if inside else ''}{_WAYS}{_OFF}"
        )

    def _forward(self, inputs: Any) -> Any:
        inputs = to_device(inputs, self._device)
        with torch.no_grad(), self._precision():
            return own_memory(call_model(self._module, inputs), inputs)

    def _evaluated(self, outputs: Any, targets: Any) -> "_Evaluated":
        """Return the loss of outputs without a graph, and its gradient by them."""
        with torch.enable_grad():
            leaves = leaves_of(outputs)
            wanted = [
                (leaf.detach().requires_grad_() if _is_float(leaf) else leaf) for leaf in leaves
            ]
            copies = [leaf.clone() if _is_float(leaf) else leaf for leaf in wanted]
            with self._precision():
                loss = self._loss(replaced(outputs, copies), to_device(targets, self._device))
            floats = [leaf for leaf in wanted if _is_float(leaf)]
            gradients = _gradients(loss, floats)
        scalars = [g for leaf, g in zip(floats, gradients, strict=True) if leaf.dim() == 0]
        inside = not loss.requires_grad or any(g is not None for g in scalars)
        return _Evaluated.of(loss, floats, gradients, inside)

    def _with_graph(self, inputs: Any, targets: Any) -> "_Evaluated":
        with torch.enable_grad(), self._precision():
            outputs = call_model(self._module, to_device(inputs, self._device))
            loss = self._loss(outputs, to_device(targets, self._device))
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

    def _tolerance(self, tensors: Sequence[torch.Tensor]) -> float:
        kinds = {tensor.dtype for tensor in tensors} | {self._autocast}
        if torch.is_autocast_enabled(self._device.type):
            kinds.add(torch.get_autocast_dtype(self._device.type))
        for parameter in self._module.parameters():
            kinds.add(parameter.dtype)
        worst = max(_TOLERANCE.get(kind, 0.0) for kind in kinds if kind is not None)
        tf32 = self._device.type == "cuda" and (
            torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        )
        return max(worst or _TOLERANCE[torch.float32], _TF32 if tf32 else 0.0)


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


def _gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    if not loss.requires_grad or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _floats(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(tree) if _is_float(leaf) and leaf.dim() > 0]


def _joined(outputs: list[Any], counts: tuple[int, int]) -> Any:
    """Return both parts' outputs as those of one, None where they do not go together."""
    columns = list(zip(*(leaves_of(output) for output in outputs), strict=False))
    if len(columns) != len(leaves_of(outputs[0])) or len(columns) != len(leaves_of(outputs[1])):
        return None
    joined: list[Any] = []
    for one, other in columns:
        tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if not tensors or one.dim() == 0:
            joined.append(one)
            continue
        if (len(one), len(other)) != counts or one.shape[1:] != other.shape[1:]:
            return None
        joined.append(torch.cat([one, other]))
    return replaced(outputs[0], joined)


def _difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float | None:
    """Return the difference relative to the size, None where there is nothing to compare."""
    if len(ours) != len(theirs) or any(
        a.shape != b.shape for a, b in zip(ours, theirs, strict=True)
    ):
        return None  # fmt: skip
    found = 0.0
    for one, other in zip(ours, theirs, strict=True):
        a, b = one.double(), other.double()
        size = float(torch.maximum(a.norm(), b.norm()))
        if not np.isfinite(size):
            return None
        found = max(found, float((a - b).norm()) / size if size > 0 else 0.0)
    return found


def _relative(
    one: torch.Tensor, other: torch.Tensor, more: Sequence[torch.Tensor], size: float
) -> float:
    if not torch.isfinite(one):
        return float("inf")
    scale = max(abs(float(value)) for value in (one, other, *more))
    # A mean of outputs that cancel is exact to their rounding only.
    return max(0.0, abs(float(one - other)) - 1e-6 * size) / scale if scale > 0 else 0.0


def telling_samples(batch: Batch, count: int) -> tuple[list[int], list[int]]:
    """Return two groups of `count` samples that differ in what losses tend to weigh by.

    Padding, ignored labels and rare classes show as integers that are negative or zero: one group
    has the samples with the fewest of them, the other those with the most. Without any, samples
    all over the mini-batch are taken.
    """
    number = batch.num_samples
    score = np.zeros(number)
    for _, leaf in batch.tensors():
        whole = torch.as_tensor(leaf) if _is_integer(leaf) else None
        if whole is not None and len(whole) == number and whole.layout == torch.strided:
            score += (whole <= 0).reshape(number, -1).sum(1).cpu().numpy()
            score += 1e3 * (whole < 0).reshape(number, -1).sum(1).cpu().numpy()
    order = np.argsort(score, kind="stable")
    if score[order[0]] == score[order[-1]]:
        order = np.arange(number)
        spread = np.unique(np.linspace(0, number - 1, 2 * count).round().astype(int))
        if len(spread) == 2 * count:
            order = spread
    return sorted(order[:count].tolist()), sorted(order[-count:].tolist())


def has_ignored(batch: Batch) -> bool:
    """Whether integers of the mini-batch are negative, as the labels of padding are."""
    return any(
        bool((torch.as_tensor(leaf) < 0).any())
        for _, leaf in batch.tensors()
        if _is_integer(leaf) and len(leaf) and leaf.dtype not in (torch.uint8, torch.bool, np.uint8)
    )


def _is_integer(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "iub"
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return False
    return not (leaf.is_floating_point() or leaf.is_complex())
