"""The simulated device for the tests of this folder."""

from simulated_device import plugin
from simulated_device.plugin import sim

__all__ = ["sim"]

collect_ignore_glob = ["test_*.py"] if plugin.missing else []
