"""The requests for device memory that a plan makes, in order."""

from repro.outofcore.actions import Kind
from repro.outofcore.allocator import Event
from repro.outofcore.plan import SwapPlan


def requests(plan: SwapPlan, iterations: int = 2) -> list[Event]:
    """Return the requests and their ends when a plan is repeated.

    A variable that is swapped in is a new request, as its memory comes from the allocator anew.
    Variables of 0 bytes need none.

    Args:
        plan: Any plan; one without transfers gives the requests of training in core.
        iterations: How often it is run; the first starts with what the plan says is resident.
    """
    return [event for _, event in by_function(plan, iterations)]


def by_function(plan: SwapPlan, iterations: int = 2) -> list[tuple[int, Event]]:
    """Return the requests of `requests`, each with the number of the function that makes it.

    Functions are counted on through the iterations; what is resident at first is of the first.
    """
    sizes, n = plan.trace.sizes, len(plan.trace.functions)
    deaths: dict[int, list[str]] = {}
    for name, (_, death) in plan.trace.lifetimes.items():
        deaths.setdefault(death % n, []).append(name)
    resident = {*plan.resident}
    if plan.trace.peak_bytes <= plan.budget_bytes:
        resident.update(plan.trace.held)
    device = dict.fromkeys(sorted(name for name in resident if sizes[name]))
    events = [(0, Event(name, sizes[name])) for name in device]
    now = 0

    def allocate(name: str) -> None:
        if name not in device and sizes[name]:
            device[name] = None
            events.append((now, Event(name, sizes[name])))

    def remove(name: str) -> None:
        if name in device:
            del device[name]
            events.append((now, Event(name, None)))

    for iteration in range(iterations):
        for number, function in enumerate(plan.trace.functions):
            now = iteration * n + number
            for name in deaths.get(number, ()):
                remove(name)
            for kind, name in plan.before[number]:
                (remove if kind is Kind.RELEASE else allocate)(name)
            for name in function.variables:
                allocate(name)
            for kind, name in plan.after[number]:
                if kind is Kind.RELEASE:
                    remove(name)
    return events
