"""When micro-batches are checked to add up to their mini-batch, and on which samples."""

import itertools
import warnings
from collections.abc import Callable

from repro.mbs.batches import Piece, Plan, joined_targets
from repro.mbs.checking import Sample, SelfCheck
from repro.mbs.collecting import Collector, room_for_outputs
from repro.mbs.errors import LossCheckError
from repro.mbs.sizing import release_memory
from repro.mbs.weighing import Weighing
from repro.measure import is_out_of_memory
from repro.measure.telling import Novelty, telling_samples

_CHECKED = {
    "loss": "that the loss of a mini-batch is the mean over its samples",
    "mixing": "that the model treats samples one by one",
}


class Verification:
    """Checks mini-batches where that is due, and remembers what has been checked."""

    def __init__(
        self, check: str, two_pass: bool, sharded: bool, weighing: Weighing, compare: SelfCheck
    ) -> None:
        self._check, self._two_pass, self._sharded = check, two_pass, sharded
        self._weighing, self._compare = weighing, compare
        self._checked: set[str] = set()
        self._novelty: Novelty[bool] = Novelty(wait=True)
        self._loss_due = False
        self._unmade: set[str] = set()
        self._stateful: list[str] = []
        self._warned_of_state = False

    def begin(self, changed: bool) -> None:
        """Start a mini-batch; `changed` says whether another loss function was given."""
        self._unmade, self._stateful = set(), []
        if changed:
            self._checked.discard("loss")

    def forget(self) -> None:
        """Forget what was checked: the model has other layers now."""
        self._checked.clear()

    def verify(self, piece: Piece, size: int, alone: bool = True) -> None:
        """Check what can be checked before the micro-batches: model, and loss of one micro-batch.

        With `alone` the piece is a whole mini-batch.
        """
        # What `split` makes of a mini-batch is known to the user alone.
        unknown = self._weighing.known is None or piece.weights is not None or piece.batch is None
        in_paper = self._weighing.normalization == "paper"
        loss = unknown and not self._two_pass and not in_paper
        # The paper's algorithm to the letter, but for what was divided by mistake.
        mixing = piece.batch is not None and (not in_paper or piece.batch.num_splittable() > 1)
        number = piece.num_samples
        self._loss_due = False
        if self._check == "off" or not (loss or mixing) or (alone and size >= number):
            return
        if number < 2 or self._sharded:  # whose processes would all have to check
            self._unmade = {"loss"} - self._checked if loss else set()
            return
        new = loss and piece.batch is not None and self._novelty.newest(piece.batch, True)
        due = self._check == "always" or "loss" not in self._checked or bool(new)
        self._loss_due = loss and due
        mixing = mixing and (self._check == "always" or "mixing" not in self._checked)
        alone_in_piece = self._loss_due and size >= number
        if mixing or alone_in_piece:
            made = self._small(piece, size, alone_in_piece, mixing)
            if alone_in_piece:
                self._loss_due = False
                self._mark(made, "loss")
            if mixing:
                self._mark(made, "mixing")
                if self._compare.hidden_state:
                    self._stateful.append("something outside the model's buffers")

    def collector(self) -> Collector | None:
        """Return a keeper of the micro-batches' outputs, None where nothing is to compare."""
        return Collector(room_for_outputs(self._compare.device)) if self._loss_due else None

    def conclude(self, piece: Piece, plan: Plan, collector: Collector | None, scale: float) -> None:
        """Compare the micro-batches' losses with that of the whole.

        `scale` is the factor of a loss in the backward pass, over its weight.

        Raises:
            LossCheckError: The losses do not add up.
        """
        if collector is None:
            return
        made = False
        while collector.usable and len(collector.parts) > 1:
            try:
                with self._compare.undone():
                    made = self._compare_collected(piece, plan, collector, scale)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            release_memory(self._compare.device)
            del collector.parts[len(collector.parts) // 2 :]
        through = bool(collector.parts) and not made
        collector.parts.clear()
        if not made:
            size = max(stop - start for start, stop in plan.bounds)
            made = self._small(piece, size, True, False, through)
        self._mark(made, "loss")

    def _compare_collected(
        self, piece: Piece, plan: Plan, collector: Collector, scale: float
    ) -> bool:
        count = len(collector.parts)
        targets = [part[1] for part in itertools.islice(plan.parts(), count)]
        if piece.batch is not None:
            whole = piece.batch.slice(0, plan.bounds[count - 1][1])[1]
        else:
            try:
                whole = joined_targets(targets)
            except ValueError:
                return False
        try:
            return self._compare.compare_collected(
                collector,
                targets,
                whole,
                exact=self._weighing.normalization == "exact",
                scale=scale,
                weighted=piece.weights is not None,
                uneven=piece.batch is None,
            )
        except LossCheckError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False  # the loss takes what only the micro-batches' own passes have

    def _mark(self, made: bool, kind: str) -> None:
        (self._checked if made else self._unmade).add(kind)
        if made:
            self._unmade.discard(kind)

    def note_state(self, changed: Callable[[], list[str]]) -> None:
        """Note the buffers that one micro-batch has changed and the next one reads, by name."""
        if self._check != "off" and not self._warned_of_state:
            self._stateful += changed()

    def warn(self) -> None:
        """Warn, once each, of what a mini-batch that went through has shown."""
        # After the mini-batch: where it failed itself, its error says more.
        if self._stateful and not self._warned_of_state:
            self._warned_of_state = True
            names = ", ".join(self._stateful[:3]) + (" and others" if self._stateful[3:] else "")
            warnings.warn(
                f"a forward pass changes {names}. Each micro-batch does so. If the next one "
                f"computes with what it left (a codebook, a queue, a running mean, a power "
                f"iteration), the gradient is not that of the undivided mini-batch: update it once "
                f"for each mini-batch, outside forward, or put its layer into evaluation mode. "
                f"Name random number generators of the model's own in generators=; check='off' "
                f"says that all is well (a count of calls, a cache)",
                RuntimeWarning,
                stacklevel=3,
            )
        if self._unmade:
            self._checked |= self._unmade
            unchecked = " and ".join(t for name, t in _CHECKED.items() if name in self._unmade)
            warnings.warn(
                f"MicroBatchStreamer could not check {unchecked}: loss or model cannot be computed "
                f"on a few samples, have another outcome when they are evaluated again on the same "
                f"samples, the model is fully sharded, or a mini-batch comes one sample at a time. "
                f"docs/losses.md says what to give for which loss; check='off' says that it is so",
                RuntimeWarning,
                stacklevel=3,
            )

    def _small(
        self, piece: Piece, size: int, loss: bool, mixing: bool, through: bool = False
    ) -> bool:
        """Check on a few samples, with forward passes of their own; return whether that ran.

        Two groups of as many samples as micro-batches have, and of half as many where memory runs
        out or the model cannot take them: some take no fewer, or no more, at once.
        """
        number = piece.num_samples
        count = min(number // -(-number // size), number // 2)
        half = max(1, min(size // 2, number // 2))
        while count:
            out_of_memory = False
            try:
                sample = self._sample(piece, size, count)
                if sample is not None and self._compare.run(sample, loss, mixing, through):
                    return True
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                out_of_memory = True
            release_memory(self._compare.device)
            if count <= half and not out_of_memory:
                return False
            count = half if count > half else count // 2
        return False

    def _sample(self, piece: Piece, size: int, count: int) -> Sample | None:
        """Return two groups of samples, None where there are none or they weigh nothing."""
        if piece.batch is None or piece.weighed_by_part:
            plan = self._weighing.plan(piece, size)
            if len(plan.bounds) < 2:
                return None
            every = zip(plan.parts(), plan.bounds, plan.weights, strict=True)
            chosen = sorted(every, key=lambda part: part[2] == 0)[:2]
            (one, other), bounds, weights = zip(*chosen, strict=True)
            counts, twice = (bounds[0][1] - bounds[0][0], bounds[1][1] - bounds[1][0]), None
            if piece.batch is not None:
                whole = piece.batch.take([n for bound in bounds for n in range(*bound)])
            else:
                try:
                    whole = None, joined_targets([one[1], other[1]])
                except ValueError:
                    return None
        else:
            first, second = telling_samples(piece.batch, count)
            whole = piece.batch.take([*first, *second])
            one, other = piece.batch.take(first), piece.batch.take(second)
            twice = piece.batch.take([*first, *first])[0]
            counts, weights = (count, count), (float(count), float(count))
            if piece.weights is not None:
                weights = float(piece.weights[first].sum()), float(piece.weights[second].sum())
        factors = 1.0, 1.0
        if self._weighing.normalization == "exact":
            if sum(weights) == 0:
                return None
            factors = weights[0] / sum(weights), weights[1] / sum(weights)
        return Sample((one, other), whole, twice, counts, factors, piece.weights is not None)
