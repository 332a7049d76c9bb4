"""Train a CNN in several processes: the batch grows by θ, the averaging of gradients is overlapped.

torchrun --nproc-per-node 2 examples/torchrun.py
torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun.py --checkpoint run.pt

On a CPU the processes are connected by gloo, on GPUs by NCCL, one process for each GPU. Without
torchrun one process trains alone. See docs/torchrun.md.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.adaptive import (
    METHODS,
    DataParallel,
    ThetaController,
    full_cost,
    join_processes,
    leave_processes,
    load_checkpoint,
    save_checkpoint,
    set_lr,
)


def make_model() -> nn.Module:
    """Return a small CNN for images (B, 3, H, W) of ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)),
    )


def make_data() -> tuple[Tensor, Tensor]:
    """Return images (N, 3, 32, 32), patterns under noise, and their classes (N,)."""
    generator = torch.Generator().manual_seed(0)  # the same data in every process
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    classes = torch.randint(10, (2048,), generator=generator)
    return patterns[classes] + 4 * torch.randn(2048, 3, 32, 32, generator=generator), classes


def batches(images: Tensor, classes: Tensor, size: int, epoch: int) -> Iterator[list[Tensor]]:
    """Yield the mini-batches of an epoch, the same in every process."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for part in order.to(images.device).split(size):
        yield [images[part], classes[part]]


def main() -> None:
    """Train, and print a line for each epoch in the first process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--averaging", choices=METHODS, default="all_to_all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=Path, help="written every epoch, and gone on from")
    options = parser.parse_args()

    # 1. Join the other processes. From here on `device` is this process's own.
    rank, processes = join_processes(options.device)
    if rank == 0 and processes > 1:
        print(f"{processes} processes, connected by {dist.get_backend()}", flush=True)
    torch.manual_seed(0)
    images, classes = (part.to(options.device) for part in make_data())
    model = make_model().to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)  # set_lr gives the rate

    # 2. One object averages gradients, another chooses batch and rate: from B_s = 64 to B_m = 512.
    trainer = DataParallel(model, nn.functional.cross_entropy, optimizer, options.averaging)
    controller = ThetaController(64, 512, initial_lr=0.02)

    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "controller": controller}
    if options.checkpoint and options.checkpoint.exists():
        saved = load_checkpoint(options.checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        step = controller.setting
    else:  # 3. Before training the controller is shown the cost and parameters at the start.
        cost = full_cost(model, batches(images, classes, 512, 0), 512)
        step = controller.observe(cost, model.parameters())

    while step.epoch <= options.epochs:
        set_lr(optimizer, step.lr)
        losses = []
        for inputs, targets in batches(images, classes, step.batch_size, step.epoch):
            # 4. Every process gives the whole mini-batch and computes its share of it.
            losses.append(trainer.step(inputs, targets))
        # 5. The last update ends here, and BatchNorm's buffers, if there are any, are averaged.
        trainer.average_buffers()
        # 6. The cost is the same in every process, so that all choose the same next batch.
        cost = trainer.mean(torch.stack(losses).mean())
        done, step = step, controller.observe(cost, model.parameters())
        if rank == 0:
            if options.checkpoint:
                state = {name: part.state_dict() for name, part in parts.items()}
                save_checkpoint(options.checkpoint, state)
            print(
                f"epoch {done.epoch}: batch {done.batch_size}, rate {done.lr:.3g}, "
                f"cost {cost:.4f}, θ {step.theta:.3g}, K {step.interval or 'not found yet'}",
                flush=True,
            )
    trainer.close()
    leave_processes()


if __name__ == "__main__":
    main()
