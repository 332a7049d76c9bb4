"""Micro-Batch Streaming in a loop of Hugging Face Accelerate.

python examples/with_accelerate.py    (pip install accelerate)

Mini-batches of 64 images are computed 24 at a time. Leave Accelerate's own gradient accumulation
at 1.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from repro.mbs import MicroBatchStreamer


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


def train(accelerator: Accelerator, model: nn.Module, loader: DataLoader, epochs: int) -> float:
    """Train in micro-batches of at most 24 images; return the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare_data_loader(loader, device_placement=False)  # the streamer copies
    streamer = MicroBatchStreamer(model, nn.CrossEntropyLoss(), 24, scaler=accelerator.scaler)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = streamer.backward(inputs, targets).loss
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(f"last loss {train(Accelerator(), make_model(), make_loader(), epochs=5):.6f}")
