"""The blocks of docs/recipes.md, run beside an ordinary training with whole mini-batches.

Each needs its library (``make recipes``), and is skipped without it.
"""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from repro import paths
from repro._torchvision import torchvision  # noqa: F401  (first: the libraries import it themselves)
from repro.mbs import MicroBatchStreamer

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

PAGE = (paths.ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def recipe(title, **given):
    """Run the block below a heading; return what it defines."""
    block = re.search(rf"^## {title}\n.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names = {"MicroBatchStreamer": MicroBatchStreamer, **given}
    exec(compile(block[1], f"docs/recipes.md, {title}", "exec"), names)
    return names


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def mini_batches():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(48, 8, generator=generator)
    labels = torch.randint(3, (48,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=16)


def trained_whole(precision):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in mini_batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return model


def assert_same(model, expected, start, tolerance):
    moved = [
        (a - b).abs().max() for a, b in zip(expected.parameters(), start.parameters(), strict=True)
    ]
    assert max(moved) > 20 * tolerance  # else anything would agree
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


# bfloat16 has 8 bits: a sum of rounded parts differs from the rounded sum.
PRECISIONS = [("no", 1e-6), ("bf16", 2e-4)]


@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS)
def test_accelerate(precision, tolerance):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = classifier()
    names = recipe(
        "Accelerate",
        Accelerator=accelerate.Accelerator,
        precision=precision,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=mini_batches(),
        loss_fn=nn.CrossEntropyLoss(),
        micro_batch_size=5,
    )
    assert_same(names["model"], trained_whole(precision), classifier(), tolerance)


@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS)
def test_lightning(precision, tolerance):
    lightning = pytest.importorskip("lightning")
    streaming = recipe("Lightning", LightningModule=lightning.LightningModule)["Streaming"]

    class Training(streaming):
        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    module = Training(classifier(), nn.CrossEntropyLoss(), 5)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, mini_batches())
    assert_same(module.model, trained_whole(precision), classifier(), tolerance)


def test_hugging_face_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    # Without it the Trainer would take the folder tests/datasets for the library.
    pytest.importorskip("datasets.arrow_dataset")

    def language_model():
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, eos_token_id=0,
            bos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    generator = torch.Generator().manual_seed(1)
    sentences = []
    for _ in range(24):
        tokens = torch.randint(1, 50, (12,), generator=generator)
        length = int(torch.randint(2, 12, (), generator=generator))
        labels = torch.where(torch.arange(12) < length, tokens, -100)
        sentences.append({"input_ids": tokens, "labels": labels})

    def trained(trainer_class):
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, per_device_train_batch_size=8, num_train_epochs=1,
            optim="sgd", learning_rate=0.5, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        model = language_model()
        result = trainer_class(model, arguments, train_dataset=sentences).train()
        return model, result.training_loss

    names = recipe("Hugging Face Trainer", Trainer=transformers.Trainer, micro_batch_size=3)
    model, loss = trained(names["StreamingTrainer"])
    expected, expected_loss = trained(transformers.Trainer)
    assert_same(model, expected, language_model(), 1e-6)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
