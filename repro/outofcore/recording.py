"""From the operations that ran in an iteration to its trace."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from repro.measure import accelerator
from repro.outofcore.residency import Variable
from repro.outofcore.sums import ADD_INTO
from repro.outofcore.trace import Function, Trace

_SKIPPED = 16  # functions at the start of an iteration that may belong to the one before
# They make a tensor of a storage without looking at the storage, even where it has no bytes now.
_WITHOUT_ACCESS = frozenset(
    {"aten.detach", "aten.alias", "aten.view", "aten._unsafe_view", "aten.lift_fresh"}
)
_KINDS = ("int", "SymInt", "float", "bool", "number", "Scalar", "str", "Device", "Layout")
# Types of arguments that hold no tensor, as schemas write them.
_WITHOUT_TENSORS = frozenset(
    [form.format(kind) for kind in _KINDS for form in ("{}", "Optional[{}]", "List[{}]")]
    + [f"Optional[List[{kind}]]" for kind in _KINDS]
)
# Their schemas do not say that they write the running statistics.
_WRITES_UNSAID = {
    "aten.native_batch_norm": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm": ("running_mean", "running_var"),
    "aten.miopen_batch_norm": ("running_mean", "running_var"),
    "aten.batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten.batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}

# The sizes of their results depend on values; of "index" where masks choose.
_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "index", "repeat_interleave", "bincount"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
    | {"_to_sparse", *(f"_to_sparse_{layout}" for layout in ("csr", "csc", "bsr", "bsc"))}
    | {"_ctc_loss"}
)


class Signature(NamedTuple):
    """What is known of an operation from its schema.

    Attributes:
        name: Without the overload, such as ``"aten.convolution"``.
        ignored: It does not touch what its tensors hold.
        takes: The positions of arguments that may be or hold tensors, ascending.
        takes_named: Their names.
        writes: For each argument by position, whether it is written.
        writes_named: Names of arguments that are written.
        grouped: It works on lists of tensors one by one, so that it can be run in parts.
        makes: It may return tensors of storages that it was not given.
        view: It makes a tensor of a storage that it was given.
        resizes: It may change the size of a storage that it was given.
        collective: It works on with other processes after it has returned.
        awaited: Its results come from other processes, and are to be waited for.
        by_values: The size of its result may depend on values.
        has_meta: It can be run on the device meta, where it computes nothing and draws no number.
        takes_device: It may be told by name where to make its result.
    """

    name: str
    ignored: bool
    takes: tuple[int, ...]
    takes_named: frozenset[str]
    writes: tuple[bool, ...]
    writes_named: frozenset[str]
    grouped: bool
    makes: bool
    view: bool
    resizes: bool
    collective: bool
    awaited: bool
    by_values: bool
    has_meta: bool
    takes_device: bool


def signature(operation: OpOverload) -> Signature:
    """Return what is known of an operation."""
    # By its address: its own hash is computed in Python at every look.
    cached = _SIGNATURES.get(id(operation))
    if cached is None:
        cached = _SIGNATURES[id(operation)] = operation, _signature(operation)
    return cached[1]


_SIGNATURES: dict[int, tuple[OpOverload, Signature]] = {}


def _signature(operation: OpOverload) -> Signature:
    schema = operation._schema
    name = f"{operation.namespace}.{operation._opname}"
    unsaid = _WRITES_UNSAID.get(name, ())
    writes = tuple(
        bool(argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in unsaid
        or operation.namespace == "c10d"  # whose schemas do not say it either
        for argument in schema.arguments
    )
    named = frozenset(a.name for a, write in zip(schema.arguments, writes, strict=True) if write)
    grouped = operation._opname.startswith(("_foreach_", "_fused_")) and not any(
        "Tensor" in str(a.type) and "List" not in str(a.type) and a.name in ("scalars", "weight")
        for a in schema.arguments
    )
    in_place = all(
        r.alias_info is not None and r.alias_info.is_write for r in schema.returns
    ) and any(writes)
    ignored = name in _WITHOUT_ACCESS or operation.namespace in ("prim", "profiler")
    # What has no memory is never given to an operation: torch fills it with zeros before.
    makes = not (in_place or operation.is_view or name == "aten._efficientzerotensor")
    changes_values = operation._opname.endswith("_") and not operation._opname.startswith("resize")
    # By exclusion: what may hold a tensor in a way that no name here says is looked at.
    takes = [n for n, a in enumerate(schema.arguments) if str(a.type) not in _WITHOUT_TENSORS]
    return Signature(
        name,
        ignored,
        tuple(takes),
        frozenset(schema.arguments[n].name for n in takes),
        writes,
        named,
        grouped,
        makes,
        operation.is_view,
        resizes=not changes_values
        and any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments),
        collective=operation.namespace == "c10d",
        awaited=operation.namespace == "_c10d_functional" and operation._opname != "wait_tensor",
        by_values=name.removeprefix("aten.") in _BY_VALUES
        and operation._overloadname != "self_Tensor",
        # One that is registered for all devices at once would compute there, too.
        has_meta=not ignored
        and (
            operation.namespace in ("aten", "prims")
            or torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "Meta")
        ),
        takes_device=any(a.name == "device" and a.kwarg_only for a in schema.arguments),
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument or a result, those within lists included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in which a sparse or nested tensor keeps what it holds; else none."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested and tensor.layout is torch.strided:
        return [tensor.values()]
    return []


@dataclass(slots=True)
class Entry:
    """One operation that ran: what it read, what of that it wrote, and what it made."""

    operation: OpOverload
    inputs: list[Variable]
    written: list[Variable]
    made: list[Variable]
    into: Variable | None = None  # a gradient that this may be a sum into, if it ends here
    seconds: float = 0.0
    events: tuple[accelerator.Event, accelerator.Event] | None = None

    def time_s(self) -> float:
        """Return the seconds that it took, once the device has come so far."""
        if self.events is None:
            return self.seconds
        return accelerator.elapsed_s(*self.events)


@dataclass
class Recording:
    """One iteration as it ran.

    Attributes:
        trace: It, at storage granularity.
        order: The variable behind each of the trace's, in the order of `trace.accesses`.
        times: Seconds of each function.
        operations: What each function ran.
    """

    trace: Trace
    order: list[Variable]
    times: list[float]
    operations: list[OpOverload] = field(repr=False)


def sum_in_place(entries: Sequence[Entry], origin: int) -> list[Entry]:
    """Return operations as they are once sums of gradients go into what ends with them.

    The result of such a sum stands for the operand that it goes into from that one's birth on.

    Args:
        entries: The operations in order.
        origin: The clock at the start of the iteration.
    """
    stands: dict[Variable, Variable] = {}
    for number in reversed(range(len(entries))):
        entry = entries[number]
        into = entry.into
        if into is None or len(entry.made) != 1 or into.died != origin + number + 1:
            continue
        total = stands.get(entry.made[0], entry.made[0])
        if into.since >= origin and total.nbytes == into.nbytes:
            stands[into] = total
            total.since = into.since
    if not stands:
        return list(entries)

    def now(variables: list[Variable]) -> list[Variable]:
        return [stands.get(variable, variable) for variable in variables]

    result = []
    for entry in entries:
        inputs, written, made = now(entry.inputs), now(entry.written), now(entry.made)
        if entry.into in stands and stands[entry.into] in made:
            position = inputs.index(made[0])
            inputs = [made[0], *inputs[:position], *inputs[position + 1 :]]
            entry = replace(entry, operation=ADD_INTO, inputs=inputs, written=made, made=[])
        elif inputs != entry.inputs or written != entry.written or made != entry.made:
            entry = replace(entry, inputs=inputs, written=written, made=made)
        result.append(entry)
    return result


def build(entries: Sequence[Entry], origin: int, previous: Recording | None) -> Recording:
    """Return an iteration as a trace.

    A variable that is alive at the end dies in the next iteration where its counterpart of the
    iteration before died in this one, as far as both ran the same functions; where that is not
    known, it lives until its successor comes.

    Args:
        entries: The operations in order; at least one.
        origin: The clock at the start of the iteration.
        previous: The iteration before.
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
    # The iteration before made it, and this one looks at it: its loss.
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
                if twin in first:  # it is looked at once more, and counts as given there
                    death = min(death, n + first[twin])
                elif twin.died is not None:
                    death = min(death, n + max(0, twin.died - origin))
            deaths[name] = max(death, last[variable] + 1)
        kinds[name] = variable.kind or (
            "activation" if variable in born else "input" if name in deaths else "buffer"
        )
    trace = Trace(tuple(functions), sizes, kinds, deaths)
    times = [entry.time_s() for entry in entries]
    return Recording(trace, order, times, [entry.operation for entry in entries])


def _twins(
    previous: Recording, functions: list[Function], sizes: dict[str, int]
) -> dict[str, Variable]:
    """Return the variables of the iteration before that did what some of this one do, by name.

    The two are laid beside each other for as long as they run the same functions. What ran after
    the end of the iteration before, such as reading its loss, stands at the start of this one.
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
