"""Which losses `MicroBatchStreamer` computes exactly by default, and what to give for the others.

For each loss: the relative error of the gradient of 65 samples in micro-batches of at most 16,
against plain PyTorch on the whole; as the streamer is by default, where it refuses, with the check
off, and with what the page says to give. The table of docs/losses.md, as Markdown.

Run from the repository root: ``python -m benchmarks.losses``. Rows of Hugging Face's models need
`transformers`, and are left out without it.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repro._torchvision import torchvision  # noqa: F401  (transformers imports it itself)
from repro.mbs import LossCheckError, LossReductionError, MicroBatchStreamer, token_counts

SAMPLES, MICRO, CLASSES = 65, 16, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 6, generator=GENERATOR)
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=GENERATOR)
VALUES = torch.randn(SAMPLES, CLASSES, generator=GENERATOR)
MASKS = (torch.rand(SAMPLES, CLASSES, generator=GENERATOR) < 0.3).float()
WEIGHT = torch.tensor([0.1, 1.0, 3.0, 10.0])
IGNORED = torch.where(torch.arange(SAMPLES) % 3 > torch.arange(SAMPLES) // 40, LABELS, -100)
TOKENS = torch.randint(1, 50, (SAMPLES, 12), generator=GENERATOR)
LENGTHS = torch.randint(2, 12, (SAMPLES, 1), generator=GENERATOR).sort(0).values
PADDED = torch.where(torch.arange(12) < LENGTHS, TOKENS, -100)

Options = dict[str, Any]


def classifier() -> nn.Module:
    """Return a small model of 6 features and 4 outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def dice(outputs: Tensor, masks: Tensor) -> Tensor:
    """Equation 19 over the mini-batch."""
    p = outputs.sigmoid()
    return 1 - 2 * (p * masks).sum() / (p.sum() + masks.sum())


def clip(outputs: Tensor, others: Tensor) -> Tensor:
    """Return CLIP's loss of pairs of embeddings."""
    similar = 10 * F.normalize(outputs) @ F.normalize(others).T
    partners = torch.arange(len(outputs))
    return (F.cross_entropy(similar, partners) + F.cross_entropy(similar.T, partners)) / 2


def info_nce(outputs: Tensor, others: Tensor) -> Tensor:
    """Return InfoNCE with the other samples as negatives."""
    similar = F.normalize(outputs) @ F.normalize(others).T / 0.5
    return F.cross_entropy(similar, torch.arange(len(outputs)))


