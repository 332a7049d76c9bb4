"""Choice of the mini-batches, and the samples, on which losses are checked to add up."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from repro.mbs.batches import Piece, in_order, targets_in_order
from repro.mbs.errors import MicroBatchError
from repro.mbs.setting import Setting
from repro.mbs.sizing import release_memory
from repro.measure import is_out_of_memory, memory_state
from repro.measure.batches import Sample
from repro.measure.loss_check import LossCheck
from repro.measure.loss_parts import MixedSamplesError
from repro.measure.telling import Novelty, telling_samples

_MOST_BYTES = 2**28  # most bytes of outputs kept for a comparison
_CHECKED = {
    "loss": "that the loss of a mini-batch is the mean over its samples",
    "mixing": "that the model treats samples one by one",
}
_ADVICE = (
    "If it is a mean over something else than samples, such as tokens, give weights= (one per "
    "sample; token_counts counts tokens); if it is a sum, normalization='none'; if it needs the "
    "mini-batch as a whole (a ratio, a root, pairs of samples), two_pass=True. What the loss "
    "knows of single samples (a teacher's outputs, weights of samples) belongs in targets. ",
    "If the model computes the loss: with Hugging Face's models pass num_items_in_batch "
    "among the inputs with normalization='none', or weights=token_counts(labels), shifted for a "
    "causal language model; with others compute it in loss_fn. ",
)


class Verification:
    """Checks mini-batches when a check is due; `modules` and `loss_fn` are the current ones."""

    def __init__(
        self,
        check: str,
        two_pass: bool,
        setting: Setting,
        modules: Sequence[nn.Module],
        loss_fn: Callable[..., Any],
    ) -> None:
        self._check, self._two_pass = check, two_pass
        self._setting, self._weighing = setting, setting.weighing
        undone = partial(setting.ledger.transaction, keep=False)
        given = setting.module, modules, loss_fn, setting.device, undone
        self.compare = LossCheck(*given, setting.precision.forward, _ADVICE)
        self._checked: set[str] = set()
        self._trained: set[nn.Module] = set()  # modules that were in training mode when checked
        self._novelty = Novelty()
        self._unmade: set[str] = set()
        self._stateful: list[str] = []
        self._watching = self._state_due = self._warned_of_state = False

    def begin(self, new_loss: bool, new_layers: bool) -> None:
        """Start a mini-batch, perhaps with another loss function, or with other layers."""
        self._unmade, self._stateful, self._watching = set(), [], False
        training = {module for module in self.compare.modules if module.training}
        if new_layers or not training <= self._trained:  # which may mix samples then alone
            self._checked.clear()
        elif new_loss:
            self._checked.discard("loss")
        self._trained = training if new_layers else self._trained | training

    def verify(self, piece: Piece, size: int, alone: bool = True) -> None:
        """Check model and loss if a check is due; with `alone` the piece is a whole mini-batch."""
        if self._check == "off":
            return
        number, processes, weighing = piece.num_samples, self._setting.processes, self._weighing
        due = {"loss", "mixing"} - (set() if self._check == "always" else self._checked)
        # The effect of `split` on a mini-batch is unknown here.
        unknown = weighing.known is None or piece.weights is not None or piece.batch is None
        # Undivided, too, it has two passes. Losses may exchange tensors between processes.
        read = self._two_pass and unknown and number > 1 and not processes.several
        if read and "loss" in due:
            self._small(piece, size, self.compare.loss_reads_outputs)
            self._checked.add("loss")
        if alone and size >= number:  # undivided
            return
        in_paper = weighing.normalization == "paper"
        loss = unknown and not self._two_pass and not in_paper
        if number < 2 or processes.sharded:  # all its processes would have to check
            self._unmade |= {"loss"} if loss else set()
            return
        # The paper's exact algorithm is checked only for parts divided by mistake.
        divided = piece.batch is not None and piece.batch.num_splittable() > 1
        mixing = divided or not in_paper
        if mixing and "mixing" in due:
            if piece.batch is None:
                made = self._of_split(piece, size)
            else:
                made = self._small(piece, size, self.compare.samples_stay_apart)
            (self._checked if made else self._unmade).add("mixing")
            if self.compare.hidden_state:
                self._stateful.append("something outside the model's buffers")
        if self._two_pass and self.compare.fixed_rows:
            raise MicroBatchError(
                "two_pass needs outputs with a row for each sample, and the model returns a tensor "
                "that is as long for a part of them; compute what belongs to no sample in loss_fn, "
                "or expand it to a row for each sample"
            )
        if loss and (self._has_news(piece, size) or "loss" in due):
            self._checked.discard("loss")  # after an error it is still to be checked
            made = size < number and self._of_micro_batches(piece, size)
            # Micro-batches may weigh the same by chance, as with equally many of each class.
            if not made or piece.weights is None:
                made = self._small(piece, size, self.compare.loss_adds_up) or made
            (self._checked if made else self._unmade).add("loss")

    def _has_news(self, piece: Piece, size: int) -> bool:
        """Whether there are values, or a micro-batch without weight, as in no mini-batch before."""
        if piece.batch is None:
            return False
        new = self._novelty.in_batch(piece.batch)
        if piece.weights is None or "empty" in self._checked:
            return new
        # One without weight is left out: right only where its loss is divided by that weight, 0.
        empty = 0 in self._weighing.plan(piece, size).weights
        self._checked |= {"empty"} if empty else set()
        return new or empty

    def _of_micro_batches(self, piece: Piece, size: int) -> bool:
        """Compare the losses of micro-batches with the whole loss; return whether that ran."""
        if memory_state(self._setting.device).simulated:
            return False  # a budget counts every byte: a size that fits would seem too large
        host = memory_state("cpu")
        room = min(_MOST_BYTES, max(0, host.limit_bytes - host.live_bytes) // 16)
        plan, batch = self._weighing.plan(piece, size), piece.batch

        def targets(count: int) -> Any:
            if batch is not None:
                return batch.slice(0, plan.bounds[count - 1][1])[1]
            return targets_in_order(piece, plan, count, rows=False)

        counts = [stop - start for start, stop in plan.bounds]
        inputs = None if batch is None else batch.inputs
        exact = self._weighing.normalization == "exact"
        sample = Sample(plan.parts(), counts, plan.weights, exact, targets, inputs)
        return bool(self._fits(self.compare.outputs_add_up, sample, room))

    def _of_split(self, piece: Piece, size: int) -> bool:
        """Compare two parts of `split` with one of as many samples; return whether that ran."""
        plan = piece.plan(size)
        parts, ranges = [*itertools.islice(plan.parts(), 2)], plan.bounds[:2]
        both = replace(piece, weights=None).plan(ranges[-1][1])
        if len(parts) < 2 or both.bounds[0] != (0, ranges[1][1]):
            return False
        inputs, counts = next(both.parts())[0], [stop - start for start, stop in ranges]
        sample = Sample(parts, counts, counts, True, lambda _: None, inputs)
        try:
            return bool(self._fits(self.compare.samples_stay_apart, sample))
        except MixedSamplesError:
            if in_order(inputs, parts, ranges):
                raise
            return False  # of other samples, perhaps

    def start(self, several: bool) -> None:
        """Begin the micro-batches of a piece; with `several` the mini-batch has more than one."""
        self._state_due = several and self._check != "off"
        self._watching = self._state_due or (self._two_pass and self._check != "off")

    def watched(self, index: int) -> Iterable[nn.Parameter]:
        """The parameters whose gradients the forward pass of a micro-batch may not change."""
        # The second micro-batch would change what the first has left. So would the first where
        # there was an earlier piece or pass.
        due = self._watching and index < 2 and not self._setting.processes.sharded
        return self._setting.module.parameters() if due else ()

    def note_state(self) -> None:
        """Note the names of buffers that the first micro-batch has changed and the next reads."""
        if self._state_due and not self._warned_of_state:
            self._stateful += self._setting.ledger.changed_buffers()
        self._state_due = False

    def warn(self) -> None:
        """Warn, once each, of problems noted in a mini-batch that succeeded."""
        # After the mini-batch: if it failed, its own error says more.
        if self._stateful and not self._warned_of_state:
            self._warned_of_state = True
            names = ", ".join(self._stateful[:3]) + (" and others" if self._stateful[3:] else "")
            warnings.warn(
                f"a forward pass changes {names}. Each micro-batch does so. If the next one "
                f"computes with what it left (a codebook, a queue, a running mean, a power "
                f"iteration), the gradient is not that of the undivided mini-batch; nor is a "
                f"statistic that evaluation reads. Update it once for each mini-batch, outside "
                f"forward. Name random number generators of the "
                f"model's own in generators=; check='off' says that all is well (a count of calls)",
                RuntimeWarning,
                stacklevel=3,
            )
        if unmade := self._unmade - self._checked:
            self._checked |= unmade
            unchecked = " and ".join(t for name, t in _CHECKED.items() if name in unmade)
            warnings.warn(
                f"MicroBatchStreamer could not check {unchecked}: a few samples cannot be computed "
                f"alone, or have another outcome the second time; the model is fully sharded; or a "
                f"mini-batch comes one sample at a time. docs/losses.md says what to give for "
                f"which loss; check='off' says that it is so",
                RuntimeWarning,
                stacklevel=3,
            )

    def _small(self, piece: Piece, size: int, check: Callable[[Sample], bool]) -> bool:
        """Check on a few samples, with separate forward passes; return whether that ran.

        Two groups have the size of micro-batches, or half of it if memory runs out or the model
        refuses their number: some models accept no fewer, or no more, samples at once.
        """
        number = piece.num_samples
        count = min(number // -(-number // size), number // 2)
        half = max(1, min(size // 2, number // 2))
        counts = [count, half] if half < count else [count]
        while counts:
            count = counts.pop(0)
            if made := self._fits(self._on_two_groups, piece, count, check):
                return True
            if made is None and not counts and count > 1:
                counts.append(count // 2)
        return False

    def _fits(self, check: Callable[..., bool], *arguments: Any) -> bool | None:
        """Run a check; return None where memory runs out."""
        try:
            return check(*arguments)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release_memory(self._setting.device)  # outside the except block, as in `AutoSizer`
        return None

    def _on_two_groups(self, piece: Piece, count: int, check: Callable[[Sample], bool]) -> bool:
        """Check two groups of samples; False without weight, or of samples that `split` makes."""
        if piece.batch is None:
            return False
        groups = telling_samples(piece.batch, count, classes_apart=True)
        weights = [float(count)] * 2
        if piece.weights is not None:
            weights = [float(piece.weights[group].sum()) for group in groups]
        exact = self._weighing.normalization == "exact"
        if exact and sum(weights) == 0:
            return False
        return check(Sample.of(piece.batch, groups, weights, exact))
