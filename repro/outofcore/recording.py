"""Properties of operations by their schemas, sums of gradients, and the trace of a run."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from repro.measure import accelerator
from repro.outofcore.residency import Variable
from repro.outofcore.sequence import Function, Trace

ADD: OpOverload = torch.ops.aten.add.Tensor
ADD_INTO: OpOverload = torch.ops.aten.add_.Tensor
_OURS = ("repro.outofcore.", "torch._dynamo", "torch._compile")
_SKIPPED = 16  # most functions at an iteration's start that may belong to the one before
# Operations that make a tensor of a storage without access to its bytes, even if it is empty now.
_WITHOUT_ACCESS = frozenset(
    {"aten.detach", "aten.alias", "aten.view", "aten._unsafe_view", "aten.lift_fresh"}
)
# Types of arguments that hold no tensor, as schemas write them, also in lists or optional.
_WITHOUT_TENSORS = re.compile(
    r"(Optional\[|List\[)*(int|SymInt|float|bool|number|Scalar|str|Device|Layout)\]*"
)
# Operations with schemas that do not say that they write the running statistics.
_NORMS = frozenset(
    {f"aten.{by}_batch_norm" for by in ("native", "cudnn", "miopen")}
    | {"aten.batch_norm_gather_stats", "aten.batch_norm_gather_stats_with_counts"}
    | {"aten.batch_norm_update_stats"}
)
_WRITES_UNSAID = ("running_mean", "running_var")
_ONE_FOR_ALL = ("scalars", "weight")
# Operations with result sizes that depend on values; "index" only with masks.
_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "index", "repeat_interleave", "bincount"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
    | {"_to_sparse", *(f"_to_sparse_{layout}" for layout in ("csr", "csc", "bsr", "bsc"))}
    | {"_ctc_loss"}
)


class Signature(NamedTuple):
    """An operation's properties according to its schema."""

    name: str  # without the overload, such as "aten.convolution"
    ignored: bool  # it does not touch the values of its tensors
    takes: tuple[int, ...]  # the positions of arguments that may be or hold tensors, ascending
    takes_named: frozenset[str]  # their names
    writes: tuple[bool, ...]  # for each argument by position, whether it is written
    writes_named: frozenset[str]  # names of arguments that are written
    grouped: bool  # it works on lists of tensors one by one, so that it can be run in parts
    makes: bool  # it may return tensors with new storages
    view: bool  # it returns a tensor of a given storage
    resizes: bool  # it may change the size of a given storage
    collective: bool  # it continues with other processes after it has returned
    awaited: bool  # its results come from other processes, and must be waited for
    by_values: bool  # the size of its result may depend on values
    has_meta: bool  # it can be run on the device meta, which computes and draws nothing
    takes_device: bool  # it has an argument for its result's device


def signature(operation: OpOverload) -> Signature:
    """Return the signature of an operation."""
    # By its address: an operation computes its own hash in Python at every look-up.
    cached = _SIGNATURES.get(id(operation))
    if cached is None:
        cached = _SIGNATURES[id(operation)] = operation, _signature(operation)
    return cached[1]


_SIGNATURES: dict[int, tuple[OpOverload, Signature]] = {}


def _signature(operation: OpOverload) -> Signature:
    arguments, returns = operation._schema.arguments, operation._schema.returns
    space, short = operation.namespace, operation._opname
    name = f"{space}.{short}"
    said = [bool(a.alias_info is not None and a.alias_info.is_write) for a in arguments]
    unsaid = _WRITES_UNSAID if name in _NORMS else ()
    writes = tuple(  # the schemas of collectives do not say that they write either
        write or a.name in unsaid or space == "c10d"
        for a, write in zip(arguments, said, strict=True)
    )
    in_place = any(writes) and all(r.alias_info and r.alias_info.is_write for r in returns)
    ignored = name in _WITHOUT_ACCESS or space in ("prim", "profiler")
    # By exclusion: arguments of any other type may hold tensors.
    takes = [n for n, a in enumerate(arguments) if not _WITHOUT_TENSORS.fullmatch(str(a.type))]
    return Signature(
        name=name,
        ignored=ignored,
        takes=tuple(takes),
        takes_named=frozenset(arguments[n].name for n in takes),
        writes=writes,
        writes_named=frozenset(a.name for a, w in zip(arguments, writes, strict=True) if w),
        grouped=short.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        and not any(
            "Tensor" in str(a.type) and "List" not in str(a.type) and a.name in _ONE_FOR_ALL
            for a in arguments
        ),
        # Its result has no memory, and torch fills it with zeros before an operation takes it.
        makes=not (in_place or operation.is_view or name == "aten._efficientzerotensor"),
        view=operation.is_view,
        # An operation with a name ending in "_" changes only values.
        resizes=any(said) and (not short.endswith("_") or short.startswith("resize")),
        collective=space == "c10d",
        awaited=space == "_c10d_functional" and short != "wait_tensor",
        by_values=name.removeprefix("aten.") in _BY_VALUES
        and operation._overloadname != "self_Tensor",
        # An operation registered for all devices at once would compute on meta, too.
        has_meta=not ignored
        and (
            space in ("aten", "prims")
            or torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "Meta")
        ),
        takes_device=any(a.name == "device" and a.kwarg_only for a in arguments),
    )


