"""When micro-batches are checked to add up to their mini-batch, and on which samples."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from repro.mbs.batches import Piece, Plan, joined_targets
from repro.mbs.checking import Sample, SelfCheck, has_ignored, telling_samples
from repro.mbs.sizing import release_memory
from repro.measure import is_out_of_memory


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
        self._unmade: set[str] = set()

    def begin(self) -> None:
        """Start a mini-batch."""
        self._unmade = set()

    def verify(self, piece: Piece, size: int, alone: bool = True) -> None:
        """Check loss and model on a few samples, where that is due.

        Args:
            piece: The mini-batch, or a part of one.
            size: Of its micro-batches.
            alone: Whether the piece is a whole mini-batch.
        """
        weighs = piece.weights is not None
        loss = not self._known or (weighs and not self._two_pass)
        loss = loss and not self._two_pass and self._normalization != "paper"
        mixing = piece.batch is not None and piece.batch.num_splittable() > 1
        number = piece.num_samples
        if self._check == "off" or not (loss or mixing) or (alone and size >= number):
            return
        if number < 2 or self._sharded:  # whose processes would all have to check
            self._unmade = {"loss"} - self._checked if loss else set()
            return
        due = {"loss"} if loss else set()
        due |= {"mixing"} if mixing else set()
        if loss and "ignored" not in self._checked and piece.batch and has_ignored(piece.batch):
            due.add("ignored")
        if self._check == "first" and due <= self._checked:
            return
        while size:
            try:
                with self._undone():
                    sample = self._sample(piece, size)
                    made = sample is not None and self._compare.run(sample, loss, mixing)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            release_memory(self.device)
            size //= 2
            made = False
        if made:
            self._checked |= due
            self._unmade -= due
        elif loss:
            self._unmade = due

    def warn_if_unchecked(self) -> None:
        """Warn, once, where a mini-batch that went through could not be checked."""
        # After the mini-batch: where it failed itself, its error says more.
        if not self._unmade:
            return
        self._checked |= self._unmade
        warnings.warn(
            "MicroBatchStreamer could not check that the loss of a mini-batch is the mean over its "
            "samples: the model cannot be evaluated twice with the same outcome, is fully sharded, "
            "or comes with one sample at a time. docs/losses.md says what to give for which loss; "
            "check='off' says that it is so",
            RuntimeWarning,
            stacklevel=3,
        )

    def _sample(self, piece: Piece, size: int) -> Sample | None:
        counted = piece.weights is not None and len(piece.weights) != piece.num_samples
        if piece.batch is None or counted:
            plan = self._plan(piece, size)
            if len(plan.bounds) < 2:
                return None
            parts = list(zip(plan.parts(), plan.bounds, plan.weights, strict=True))
            chosen = sorted(parts, key=lambda part: part[2] == 0)[:2]
            bounds = [bound for _, bound, _ in chosen]
            counts = bounds[0][1] - bounds[0][0], bounds[1][1] - bounds[1][0]
            weights = [weight for _, _, weight in chosen]
            both = chosen[0][0], chosen[1][0]
            if piece.batch is not None:
                whole = piece.batch.take([n for bound in bounds for n in range(*bound)])
            else:
                whole = None, joined_targets([part[1] for part in both], bounds)
        else:
            half = max(1, min(size // 2 if size > 3 else min(size, 2), piece.num_samples // 2))
            groups = telling_samples(piece.batch, half)
            whole = piece.batch.take([*groups[0], *groups[1]])
            both = piece.batch.take(groups[0]), piece.batch.take(groups[1])
            counts, weights = (half, half), [float(half)] * 2
            if piece.weights is not None:
                weights = [float(piece.weights[group].sum()) for group in groups]
        factors = 1.0, 1.0
        if self._normalization == "exact":
            if sum(weights) == 0:
                return None
            factors = weights[0] / sum(weights), weights[1] / sum(weights)
        return Sample(both, whole, counts, factors)
