"""Micro-Batch Streaming in a LightningModule, by manual optimization.

python examples/with_lightning.py    (pip install lightning)

Mini-batches of 64 images are computed 24 at a time. Leave the Trainer's own
accumulate_grad_batches at 1.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from repro import _torchvision  # noqa: F401  (only for a torchvision that does not match torch)
from repro.mbs import MicroBatchStreamer

# isort: split
from lightning import LightningModule, Trainer


def make_model() -> nn.Module:
    """Return a small CNN for images (B, 3, 8, 8) of four classes."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def make_loader() -> DataLoader:
    """Return mini-batches of 64 images, patterns under noise, and their classes."""
    torch.manual_seed(1)
    patterns, classes = torch.randn(4, 3, 8, 8), torch.randint(4, (256,))
    images = patterns[classes] + torch.randn(256, 3, 8, 8)
    return DataLoader(TensorDataset(images, classes), batch_size=64)


class Streaming(LightningModule):
    """Trains a model in micro-batches."""

    automatic_optimization = False

    def __init__(self, model: nn.Module, micro_batch_size: int) -> None:
        super().__init__()
        self.model = model
        self.streamer = MicroBatchStreamer(model, nn.CrossEntropyLoss(), micro_batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch  # the streamer copies

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.streamer.backward(*batch).loss
        optimizer.step()
        self.log("loss", loss)


def train(model: nn.Module, loader: DataLoader, epochs: int, precision: str = "32-true") -> float:
    """Train on the CPU in micro-batches of at most 24 images; return the last loss."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", precision=precision, **quiet)
    trainer.fit(Streaming(model, 24), loader)
    return trainer.callback_metrics["loss"].item()


if __name__ == "__main__":
    print(f"last loss {train(make_model(), make_loader(), epochs=5):.6f}")
