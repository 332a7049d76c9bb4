"""Which mini-batch fits the paper's card, predicted at the published sizes: what is executed."""

from functools import partial

import torch

from repro.experiments.mbs import building
from repro.experiments.mbs.building import Config
from repro.experiments.outcome import Outcome
from repro.measure import LinearMemoryModel
from repro.measure.fake_tensors import first_steps, imagined


def foretell(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Find the largest mini-batch by live tensors that have shapes and no content (Table 2).

    The published network takes two training steps at each size; nothing is computed.
    """
    peaks = [_peak(config, size) for size in config["sizes"]]
    model = LinearMemoryModel.fit(config["sizes"], peaks)
    return Outcome(
        {
            "peaks": peaks,
            "fixed_bytes": model.fixed_bytes,
            "bytes_per_sample": model.bytes_per_sample,
            "limit_bytes": config["device_bytes"],
            "largest": model.largest_batch(config["device_bytes"]),
        }
    )


def _peak(config: Config, size: int) -> int:
    sides = config["sides"]
    with imagined():
        options = dict(config["model"])
        model = building.models.build(
            options.pop("name"), num_classes=config["classes"], **options
        ).train()
        step = building.training_step(
            {**config, "micro_batch": None}, model, building.build_optimizer(config, model), "cpu"
        )
        inputs = torch.empty(size, 3, *sides)
        masks = building.is_segmentation(config)
        targets = torch.empty(size, *(sides if masks else ()), dtype=torch.int64)
        peak, _ = first_steps(partial(step, inputs, targets), [model, inputs, targets])
    return peak
