"""The simulated device for the tests of this folder, which are left out where there is none."""

from simulated_device import plugin

plugin.load()  # as modules are collected that import what is built
collect_ignore_glob = ["test_*.py"] if plugin.missing else []
