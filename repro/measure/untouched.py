"""Calls of a model that leave the model and all random number generators unchanged."""

import copy
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from repro.measure import accelerator
from repro.measure.batches import leaves_of, map_leaves
from repro.measure.memory import is_out_of_memory

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_TORCHS = frozenset(vars(nn.Module()))  # attributes that torch itself gives a module


class Snapshot:
    """The current state of modules and random generators, as far as calls may change it.

    Kept are parameters, gradients, buffers and modes (without `tensors` modes alone), and the
    generators of torch, numpy and Python; for modules of classes outside torch also the other
    attributes (with `everything` for all modules, and also torch's own, such as hooks), with the
    tensors, arrays and generators in them, and in their tuples, lists, dictionaries, sets and
    deques. The content of other objects is not kept, and roots that are no modules are ignored.
    Gradients are set aside until `restore`, so that none is copied.
    """

    def __init__(self, *roots: Any, tensors: bool = True, everything: bool = False) -> None:
        self._everything = everything
        self._seen: dict[int, Any] = {}  # by id; kept alive, so that no id is reused
        self._undo: list[Callable[[], Any]] = []
        self._tensors: list[tuple[str, Tensor, Tensor, Tensor]] = []
        self._buffers: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        for root in roots:
            for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
                self._keep_module(name or type(module).__name__, module, tensors)
        devices = {tensor.device for _, tensor, _, _ in self._tensors} | {torch.device("cpu")}
        self._put_back_numbers = random_numbers(devices)
        self.set_gradients_aside()

    def set_gradients_aside(self) -> None:
        """Set the gradients, which `restore` puts back, to None."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _keep_module(self, name: str, module: nn.Module, tensors: bool) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        members, torchs = vars(module), () if self._everything else _TORCHS
        mode, kept = module.training, dict[str, Any]()
        whole = self._everything or not type(module).__module__.startswith("torch.")
        if whole:
            kept |= {key: value for key, value in members.items() if key not in torchs}

        def undo() -> None:
            for key in [key for key in members if key not in torchs] if whole else ():
                del members[key]
            members.update(kept)
            module.training = mode  # a scripted module's is no member

        self._undo.append(undo)
        for key, value in kept.items():
            self._keep(f"{name}.{key}", value)
        if not tensors:
            return
        for key, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                self._gradients.append((parameter, parameter.grad))
                self._keep(f"{name}.{key}", parameter)
        self._buffers.append((name, module._buffers, dict(module._buffers)))
        for keys in (module._buffers, module._non_persistent_buffers_set):
            self._keep(name, keys)

    def _keep(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, str | int | float) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):  # in a list, and so a part of no other module
            self._keep_module(name, value, tensors=True)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if not is_lazy(value) and not value.is_inference():  # which nothing changes
                data = value.data
                self._tensors.append((name, value, data, stored(data).clone()))
        elif type(value) in _CONTAINERS:
            items = copy.copy(value)
            self._undo.append(lambda: _refill(value, items))
            for key, item in items.items() if isinstance(items, dict) else enumerate(items):
                self._keep(f"{name}.{key}", item)
        elif isinstance(value, tuple):
            for key, item in enumerate(value):
                self._keep(f"{name}.{key}", item)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._undo.append(partial(np.copyto, value, value.copy()))
        elif put_back := generator_state(value):
            self._undo.append(put_back)

    def changed(self) -> dict[str, Tensor]:
        """Parameters, buffers and attributes' tensors that have other values or are new."""
        found = {
            name: value.detach().clone()
            for name, value, _, saved in self._tensors
            if _is_strided(value) and not torch.equal(bits(value), bits(saved))
        }
        for name, buffers, saved in self._buffers:
            for key, buffer in buffers.items():
                if buffer is not None and buffer is not saved.get(key):
                    found[f"{name}.{key}"] = buffer.detach().clone()
        return found

    def restore(self) -> None:
        """Restore everything, as far as possible; the first error is raised at the end."""
        with ExitStack() as stack:  # calls the last first
            stack.callback(self._put_back_numbers)
            for parameter, gradient in self._gradients:
                stack.callback(setattr, parameter, "grad", gradient)
            for _, tensor, data, saved in self._tensors:
                stack.callback(_write, tensor, data, saved)
            for undo in self._undo:
                stack.callback(undo)


