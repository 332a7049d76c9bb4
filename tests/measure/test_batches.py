"""Mini-batches of any structure: samples are found, taken out and moved, or refused."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from outputs import ModelOutput
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, unpack_sequence

from repro.measure.batches import (
    BatchError,
    BatchSizeMismatchError,
    EmptyBatchError,
    UnsplittableBatchError,
    bounds,
    call_model,
    leaves_of,
    read_batch,
    split_by,
    to_device,
)

N = 5
X = torch.arange(N * 2.0).view(N, 2)
Y = torch.arange(N)
Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    label: object = None
    scale: float = 1.0
    size: int = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "size", len(self.image))  # derived anew in each part


@dataclass
class Changing:
    image: torch.Tensor

    def __post_init__(self):
        self.image = self.image * 2


class Holder:
    def __init__(self, x):
        self.x = x


def ragged(dims=1):
    return [torch.full((n + 1, *[2] * (dims - 1)), float(n)) for n in range(N)]


FORMS = {
    "tensor": (X, Y),
    "no targets": (X, None),
    "arguments": ((X, "text", 2.0, torch.tensor(3.0), None), Y),
    "list of arguments": ([X, X], {"a": (Y, Y.float())}),
    "dictionary": ({"x": X, "deep": {"list": [X, Y]}}, OrderedDict(y=Y)),
    "mapping": (UserDict(x=X, y=UserDict(z=Y)), Y),
    "named tuple": (Pair(X, Y), Pair(Y, 3)),
    "dataclass": (Frozen(X, {"y": Y}), Frozen(X)),
    "model output": (ModelOutput(logits=X), Y),
    "arrays": (X.numpy(), {"y": Y.numpy(), "names": np.array(list("abcde"), dtype=object)}),
    "bits": (X > 1, np.arange(N)),
    "images": ((ragged(2), [{"boxes": box, "n": torch.tensor(1)} for box in ragged(2)]), None),
    "tuple of images": ((tuple(ragged(2)), tuple({"b": b} for b in ragged())), Y),
    "texts": ({"text": list("abcde"), "x": X}, Y),
    "packed": (pack_sequence(ragged()[::-1]), Y),
    "packed, unsorted": (pack_sequence(ragged(), enforce_sorted=False), Y),
    "sparse": (X.to_sparse(), Y),
    "device names": ({"x": X, "d": torch.device("cpu"), "f": torch.relu, "m": nn.ReLU()}, Y),
}


LISTS = ("images", "tuple of images", "texts", "packed", "packed, unsorted")  # see below


@pytest.mark.parametrize("form", [form for form in FORMS if form not in LISTS])
def test_slices_hold_every_sample_once_in_the_same_form(form):
    inputs, targets = FORMS[form]
    batch = read_batch(inputs, targets)
    assert batch.num_samples == N
    for which, part in ((slice(0, 2), batch.slice(0, 2)), ([3, 1], batch.take([3, 1]))):
        assert type(part[0]) is (dict if isinstance(inputs, UserDict) else type(inputs))
        leaves = leaves_of((inputs, targets))
        for got, leaf in zip(leaves_of(part), leaves, strict=True):
            assert type(got) is type(leaf)
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                assert torch.equal(got.to_dense(), leaf.to_dense()[which])
            elif isinstance(leaf, np.ndarray):
                assert (got == leaf[which]).all()
            else:
                assert got is leaf or got in (2, 3.0)  # the dataclass's derived size


def test_lists_with_one_item_a_sample_are_divided():
    images, boxes = ragged(2), [{"boxes": box} for box in ragged(2)]
    part, _ = read_batch((images, boxes)).slice(1, 3)
    assert [len(image) for image in part[0]] == [2, 3]
    assert [len(box["boxes"]) for box in part[1]] == [2, 3]
    assert all(isinstance(part[i], list) for i in (0, 1))
    text, _ = read_batch(FORMS["texts"][0]).slice(1, 3)
    assert text["text"] == ["b", "c"]


@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences_are_packed_again(enforce_sorted):
    sequences = ragged(2)[::-1] if enforce_sorted else [ragged(2)[i] for i in (3, 0, 4, 1, 2)]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    part, _ = read_batch(packed).slice(1, 4)
    assert (part.sorted_indices is None) == enforce_sorted
    for one, other in zip(unpack_sequence(part), sequences[1:4], strict=True):
        assert torch.equal(one, other)
    rnn = nn.GRU(2, 3, batch_first=True)
    whole, parts = (
        call_model(rnn, packed)[1],
        [read_batch(packed).slice(*b)[0] for b in ((0, 2), (2, 5))],
    )
    torch.testing.assert_close(torch.cat([call_model(rnn, p)[1] for p in parts], 1), whole)
    assert to_device(part, torch.device("cpu")).data.device.type == "cpu"
    assert pad_packed_sequence(part)[0].shape[1] == 3


def test_slices_are_views_without_a_graph():
    x = X.clone().requires_grad_()
    part, _ = read_batch({"x": x}).slice(1, 3)
    assert not part["x"].requires_grad
    assert part["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    array = np.arange(4.0)
    assert read_batch(array).slice(0, 2)[0].base is array


TABLE = torch.ones(N, N)


@pytest.mark.parametrize(
    ("inputs", "targets", "shared"),
    [
        ({"x": X, "table": TABLE}, Y, ["table"]),
        ({"x": X, "table": TABLE}, Y, ["inputs.table"]),
        ({"x": X, "table": TABLE}, Y, [TABLE]),
        ((X, TABLE), Y, [1]),
        ((X, TABLE), Y, ["1"]),
        ({"x": X, "graph": {"edges": TABLE}}, Y, ["graph.edges"]),
        ({"x": X, "graph": {"edges": TABLE[:3]}}, Y, ["graph"]),
        ({"x": X, "graph": Holder(TABLE)}, Y, ["graph"]),
        ({"x": X, "lengths": [1] * N}, Y, ["lengths"]),
        (X, {"y": Y, "table": TABLE[:2]}, ["targets.table"]),
        (Frozen(X, TABLE), Y, ["label"]),
    ],
)
def test_what_is_shared_reaches_every_part_whole(inputs, targets, shared):
    part = read_batch(inputs, targets, shared=shared).slice(0, 2)
    whole = {id(leaf) for leaf in leaves_of((inputs, targets))} - {id(X), id(Y)}
    for got, leaf in zip(leaves_of(part), leaves_of((inputs, targets)), strict=True):
        if leaf is X or leaf is Y:
            assert len(got) == 2
        elif isinstance(leaf, torch.Tensor):
            assert torch.equal(got, leaf)
        else:
            assert id(got) in whole or got == 2


@pytest.mark.parametrize(
    ("inputs", "targets", "options", "error", "message"),
    [
        (X[:0], Y[:0], {}, EmptyBatchError, "no samples"),
        (X, Y[:4], {}, BatchSizeMismatchError, r"\[5, 4\]; they must be equal.*shared="),
        (X, Y[:4].numpy(), {}, BatchSizeMismatchError, r"inputs has 5, targets has 4"),
        (Frozen(X, Y[:4]), None, {}, BatchSizeMismatchError, r"inputs.label has 4"),
        (3.0, None, {}, BatchError, "no tensor with a batch dimension"),
        (torch.tensor(1.0), None, {}, BatchError, "no tensor with a batch dimension"),
        ("text", None, {}, BatchError, r"inputs are str"),
        (Holder(X), Y, {}, UnsplittableBatchError, "inputs is a Holder, whose samples"),
        ({"x": X, "g": Holder([X])}, Y, {}, UnsplittableBatchError, "inputs.g is a Holder"),
        (X, iter([1]), {}, UnsplittableBatchError, "targets is an iterator"),
        ({"x": X, "s": {X}}, Y, {}, UnsplittableBatchError, "inputs.s is a set"),
        ({"x": X, "n": [3] * N}, Y, {}, UnsplittableBatchError, "inputs.n has 5 items"),
        ({"x": X, "n": [X] * N}, Y, {}, UnsplittableBatchError, "inputs.n has 5 items"),
        (([torch.ones(3, 4)] * N,), None, {}, UnsplittableBatchError, "3 or 5 samples"),
        (X, Y, {"shared": ["tabel"]}, UnsplittableBatchError, "names 'tabel'.*it has inputs"),
        (X, Y, {"shared": [3]}, UnsplittableBatchError, "names 3, which"),
        (X, Y, {"shared": [TABLE]}, UnsplittableBatchError, "names a Tensor, which"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(inputs, targets, options, error, message):
    with pytest.raises(error, match=message):
        read_batch(inputs, targets, **options)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor(ragged(2), layout=torch.jagged)
    with pytest.raises(UnsplittableBatchError, match="inputs is a nested tensor"):
        read_batch(nested, Y)


def test_a_class_that_changes_its_fields_is_refused():
    with pytest.raises(UnsplittableBatchError, match="Changing changes its field image"):
        read_batch(Changing(X), Y).slice(0, 2)


def test_what_a_list_was_in_an_earlier_mini_batch_decides():
    known = {}
    read_batch({"x": X, "pair": [X, X], "sizes": [8, 16]}, Y, known=known)
    x = X[:2]  # as many samples as the lists have items
    batch = read_batch({"x": x, "pair": [x, x], "sizes": [8, 16]}, Y[:2], known=known)
    part, _ = batch.slice(0, 1)
    assert part["sizes"] == [8, 16] and [len(p) for p in part["pair"]] == [1, 1]
    with pytest.raises(UnsplittableBatchError):
        read_batch({"x": x, "pair": [x, x]}, Y[:2])
    # a tuple of targets is a structure
    assert len(read_batch(x, (x, x)).slice(0, 1)[1]) == 2


@pytest.mark.parametrize("most", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 65, 70, 129])
def test_bounds_are_as_few_as_can_be_and_alike(count, most):
    ranges = bounds(count, most)
    sizes = [stop - start for start, stop in ranges]
    assert [n for start, stop in ranges for n in range(start, stop)] == list(range(count))
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-count // most) and sizes == sorted(sizes, reverse=True)


def test_a_split_function():
    def halves(batch, most):
        x, y = batch
        return [(x[i : i + most], y[i : i + most]) for i in range(0, len(x), most)]

    parts = split_by(halves, X, Y, 2)
    assert [count for _, _, count in parts] == [2, 2, 1]
    counted = split_by(lambda batch, most: [(Holder(X), None, 3)], X, Y, 2)
    assert counted[0][2] == 3


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (None, UnsplittableBatchError, "split returned NoneType"),
        ([], EmptyBatchError, "no micro-batch"),
        ([X], UnsplittableBatchError, "a list of Tensor"),
        ([(X, Y, 0)], UnsplittableBatchError, "0 as a number"),
        ([(Holder(X), None)], UnsplittableBatchError, "cannot be counted"),
        ([(X, Y[:1])], UnsplittableBatchError, "cannot be counted"),
    ],
)
def test_a_split_function_that_returns_something_else(result, error, message):
    with pytest.raises(error, match=message):
        split_by(lambda batch, most: result, X, Y, 2)
