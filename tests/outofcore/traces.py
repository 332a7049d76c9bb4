"""Random and hand-made traces for the tests of `repro.outofcore`."""

import random

from repro.outofcore import Function, SwapPlan, Trace, bound


def chain(layers: int, width: int = 10, weight: int = 3) -> Trace:
    """Return forward, backward and update of a chain of layers, without weights of 0 bytes."""
    sizes, functions = {"a0": width}, []
    for i in range(layers):
        sizes |= {f"a{i + 1}": width, f"g{i}": width, f"g{layers}": width}
        sizes |= {f"w{i}": weight, f"d{i}": weight} if weight else {}
        inputs = (f"a{i}", f"w{i}") if weight else (f"a{i}",)
        functions.append(Function("forward", inputs, (f"a{i + 1}",)))
    functions.append(Function("loss", (f"a{layers}",), (f"g{layers}",)))
    for i in reversed(range(layers)):
        inputs = (f"g{i + 1}", f"a{i}", f"w{i}") if weight else (f"g{i + 1}", f"a{i}")
        outputs = (f"g{i}", f"d{i}") if weight else (f"g{i}",)
        functions.append(Function("backward", inputs, outputs))
    if weight:
        functions += [Function("update", (f"w{i}", f"d{i}"), (f"w{i}",)) for i in range(layers)]
    return Trace(tuple(functions), sizes, deaths={"a0": len(functions)})


def least_s(plan: SwapPlan, times, rates) -> float:
    """The seconds that no plan of the trace within the budget beats."""
    return bound(plan.trace, plan.budget_bytes, times, rates)


def random_trace(rng: random.Random) -> Trace:
    """Return a trace of up to 14 functions with every kind of variable and of access."""
    n = rng.randint(1, 14)
    sizes = {f"p{i}": rng.randint(0, 9) for i in range(rng.randint(0, 4))}
    live, functions = list(sizes), []
    for number in range(n):
        inputs, outputs = rng.sample(live, min(len(live), rng.randint(0, 3))), []
        for _ in range(rng.randint(0, 2)):
            which = rng.random()
            if which < 0.6 or not live:  # a new one
                name = f"t{len(sizes)}"
                sizes[name] = rng.randint(0, 9)
                outputs.append(name)
            elif which < 0.85 and inputs:  # changed in place
                outputs.append(rng.choice(inputs))
            else:  # perhaps overwritten whole
                outputs.append(rng.choice(live))
        functions.append(Function(f"f{number}", tuple(inputs), tuple(outputs)))
        live += [name for name in dict.fromkeys(outputs) if name not in live]
    accesses = Trace(tuple(functions), sizes).accesses
    deaths = {
        name: rng.randint(used[-1] + 1, used[0] + n)
        for name, used in accesses.items()
        if rng.random() < 0.3
    }
    return Trace(tuple(functions), sizes, deaths=deaths)


def budgets(trace: Trace, rng: random.Random) -> set[int]:
    """Return budgets from just feasible to ample."""
    low, high = trace.smallest_budget, max(trace.smallest_budget, trace.peak_bytes)
    return {low, (low + high) // 2, high, rng.randint(low, high)}
