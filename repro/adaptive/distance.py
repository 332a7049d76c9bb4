"""Distance from the initial parameters: the norm in equation 4, with one copy of the start."""

from collections.abc import Iterable
from itertools import zip_longest

import torch
from torch import Tensor

CHUNK = 2**18  # most elements of a difference in memory at a time


class StartingPoint:
    """A copy of the initial parameters w_0, and the distance of other parameters from them."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.tensors = [p.detach().clone() for p in parameters]
        if not self.tensors:
            raise ValueError("there are no parameters; give those of the model, model.parameters()")

    def distance(self, parameters: Iterable[Tensor]) -> float:
        """Return ‖w_0 - w‖, the Euclidean norm over all parameters.

        The difference is formed in pieces of at most `CHUNK` elements (or one row), so that no
        second copy of the model is made; squares are summed in float64. Waits for a GPU once.
        """
        current = [p.detach() for p in parameters]
        for number, (now, before) in enumerate(zip_longest(current, self.tensors)):
            if now is None or before is None or now.shape != before.shape:
                shapes = ["missing" if p is None else tuple(p.shape) for p in (now, before)]
                raise ValueError(
                    f"parameter {number} is {shapes[0]}, and {shapes[1]} in w_0; give those of the "
                    "same model in the same order, by model.parameters() each time (an iterator is "
                    "spent after one use)"
                )
        totals: dict[torch.device, Tensor] = {}
        for now, before in zip(current, self.tensors, strict=True):
            zero = torch.zeros((), dtype=torch.float64, device=now.device)
            total = totals.setdefault(now.device, zero)
            for piece, start in zip(_pieces(now), _pieces(before), strict=True):
                start = start.to(now.device, non_blocking=True)
                if not (piece.is_floating_point() or piece.is_complex()):  # differences would wrap
                    piece, start = piece.double(), start.double()
                gap = torch.sub(piece, start)
                if gap.dtype in (torch.float16, torch.bfloat16):  # squares would overflow
                    gap = gap.float()
                gap = torch.view_as_real(gap) if gap.is_complex() else gap
                total += gap.square_().sum(dtype=torch.float64)
        return float(sum(float(total) for total in totals.values()) ** 0.5)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Cut a tensor of any layout into rows that hold at most `CHUNK` elements together."""
    rows = torch.atleast_1d(tensor)
    pieces: tuple[Tensor, ...] = rows.split(max(1, CHUNK * len(rows) // max(1, rows.numel())))
    return pieces