def generator_state(generator: Any) -> Callable[[], Any] | None:
    """A function that puts back the present state, None for an object that is no generator."""
    if isinstance(generator, random.SystemRandom):
        return lambda: None  # it has no state
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, torch.Generator | np.random.RandomState):
        state: Any = generator.get_state()
        return partial(generator.set_state, state)
    return None


def random_numbers(
    devices: Iterable[torch.device], generators: Iterable[Any] = ()
) -> Callable[[], None]:
    """A function that restores the states of Python's, numpy's, devices' and other generators."""
    undo: list[Any] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),  # noqa: NPY002
        *(partial(accelerator.set_rng, device, accelerator.get_rng(device)) for device in devices),
        *map(generator_state, generators),
    ]

    def put_back() -> None:
        for each in undo:
            each()

    return put_back


def modules_in(function: Any) -> list[nn.Module]:
    """The modules in a loss: itself, its method's, or those it closes over."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, partial):
        parts = [function.func, *function.args, *function.keywords.values()]
        return [module for part in parts for module in modules_in(part)]
    owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    found = [owner, *(function.__globals__.get(name) for name in code.co_names)]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return [value for value in found if isinstance(value, nn.Module)]


@contextmanager
def untouched(*roots: Any, **options: bool) -> Iterator[Snapshot]:
    """Restore modules and random generators when the block ends, even by an error: `Snapshot`."""
    snapshot = Snapshot(*roots, **options)
    try:
        yield snapshot
    finally:
        snapshot.restore()


def own_statistics(module: nn.Module) -> bool:
    """Whether this is a BatchNorm without running statistics and with a forward of its own."""
    lacking = isinstance(module, _BatchNorm) and module.running_mean is None
    return lacking and not type(module).forward.__module__.startswith("torch.")


@contextmanager
def running_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Lend running statistics to BatchNorm without any, which mixes samples in evaluation, too."""
    layers = [m for m in modules if isinstance(m, _BatchNorm) and m.running_mean is None]
    weights = (p for m in modules for p in m.parameters() if p.is_floating_point())
    any_weight = next(weights, torch.zeros(()))
    try:
        for layer in layers:
            like = any_weight if layer.weight is None else layer.weight
            layer.running_mean, layer.running_var = (
                torch.full((layer.num_features,), value, dtype=like.dtype, device=like.device)
                for value in (0.0, 1.0)
            )
        yield
    finally:
        for layer in layers:
            layer.running_mean = layer.running_var = None


def uncached() -> AbstractContextManager[Any]:
    """Compute weights anew despite `parametrize.cached`, which may hold some without a graph."""
    return mock.patch.object(parametrize, "_cache_enabled", 0)


class WithoutGraph:
    """Calls a model without a graph; where that fails, with one from then on."""

    needs_graph = False  # the model differentiates, or hooks its activations

    def __call__(self, call: Callable[[], Any], again: Callable[[], None] = lambda: None) -> Any:
        """Outputs without a graph; `again` undoes a call that failed."""
        if not self.needs_graph:
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    # Raised by checkpointing, which has no effect here.
                    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                    outputs = call()
                    leaves = (x for x in leaves_of(outputs) if isinstance(x, Tensor))
                    if any(leaf.requires_grad for leaf in leaves):  # it enables a graph itself
                        outputs = map_leaves(detached, outputs)
                    return outputs
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
            again()
        with torch.enable_grad():
            outputs = call()
        self.needs_graph = True
        return map_leaves(detached, outputs)


def detached(leaf: Any) -> Any:
    """A leaf of a structure without its graph."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def seed_all(seed: int, *roots: nn.Module) -> None:
    """Seed torch's generators of the CPU and of the modules' devices only."""
    torch.default_generator.manual_seed(seed)
    tensors = (t for root in roots for t in (*root.parameters(), *root.buffers()))
    for device in {t.device for t in tensors if accelerator.is_accelerator(t.device)}:
        with accelerator.on(device):
            accelerator.module(device).manual_seed(seed)


def stored(tensor: Tensor) -> Tensor:
    """A view of a tensor's distinct elements: one entry of each expanded dimension."""
    if not _is_strided(tensor) or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a strided tensor of any type, (n,); a view if it is contiguous."""
    whole = stored(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)


def _write(tensor: Tensor, data: Tensor, saved: Tensor) -> None:
    if _is_strided(tensor) and (tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape):
        tensor.data = data  # a call gave it other memory, or another size
    with torch.no_grad():
        stored(data).copy_(saved)  # hidden from autograd: the tensor's version stays


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
