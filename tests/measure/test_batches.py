"""Mini-batches of any structure: samples are found, taken out and moved, or refused."""

import itertools
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from outputs import ModelOutput
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, unpack_sequence

from repro.measure import batches
from repro.measure.batches import UnsplittableBatchError, leaves_of, read_batch

N = 5
X = torch.arange(N * 2.0).view(N, 2)
Y = torch.arange(N)
ENDS = ((0, 2), (2, 5))
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
    "sparse": (X.to_sparse(), Y),
    "device names": ({"x": X, "d": torch.device("cpu"), "f": torch.relu, "m": nn.ReLU()}, Y),
}


@pytest.mark.parametrize("form", FORMS)
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
    for kind in (list, tuple):
        images, boxes = kind(ragged(2)), kind({"boxes": box} for box in ragged(2))
        (images, boxes), y = read_batch((images, boxes), Y).slice(1, 3)
        assert [len(image) for image in images] == [len(box["boxes"]) for box in boxes] == [2, 3]
        assert type(images) is type(boxes) is kind and torch.equal(y, Y[1:3])
    text, _ = read_batch({"text": list("abcde"), "x": X}).slice(1, 3)
    assert text["text"] == ["b", "c"]


@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences_are_packed_again(enforce_sorted):
    sequences = ragged(2)[::-1] if enforce_sorted else [ragged(2)[i] for i in (3, 0, 4, 1, 2)]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    batch = read_batch(packed)
    part, _ = batch.slice(1, 4)
    assert (part.sorted_indices is None) == enforce_sorted
    for one, other in zip(unpack_sequence(part), sequences[1:4], strict=True):
        assert torch.equal(one, other)
    rnn = nn.GRU(2, 3, batch_first=True)
    given = packed, *(batch.slice(*ends)[0] for ends in ENDS)
    whole, *parts = [batches.call_model(rnn, p)[1] for p in given]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert batches.to_device(part, torch.device("cpu")).data.device.type == "cpu"
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
        *(({"x": X, "table": TABLE}, Y, [name]) for name in ("table", "inputs.table", TABLE)),
        *(((X, TABLE), Y, [name]) for name in (1, "1")),
        ({"x": X, "graph": {"edges": TABLE}}, Y, ["graph.edges"]),
        ({"x": X, "graph": {"edges": TABLE[:3]}}, Y, ["graph"]),
        ({"x": X, "graph": Holder(TABLE)}, Y, ["graph"]),
        ({"x": X, "lengths": [1] * N}, Y, ["lengths"]),
        (X, {"y": Y, "table": TABLE[:2]}, ["targets.table"]),
        (Frozen(X, TABLE), Y, ["label"]),
        ({"x": X, "positions": torch.arange(4)[None]}, Y, []),  # which broadcast
    ],
)
def test_what_is_shared_reaches_every_part_whole(inputs, targets, shared):
    part = read_batch(inputs, targets, shared=shared).slice(0, 2)
    for got, leaf in zip(leaves_of(part), leaves_of((inputs, targets)), strict=True):
        if leaf is X or leaf is Y:
            assert len(got) == 2
        elif isinstance(leaf, torch.Tensor):
            assert torch.equal(got, leaf)
        else:
            assert got is leaf or got == 2  # the dataclass's derived size


