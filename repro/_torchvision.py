"""Import torchvision, even if its compiled operators do not match the installed torch.

A CPU build of torch has no matching torchvision binary on PyPI; the import then stops at the
missing `nms` schema although models, transforms and datasets need none of the compiled code.
Import torchvision through this module only: ``from repro._torchvision import torchvision``.
"""

import importlib
import sys
import warnings

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_library: torch.library.Library | None = None  # the schemas live as long as this object


def _declare_missing_schemas() -> None:
    global _library
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            _library.define(schema)


try:
    torchvision = importlib.import_module("torchvision")
except RuntimeError as error:
    if "torchvision::" not in str(error):
        raise
    _declare_missing_schemas()
    torchvision = importlib.import_module("torchvision")

# torchvision's image extension warns from several modules when the binary is not loaded.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("torchvision.datasets")
    importlib.import_module("torchvision.models")
    importlib.import_module("torchvision.transforms")