_NOT_KEPT = (torch.ScriptObject, torch.UntypedStorage)  # have no ==, or hold memory


def form(name: str, arguments: Iterable[Any]) -> list[Any]:
    """Return what gives an operation's results their sizes: its arguments, of tensors shapes.

    In torch's own operations a float beside a tensor gives none, as Adam's corrections.
    """
    made: list[Any] = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            value = None if value.is_nested else value.shape
        elif isinstance(value, (list, tuple)):
            if value and not isinstance(value[0], int):
                value = form(name, value)
        elif isinstance(value, float):
            if name.startswith("aten.") and made and isinstance(made[0], torch.Size):
                value = float
        elif isinstance(value, _NOT_KEPT):
            value = None
        made.append(value)
    return made


Events = tuple[accelerator.Event, accelerator.Event]


def timed(
    device: torch.device, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Events]:
    """Return the result of a call, and events of the device before and after it."""
    begin, end = (accelerator.new_event(device, timing=True) for _ in range(2))
    begin.record()
    result = call(*args, **kwargs)
    end.record()
    return result, (begin, end)


@dataclass(slots=True)
class Entry:
    """One operation that ran: its inputs, the inputs that it wrote, and its new variables."""

    operation: OpOverload
    inputs: list[Variable]
    written: list[Variable]
    made: list[Variable]
    form: list[Any]  # of its arguments
    into: Variable | None = None  # a gradient that may hold this sum, if it ends here
    events: Events | None = None  # before and after it


@dataclass
class Recording:
    """One iteration as it ran."""

    trace: Trace
    order: list[Variable]  # the actual variables, in the order of `trace.accesses`
    times: list[float]  # seconds of each function
    calls: list[tuple[OpOverload, list[Any]]] = field(repr=False)  # of each function


# ---- sums of gradients in place, as in plain autograd. If a tensor is used twice, autograd sums
# two gradients of it: plain autograd into the first gradient, if nothing else holds it, but under a
# dispatch mode always into a new tensor, so that an iteration would hold one more. The recording
# finds such a sum by an operand that ends right after it; iterations that follow the plan then sum
# in place: a + b = b + a to the last bit. The other operand may be a slice of a larger tensor.


_Holders = tuple[int, int, int]


def _holders(args: tuple[Any, ...], position: int) -> _Holders:
    """Return counts of references to a tensor in C++ and in Python, and to its storage."""
    held = torch._C._storage_Use_Count(args[position].untyped_storage()._cdata)
    return args[position]._use_count(), sys.getrefcount(args[position]), held


def _in_the_engine() -> bool:
    """Whether autograd itself, not the user's code, runs an operation in a backward pass."""
    if torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


class _Probe(TorchDispatchMode):
    """Counts the references to the operands of a sum that only autograd holds."""

    holders: tuple[_Holders, _Holders] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ADD and _in_the_engine():
            self.holders = _holders(args, 0), _holders(args, 1)
        return func(*args, **(kwargs or {}))


