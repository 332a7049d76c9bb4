"""Micro-Batch Streaming in an ordinary loop: mini-batches of 64 images, memory for 24 at a time.

python examples/plain_torch.py

It trains one network by an ordinary loop and a second one by the same loop with the marked lines
changed. The weights agree but for rounding.
"""

import torch
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


def train_ordinarily(model: nn.Module, loader: DataLoader, epochs: int) -> float:
    """Train on whole mini-batches; return the last loss."""
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
    return loss.item()


def train(model: nn.Module, loader: DataLoader, epochs: int) -> float:
    """Train in micro-batches of at most 24 images; return the last loss."""
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamer = MicroBatchStreamer(model, loss_fn, 24)  # new; "auto" takes the most that fits
    for _ in range(epochs):
        for inputs, targets in loader:  # in host memory: the streamer copies
            optimizer.zero_grad()
            loss = streamer.backward(inputs, targets).loss  # changed: forward and backward pass
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    whole, streamed = make_model(), make_model()
    print(f"ordinary training: last loss {train_ordinarily(whole, make_loader(), epochs=5):.6f}")
    print(f"Micro-Batch Streaming: last loss {train(streamed, make_loader(), epochs=5):.6f}")
    pairs = zip(whole.parameters(), streamed.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"largest difference of a weight: {difference:.1e}")
