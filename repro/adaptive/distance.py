"""Distance from the initial parameters: the norm in equation 4, with one copy of the start."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 2**18  # most elements of a difference in memory at a time


class StartingPoint:
    """The initial parameters w_0, and the distance of other parameters from them.

    Args:
        parameters: w_0; copied, never changed.

    Raises:
        ValueError: There is no parameter.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.tensors = [p.detach().clone() for p in parameters]
        if not self.tensors:
            raise ValueError("there are no parameters; give those of the model, model.parameters()")

    def distance(self, parameters: Iterable[Tensor]) -> float:
        """Return ‖w_0 - w‖, the Euclidean norm over all parameters.

        The difference is formed in pieces of at most `CHUNK` elements (or one row), so that no
        second copy of the model is made; squares are summed in float64. Waits for a GPU once.

        Raises:
            ValueError: Number or shapes of the parameters are not those of w_0.
        """
        current = [p.detach() for p in parameters]
        shapes = [tuple(p.shape) for p in current]
        wanted = [tuple(p.shape) for p in self.tensors]
        if shapes != wanted:
            raise ValueError(
                f"{_what_differs(shapes, wanted)}; give the parameters of the same model, in the "
                "same order"
            )
        totals: dict[torch.device, Tensor] = {}
        for now, before in zip(current, self.tensors, strict=True):
            zero = torch.zeros((), dtype=torch.float64, device=now.device)
            total = totals.setdefault(now.device, zero)
            for piece in _pieces(now):
                gap = torch.sub(now[piece], before[piece].to(now.device, non_blocking=True))
                if gap.dtype in (torch.float16, torch.bfloat16):  # squares would overflow
                    gap = gap.float()
                total += gap.square_().sum(dtype=torch.float64)
        return float(sum(float(total) for total in totals.values()) ** 0.5)


def _pieces(tensor: Tensor) -> Iterator[slice | tuple[()]]:
    """Cut a tensor of any layout into rows that hold at most `CHUNK` elements together."""
    if tensor.dim() == 0:
        yield ()
        return
    rows = max(1, CHUNK * len(tensor) // max(1, tensor.numel()))
    for start in range(0, len(tensor), rows):
        yield slice(start, start + rows)


def _what_differs(shapes: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> str:
    if len(shapes) != len(wanted):
        spent = " (a generator is spent after one use: call model.parameters() each time)"
        counts = f"{len(shapes)} parameters were given, and w_0 has {len(wanted)}"
        return counts if shapes else counts + spent
    number = next(i for i, (a, b) in enumerate(zip(shapes, wanted, strict=True)) if a != b)
    return f"parameter {number} has the shape {shapes[number]}, and {wanted[number]} in w_0"
