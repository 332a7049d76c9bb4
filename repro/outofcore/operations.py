"""Interception, timing, size prediction and division of a block's operations."""

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from repro.measure.memory import components, tensors_in
from repro.outofcore.recording import signature


def _dispatch(self: "Operations", func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    for of in types:
        if of is not torch.Tensor and of is not Parameter and _dispatches(of):
            return NotImplemented  # a wrapper tensor: the inner tensors' operations come here later
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            "torch.jit.trace within an OutOfCore block would keep this input's activations as "
            "constants: trace before the block"
        )
    if torch._C._is_torch_function_mode_enabled():  # as in a scripted module: we look at addresses
        with torch._C.DisableTorchFunction():
            return self.owner.run(func, args, kwargs or {})
    return self.owner.run(func, args, kwargs or {})


def _dispatches(of: type) -> bool:
    how = getattr(of, "__torch_dispatch__", None)
    return how is not torch._C._disabled_torch_dispatch_impl and of.__name__ != "FakeTensor"


class Operations(TorchDispatchMode):
    """Intercepts every operation, including those of backward passes and optimizers."""

    def __init__(self, owner: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    supports_higher_order_operators = True  # such as torch.cond: each arrives as one operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `uncompiled` suffices; torch's wrapper takes half as long as all of our code

    __torch_dispatch__ = _dispatch


class _Sizes(Operations):
    """Locks the integers that operations make."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.owner.hold_sizes(tensors_in(result))
        return result


class RawAccess(TorchFunctionMode):
    """Intercepts requests for a tensor's address, which are no operations."""

    LOCKS = frozenset(
        {"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "share_memory_"}
        | {"data_ptr", "const_data_ptr", "mutable_data_ptr"}
    )
    # Their C++ code keeps the address of lengths or sizes while other operations run, and of those
    # that it makes.
    MAKE_SIZES = frozenset({"_pack_padded_sequence", "_pad_packed_sequence", "ctc_loss"})
    READ_SIZES = MAKE_SIZES | {"lstm", "gru", "rnn_tanh", "rnn_relu", "tensor_split"}
    READ_SIZES |= {"quantized_lstm", "quantized_gru"}
    READ_ITEMS = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "new"})  # of lists
    WATCHED = LOCKS | {"__deepcopy__", "tolist", "__repr__", "__format__", "pin_memory"}
    WATCHED |= {"apply_", "map_", "map2_"}  # they write in a Python loop, which is no operation

    def __init__(self, owner: Any, depth: int = 0) -> None:
        super().__init__()
        self.owner, self.depth = owner, depth

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._len_torch_dispatch_stack() < self.depth:  # a mode looks at an operation
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in self.WATCHED and args and isinstance(args[0], torch.Tensor):
            if name in ("untyped_storage", "data_ptr") and (by := _serialiser()):
                if name == "untyped_storage":
                    return self.owner.snapshot(args[0], keep=by == "safetensors")
                if by == "safetensors":
                    start = args[0].storage_offset() * args[0].element_size()
                    return self.owner.snapshot(args[0], keep=True).data_ptr() + start
            for operand in reversed(args):  # `map_` reads others besides
                if isinstance(operand, torch.Tensor):
                    self.owner.bring(operand, lock=name in self.LOCKS)
        elif name in self.READ_ITEMS and self.owner.device.type != "cpu":
            for tensor in tensors_in([*args, *(kwargs or {}).values()]):
                self.owner.bring(tensor, lock=False)
        elif name in self.READ_SIZES:
            self.owner.hold_sizes(tensors_in([args, list((kwargs or {}).values())]))
            with _Sizes(self.owner) if name in self.MAKE_SIZES else nullcontext():
                return func(*args, **(kwargs or {}))
        elif name == "multi_head_attention_forward" and not torch.is_grad_enabled():
            say_once(
                "fast path",
                "within OutOfCore attention in evaluation does not take torch's fast path: padded "
                "positions of nn.TransformerEncoder hold other numbers than without it (zeros "
                "there); all other positions agree up to rounding",
            )
        return func(*args, **kwargs) if kwargs else func(*args)


class OutOfCoreWarning(UserWarning):
    """Code behaves differently within a block than outside."""


_said: set[str] = set()


def say_once(key: str, text: str) -> None:
    """Warn once per process."""
    if key not in _said:
        _said.add(key)
        warnings.warn(text, OutOfCoreWarning, stacklevel=4)


def _serialiser() -> str:
    """Return the serialiser that asks for an address, and reads there at once; else ""."""
    frame: FrameType | None = sys._getframe(2)
    for depth in range(4):
        if frame is None:
            break
        if depth == 0 and frame.f_globals.get("__name__", "").startswith("safetensors"):
            return "safetensors"
        if frame.f_code.co_name == "_reduce_ex_internal":
            by = frame.f_back and frame.f_back.f_back
            return "" if by and by.f_code is copy.copy.__code__ else "pickle"
        frame = frame.f_back
    return ""


