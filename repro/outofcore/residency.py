"""Which storages are on the device, within a byte budget.

A storage is swapped out by resizing it to nothing: autograd, views and the user go on holding it,
and their values are back once it has its bytes again. On a CPU it keeps its size and lies where its
copy on the host is: readers that we do not see (a forked process, a serialiser, C++ code) read its
values.
"""

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch

from repro.outofcore.bounds import BudgetTooSmall
from repro.outofcore.host import HostStore, Mover, Place

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Variable:
    """One storage, known by a weak reference: nothing here prolongs its life."""

    # Defaults of the class: one is made for every result of an operation.
    resident = True  # it takes device memory
    valid = False  # the host's copy is right, or will be once `outgoing` is done
    locked = False  # it is never swapped out: somebody has its address
    fixed = False  # likewise, for good: its memory is not torch's own, or processes share it
    raw = False  # native code may write it by its address: no copy of it is trusted
    unlocked = False  # it was locked
    storage_ref: weakref.ref[torch.UntypedStorage] | None = None
    place: Place | None = None  # on the host, where it has one
    # The copies that nobody has waited for, with the storage.
    incoming: tuple[Any, torch.UntypedStorage] | None = None
    outgoing: tuple[Any, torch.UntypedStorage] | None = None
    fresh: torch.UntypedStorage | None = None  # on a CPU, where the copy to the device goes
    pins = 0  # collectives that work on it
    died: int | None = None  # the operation before which it was gone
    kind = ""  # one of `sequence.KINDS`, if known
    bound = -1  # the trace's variable that it is in this iteration

    def __init__(self, nbytes: int, since: int) -> None:
        self.nbytes = nbytes  # while it is on the device
        self.used = self.since = since  # the operations that used it last and first, counted on

    def peek(self) -> torch.UntypedStorage | None:
        """Return its storage, or None where it has ended."""
        return self.storage_ref() if self.storage_ref else None

    def storage(self) -> torch.UntypedStorage:
        """Return its storage, which must be alive."""
        storage = self.peek()
        assert storage is not None
        return storage


_UNKNOWN = Variable(0, 0)


