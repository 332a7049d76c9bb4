"""Micro-Batch Streaming (Piao et al.)."""