class Sums:
    """Finds sums that can be made in place.

    The usual number of references to a tensor is internal to torch, so it is first measured on a
    small graph on the device; if that fails, no sum is made in place.
    """

    def __init__(self, device: torch.device) -> None:
        probe = _Probe()  # type: ignore[no-untyped-call]
        with (
            suppress(RuntimeError, NotImplementedError, AttributeError),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            x = torch.zeros(2, device=device, requires_grad=True)
            y = x * 1.0
            end = (y * 2.0 + y * 3.0).sum()  # two gradients of y, neither held elsewhere
            with probe:
                torch.autograd.grad(end, x)
        self._alone = probe.holders

    def into(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the position of the operand that may hold a sum of two gradients, or None."""
        if self._alone is None or kwargs or len(args) != 2 or not _in_the_engine():
            return None
        if any(not isinstance(v, torch.Tensor) or v.layout is not torch.strided for v in args):
            return None
        alone = [_holders(args, i) == self._alone[i] for i in (0, 1)]  # before we add references
        one, other = args
        alike = one.dtype == other.dtype and one.shape == other.shape
        if not (any(alone) and alike) or any(t.is_conj() or t.is_neg() for t in args):
            return None
        if alone[0] and _dense(one):  # plain autograd's condition
            return 0
        return 1 if alone[1] and one.stride() == other.stride() and _dense(other) else None


def _dense(tensor: torch.Tensor) -> bool:
    return torch._debug_has_internal_overlap(tensor) == 0  # it is dense, too


def sum_in_place(entries: Sequence[Entry], origin: int) -> list[Entry]:
    """Return operations with sums in place of an operand that ends there, from its birth on."""
    totals: dict[Variable, Variable] = {}
    for number in reversed(range(len(entries))):
        entry = entries[number]
        into = entry.into
        if into is None or len(entry.made) != 1 or into.died != origin + number + 1:
            continue
        total = totals.get(entry.made[0], entry.made[0])
        if into.since >= origin and total.nbytes == into.nbytes:
            totals[into] = total
            total.since = into.since
    if not totals:
        return list(entries)

    def now(variables: list[Variable]) -> list[Variable]:
        return [totals.get(variable, variable) for variable in variables]

    result = []
    for entry in entries:
        inputs, written, made = now(entry.inputs), now(entry.written), now(entry.made)
        if entry.into in totals and totals[entry.into] in made:
            position = inputs.index(made[0])
            inputs = [made[0], *inputs[:position], *inputs[position + 1 :]]
            entry = replace(entry, operation=ADD_INTO, inputs=inputs, written=made, made=[])
        elif inputs != entry.inputs or written != entry.written or made != entry.made:
            entry = replace(entry, inputs=inputs, written=written, made=made)
        result.append(entry)
    return result


# ---- traces


def build(entries: Sequence[Entry], origin: int, previous: Recording | None) -> Recording:
    """Return an iteration as a trace.

    A variable that is alive at the end dies in the next iteration at the function at which its
    counterpart of the iteration before died in this one, as far as both ran the same functions; if
    that is unknown, it lives until its successor is made.
    """
    names: dict[Variable, str] = {}
    born: set[Variable] = set()
    first: dict[Variable, int] = {}
    last: dict[Variable, int] = {}
    functions = []
    for number, entry in enumerate(entries):
        for variable in (*entry.inputs, *entry.made):
            if variable not in names:
                names[variable] = f"v{len(names)}"
                first[variable] = number
            last[variable] = number
        born.update(entry.made)
        functions.append(
            Function(
                signature(entry.operation).name,
                tuple(names[v] for v in entry.inputs),
                tuple(names[v] for v in (*entry.written, *entry.made)),
            )
        )
    order = list(names)
    sizes = {name: variable.nbytes for variable, name in names.items()}
    twins = _twins(previous, functions, sizes) if previous else {}
    # Made by the iteration before and read in this one, such as a loss.
    left = {v for name, v in twins.items() if names.get(v, name) != name}
    n = len(functions)
    deaths: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for variable, name in names.items():
        lasting = variable.kind in ("parameter", "buffer", "optimizer state")
        if variable.died is not None:
            deaths[name] = min(max(variable.died - origin, last[variable] + 1), n)
        elif variable in born or variable in left or not (variable.since < origin or lasting):
            death = first[variable] + n
            if name in twins:
                twin = twins[name]
                if twin in first:  # read once more, where it counts as given from outside
                    death = min(death, n + first[twin])
                elif twin.died is not None:
                    death = min(death, n + max(0, twin.died - origin))
            deaths[name] = max(death, last[variable] + 1)
        kinds[name] = variable.kind or (
            "activation" if variable in born else "input" if name in deaths else "buffer"
        )
    trace = Trace(tuple(functions), sizes, kinds, deaths)
    times = [accelerator.elapsed_s(*e.events) if e.events else 0.0 for e in entries]
    return Recording(trace, order, times, [(entry.operation, entry.form) for entry in entries])


def _twins(
    previous: Recording, functions: list[Function], sizes: dict[str, int]
) -> dict[str, Variable]:
    """Return, by name, the counterparts of variables in the iteration before.

    Operations after that iteration's end, such as reading its loss, are at the start of this one.
    """
    variables = dict(zip(previous.trace.accesses, previous.order, strict=True))
    best: dict[str, str] = {}
    for skipped in range(min(_SKIPPED, len(functions))):
        pairs: dict[str, str] = {}
        back: dict[str, str] = {}
        for ours, theirs in zip(functions[skipped:], previous.trace.functions, strict=False):
            if _shape(ours) != _shape(theirs) or not all(
                pairs.get(a, b) == b and back.get(b, a) == a and sizes[a] == previous.trace.sizes[b]
                for a, b in zip(ours.variables, theirs.variables, strict=True)
            ):
                break
            pairs.update(zip(ours.variables, theirs.variables, strict=True))
            back.update(zip(theirs.variables, ours.variables, strict=True))
        if len(pairs) > len(best):
            best = pairs
        if len(pairs) == len(variables):
            break
    return {ours: variables[theirs] for ours, theirs in best.items()}


def _shape(function: Function) -> tuple[str, int, int, int]:
    return function.name, len(function.inputs), len(function.outputs), len(function.variables)
