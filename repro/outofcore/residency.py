"""The storages on the device, within a byte budget.

A storage is swapped out by resizing it to nothing: autograd, views and the user keep holding it,
and see its values once it has its bytes again. On a CPU it keeps its size and points to its copy on
the host, so that unseen readers (a forked process, a serialiser, C++ code) read its values.
"""

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch

from repro.outofcore.host import IN, OUT, HostStore, Mover, Place
from repro.outofcore.simulation import BudgetTooSmall

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Variable:
    """One storage, known by a weak reference, which does not keep it alive."""

    # Class defaults save time: every result of an operation makes a variable.
    resident = True  # it takes device memory
    valid = False  # the host's copy is correct, or will be once `outgoing` is done
    locked = False  # it is never swapped out, since its address is in use or it is fixed
    fixed = False  # its memory is not torch's own, or is shared
    raw = False  # native code may write it by its address: no copy of it is trusted
    storage_ref: weakref.ref[torch.UntypedStorage] | None = None
    place: Place | None = None  # on the host, if it has one
    # Copies that have not been waited for, with the storage; to the device also with the target.
    incoming: tuple[Any, torch.UntypedStorage, torch.UntypedStorage] | None = None
    outgoing: tuple[Any, torch.UntypedStorage] | None = None
    pins = 0  # number of collectives that use it
    died: int | None = None  # number of the operation before which it was gone
    kind = ""  # one of `sequence.KINDS`, if known
    bound = -1  # its number in the trace, in this iteration

    def __init__(self, nbytes: int, since: int) -> None:
        self.nbytes = nbytes  # while it is on the device
        self.used = self.since = since  # numbers of the operations that used it last and first

    def peek(self) -> torch.UntypedStorage | None:
        """Return its storage, or None if it has ended."""
        return self.storage_ref() if self.storage_ref else None

    def storage(self) -> torch.UntypedStorage:
        """Return its storage, which must be alive."""
        storage = self.peek()
        assert storage is not None
        return storage


_UNKNOWN = Variable(0, 0)