def result_bytes(
    operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], room: int
) -> tuple[int, bool]:
    """Return the bytes that an operation makes, and whether this is an upper bound.

    They are known from a run on the device meta. If sizes depend on values, they are the most that
    a mask may choose, or what it chooses if the most is above `room` bytes: to count waits for an
    accelerator. For any other operation, such as a custom one without a fake implementation, the
    guess is the bytes of the inputs.
    """
    nbytes, known = 0, signature(operation)
    try:
        with torch._C._DisableTorchDispatch():  # hidden from the user's modes
            if known.by_values and by_values(operation, args):
                return _bytes_by_values(operation, args, kwargs, room)
            if known.name == "aten._to_dense":  # of a sparse tensor, which meta does not take
                return args[0].numel() * args[0].dtype.itemsize, True
            if known.name == "aten._grouped_mm":  # of which meta takes bfloat16 alone
                offs = args[2] if len(args) > 2 else kwargs.get("offs")
                return _grouped_mm_bytes(args[0], args[1], offs), True
            if known.has_meta:
                nbytes, certain = _meta_bytes(operation, args, kwargs)
                if certain:
                    return nbytes, True
    except Exception:
        pass
    given = tensors_in([*args, *kwargs.values()])
    parts = [part for tensor in given for part in components(tensor) or [tensor]]
    return max(nbytes, sum(p.nbytes for p in parts if p.layout is torch.strided)), False


