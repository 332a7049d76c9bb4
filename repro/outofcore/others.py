"""Operations of other threads, and how the thread that trains waits for these and collectives."""

import time
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from repro.measure import accelerator
from repro.outofcore.bounds import BudgetTooSmall
from repro.outofcore.interrupts import Uninterrupted
from repro.outofcore.iterations import Statistics
from repro.outofcore.operations import result_bytes
from repro.outofcore.recording import signature
from repro.outofcore.residency import Residency, Variable
from repro.outofcore.running import Running, in_compiled

_PATIENCE_S = 300.0  # for other threads and collectives to end what they do with a tensor


class Others:
    """Runs operations of other threads beside what the thread that trains runs.

    Args:
        running: What that thread runs.
        residency: What moves variables.
        statistics: Where to count.
        guard: What tells whether an interrupt is pending: then nobody waits any longer.
    """

    def __init__(
        self,
        running: Running,
        residency: Residency,
        statistics: Statistics,
        guard: Uninterrupted,
    ) -> None:
        self._running, self._residency, self._lock = running, residency, residency.lock
        self._statistics, self._guard = statistics, guard

    def run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of another thread: it may take room, and nothing that it uses leaves."""
        # One of higher order, such as torch.cond, calls functions whose operations nobody sees.
        known = signature(operation) if isinstance(operation, OpOverload) else None
        if known is None and in_compiled():
            raise NotImplementedError(
                f"{operation} needs torch.compile, which does not look into an OutOfCore block: "
                "use what computes the same without (Python's if and while, "
                "F.scaled_dot_product_attention), or train without the block"
            )
        if known is not None and known.ignored:
            return operation(*args, **kwargs)
        residency, running = self._residency, self._running

        def what() -> str:
            return f"an operation of another thread ({known.name})" if known else str(operation)

        with self._lock:
            if known is None:
                inputs = written = running.operands.held(args, kwargs)
            else:
                inputs, written = running.operands.of(known, args, kwargs)
            nbytes, certain = 0, True
            while True:
                for variable in inputs:
                    if not variable.resident:
                        self._statistics.on_demand += 1
                        self._make_room(variable.nbytes, inputs, what, strict=True)
                        residency.swap_in(variable)
                    residency.arrive(variable)
                    variable.used = residency.clock
                if known is not None and (known.makes or known.resizes):
                    nbytes, certain = result_bytes(operation, args, kwargs)
                self._make_room(nbytes, inputs, what, strict=certain)
                if all(variable.resident for variable in inputs):  # also where we had to wait
                    break
            for variable in inputs:
                variable.pins += 1
            for variable in written:
                residency.written(variable)
            residency.used_bytes += nbytes
        try:
            self._other_streams()
            result = (operation if known is None else operation._op)(*args, **kwargs)
            self._other_streams()
        except BaseException:
            with self._lock:
                self._end(inputs, nbytes)
            raise
        with self._lock:  # without a gap, in which another thread could take what was kept free
            self._end(inputs, nbytes)
            makes = known is None or known.makes
            made = running.operands.made(result, inputs) if makes else []
            if known is not None and known.resizes:
                running.operands.resized(known, args, kwargs, written, made)
            residency.note_peak()
            keep = (*inputs, *made, *running.active)
            residency.make_room(running.promised or 0, keep, what, strict=False)
        return result

    def _make_room(
        self, nbytes: int, inputs: list[Variable], what: Callable[[], str], strict: bool
    ) -> None:
        """Have room beside what the thread that trains works on, or else when that is done."""
        residency, running = self._residency, self._running
        until = time.monotonic() + _PATIENCE_S
        while True:
            active, promised = tuple(running.active), running.promised
            need, keep = nbytes + (promised or 0), (*inputs, *active)
            try:
                return residency.make_room(need, keep, what, strict, patient=False)
            except BudgetTooSmall:
                busy = active or promised or any(v.pins for v in residency.variables())
                if not busy or time.monotonic() > until or self._guard.pending is not None:
                    raise
                running.changed.wait(0.002)
                running.collectives.let_go()

    def _end(self, inputs: list[Variable], nbytes: int) -> None:
        self._residency.used_bytes -= nbytes
        for variable in inputs:
            variable.pins -= 1
        self._running.changed.notify_all()

    def _other_streams(self) -> None:
        device = self._residency.device
        if accelerator.is_accelerator(device):  # each thread has a current stream of its own
            accelerator.synchronize(device)

    def wait(self) -> bool:
        """Wait until nobody else works on some tensor: other threads, or collectives."""
        residency, running = self._residency, self._running
        until = time.monotonic() + _PATIENCE_S
        before = sum(v.pins for v in residency.variables())
        if not before and running.promised is None:
            return False
        running.waiting += 1
        try:
            while time.monotonic() < until and self._guard.pending is None:
                running.changed.wait(0.002)
                running.collectives.let_go()
                if sum(v.pins for v in residency.variables()) < before:
                    return True
                if not before and running.promised is None:
                    return True
        finally:
            running.waiting -= 1
        return False