@pytest.mark.parametrize(
    ("inputs", "targets", "options", "error", "message"),
    [
        (X[:0], Y[:0], {}, batches.EmptyBatchError, "no samples"),
        (X, Y[:4], {}, batches.BatchSizeMismatchError, r"\[5, 4\]; they must be equal.*shared="),
        (X, Y[:4].numpy(), {}, batches.BatchSizeMismatchError, r"inputs has 5, targets has 4"),
        (Frozen(X, Y[:4]), None, {}, batches.BatchSizeMismatchError, r"inputs.label has 4"),
        (torch.tensor(1.0), None, {}, batches.BatchError, "no tensor with a batch dimension"),
        ("text", None, {}, batches.BatchError, r"inputs are str"),
        (Holder(X), Y, {}, UnsplittableBatchError, "inputs is a Holder, whose samples"),
        ({"x": X, "g": Holder([X])}, Y, {}, UnsplittableBatchError, "inputs.g is a Holder"),
        (X, iter([1]), {}, UnsplittableBatchError, "targets is an iterator"),
        ({"x": X, "s": {X}}, Y, {}, UnsplittableBatchError, "inputs.s is a set"),
        *(({"x": X, "n": [item] * N}, Y, {}, UnsplittableBatchError, "inputs.n has 5 items")
          for item in (3, X)),
        (([torch.ones(3, 4)] * N,), None, {}, UnsplittableBatchError, "3 or 5 samples"),
        (X, Y, {"shared": ["tabel"]}, UnsplittableBatchError, "names 'tabel'.*it has inputs"),
        *((X, Y, {"shared": [name]}, UnsplittableBatchError, f"names {told}, which")
          for name, told in ((3, "3"), (TABLE, "a Tensor"))),
        (torch.nested.nested_tensor(ragged(2), layout=torch.jagged), Y, {}, UnsplittableBatchError,
         "inputs is a nested tensor"),
        (X.to_mkldnn(), Y, {}, UnsplittableBatchError, "inputs is a tensor of torch._mkldnn"),
        (Changing(X), Y, {}, UnsplittableBatchError, "Changing changes its field image"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(inputs, targets, options, error, message):
    with pytest.raises(error, match=message):
        read_batch(inputs, targets, **options).slice(0, 2)


def test_what_a_list_was_in_an_earlier_mini_batch_decides():
    known = {}
    more = {"sizes": [8, 16], "names": ["a", "b"]}
    read_batch({"x": X, "pair": [X, X], **more}, Y, known=known)
    x = X[:2]  # as many samples as the lists have items
    batch = read_batch({"x": x, "pair": [x, x], **more}, Y[:2], known=known)
    part, _ = batch.slice(0, 1)
    assert {name: part[name] for name in more} == more and [len(p) for p in part["pair"]] == [1, 1]
    with pytest.raises(UnsplittableBatchError):
        read_batch({"x": x, "pair": [x, x]}, Y[:2])
    for kind in (list, tuple):  # of images and boxes, as of zip(*samples)
        known = {}
        for boxes in ((1, 2, 5, 4), (3, 3, 3, 3), (3, 1, 2)):  # an image has three channels
            images = kind(torch.ones(3, 8, 8 + n) for n in boxes)
            form = (images, kind({"boxes": torch.ones(n, 4)} for n in boxes))
            batch = read_batch(form, known=known)
            assert batch.num_samples == len(boxes) and len(batch.slice(0, 1)[0][0]) == 1
        with pytest.raises(UnsplittableBatchError, match=r"inputs\.0 has 3 items"):
            read_batch(form)
    lists = [torch.ones(n, 4) for n in (1, 2)], [torch.ones(n) for n in (1, 2)]
    assert read_batch((torch.ones(2, 3), lists)).num_samples == 2  # boxes and labels
    # a tuple of targets is a structure
    assert len(read_batch(x, (x, x)).slice(0, 1)[1]) == 2


def test_bounds_are_as_few_as_can_be_and_alike():
    for count, most in itertools.product((1, 2, 3, 5, 16, 65, 70, 129), (1, 2, 3, 16, 64)):
        ranges = batches.bounds(count, most)
        sizes = [stop - start for start, stop in ranges]
        assert [n for start, stop in ranges for n in range(start, stop)] == list(range(count))
        assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
        assert len(sizes) == -(-count // most) and sizes == sorted(sizes, reverse=True)


def test_a_split_function():
    def halves(batch, most):
        x, y = batch
        return [(x[i : i + most], y[i : i + most]) for i in range(0, len(x), most)]

    assert [count for _, _, count in batches.split_by(halves, X, Y, 2)] == [2, 2, 1]
    assert batches.split_by(lambda batch, most: [(Holder(X), None, 3)], X, Y, 2)[0][2] == 3
    for result, error, message in (
        (None, UnsplittableBatchError, "split returned a NoneType"),
        ([], batches.EmptyBatchError, "no micro-batch"),
        ([X], UnsplittableBatchError, "split returned a list; it must"),
        ([(X, Y, 0)], UnsplittableBatchError, "0 as a number"),
        ([(Holder(X), None)], UnsplittableBatchError, "cannot be counted"),
        ([(X, Y[:1])], UnsplittableBatchError, "cannot be counted"),
    ):
        with pytest.raises(error, match=message):
            batches.split_by(lambda batch, most, result=result: result, X, Y, 2)