class Residency:
    """All managed storages of one device, and the bytes that they take there.

    Those of other devices, and the excluded ones, are left alone.

    Attributes:
        uncounted: Bytes by address of storages left alone, as operations began with a part of them.
        lock: To be held by the caller of anything here.
        wait: Gives collectives some time to end; returns whether any were under way.
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
        self.on_demand = 0  # swap-ins that somebody waited for, since no plan had asked for them
        self.leaving: deque[Variable] = deque()  # those with a copy to the host under way, at least
        self.ended: deque[Variable] = deque()  # not counted as such yet
        self.known: dict[int, Variable | None] = {}  # by address; None: left alone
        self.uncounted: dict[int, int] = {}
        self._aliases_met = False
        self._excluded = frozenset(excluded)
        # For each of these, which tell of the end of a storage: its address and its variable.
        self._watches: dict[weakref.ref[torch.UntypedStorage], tuple[int, Variable | None]] = {}
        self._on_end = self._ended
        self.lock = threading.RLock()
        self.wait: Callable[[], bool] = lambda: False
        self.lies = store.whole

    def find(
        self, tensor: torch.Tensor, made: bool = False, named: bool = False
    ) -> Variable | None:
        """Return a tensor's variable, made known where it is new; None where it is left alone.

        A storage from outside of which the first operation sees only a part, such as a slice of a
        dataset, is left alone until an operation writes to it. One that is `made` by an operation
        of the block counts, and one that is `named` by the user or an optimizer.
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
        """Count a storage that was left alone so far, as an operation writes to a part of it."""
        if not self.uncounted or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if self.uncounted.pop(storage._cdata, None) is None:
            return None
        del self._watches[weakref.ref(storage)]  # equal to the one that tells of its end so far
        return self._meet(storage._cdata, storage, tensor, False, True)

    def _meet(
        self, key: int, storage: torch.UntypedStorage, tensor: torch.Tensor, made: bool, named: bool
    ) -> Variable | None:
        if (nbytes := storage.nbytes()) == 0:
            return None  # it may grow yet
        managed = storage.device == self.device and key not in self._excluded
        fixed = managed and not storage.resizable()
        if managed and not made and self.device.type != "meta":
            if tensor._is_zerotensor():
                managed = False  # a size without memory
            else:
                fixed = fixed or self._shared(storage)
                managed, fixed = self._beside_aliases(storage, fixed)
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
            if fixed:
                variable.locked = variable.fixed = True
        return variable

    def _shared(self, storage: Any) -> bool:
        return self.device.type == "cpu" and storage.is_shared()

    def _beside_aliases(self, storage: torch.UntypedStorage, fixed: bool) -> tuple[bool, bool]:
        """Return whether a storage from outside counts, and whether it stays where it is.

        Others may lie at the same address, such as by DLPack: then all of them stay.
        """
        start = storage.data_ptr()
        end = start + storage.nbytes()
        counts, foreign = True, fixed
        for variable in self.variables():
            if not (fixed or variable.fixed) or variable.died is not None or not variable.resident:
                continue
            other = variable.peek()
            if other is None or other is storage:
                continue
            at = other.data_ptr()
            if at < end and start < at + variable.nbytes:
                variable.locked = variable.fixed = True
                counts, fixed = not foreign, True
        return counts, fixed

    def _meet_aliases(self) -> None:
        """Find, before anything leaves, tensors in the memory of others that are not known yet.

        One that DLPack or an address made may first be used when the tensor below it has left.
        """
        self._aliases_met = True
        with torch._C.DisableTorchFunction():
            for tensor in gc.get_objects() if self.device.type == "cpu" else ():
                if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                    continue
                if tensor.device.type != "cpu" or tensor._is_zerotensor():
                    continue
                storage = tensor.untyped_storage()
                if not storage.resizable() and storage.nbytes():
                    self._beside_aliases(storage, fixed=True)

    def _ended(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        # The address may be used again from now on.
        key, variable = self._watches.pop(reference)
        self.known.pop(key, None)
        self.uncounted.pop(key, None)
        if variable is None:
            return
        variable.died = self.clock
        # Whatever thread this is (a copying one, which collects garbage), it must not wait.
        if self.lock.acquire(blocking=False):
            self._end(variable)
            self.lock.release()
        else:
            self.ended.append(variable)

    def bury(self) -> None:
        """Count no more the variables that ended while another thread was at work here."""
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
        """Take device memory for a variable and start its copy; the room must be there."""
        if variable.resident or variable.died is not None:
            return
        assert variable.place is not None
        storage = target = variable.storage()
        if self.lies:  # until the copy is done, readers read the host's
            target = variable.fresh = torch.UntypedStorage(variable.nbytes)
        else:
            storage.resize_(variable.nbytes)
        variable.resident = True
        self.used_bytes += variable.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        variable.incoming = self.mover.start_in(target, variable.place), storage
        self.bytes_in += variable.nbytes

    def arrive(self, variable: Variable) -> None:
        """Let the device wait for a variable's copy."""
        if variable.incoming is not None:
            ticket, storage = variable.incoming
            variable.incoming = None
            fresh, variable.fresh = variable.fresh, None
            try:
                self.mover.wait(ticket)
            except OSError:
                if fresh is not None:  # it still lies on the host
                    variable.resident = False
                    self.used_bytes -= variable.nbytes
                raise
            if fresh is not None:
                storage._swap_data_ptr_(fresh)  # type: ignore[attr-defined]

    def swap_out(self, variable: Variable) -> None:
        """Start the copy of a variable to the host, where the host's is not right."""
        if not variable.resident or variable.valid or variable.died is not None or variable.pins:
            return  # such as one that is still coming
        if not self._aliases_met:
            self._meet_aliases()
        if variable.locked:
            return
        storage = variable.peek()
        if storage is None:
            return  # it ends just now, in another thread
        if variable.place is None:
            variable.place = self.store.take(variable.nbytes)
        variable.outgoing = self.mover.start_out(storage, variable.place), storage
        variable.valid = True
        self.leaving.append(variable)
        self.bytes_out += variable.nbytes

    def let_go(self) -> None:
        """Drop the hold on storages whose copies are done, so that they may end."""
        leaving = self.leaving
        while leaving:  # copies end in the order in which they began
            outgoing = leaving[0].outgoing
            if outgoing is not None and not self.mover.done(outgoing[0]):
                break
            variable = leaving.popleft()
            self.settle(variable)

    def settle(self, variable: Variable) -> None:
        """Let the device wait for a variable's copy to the host; it stays on the device.

        Raises:
            OSError: The copy failed, such as on a full disk; the device has the value.
        """
        if variable.outgoing is not None:
            ticket, variable.outgoing = variable.outgoing[0], None
            try:
                self.mover.wait(ticket)
            except OSError:
                variable.valid = False
                raise

    def release(self, variable: Variable) -> None:
        """Free a variable's device memory, when its copy to the host is done."""
        if not self._aliases_met:
            self._meet_aliases()
        if not variable.resident or variable.locked or variable.died is not None or variable.pins:
            return
        self.arrive(variable)  # while it lies on the host, torch does not own its memory either
        storage: Any = variable.peek()
        if storage is None:
            return
        if self._shared(storage) or not (storage.resizable() or (self.lies and variable.unlocked)):
            variable.locked = variable.fixed = True  # it has become so, where nobody saw it
            return
        del storage  # so that it may end
        if variable.raw:
            self.written(variable)
        self.swap_out(variable)
        self.settle(variable)
        storage = variable.peek()
        if variable.died is not None or storage is None:  # the copy held its storage until now
            return
        if self.lies:
            assert variable.place is not None
            address = self.store.address(variable.place)
            host_storage = torch._C._construct_storage_from_data_pointer(
                address, self.device, variable.nbytes
            )
            storage._swap_data_ptr_(host_storage)  # which ends with the device's memory
        else:
            storage.resize_(0)
        variable.resident = False
        self.used_bytes -= variable.nbytes

    def written(self, variable: Variable) -> None:
        """Note that a variable has a new value; the host's copy is no longer right."""
        self.settle(variable)
        variable.valid = False

    def resized(self, variable: Variable) -> None:
        """Note the bytes of a variable whose storage an operation, or its holder, has resized."""
        nbytes = variable.storage().nbytes()
        if variable.resident and variable.incoming is None and nbytes != variable.nbytes:
            self.settle(variable)
            self._forget_place(variable)
            self.used_bytes += nbytes - variable.nbytes
            variable.nbytes = nbytes

    def make_room(
        self,
        nbytes: int,
        keep: Iterable[Variable],
        what: Callable[[], str],
        strict: bool = True,
    ) -> None:
        """Free device memory for `nbytes`: of variables not to `keep`, those used longest ago.

        Where that is not enough and it is `strict`, wait for collectives, and then raise.

        Raises:
            BudgetTooSmall: All that may be released is not enough.
        """
        kept = set(keep)
        while self.used_bytes + nbytes > self.budget_bytes:
            self.bury()
            # Some may have ended, but for the copy. Copies end in the order in which they began:
            # to wait for one that frees enough is to wait for no other.
            while self.leaving and self.used_bytes + nbytes > self.budget_bytes:
                self.settle(self.leaving.popleft())
                self.bury()
            movable = (v for v in self.variables() if v.resident and not (v.locked or v.pins))
            # First those that no plan knows.
            for variable in sorted(movable, key=lambda v: (v.bound >= 0, v.used)):
                if self.used_bytes + nbytes <= self.budget_bytes:
                    return
                if variable not in kept:
                    self.release(variable)
            for variable in self.variables():
                if variable.locked:
                    self.resized(variable)
            if self.used_bytes + nbytes <= self.budget_bytes or not strict:
                return
            if not self.ended and not self.wait():
                break
        else:
            return
        raise self._too_small(nbytes, what())

    def _too_small(self, nbytes: int, name: str) -> BudgetTooSmall:
        because, variables = "", self.variables()
        if held := sum(v.nbytes for v in variables if v.locked):
            because = f", {held} of them of variables whose address is in use"
            if any(v.fixed for v in variables):
                because += " or whose memory is not torch's own"
        if busy := sum(v.nbytes for v in variables if v.pins):
            because += f", {busy} of them in use by collectives"
        needed = self.used_bytes + nbytes
        return BudgetTooSmall(name, needed, self.budget_bytes, f"{name}{because}", final=False)

    def restore(self) -> None:
        """Bring every variable back, whatever the budget, and wait until all are there.

        Raises:
            OSError, RuntimeError: One cannot be read back, or the device has no more memory; all
                others are there.
        """
        failed: Exception | None = None
        for variable in self.variables():
            with suppress(OSError):  # one that could not be written is still on the device
                self.settle(variable)
            try:
                self.swap_in(variable)
                self.arrive(variable)
            except (OSError, RuntimeError) as error:
                failed = failed or error
        self.mover.finish()
        if failed is not None:
            raise failed


class Addresses:
    """Tensors whose bytes are read by their address, of which no operation tells.

    The residency's lock is to be held by the caller.

    Attributes:
        kept: Copies that serialisers read by address; to be cleared when anything is written.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
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
            residency.on_demand += 1
            residency.make_room(variable.nbytes, (variable,), lambda: "reading a tensor's address")
            residency.swap_in(variable)
        residency.arrive(variable)
        residency.written(variable)  # it may be, without a word to us
        variable.used = residency.clock
        variable.locked = variable.locked or lock

    def unlock(self, tensor: torch.Tensor | None) -> None:
        """Let a tensor, or all of them, be swapped out again."""
        known = self._residency.look_up(tensor) if tensor is not None else None
        for variable in [known] if tensor is not None else self._residency.variables():
            if variable is not None and variable.locked:
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
        if saved is not None:
            return saved
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
