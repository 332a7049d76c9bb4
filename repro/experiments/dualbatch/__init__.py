"""Dual-batch learning and cyclic progressive learning (Lu et al.)."""
