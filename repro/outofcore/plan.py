"""When to copy which variable, for one repeated iteration, and what that costs.

Source: Hayakawa and Narihira, section 3. A `SwapPlan` is what any scheduler of `schedule` or
`baselines` returns, so that all are checked, simulated and run by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repro.outofcore.actions import Action, Kind
from repro.outofcore.bounds import bound
from repro.outofcore.checking import check
from repro.outofcore.host import aligned
from repro.outofcore.simulation import Simulation, simulate

if TYPE_CHECKING:
    from repro.outofcore.trace import Trace


@dataclass(frozen=True)
class SwapPlan:
    """The actions around each function of a repeated iteration.

    Attributes:
        trace: What is scheduled.
        budget_bytes: The device memory that may be taken at any time.
        before: (n) actions just before each function, in order.
        after: (n) actions just after each function, in order.
        resident: Variables that are on the device when the iteration starts.
        host_valid: Variables whose copy on the host is right when the iteration starts.
        outgoing: Variables whose copy to the host began in the iteration before, and whose device
            memory has not been released.
        scheduler: The name of what made it.
        window_bytes: The window, where it has one.
        copies_again: It copies to the host what the host has already, as the paper's own does.
    """

    trace: Trace = field(repr=False)
    budget_bytes: int
    before: tuple[tuple[Action, ...], ...] = field(repr=False)
    after: tuple[tuple[Action, ...], ...] = field(repr=False)
    resident: frozenset[str] = field(repr=False)
    host_valid: frozenset[str] = field(repr=False)
    outgoing: frozenset[str] = field(default=frozenset(), repr=False)
    scheduler: str = "window"
    window_bytes: int | None = None
    copies_again: bool = False

    @property
    def bytes_in(self) -> int:
        """Bytes copied to the device in one iteration."""
        return self._bytes(Kind.SWAP_IN)

    @property
    def bytes_out(self) -> int:
        """Bytes copied to the host in one iteration."""
        return self._bytes(Kind.SWAP_OUT)

    @property
    def bytes_moved(self) -> int:
        """Bytes copied in both directions in one iteration."""
        return self.bytes_in + self.bytes_out

    @cached_property
    def host_bytes(self) -> int:
        """The most bytes of variables on the host at once: once there, they stay until they end."""
        sizes = {name: aligned(nbytes) for name, nbytes in self.trace.sizes.items()}
        deaths: dict[int, list[str]] = {}
        for name, (_, death) in self.trace.lifetimes.items():
            deaths.setdefault(death % len(self.trace.functions), []).append(name)
        on_host: set[str] = set()
        held = peak = 0
        for number in 2 * [*range(len(self.trace.functions))]:
            for name in deaths.get(number, ()):
                if name in on_host:
                    on_host.discard(name)
                    held -= sizes[name]
            for kind, name in (*self.before[number], *self.after[number]):
                # What is released is copied in any case: somebody may look at its value.
                if kind in (Kind.SWAP_OUT, Kind.RELEASE) and name not in on_host:
                    on_host.add(name)
                    held += sizes[name]
                    peak = max(peak, held)
        return peak

    def _bytes(self, kind: Kind) -> int:
        return sum(
            self.trace.sizes[action.variable]
            for actions in (*self.before, *self.after)
            for action in actions
            if action.kind is kind
        )

    def verify(self) -> int:
        """Run the plan on paper, twice, and check every rule that a plan has to keep.

        The budget holds before and during every function, transfers under way included; inputs are
        on the device when their function runs; a copy to the device has a right copy on the host to
        come from; nothing is copied that is dead, that the host already has, or that is there;
        no value that is still needed is lost; and the iteration ends as it started.

        Returns:
            The most bytes held at any time.

        Raises:
            PlanError: A rule is broken; the message names the function and the variable.
        """
        return check(self)

    def simulate(
        self,
        compute_times: Sequence[float] | NDArray[np.float64],
        bandwidth: float | tuple[float, float],
        latency_s: float = 0.0,
    ) -> Simulation:
        """Return what an iteration takes on a device with two copy streams.

        Functions run in order on one stream, copies to the device in order on a second, copies to
        the host on a third; streams wait for each other exactly as the plan says. Iterations are
        repeated until two in a row take the same time, and the last is returned.

        Args:
            compute_times: (n,) seconds of each function.
            bandwidth: Bytes/s of the copies; a pair gives (to the device, to the host).
            latency_s: Seconds that each copy takes beside its bytes.

        Raises:
            ValueError: The number of times is not that of the functions, or a value is negative.
        """
        return simulate(self, compute_times, bandwidth, latency_s)

    def bound(
        self,
        compute_times: Sequence[float] | NDArray[np.float64],
        bandwidth: float | tuple[float, float],
        latency_s: float = 0.0,
    ) -> float:
        """Return the seconds that no plan of this trace within this budget can beat.

        The arguments are those of `simulate`, whose `Simulation.time_s` it is never above: see
        `bounds`.
        """
        return bound(self.trace, self.budget_bytes, compute_times, bandwidth, latency_s)