class Residency:
    """All managed storages of one device, and the bytes that they take there.

    Storages of other devices, and excluded ones, are not managed. Who calls a method holds `lock`.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: torch.device,
        store: HostStore,
        mover: Mover,
        excluded: Collection[int] = (),
    ) -> None:
        self.budget_bytes, self.device, self.store, self.mover = budget_bytes, device, store, mover
        self.used_bytes = self.peak_bytes = self.bytes_in = self.bytes_out = 0
        self.clock = 0  # operations so far
        self.on_demand = 0  # swap-ins that no plan had started, so that an operation waited
        self.leaving: deque[Variable] = deque()  # including all with a running copy to the host
        self.ended: deque[Variable] = deque()  # ended, but still counted
        # Variables with their last use, the least recent at the end; `make_room` takes from it.
        self._oldest: list[tuple[Variable, int]] = []
        self.known: dict[int, Variable | None] = {}  # by address; None: not managed
        # Bytes by address of storages not managed, since operations first used a part.
        self.uncounted: dict[int, int] = {}
        # Copies that serialisers read by address: `kept` until any tensor is written.
        self.kept: dict[Variable, torch.UntypedStorage] = {}
        # Copies of pickle, which asks once for each tensor: shared within one moment.
        self._saved: WeakValueDictionary[tuple[Variable, int], torch.UntypedStorage] = (
            WeakValueDictionary()
        )
        self._aliases_met = False
        self._fixed: list[Variable] = []  # all that are `fixed`
        self._excluded = frozenset(excluded)
        # Weak references that report the end of a storage: its address and its variable.
        self._watches: dict[weakref.ref[torch.UntypedStorage], tuple[int, Variable | None]] = {}
        self._on_end = self._ended
        self.lock = threading.RLock()
        self.wait: Callable[[], bool] = lambda: False  # for collectives; whether any were running
        self.lies = store.whole

    def find(
        self, tensor: torch.Tensor, made: bool = False, named: bool = False
    ) -> Variable | None:
        """Return a tensor's variable, registered if it is new; None if it is not managed.

        If the first operation on a storage from outside uses only a part of it, such as a slice of
        a dataset, the storage is not managed until an operation writes to it. A storage `made` by
        an operation of the block, or `named` by the user or an optimizer, is always managed.
        """
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # no storage: sparse, or of another framework
            return None
        key = storage._cdata
        variable = self.known.get(key, _UNKNOWN)
        if variable is not _UNKNOWN:
            return variable
        return self._meet(key, storage, tensor, made, named)

    def look_up(self, tensor: torch.Tensor) -> Variable | None:
        """Return a tensor's variable if it is known already, else None."""
        try:
            return self.known.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None

    def adopt(self, tensor: torch.Tensor) -> Variable | None:
        """Manage a storage from now on, since an operation writes to a part of it."""
        if not self.uncounted or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if self.uncounted.pop(storage._cdata, None) is None:
            return None
        del self._watches[weakref.ref(storage)]  # equal to the reference that reports its end
        return self._meet(storage._cdata, storage, tensor, False, True)

    def _meet(
        self, key: int, storage: torch.UntypedStorage, tensor: torch.Tensor, made: bool, named: bool
    ) -> Variable | None:
        if (nbytes := storage.nbytes()) == 0:
            return None  # it may still grow
        managed = storage.device == self.device and key not in self._excluded
        locked = managed and not storage.resizable()
        if managed and not made and self.device.type != "meta":
            managed = not tensor._is_zerotensor()  # it has a size without memory
            if managed:
                managed, locked = self._beside_aliases(storage, locked or self._shared(storage))
        if managed and not (made or named or tensor.requires_grad or 2 * tensor.nbytes > nbytes):
            managed = False
            self.uncounted[key] = nbytes
        variable = Variable(nbytes, self.clock) if managed else None
        reference = weakref.ref(storage, self._on_end)
        self._watches[reference] = key, variable
        self.known[key] = variable
        if variable is not None:
            variable.storage_ref = reference
            self.used_bytes += nbytes
            if locked:
                self._fix(variable)
        return variable

    def _fix(self, variable: Variable) -> None:
        if not variable.fixed:
            variable.locked = variable.fixed = True
            self._fixed.append(variable)

    def _shared(self, storage: Any) -> bool:
        return self.device.type == "cpu" and storage.is_shared()

    def _beside_aliases(self, storage: torch.UntypedStorage, locked: bool) -> tuple[bool, bool]:
        """Return whether a storage from outside counts, and whether it is locked.

        Other storages may share its memory, such as by DLPack: then all of them are locked.
        """
        try:
            start = storage.data_ptr()
        except RuntimeError:
            return False, locked  # a wrapper's, such as a DTensor's: its parts have memory
        counts, foreign = True, locked
        end = start + storage.nbytes()
        self._fixed = [v for v in self._fixed if v.died is None]
        for variable in self.variables() if locked else self._fixed:
            other = variable.peek() if variable.resident and variable.died is None else None
            if other is None or other is storage:
                continue
            at = other.data_ptr()
            if at < end and start < at + variable.nbytes:
                self._fix(variable)
                locked, counts = True, not foreign
        return counts, locked

    def _meet_aliases(self) -> None:
        """Find tensors in the memory of others, which may be used only after these have left."""
        self._aliases_met = True
        with torch._C.DisableTorchFunction():
            for tensor in gc.get_objects() if self.device.type == "cpu" else ():
                if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                    continue
                if tensor.device.type == "cpu" and not tensor._is_zerotensor():
                    # A wrapper of a functional transform, or memory that was not allocated yet.
                    with suppress(NotImplementedError, RuntimeError):
                        storage = tensor.untyped_storage()
                        if not storage.resizable() and storage.nbytes():
                            self._beside_aliases(storage, locked=True)

    def _ended(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        # From now on the address may be reused.
        key, variable = self._watches.pop(reference)
        self.known.pop(key, None)
        self.uncounted.pop(key, None)
        if variable is None:
            return
        variable.died = self.clock
        # This may run in any thread (garbage collection in a copying one): it must not wait.
        if self.lock.acquire(blocking=False):
            self._end(variable)
            self.lock.release()
        else:
            self.ended.append(variable)

    def bury(self) -> None:
        """Stop counting the variables that ended while another thread held the lock."""
        while self.ended:
            self._end(self.ended.popleft())

    def _end(self, variable: Variable) -> None:
        self.used_bytes -= variable.nbytes if variable.resident else 0
        variable.resident = False
        self._forget_place(variable)

    def _forget_place(self, variable: Variable) -> None:
        if variable.place is not None:
            self.store.give_back(variable.place)
            variable.place, variable.valid = None, False

    def variables(self) -> list[Variable]:
        """Return all managed variables that are alive."""
        return [v for v in tuple(self.known.values()) if v is not None]

    def swap_in(self, variable: Variable) -> None:
        """Take device memory for a variable and start its copy; there must be room."""
        if variable.resident or variable.died is not None:
            return
        assert variable.place is not None
        storage = target = variable.storage()
        if self.lies:  # until the copy is done, readers read the host's
            target = torch.UntypedStorage(variable.nbytes)
        else:
            storage.resize_(variable.nbytes)
        variable.resident = True
        self.used_bytes += variable.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        variable.incoming = self.mover.start(IN, target, variable.place), storage, target
        self.bytes_in += variable.nbytes

    def arrive(self, variable: Variable) -> None:
        """Let the device wait for a variable's copy."""
        if variable.incoming is not None:
            ticket, storage, target = variable.incoming
            variable.incoming = None
            try:
                self.mover.wait(ticket)
            except OSError:
                if target is not storage:  # it is still on the host
                    variable.resident = False
                    self.used_bytes -= variable.nbytes
                raise
            if target is not storage:
                storage._swap_data_ptr_(target)  # type: ignore[attr-defined]

    def swap_out(self, variable: Variable) -> None:
        """Start the copy of a variable to the host, unless the host's copy is correct."""
        if not self._may_leave(variable) or variable.valid:
            return  # such as a variable that is still arriving
        storage = variable.peek()
        if storage is None:
            return  # it has just ended in another thread
        if variable.place is None:
            variable.place = self.store.take(variable.nbytes)
        variable.outgoing = self.mover.start(OUT, storage, variable.place), storage
        variable.valid = True
        self.leaving.append(variable)
        self.bytes_out += variable.nbytes

    def _may_leave(self, variable: Variable) -> bool:
        if not self._aliases_met:
            self._meet_aliases()
        locked = variable.locked or variable.pins or variable.died is not None
        return variable.resident and not locked

    def let_go(self) -> None:
        """Release references to storages after their copies are done, so that they may end."""
        leaving = self.leaving
        while leaving:  # copies end in the order of their start
            outgoing = leaving[0].outgoing
            if outgoing is not None and not self.mover.done(outgoing[0]):
                break
            variable = leaving.popleft()
            self.settle(variable)

    def settle(self, variable: Variable) -> None:
        """Let the device wait for a variable's copy to the host; it stays on the device.

        An OSError where the copy failed, such as on a full disk; the device has the value.
        """
        if variable.outgoing is not None:
            # The storage is held until the wait: freed before it, its memory could be unmapped
            # while the copy still reads it.
            ticket, _held = variable.outgoing
            variable.outgoing = None
            try:
                self.mover.wait(ticket)
            except OSError:
                variable.valid = False
                raise

    def release(self, variable: Variable) -> None:
        """Free a variable's device memory, once its copy to the host is done."""
        if not self._may_leave(variable):
            return
        self.arrive(variable)  # until it arrives, torch does not own its memory either
        storage: Any = variable.peek()
        if storage is None:
            return
        if self._shared(storage) or not storage.resizable():
            self._fix(variable)  # it was shared unnoticed
            return
        del storage  # so that it may end
        if variable.raw:
            self.written(variable)
        self.swap_out(variable)
        self.settle(variable)
        storage = variable.peek()
        if variable.died is not None or storage is None:  # only the copy had kept it alive
            return
        if self.lies:
            assert variable.place is not None
            address = self.store.address(variable.place)
            host_storage = torch._C._construct_storage_from_data_pointer(
                address, self.device, variable.nbytes
            )
            storage._swap_data_ptr_(host_storage)  # this frees the device's memory
        else:
            storage.resize_(0)
        variable.resident = False
        self.used_bytes -= variable.nbytes

    def written(self, variable: Variable) -> None:
        """Note that a variable has a new value; the host's copy is outdated."""
        self.settle(variable)
        variable.valid = False

    def resized(self, variable: Variable) -> None:
        """Note a variable's bytes after an operation, or its holder, resized its storage."""
        nbytes = variable.storage().nbytes()
        if variable.resident and variable.incoming is None and nbytes != variable.nbytes:
            self.settle(variable)
            self._forget_place(variable)
            self.used_bytes += nbytes - variable.nbytes
            variable.nbytes = nbytes

    def make_room(
        self, nbytes: int, keep: Iterable[Variable], what: Callable[[], str], strict: bool = True
    ) -> None:
        """Free device memory for `nbytes`: least recently used variables first, none in `keep`.

        If that is not enough and it is `strict`, wait for collectives, and then raise.
        """
        kept = set(keep)

        def lacks() -> bool:
            return self.used_bytes + nbytes > self.budget_bytes

        while lacks():
            self.bury()
            # Some variables live only until their copies are done. Copies end in the order of their
            # start, so that waiting for the one that frees enough costs no further wait.
            while self.leaving and lacks():
                self.settle(self.leaving.popleft())
                self.bury()
            oldest = self._by_last_use()
            while lacks() and (found := next(oldest, None)):
                if found not in kept:
                    self.release(found)
            for variable in self.variables() if lacks() else ():
                if variable.locked:
                    self.resized(variable)
            if lacks() and not (strict and (self.ended or self.wait())):
                break
        if not (strict and lacks()):
            return
        name, needed = what(), self.used_bytes + nbytes
        where, held = name, sum(v.nbytes for v in self.variables() if v.locked or v.pins)
        if held:
            where += (
                f", {held} of them of variables whose address is in use, whose memory is not "
                "torch's own, or that collectives hold"
            )
        raise BudgetTooSmall(name, needed, self.budget_bytes, where, final=False)

    def _by_last_use(self) -> Iterator[Variable]:
        """Yield the variables that may leave: those outside the plan first, by their last use."""
        # To sort thousands of variables for each operation would take longer than the operations.
        # So first come those of the last order that have not been used since.
        yield from self._take_oldest()
        movable = [v for v in self.variables() if v.resident and not (v.locked or v.pins)]
        movable.sort(key=lambda v: v.used)
        self._oldest = [(v, v.used) for v in reversed(movable) if v.bound < 0]
        yield from self._take_oldest()
        yield from (v for v in movable if v.bound >= 0)

    def _take_oldest(self) -> Iterator[Variable]:
        while self._oldest:
            variable, used = self._oldest.pop()
            if variable.resident and variable.used == used and variable.bound < 0:
                yield variable

    def restore(self) -> None:
        """Bring every variable back, even beyond the budget; raise an error after all others."""
        failed: Exception | None = None
        for variable in self.variables():
            with suppress(OSError):  # a variable that could not be written is still on the device
                self.settle(variable)
            try:
                self.swap_in(variable)
                self.arrive(variable)
            except (OSError, RuntimeError) as error:
                failed = failed or error
        self.mover.finish()
        if failed is not None:
            raise failed

    # ---- tensors that are read by their address, unseen by operations

    def bring(self, tensor: torch.Tensor, lock: bool) -> None:
        """Bring a tensor's bytes to the device; with `lock` they stay there."""
        variable = self.find(tensor)
        if variable is None:
            return
        if not variable.resident:
            self.on_demand += 1
            self.make_room(variable.nbytes, (variable,), lambda: "reading a tensor's address")
            self.swap_in(variable)
        self.arrive(variable)
        self.written(variable)  # it may be written unnoticed
        variable.used = self.clock
        variable.locked = variable.locked or lock

    def snapshot(self, tensor: torch.Tensor, keep: bool) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host; `keep` adds it to `kept`."""
        variable = self.find(tensor)
        if variable is None:
            return tensor.untyped_storage()
        key = variable, self.clock
        saved = self.kept.get(variable) if keep else self._saved.get(key)
        if saved is not None:
            return saved
        if variable.resident:
            self.arrive(variable)
            saved = variable.storage().cpu()
            if self.device.type == "cpu":
                saved = saved.clone()
        else:
            assert variable.place is not None
            self.mover.finish()
            saved = torch.UntypedStorage(variable.nbytes)
            self.store.copy(IN, variable.place, saved.data_ptr())
        if keep:
            self.kept[variable] = saved
        else:
            self._saved[key] = saved
        return saved
