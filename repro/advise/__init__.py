"""Predicts which methods train a batch within a memory, before anything is trained.

Example:
    >>> from repro.advise import advise
    >>> advice = advise("torchvision/resnet18", 256, 2 * 2**30, image=224, device="H100")
    >>> print(advice.text())  # doctest: +SKIP

The predictions use a training step recorded on tensors without content, the planners of
`repro.outofcore`, and rates from a data sheet or, where the device is present, from measured steps.
"""

from repro.advise.advising import Advice, advise
from repro.advise.predicting import METHODS, Prediction, predict
from repro.advise.speed import Speed, probe
from repro.advise.workload import AdviceError, Workload, checkpoint_blocks

__all__ = [
    "METHODS", "Advice", "AdviceError", "Prediction", "Speed", "Workload", "advise",
    "checkpoint_blocks", "predict", "probe",
]  # fmt: skip
