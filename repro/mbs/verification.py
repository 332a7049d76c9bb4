"""When micro-batches are checked to add up to their mini-batch, and on which samples."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from repro.mbs.batches import Piece, Plan, joined_targets
from repro.mbs.checking import Sample, SelfCheck
from repro.mbs.collecting import Collector, room_for_outputs
from repro.mbs.errors import LossCheckError
from repro.mbs.sizing import release_memory
from repro.measure import is_out_of_memory
from repro.measure.telling import Novelty, telling_samples

_CHECKED = {
    "loss": "that the loss of a mini-batch is the mean over its samples",
    "mixing": "that the model treats samples one by one",
}


class Verification:
    """Checks mini-batches where that is due, and remembers what has been checked.

    Args:
        check: ``"first"``, ``"always"`` or ``"off"``.
        known: Whether the loss is one of torch's.
        two_pass: Whether it is computed over the whole mini-batch.
        normalization: How micro-batches are weighed.
        sharded: Whether the processes compute together.
        compare: Computes and compares.
        plan: Cuts a piece into micro-batches of a size.
        undone: Makes a context that leaves no trace.
        device: The device.
    """

    def __init__(
        self,
        check: str,
        known: bool,
        two_pass: bool,
        normalization: str,
        sharded: bool,
        compare: SelfCheck,
        plan: Callable[[Piece, int], Plan],
        undone: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
    ) -> None:
        self._check = check
        self._known = known
        self._two_pass = two_pass
        self._normalization = normalization
        self._sharded = sharded
        self._compare = compare
        self._plan = plan
        self._undone = undone
        self.device = device
        self._checked: set[str] = set()
        self._novelty: Novelty[bool] = Novelty(wait=True)
        self._loss_due = False
        self._unmade: set[str] = set()
        self._stateful: list[str] = []
        self._warned_of_state = False

    def begin(self, known: bool, normalization: str, changed: bool) -> None:
        """Start a mini-batch.

        Args:
            known: Whether the loss is one of torch's, as it is now.
            normalization: As it is now.
            changed: Whether another loss function was given.
        """
        self._unmade, self._stateful = set(), []
        self._known, self._normalization = known, normalization
        if changed:
            self._checked.discard("loss")

    def forget(self) -> None:
        """Forget what was checked: the model has other layers now."""
        self._checked.clear()

    def verify(self, piece: Piece, size: int, alone: bool = True) -> None:
        """Check what can be checked before the micro-batches: model, and loss of one micro-batch.

        Args:
            piece: The mini-batch, or a part of one.
            size: Of its micro-batches.
            alone: Whether the piece is a whole mini-batch.
        """
        weighs = piece.weights is not None
        # What `split` makes of a mini-batch is known to the user alone.
        loss = not self._known or ((weighs or piece.batch is None) and not self._two_pass)
        loss = loss and not self._two_pass and self._normalization != "paper"
        # The paper's algorithm to the letter, but for what was divided by mistake.
        always = self._normalization != "paper"
        mixing = piece.batch is not None and (always or piece.batch.num_splittable() > 1)
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
                self._mark(made)
            if mixing:
                self._mark(made, "mixing")
                if self._compare.hidden_state:
                    self._stateful.append("something outside the model's buffers")

    def collector(self) -> Collector | None:
        """Return what keeps the outputs of the micro-batches, None where nothing is to compare."""
        return Collector(room_for_outputs(self.device)) if self._loss_due else None

    def conclude(self, piece: Piece, plan: Plan, collector: Collector | None, scale: float) -> None:
        """Compare what the micro-batches computed with the whole.

        Args:
            piece: The mini-batch, or a part of one.
            plan: Its micro-batches.
            collector: What they computed.
            scale: What a loss was multiplied by in the backward pass, over its weight.

        Raises:
            LossCheckError: The losses do not add up.
        """
        if collector is None:
            return
        made = False
        while collector.usable and len(collector.parts) > 1:
            try:
                with self._undone():
                    made = self._compare_collected(piece, plan, collector, scale)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            release_memory(self.device)
            del collector.parts[len(collector.parts) // 2 :]
        through = bool(collector.parts) and not made
        collector.parts.clear()
        if not made:
            size = max(stop - start for start, stop in plan.bounds)
            made = self._small(piece, size, True, False, through)
        self._mark(made)

    def _compare_collected(
        self, piece: Piece, plan: Plan, collector: Collector, scale: float
    ) -> bool:
        count = len(collector.parts)
        targets = [part[1] for part in itertools.islice(plan.parts(), count)]
        bounds = plan.bounds[:count]
        if piece.batch is not None:
            whole = piece.batch.slice(0, bounds[-1][1])[1]
        else:
            try:
                whole = joined_targets(targets)
            except ValueError:
                return False
        exact = self._normalization == "exact"
        weighted = piece.weights is not None
        try:
            return self._compare.compare_collected(
                collector, targets, whole, exact, scale, weighted, piece.batch is None
            )
        except LossCheckError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False  # the loss takes what only the micro-batches' own passes have

    def _mark(self, made: bool, what: str = "loss") -> None:
        (self._checked if made else self._unmade).add(what)
        if made:
            self._unmade.discard(what)

    def note_state(self, changed: Callable[[], list[str]]) -> None:
        """Note which buffers one micro-batch has changed, as the next one reads them.

        Args:
            changed: Returns their names.
        """
        if self._check != "off" and not self._warned_of_state:
            self._stateful += changed()

    def warn(self) -> None:
        """Warn, once each, of what a mini-batch that went through has shown."""
        # After the mini-batch: where it failed itself, its error says more.
        if self._stateful and not self._warned_of_state:
            self._warn_of_state(self._stateful)
        if self._unmade:
            self._warn_of_unmade()

    def _warn_of_state(self, names: list[str]) -> None:
        self._warned_of_state, self._stateful = True, []
        warnings.warn(
            f"a forward pass changes {', '.join(names[:3])}{' and others' if names[3:] else ''}. "
            f"Each micro-batch does so. If the next one computes with what it left (a codebook, a "
            f"queue, a running mean, a power iteration), the gradient is not that of the undivided "
            f"mini-batch: update it once for each mini-batch, outside forward, or put its layer "
            f"into evaluation mode. Name random number generators of the model's own in "
            f"generators=; check='off' says that all is well (a count of calls, a cache)",
            RuntimeWarning,
            stacklevel=4,
        )

    def _small(
        self, piece: Piece, size: int, loss: bool, mixing: bool, through: bool = False
    ) -> bool:
        """Check on a few samples, with forward passes of their own; return whether that ran.

        Two groups of as many samples as micro-batches have, and of half as many where those do not
        fit or the model cannot take them: some take no fewer, or no more, at once.
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
            release_memory(self.device)
            if count <= half and not out_of_memory:
                return False
            count = half if count > half else count // 2
        return False

    def _warn_of_unmade(self) -> None:
        self._checked |= self._unmade
        what = " and ".join(text for name, text in _CHECKED.items() if name in self._unmade)
        warnings.warn(
            f"MicroBatchStreamer could not check {what}: loss or model cannot be computed on a few "
            f"samples, have another outcome when they are evaluated again on the same samples, the "
            f"model is fully sharded, or a mini-batch comes one sample at a time. docs/losses.md "
            f"says what to give for which loss; check='off' says that it is so",
            RuntimeWarning,
            stacklevel=4,
        )

    def _sample(self, piece: Piece, size: int, count: int) -> Sample | None:
        counted = piece.weights is not None and len(piece.weights) != piece.num_samples
        if piece.batch is None or counted:
            plan = self._plan(piece, size)
            if len(plan.bounds) < 2:
                return None
            parts, beside = list(zip(plan.parts(), plan.bounds, plan.weights, strict=True)), None
            chosen = sorted(parts, key=lambda part: part[2] == 0)[:2]
            bounds = [bound for _, bound, _ in chosen]
            counts = bounds[0][1] - bounds[0][0], bounds[1][1] - bounds[1][0]
            weights = [weight for _, _, weight in chosen]
            both = chosen[0][0], chosen[1][0]
            if piece.batch is not None:
                whole = piece.batch.take([n for bound in bounds for n in range(*bound)])
            else:
                try:
                    whole = None, joined_targets([part[1] for part in both])
                except ValueError:
                    return None
        else:
            groups = telling_samples(piece.batch, count)
            whole = piece.batch.take([*groups[0], *groups[1]])
            both = piece.batch.take(groups[0]), piece.batch.take(groups[1])
            beside = piece.batch.take([*groups[0], *groups[0]])[0]
            counts, weights = (count, count), [float(count)] * 2
            if piece.weights is not None:
                weights = [float(piece.weights[group].sum()) for group in groups]
        factors = 1.0, 1.0
        if self._normalization == "exact":
            if sum(weights) == 0:
                return None
            factors = weights[0] / sum(weights), weights[1] / sum(weights)
        return Sample(both, whole, beside, counts, factors, piece.weights is not None)
