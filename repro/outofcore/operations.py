"""How the operations of a block are seen, timed, foretold and divided."""

import sys
import time
import warnings
from collections.abc import Callable, Iterable
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

    def snapshot(self, tensor: torch.Tensor, keep: bool = False) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host, that stands for a while if to `keep`."""

    def hold_sizes(self, values: Iterable[object]) -> None:
        """Keep tensors of whole numbers where they are, for C++ code that reads them as sizes."""


def _dispatch(self: "Operations", func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    for of in types:
        if of is not torch.Tensor and _dispatches(of):
            return NotImplemented  # a tensor around others, whose operations come here after
    if torch._C._is_torch_function_mode_enabled():  # as in a scripted module: we look at addresses
        with torch._C.DisableTorchFunction():
            return self.owner.run(func, args, kwargs or {})
    return self.owner.run(func, args, kwargs or {})


def _dispatches(of: type) -> bool:
    how = getattr(of, "__torch_dispatch__", None)
    return how is not torch._C._disabled_torch_dispatch_impl and of.__name__ != "FakeTensor"


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
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    supports_higher_order_operators = True  # such as torch.cond: they come here as a whole

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
    # Their C++ code keeps the address of lengths or sizes while other operations run.
    READ_SIZES = frozenset(
        {
            "lstm",
            "gru",
            "rnn_tanh",
            "rnn_relu",
            "quantized_lstm",
            "quantized_gru",
            "_pack_padded_sequence",
            "_pad_packed_sequence",
            "tensor_split",
            "ctc_loss",
        }
    )
    WATCHED = LOCKS | {"__deepcopy__", "tolist", "__repr__", "__format__", "pin_memory"}

    def __init__(self, owner: Observer) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.WATCHED and args and isinstance(args[0], torch.Tensor):
            if name in ("untyped_storage", "data_ptr") and (by := _serialiser()):
                if name == "untyped_storage":
                    return self.owner.snapshot(args[0], keep=by == "safetensors")
                if by == "safetensors":
                    start = args[0].storage_offset() * args[0].element_size()
                    return self.owner.snapshot(args[0], keep=True).data_ptr() + start
            self.owner.bring(args[0], lock=name in self.LOCKS)
        elif name in self.READ_SIZES:
            self.owner.hold_sizes(tensors_in([args, list((kwargs or {}).values())]))
            result = func(*args, **(kwargs or {}))
            self.owner.hold_sizes(tensors_in(result))
            return result
        elif name == "multi_head_attention_forward" and not torch.is_grad_enabled():
            say_once(
                "fast path",
                "within OutOfCore attention in evaluation does not take torch's fast path: padded "
                "positions of nn.TransformerEncoder hold other numbers than without it (zeros "
                "there); all other positions agree up to rounding",
            )
        return func(*args, **kwargs) if kwargs else func(*args)


class OutOfCoreWarning(UserWarning):
    """Something runs otherwise within a block than it would outside."""


_said: set[str] = set()


def say_once(key: str, text: str) -> None:
    """Warn, once in a process."""
    if key not in _said:
        _said.add(key)
        warnings.warn(text, OutOfCoreWarning, stacklevel=4)


def _serialiser() -> str:
    """Return which serialiser asks for an address, to read there and soon; else nothing."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__", "").startswith("safetensors"):
        return "safetensors"
    for _ in range(4):
        if frame.f_code.co_name == "_reduce_ex_internal":
            return "pickle"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


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


def result_bytes(
    operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, bool]:
    """Return the bytes that an operation makes, from a run without values, and whether that is so.

    They are those of new storages, and what given ones grow by. Where there is no such run, the
    bytes of its inputs are as good a guess as any.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    try:
        given = [_meta(value, pairs) for value in args]
        named = {name: _meta(value, pairs) for name, value in kwargs.items()}
        result = operation(*given, **named)
        old = {made.untyped_storage()._cdata for _, made, _ in pairs}
        storages = [tensor.untyped_storage() for tensor in tensors_in(result)]
    except Exception:
        known = (t for t in tensors_in([*args, *kwargs.values()]) if t.layout is torch.strided)
        return sum(tensor.nbytes for tensor in known), False
    new = {storage._cdata: storage.nbytes() for storage in storages}
    total = sum(nbytes for key, nbytes in new.items() if key not in old)
    for value, made, before in pairs:
        after = made.untyped_storage().nbytes()
        if after > before:
            total += max(0, after - value.untyped_storage().nbytes())
    return total, True


def _meta(value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor, int]]) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        pairs.append((value, made, made.untyped_storage().nbytes()))
        return made
    if isinstance(value, list | tuple):
        return type(value)(_meta(item, pairs) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


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
