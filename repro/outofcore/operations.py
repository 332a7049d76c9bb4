"""How the operations of a block are seen, timed, foretold and divided."""

import sys
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from repro.measure import accelerator
from repro.outofcore.recording import tensors_in


class Observer(Protocol):
    """Who wants to see them.

    Attributes:
        device: Whose tensors it manages.
    """

    device: torch.device

    def run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""

    def bring(self, tensor: torch.Tensor, lock: bool) -> None:
        """Have a tensor's bytes where its address says, for good where `lock`."""

    def snapshot(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host."""


def _dispatch(self: "Operations", func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return self.owner.run(func, args, kwargs or {})


def _left_alone(code: CodeType) -> bool:
    """Have torch.compile never look into a function and what it calls; return whether it can be."""
    try:
        of = torch._C._dynamo.eval_frame
        skip = of._FrameAction.SKIP
        of.set_code_exec_strategy(code, of._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):  # these names are torch's own affair
        return False
    return True


_LEFT_ALONE = _left_alone(_dispatch.__code__)


class Operations(TorchDispatchMode):
    """Sees every operation, those of backward passes and of optimizers included."""

    def __init__(self, owner: Observer) -> None:
        super().__init__()
        self.owner = owner

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not _LEFT_ALONE  # by a wrapper, which takes as long as half of what we do

    __torch_dispatch__ = _dispatch


class RawAccess(TorchFunctionMode):
    """Sees what asks for a tensor's address, of which no operation tells."""

    LOCKS = frozenset(
        {
            "numpy",
            "__array__",
            "__dlpack__",
            "data_ptr",
            "const_data_ptr",
            "mutable_data_ptr",
            "untyped_storage",
            "storage",
            "share_memory_",
        }
    )
    WATCHED = LOCKS | {"__deepcopy__", "tolist", "__repr__", "__format__", "pin_memory"}

    def __init__(self, owner: Observer) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.WATCHED and args and isinstance(args[0], torch.Tensor):
            if name == "untyped_storage" and _is_pickling():
                return self.owner.snapshot(args[0])
            self.owner.bring(args[0], lock=name in self.LOCKS)
        return func(*args, **kwargs) if kwargs else func(*args)


def _is_pickling() -> bool:
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_code.co_name == "_reduce_ex_internal":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


class Timer:
    """Seconds of one operation: of the clock on a CPU, by events on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.events: tuple[accelerator.Event, accelerator.Event] | None = None
        self.seconds = 0.0
        if accelerator.is_accelerator(device):
            begin, end = (accelerator.new_event(device, timing=True) for _ in range(2))
            self.events = begin, end
            begin.record()
        self._start = time.perf_counter()

    def stop(self) -> None:
        """End the time."""
        if self.events:
            self.events[1].record()
        self.seconds = time.perf_counter() - self._start


def result_bytes(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of new storages that an operation makes, from a run without values."""

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
        if isinstance(value, list | tuple):
            return type(value)(map(meta, value))
        return torch.device("meta") if isinstance(value, torch.device) else value

    given = [meta(value) for value in args]
    named = {name: meta(value) for name, value in kwargs.items()}
    try:
        result = operation(*given, **named)
    except Exception:  # no such run for this operation: its inputs are as good a guess as any
        return sum(tensor.nbytes for tensor in tensors_in(args))
    old = {t.untyped_storage()._cdata for t in tensors_in([*given, *named.values()])}
    new = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(result)}
    return sum(nbytes for key, nbytes in new.items() if key not in old)


def divide(args: tuple[Any, ...], limit_bytes: float) -> list[slice]:
    """Return how to divide an operation on lists of tensors into parts of at most some bytes.

    A part has one element at least.
    """
    lists = [value for value in args if isinstance(value, list | tuple) and value]
    count = max(map(len, lists), default=0)
    nbytes = [
        sum(v[i].nbytes for v in lists if len(v) == count and isinstance(v[i], torch.Tensor))
        for i in range(count)
    ]
    parts, start, held = [], 0, 0
    for i, size in enumerate(nbytes):
        if i > start and held + size > limit_bytes:
            parts.append(slice(start, i))
            start, held = i, 0
        held += size
    return [*parts, slice(start, count)]


def run_in_parts(
    run: Callable[..., Any],
    operation: OpOverload,
    parts: list[slice],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operation on lists part by part, and put the results together."""
    count = parts[-1].stop

    def take(value: Any, part: slice) -> Any:
        whole = isinstance(value, list | tuple) and len(value) == count
        return value[part] if whole else value

    results = [
        run(
            operation,
            tuple(take(value, part) for value in args),
            {name: take(value, part) for name, value in kwargs.items()},
        )
        for part in parts
    ]
    if results[0] is None:
        return None
    return [item for result in results for item in result]
