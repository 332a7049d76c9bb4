"""Tensors whose bytes are read by their address, of which no operation tells."""

from weakref import WeakValueDictionary

import torch

from repro.outofcore.iterations import Statistics
from repro.outofcore.residency import Residency, Variable


class Addresses:
    """Has bytes where somebody looks for them; its lock is to be held by who calls it.

    Args:
        residency: What moves them.
        statistics: Where to count.

    Attributes:
        kept: Copies of what serialisers read by address; to be cleared when anything is written.
    """

    def __init__(self, residency: Residency, statistics: Statistics) -> None:
        self._residency, self._statistics = residency, statistics
        self._saved: WeakValueDictionary[tuple[int, int], torch.UntypedStorage] = (
            WeakValueDictionary()
        )
        self.kept: dict[Variable, torch.UntypedStorage] = {}

    def bring(self, tensor: torch.Tensor, lock: bool) -> None:
        """Have a tensor's bytes on the device, and for good where `lock`."""
        residency = self._residency
        variable = residency.find(tensor)
        if variable is None:
            return
        if not variable.resident:
            self._statistics.on_demand += 1
            residency.make_room(variable.nbytes, (variable,), lambda: "reading a tensor's address")
            residency.swap_in(variable)
        residency.arrive(variable)
        residency.written(variable)  # it may be, without a word to us
        variable.used = residency.clock
        variable.locked = variable.locked or lock

    def unlock(self, tensor: torch.Tensor | None) -> None:
        """Let a tensor, or all of them, be swapped out again."""
        if tensor is None:
            variables = self._residency.variables()
        else:
            known = self._residency.look_up(tensor)
            variables = [] if known is None else [known]
        for variable in variables:
            if variable.locked:
                self._residency.resized(variable)
                variable.locked, variable.unlocked = variable.fixed, True

    def snapshot(self, tensor: torch.Tensor, keep: bool) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host, in `kept` where to `keep`."""
        residency = self._residency
        variable = residency.find(tensor)
        if variable is None:
            return tensor.untyped_storage()
        key = id(variable), residency.clock
        saved = self.kept.get(variable) if keep else self._saved.get(key)
        if saved is None:
            if variable.resident:
                residency.arrive(variable)
                saved = variable.storage().cpu()
                if residency.device.type == "cpu":
                    saved = saved.clone()
            else:
                assert variable.place is not None
                residency.mover.finish()
                saved = torch.UntypedStorage(variable.nbytes)
                residency.store.read(variable.place, saved.data_ptr())
            if keep:
                self.kept[variable] = saved
            else:
                self._saved[key] = saved
        return saved
