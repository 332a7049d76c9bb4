"""Micro-Batch Streaming in the Hugging Face Trainer, on a small language model.

python examples/with_hf_trainer.py    (pip install transformers accelerate datasets)

Mini-batches of 8 sentences of different lengths are computed 3 at a time, once by the Trainer alone
and once by a Trainer that streams. The weights agree but for rounding. Leave the Trainer's own
gradient_accumulation_steps at 1.
"""

import tempfile

import torch
from torch import Tensor, nn

from repro import _torchvision  # noqa: F401  (only for a torchvision that does not match torch)
from repro.mbs import MicroBatchStreamer

# isort: split
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class StreamingTrainer(Trainer):
    """Computes each mini-batch in micro-batches of at most 3 sentences."""

    streamer = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        if self.streamer is None:
            self.streamer = MicroBatchStreamer(
                model, lambda outputs: outputs["loss"], 3, normalization="none"
            )
        return self.streamer.backward({**inputs, "num_items_in_batch": num_items_in_batch}).loss


def make_model() -> nn.Module:
    """Return a GPT-2 of one layer for 50 tokens."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, eos_token_id=0,
        bos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_sentences() -> list[dict[str, Tensor]]:
    """Return 24 sequences of 12 tokens each; the label -100 is padding."""
    torch.manual_seed(1)
    tokens, lengths = torch.randint(1, 50, (24, 12)), torch.randint(2, 12, (24, 1))
    labels = torch.where(torch.arange(12) < lengths, tokens, -100)
    pairs = zip(tokens, labels, strict=True)
    return [{"input_ids": sentence, "labels": wanted} for sentence, wanted in pairs]


def train(trainer_class: type[Trainer], model: nn.Module) -> float:
    """Train one epoch; return the mean loss."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=8, num_train_epochs=1, optim="sgd",
            learning_rate=0.5, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        return trainer_class(model, arguments, train_dataset=make_sentences()).train().training_loss


if __name__ == "__main__":
    whole, streamed = make_model(), make_model()
    print(f"the Trainer alone: mean loss {train(Trainer, whole):.6f}")
    print(f"Micro-Batch Streaming: mean loss {train(StreamingTrainer, streamed):.6f}")
    pairs = zip(whole.parameters(), streamed.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"largest difference of a weight: {difference:.1e}")
