"""Names that moved to `view`; gone when all papers are moved."""

from repro.experiments.view import (
    caption,
    device_name,
    devices,
    panel,
    shortcomings,
    signature,
)

__all__ = ["caption", "device_name", "devices", "panel", "shortcomings", "signature"]
