"""What `repro.advise` foretells of Part 1, one network at a time."""

import time
from typing import Any

from repro.advise import Workload, predict, probe
from repro.datasets import ImageData
from repro.experiments.design import Outcome
from repro.experiments.together.measuring import UNDIVIDED, limit_bytes
from repro.experiments.together.networks import Config, build_model, build_problem, recompute
from repro.measure import Timing, accelerator
from repro.measure.machine import machine


def foretell(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Foretell every way at every multiple of what fits, under the limit that is measured by.

    The network is recorded without content and a few undivided steps of what fits are timed;
    nothing that is foretold is run.
    """
    fits = config["fits"]
    simulated = not accelerator.is_accelerator(device)
    with machine(config, device):
        allowed = limit_bytes(config, device)
        begun = time.perf_counter()
        problem = build_problem(config, fits)
        workload = Workload.of(
            build_model(config, "cpu"),
            example=(problem.inputs, problem.targets),
            loss_fn=problem.loss,
            blocks=recompute,
        )
        speed = probe(workload, device, fits, allowed, seconds=config["probe_s"])

        def predicted(mode: str, batch: int) -> Any:
            kind = device.partition(":")[0]
            return predict(workload, mode, batch, allowed, speed, device=kind, simulated=simulated)

        image_s = predicted(UNDIVIDED, fits).seconds / fits
        cells = []
        for mode in config["modes"]:
            for multiple in config["multiples"]:
                cost = predicted(mode, multiple * fits)
                base_s = predicted(UNDIVIDED, multiple * fits).seconds
                cell = {"mode": mode, "multiple": multiple, "fits": cost.fits, "slowdown": None}
                if cost.fits:
                    scale = base_s / cost.batch / image_s  # of an image, not of a mini-batch
                    cell |= {
                        "slowdown": cost.slowdown and scale * cost.slowdown,
                        "bound": cost.bound and scale * cost.bound,
                        "peak_bytes": cost.peak_bytes,
                    }
                cells.append(cell)
        took = time.perf_counter() - begun
    return Outcome(
        {"limit_bytes": allowed, "cells": cells}, {"advice": Timing((took,), 0)}, allowed
    )
