"""What `doctor` runs of Micro-Batch Streaming."""

from torch import nn
from torch.nn import functional

from repro.experiments.selftests import SelfTest, relative_difference, small_batch, small_model
from repro.mbs import MicroBatchStreamer


def gradients(device: str) -> float:
    """Compare the gradient of 11 samples, in micro-batches of 3, with that of all at once."""
    images, labels = small_batch(11)
    whole, model = small_model(), small_model().to(device)
    functional.cross_entropy(whole(images), labels).backward()
    streamer = MicroBatchStreamer(model, nn.CrossEntropyLoss(), 3, device=device)
    streamer.backward(images, labels)
    streamed = [p.grad for p in model.parameters() if p.grad is not None]
    return relative_difference(streamed, [p.grad for p in whole.parameters() if p.grad is not None])


TESTS = (SelfTest("gradients in micro-batches = undivided pass on the CPU", 1e-4, gradients),)
