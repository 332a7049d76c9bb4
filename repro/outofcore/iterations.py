"""From iteration to iteration: what is recorded, what is followed, and when a plan is made anew."""

from collections.abc import Callable
from dataclasses import dataclass

from torch._ops import OpOverload

from repro.outofcore.following import Follower, Step
from repro.outofcore.operations import Timer, say_once
from repro.outofcore.plan import SwapPlan
from repro.outofcore.recording import Entry, Recording, build, sum_in_place
from repro.outofcore.residency import Variable
from repro.outofcore.sums import ADD_INTO

_MOST = 2**18  # operations of an iteration that are kept
_REFINEMENTS = 2  # plans made for better known ends of variables, at most


@dataclass
class Statistics:
    """What happened within a block.

    Attributes:
        iterations: Iterations that ended.
        replayed: Of these, the ones that ran wholly by a plan.
        plans: Plans made of recorded iterations.
        tuned: Times that a better plan of the same iteration took the place of one.
        off_order: Operations that ran otherwise than the plan at hand says.
        on_demand: Swap-ins that an operation had to wait for, since no plan had asked for them.
        bytes_in: Bytes copied to the device.
        bytes_out: Bytes copied to the host.
        peak_bytes: The most bytes of storages on the device at once.
        host_bytes: The most bytes swapped out at once.
        locked_bytes: Bytes that stay on the device, since their address is in use elsewhere.
        uncounted_bytes: Bytes that are left alone, since operations use slices of them alone.
    """

    iterations: int = 0
    replayed: int = 0
    plans: int = 0
    tuned: int = 0
    off_order: int = 0
    on_demand: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    locked_bytes: int = 0
    uncounted_bytes: int = 0


class Iterations:
    """The iterations of a block: recorded until a plan stands, then followed.

    The first is recorded. The second often runs other functions, since an optimizer makes its state
    in the first, and shows when the variables end that an iteration leaves behind: it is recorded
    again and planned. The third shows whether it repeats. Then nothing is recorded until an
    operation leaves the plan.

    Args:
        make_plan: Plans a recorded iteration; None only records.
        settle: Told of a plan that has run through as it was made, with that iteration.
        statistics: Where to count.

    Attributes:
        origin: The clock at the start of the iteration.
        log: Its operations so far, or None where they are not recorded.
        recorded: The last recorded iteration.
        follower: What follows the plan, or None before the first.
        plan: The plan.
    """

    def __init__(
        self,
        make_plan: Callable[[Recording], SwapPlan] | None,
        settle: Callable[[SwapPlan, Recording], None] | None,
        statistics: Statistics,
    ) -> None:
        self._make_plan, self._settle, self._statistics = make_plan, settle, statistics
        self.origin = 0
        self.log: list[Entry] | None = []
        self.recorded: Recording | None = None
        self.follower: Follower | None = None
        self.plan: SwapPlan | None = None
        self._proved = False  # the plan has run through once
        self._settled = False  # the plan is as good as its trace can be known
        self._refined = 0  # plans made since the functions last changed
        self._strays = 0  # iterations in a row that did not run by the plan

    def record_only(self) -> None:
        """Make no plans from now on."""
        self._make_plan = self._settle = None

    def expected(self, operation: OpOverload, inputs: list[Variable]) -> Step | None:
        """Return the plan's next step where this operation is it; else leave the plan."""
        if self.follower is None:
            return None
        step = self.follower.match(operation, inputs, self.origin)
        if step is None and inputs:
            self._statistics.off_order += 1
            self.leave()
        return step

    def sums_in_place(self) -> bool:
        """Whether the plan at hand has a sum in place here."""
        follower = self.follower
        return (
            follower is not None
            and 0 <= follower.cursor < len(follower.steps)
            and follower.steps[follower.cursor].operation is ADD_INTO
        )

    def leave(self) -> None:
        """Go on by demand; what ran by the plan so far is written into the log."""
        assert self.follower is not None
        if self.log is None:
            self.log = self.follower.passed()
        self.follower.cursor = -1

    def ran(
        self,
        step: Step | None,
        operation: OpOverload,
        inputs: list[Variable],
        written: list[Variable],
        made: list[Variable],
        timer: Timer | None,
        into: Variable | None = None,
    ) -> Step | None:
        """Note an operation that ran; return its step where it went as planned."""
        follower = self.follower
        if step is not None and follower is not None and not follower.bind_made(step, made):
            self.leave()
            step = None
        if self.log is not None:
            entry = Entry(operation, inputs, written, made, into)
            if timer is not None:
                entry.seconds, entry.events = timer.seconds, timer.events
            self.log.append(entry)
            if len(self.log) > _MOST:
                self._begin_anew()
        if step is not None and follower is not None:
            follower.cursor += 1
        return step

    def _begin_anew(self) -> None:
        """Forget what ran since the last iteration ended, since that was too much for one."""
        assert self.log is not None
        self.origin += len(self.log)
        self.log.clear()
        say_once(
            "endless",
            f"no iteration has ended in {_MOST} operations, so that nothing is planned: where no "
            "torch optimizer steps, call step() of the OutOfCore block after each",
        )

    def end(self, clock: int) -> None:
        """End an iteration, and plan anew where that is called for.

        Args:
            clock: Operations so far.

        Raises:
            BudgetTooSmall: One function alone needs more than the budget.
        """
        if clock == self.origin:
            return  # nothing ran since the last one ended
        self._statistics.iterations += 1
        done = self.follower is not None and self.follower.done
        self._strays += 1
        if done:
            self._statistics.replayed += 1
            self._proved = True
            self._strays = 0
        if self.log is not None:
            self._end_recording(done)
        self.origin = clock
        if self.follower is not None:
            self.follower.cursor = 0

    def _end_recording(self, done: bool) -> None:
        assert self.log is not None
        log = sum_in_place(self.log, self.origin)
        recorded = build(log, self.origin, self.recorded)
        plan = self.plan
        same = plan is not None and recorded.trace == plan.trace
        known = done and (self._settled or same or self._refined == _REFINEMENTS)
        # The first iteration rarely runs like those after it, so it is not planned. A plan that has
        # run through outlasts one iteration that does not follow it, such as one with an evaluation
        # before it. Where many in a row do not, a plan is made after the 2nd, 4th, 8th and so on.
        few = 2 if self._proved or self.recorded is None else 1
        patient = self._strays < few or self._strays & (self._strays - 1)
        if self._make_plan and not known and (done or not patient):
            self.plan = self._make_plan(recorded)
            self.follower = Follower(recorded, self.plan)
            self._refined = self._refined + 1 if done else 0
            self._settled = self._proved = False
            self._statistics.plans += 1
        elif known and not self._settled and self._settle and plan is not None:
            self._settle(plan, recorded)
        self._settled = self._settled or known
        self.recorded = recorded
        self.log = None if known else []