def batch_triplet(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the triplet loss with the hardest pairs of the mini-batch."""
    distance = torch.cdist(outputs, outputs)
    same = labels[:, None] == labels
    hardest = (distance * same).amax(1) - (distance + 1e6 * same).amin(1)
    return F.relu(hardest + 1.0).mean()


def rows() -> Iterator[tuple[str, Callable[..., Tensor], Any, str, Options]]:
    """Yield name, loss, targets, what to give as text and as options."""
    cross, two = F.cross_entropy, {"two_pass": True}
    yield "`CrossEntropyLoss()`, `F.cross_entropy`", cross, LABELS, "", {}
    yield "… with `ignore_index`", nn.CrossEntropyLoss(), IGNORED, "", {}
    yield "… with `weight`", nn.CrossEntropyLoss(weight=WEIGHT), LABELS, "", {}
    both = nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)
    yield "… with both and `label_smoothing`", both, IGNORED, "", {}
    yield "… probabilities as targets", cross, VALUES.softmax(1), "", {}
    yield '… `reduction="sum"`', nn.CrossEntropyLoss(reduction="sum"), LABELS, "", {}
    none = nn.CrossEntropyLoss(reduction="none")
    yield '… `reduction="none"`', none, LABELS, '`reduction="mean"`', {}
    yield "`MSELoss()`, `L1Loss()`, `SmoothL1Loss()`, `HuberLoss()`", nn.MSELoss(), VALUES, "", {}
    pos = nn.BCEWithLogitsLoss(pos_weight=WEIGHT)
    yield "`BCEWithLogitsLoss(pos_weight=...)`", pos, MASKS, "", {}
    kl = nn.KLDivLoss(reduction="batchmean")
    yield '`KLDivLoss("batchmean")`, `("mean")`', kl, VALUES.softmax(1), "", {}

    def ctc(o: Tensor, t: Tensor) -> Tensor:
        scores = o.view(-1, 2, 2).log_softmax(2).transpose(0, 1)
        lengths = torch.full((len(o),), 1)
        return F.ctc_loss(scores, t[:, None] % 1 + 1, 2 * lengths, lengths)

    yield "your own: a mean over samples, `CTCLoss`", ctc, LABELS, "", {}
    triplets = lambda o, t: F.triplet_margin_loss(o, t, t.flip(1))  # noqa: E731
    yield "your own: triplets given per sample", triplets, VALUES, "", {}
    ignored = lambda o, t: F.cross_entropy(o, t)  # noqa: E731
    counts = {"weights": (IGNORED >= 0).float()}
    yield "your own: ignored targets, padding", ignored, IGNORED, "`weights=` counts", counts
    weighed = lambda o, t: F.cross_entropy(o, t, weight=WEIGHT)  # noqa: E731
    given = {"weights": WEIGHT[LABELS]}
    yield "your own: class weights", weighed, LABELS, "`weights=weight[targets]`", given
    summed = lambda o, t: F.mse_loss(o, t, reduction="sum")  # noqa: E731
    yield "your own: a sum", summed, VALUES, '`normalization="none"`', {"normalization": "none"}
    root = lambda o, t: F.mse_loss(o, t).sqrt()  # noqa: E731
    yield "RMSE", root, VALUES, "`two_pass=True`", two
    yield "Dice over the batch", dice, MASKS, "`two_pass=True`", two
    yield "InfoNCE", info_nce, VALUES, "`two_pass=True`", two
    yield "CLIP, embeddings as outputs", clip, VALUES, "`two_pass=True`", two
    yield "triplets mined in the batch", batch_triplet, LABELS, "`two_pass=True`", two


def hugging_face() -> Iterator[tuple[str, Callable[[], nn.Module], Options, str, Options]]:
    """Yield name, model, inputs, what to give as text and as options."""
    try:
        import transformers
    except ImportError:
        return
    tiny = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 32, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "num_labels": 3}  # fmt: skip

    def gpt() -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    def bert(name: str) -> nn.Module:
        return getattr(transformers, name)(transformers.BertConfig(**tiny))

    count = (PADDED[:, 1:] != -100).sum()
    inputs = {"input_ids": TOKENS, "labels": PADDED}
    given = {"normalization": "none", "with_inputs": {**inputs, "num_items_in_batch": count}}
    text = '`num_items_in_batch` among the inputs, `normalization="none"`'
    yield "Hugging Face: causal LM (GPT-2)", gpt, inputs, text, given
    shifted = {"weights": token_counts(PADDED, shift=True)}
    yield "… the same", gpt, inputs, "`weights=token_counts(labels, shift=True)`", shifted
    masked = partial(bert, "BertForMaskedLM")
    counted = {"weights": token_counts(PADDED)}
    yield (
        "Hugging Face: masked LM (BERT)",
        masked,
        inputs,
        "`weights=token_counts(labels)`",
        counted,
    )
    tags = partial(bert, "BertForSequenceClassification")
    labels = {"input_ids": TOKENS, "labels": LABELS % 3}
    yield "Hugging Face: classification (BERT)", tags, labels, "", {}


def error(
    make: Callable[[], nn.Module],
    loss_fn: Callable[..., Tensor],
    inputs: Any,
    targets: Any,
    **options: Any,
) -> str:
    """Return the gradient's relative error as text, or how it is refused."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    weights, other = options.pop("weights", None), options.pop("with_inputs", inputs)
    rest = () if targets is None else (targets,)
    try:
        MicroBatchStreamer(model, loss_fn, MICRO, **options).backward(other, *rest, weights=weights)
    except (LossCheckError, LossReductionError) as refused:
        return f"`{type(refused).__name__}`"
    loss_fn(plain(**inputs) if isinstance(inputs, dict) else plain(inputs), *rest).backward()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    ours, theirs = (
        torch.cat([pair[side].grad.flatten() for pair in pairs if pair[1].grad is not None])
        for side in (0, 1)
    )
    difference = float((ours - theirs).norm() / theirs.norm())
    return "exact" if difference < 1e-6 else f"{100 * difference:.1f} %"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    print("| loss | by default | unchecked | give | then |\n| --- | --- | --- | --- | --- |")
    cases = [(name, classifier, loss, X, targets, text, options)
             for name, loss, targets, text, options in rows()]  # fmt: skip
    cases += [(name, make, lambda outputs: outputs["loss"], inputs, None, text, options)
              for name, make, inputs, text, options in hugging_face()]  # fmt: skip
    for name, make, loss_fn, inputs, targets, text, options in cases:
        default = error(make, loss_fn, inputs, targets)
        unchecked = error(make, loss_fn, inputs, targets, check="off") if "Check" in default else ""
        then = error(make, loss_fn, inputs, targets, **options) if options else ""
        print(f"| {name} | {default} | {unchecked} | {text} | {then} |", flush=True)


if __name__ == "__main__":
    main()
