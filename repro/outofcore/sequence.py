"""One training iteration as a sequence of functions, with their variables, and actions.

Source: Hayakawa and Narihira, section 3: the function-sequence [f_1, ..., f_n], the variables that
each function uses, and the bytes b_v of each variable. A variable is one storage: views and
in-place results of a tensor are the same variable.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from repro.measure.checks import is_whole

KINDS = ("parameter", "buffer", "gradient", "optimizer state", "activation", "input")


class Kind(Enum):
    """The effect of an action on one variable."""

    SWAP_IN = "swap in"  # take device memory and start the copy from the host
    ALLOCATE = "allocate"  # take device memory; the next function overwrites it whole
    SWAP_OUT = "swap out"  # start the copy to the host; the device memory stays taken
    RELEASE = "release"  # wait for its copy to the host, if one runs, and free the device memory


class Action(NamedTuple):
    """One action of a swap plan on one variable."""

    kind: Kind
    variable: str


class TraceError(ValueError):
    """A trace contradicts itself."""


@dataclass(frozen=True, slots=True)
class Function:
    """One operation, and the variables that it reads and writes.

    Attributes:
        name: Any name, such as ``"aten.convolution"``.
        inputs: Variables that it reads.
        outputs: Variables that it writes. A variable that is only an output is new, or is
            overwritten whole; a variable changed in place is both an input and an output.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for which in ("inputs", "outputs"):
            names = getattr(self, which)
            if isinstance(names, str):
                raise TraceError(f"{which} of {self.name} is the text {names!r}: give a tuple")
            object.__setattr__(self, which, tuple(dict.fromkeys(names)))  # each once, in order

    @property
    def variables(self) -> tuple[str, ...]:
        """All its variables, each once, inputs first."""
        return tuple(dict.fromkeys(self.inputs + self.outputs))


class Gap(NamedTuple):
    """The time between two uses of a variable, or between its last use and its end."""

    variable: str
    use: int  # the function before the gap
    then: int  # the function after it, or before which the variable ends; n + f: next iteration's f
    ends: bool  # the variable ends with the gap
    needed: bool  # its value outlives the gap, or may be read within it


@dataclass(frozen=True)
class Trace:
    """The functions of one iteration, which is repeated.

    A variable that is first read exists before the iteration and stays (`persistent`: a parameter,
    a buffer, a state of the optimizer), unless `deaths` names it: then it is given anew each
    iteration (a batch). A variable that is first written is born there. A variable of `sizes` that
    no function uses is `held`: it is always there, unless it is swapped out for good.

    Args:
        functions: Functions in the order of execution.
        sizes: Bytes of each variable.
        kinds: One of `KINDS` for any of the variables.
        deaths: For variables that do not persist: the number of the function before which the
            variable ends, counted from 0. Without an entry a variable ends after its last use.
            A number beyond the last function, n + d, means function d of the next iteration.

    Raises:
        TraceError: There is no function, a size is missing or negative, or a death does not lie
            between the variable's last use and one iteration after its birth.
    """

    functions: tuple[Function, ...]
    sizes: Mapping[str, int]
    kinds: Mapping[str, str] = field(default_factory=dict)
    deaths: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", tuple(self.functions))
        n = len(self.functions)
        if not n:
            raise TraceError("a trace needs at least one function: there is none")
        if missing := self.accesses.keys() - self.sizes.keys():
            raise TraceError(
                f"the variable {min(missing)!r} has no size: add it to sizes, in bytes"
            )
        for name, size in self.sizes.items():
            if not is_whole(size, 0):
                raise TraceError(f"the size of {name!r} is {size!r}: give whole bytes, 0 or more")
        for name, kind in self.kinds.items():
            if kind not in KINDS:
                raise TraceError(f"{name!r} is a {kind!r}: choose one of {', '.join(KINDS)}")
        for name, death in self.deaths.items():
            if name not in self.accesses:
                raise TraceError(f"{name!r} dies, but no function uses it")
            first, last = self.accesses[name][0] + n, self.accesses[name][-1] + 1
            if not is_whole(death, last, first):
                raise TraceError(f"{name!r} dies before {death!r}: give {last} to {first}")

    @cached_property
    def accesses(self) -> dict[str, list[int]]:
        """Each variable's functions that use it, by number, ascending."""
        uses: dict[str, list[int]] = {}
        for number, function in enumerate(self.functions):
            for name in function.variables:
                uses.setdefault(name, []).append(number)
        return uses

    @cached_property
    def persistent(self) -> frozenset[str]:
        """Variables that exist before and after the iteration."""
        return frozenset(
            name
            for name, used in self.accesses.items()
            if name in self.functions[used[0]].inputs and name not in self.deaths
        )

    @cached_property
    def held(self) -> tuple[str, ...]:
        """Variables that no function uses, such as the weights of a skipped layer."""
        return tuple(name for name in self.sizes if name not in self.accesses)

    @property
    def held_bytes(self) -> int:
        """Bytes of the variables that no function uses."""
        return sum(self.sizes[name] for name in self.held)

    @cached_property
    def lifetimes(self) -> dict[str, tuple[int, int]]:
        """For each variable that does not persist, (birth, death): it exists in [birth, death)."""
        return {
            name: (used[0], self.deaths.get(name, used[-1] + 1))
            for name, used in self.accesses.items()
            if name not in self.persistent
        }

    @cached_property
    def gaps(self) -> list[Gap]:
        """The gaps of all variables, one variable after the other, in order."""
        n, inputs = len(self.functions), [frozenset(f.inputs) for f in self.functions]
        gaps = []
        for name, used in self.accesses.items():
            persists = name in self.persistent
            then = [*used[1:], used[0] + n if persists else self.lifetimes[name][1]]
            for a, b in zip(used, then, strict=True):
                ends = a == used[-1] and not persists
                gaps.append(Gap(name, a, b, ends, ends or name in inputs[b % n]))
        return gaps

    @cached_property
    def ending(self) -> list[list[str]]:
        """For each function the variables that end before it; with the last, for the first."""
        ending: list[list[str]] = [[] for _ in self.functions]
        for name, (_, death) in self.lifetimes.items():
            ending[death % len(ending)].append(name)
        return ending

    @cached_property
    def alive_at_start(self) -> frozenset[str]:
        """Variables that persist, or were left by the iteration before."""
        n = len(self.functions)
        return self.persistent | {v for v, (_, death) in self.lifetimes.items() if death > n}

    @cached_property
    def needs_bytes(self) -> list[int]:
        """For each function the bytes of its own variables, which it needs to run."""
        return [sum(self.sizes[name] for name in f.variables) for f in self.functions]

    @cached_property
    def live_bytes(self) -> list[int]:
        """For each function the bytes of all live variables while it runs, in core."""
        n = len(self.functions)
        change = [0] * (n + 1)
        change[0] = self.held_bytes + sum(self.sizes[name] for name in self.alive_at_start)
        for name, (birth, death) in self.lifetimes.items():
            change[birth] += self.sizes[name]
            # If it dies beyond the end, the earlier instance still exists at the start.
            change[death if death <= n else death - n] -= self.sizes[name]
        return list(accumulate(change))[:n]

    @property
    def peak_bytes(self) -> int:
        """Bytes that training in core needs."""
        return max(self.live_bytes)

    @property
    def smallest_budget(self) -> int:
        """Bytes below which no schedule exists: the largest need of one function."""
        return max(self.needs_bytes)