def _grouped_mm_bytes(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> int:
    """Of a product of groups, whose offsets divide one dimension where an operand has two."""
    several = a if a.dim() == 3 else offs
    groups = len(several) if a.dim() == b.dim() and several is not None else 1
    row = b.shape[-1] * a.element_size()
    return groups * a.shape[-2] * -(-row // 16) * 16  # rows begin at multiples of 16 bytes


def by_values(operation: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether the size of an operation's result depends on values."""
    known = signature(operation).by_values
    return known and (operation._opname != "index" or any(map(_is_mask, args[1])))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _bytes_by_values(
    operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], room: int
) -> tuple[int, bool]:
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    name, x = operation._opname, args[0]
    width, count = x.element_size(), x.numel()
    if name == "repeat_interleave":
        total = given.get("output_size")
        return width * (int(x.sum()) if total is None else total), True
    if name == "bincount":
        weights = given.get("weights")
        width = 4 if weights is not None and weights.dtype is torch.float32 else 8
        return width * max(int(x.max()) + 1 if count else 0, given.get("minlength", 0)), True
    if name == "_ctc_loss":
        longest = int(torch.as_tensor(given["target_lengths"]).max())
        return width * x.shape[1] * (x.shape[0] * (2 * longest + 1) + 1), True
    if "unique" in name:  # values, their positions, and their counts
        return count * (width + 16), False
    if name.startswith("_to_sparse"):  # values, their positions, and starts of rows
        return count * (width + 8 * x.dim()) + 8 * (max(x.shape) + 1), False
    masks = [*filter(_is_mask, args[1])] if name == "index" else [given.get("mask", x)]

    def nbytes(chosen: int) -> int:
        if name == "index":
            place = torch.empty(chosen, dtype=torch.int64, device="meta")
            by_mask = ([place] * i.dim() if _is_mask(i) else [i] for i in args[1])
            return _meta_bytes(operation, (x, [*chain(*by_mask)]), {})[0]
        each: int = 8 * x.dim()  # of nonzero and argwhere: a position
        if name == "masked_select":
            whole = torch.broadcast_shapes(x.shape, masks[0].shape).numel()
            each = width * whole // max(1, masks[0].numel())
        return chosen * each

    with suppress(RuntimeError):  # so many need not broadcast with other indices
        if (most := nbytes(max(mask.numel() for mask in masks))) <= room:
            return most, True
    return nbytes(max(int(torch.count_nonzero(mask)) for mask in masks)), True


def _meta_bytes(
    operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, bool]:
    pairs: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    given = [_meta(value, pairs) for value in args]
    named = {name: _meta(value, pairs) for name, value in kwargs.items()}
    if signature(operation).takes_device:
        named["device"] = torch.device("meta")  # else a call without a device would compute
    result = as_computed(operation, given, operation(*given, **named))
    old = {made.untyped_storage()._cdata for _, made, _ in pairs}
    storages = [tensor.untyped_storage() for tensor in tensors_in(result)]
    new = {storage._cdata: storage.nbytes() for storage in storages}
    total = sum(nbytes for key, nbytes in new.items() if key not in old)
    for value, made, before in pairs:
        after = made.untyped_storage().nbytes()
        if after > before:
            total += max(0, after - value.untyped_storage().nbytes())
    return total, all(value.layout is torch.strided for value, _, _ in pairs)


# Losses that compute their mean in the storage of each element's loss, and keep all of it.
_KEEP_ALL = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
_BATCH_NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "native_batch_norm_backward",
)
_GRADIENTS = ("mse_loss_backward", "smooth_l1_loss_backward", "soft_margin_loss_backward")


def as_computed(operation: OpOverload, args: Sequence[Any], result: Any) -> Any:
    """Return a result without values, with the storages of the real computation."""
    name = operation._opname
    if name in _KEEP_ALL and not result.dim():
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return result.new_empty(shape).as_strided((), ())
    if name in ("col2im", "im2col") and args[0].nbytes > result.nbytes:  # made like the input
        return result.new_empty(args[0].shape).as_strided(result.shape, result.stride())
    if name == "mkldnn_rnn_layer" and torch.is_grad_enabled():
        return *result[:3], result[0].new_empty(_lstm_bytes(args), dtype=torch.uint8)
    if name == "mkldnn_rnn_layer_backward":  # each bias has its own gradient, all of float32
        return tuple(r if r is None else torch.empty_like(r, dtype=torch.float32) for r in result)
    if name in _BATCH_NORMS:  # else in the layout of any input, and of an input's gradient always
        backward = name.endswith("backward")
        if backward and not args[-1][0]:
            return None, *result[1:]
        form = suggest_memory_format(args[backward])
        return torch.empty_like(result[0], memory_format=form), *result[1:]
    # Of mixed precision torch's shapes have the wrong dtype.
    if name in _GRADIENTS and result.dtype != args[1].dtype:
        return torch.empty_like(result, dtype=args[1].dtype)
    if name == "native_group_norm" and args[1] is not None:
        return result[0], *(torch.empty_like(r, dtype=args[1].dtype) for r in result[1:])
    if name == "native_group_norm_backward" and result[0] is not None:
        return torch.empty_like(result[0], dtype=args[1].dtype), *result[1:]
    return result


def _lstm_bytes(args: Sequence[Any]) -> int:
    """Return the bytes that oneDNN's LSTM keeps for its backward pass; torch's shapes lack them."""
    x, hidden = args[0], args[10]
    steps, samples, features = x.shape
    rows = steps * samples
    more = 2 * (rows + samples)  # for both ends of the layer, and before the first step

    def line(size: int, width: int) -> int:  # of a row: whole cache lines, not 256 k items
        padded = -(-size * width // 64) * 64
        return padded if padded // width % 256 else padded + 64

    wide, width = max(features, hidden), x.element_size()
    parts = [rows * line(4 * hidden, width), rows * line(hidden, width), more * line(wide, width)]
    parts += 2 * [more * line(wide, 4)] + [more * hidden * width, more * hidden * 4]
    return sum(-(-part // 4096) * 4096 for part in parts)


def _meta(value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor, int]]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            size, stride, dtype = value.size(), value.stride(), value.dtype
            made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if (whole := value.untyped_storage().nbytes()) > made.untyped_storage().nbytes():
                made = made.new_empty(whole // dtype.itemsize).as_strided(size, stride)
        else:  # a dense tensor of its shape instead
            made = torch.empty(value.shape, dtype=value.dtype, device="meta")
        pairs.append((value, made, made.untyped_storage().nbytes()))
        return made
    if isinstance(value, list | tuple):
        return type(value)(_meta(item, pairs) for item in value)
    if isinstance(value, torch.Generator):  # no random number is drawn
        return None
    return torch.device("meta") if isinstance(value, torch.device) else value


def divide(args: tuple[Any, ...], limit_bytes: float) -> list[slice]:
    """Return the parts, each of at most `limit_bytes` or one element, of an operation on lists."""
    lists = [value for value in args if isinstance(value, list | tuple) and value]
    count = max(map(len, lists), default=0)
    lists = [value for value in lists if len(value) == count]
    parts, start, held = [], 0, 0
    for i, items in enumerate(zip(*lists, strict=True)):
        size = sum(item.nbytes for item in items if isinstance(item, torch.Tensor))
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
    """Run an operation on lists part by part, and join the results."""
    count = parts[-1].stop

    def take(value: Any, part: slice) -> Any:
        whole = isinstance(value, list | tuple) and len(value) == count
        return value[part] if whole else value

    results = []
    for part in parts:
        named = {name: take(value, part) for name, value in kwargs.items()}
        results.append(run(operation, tuple(take(value, part) for value in args), named))
    return None if results[0] is None else [item for result in results for item in result]
