"""Micro-batch convolution tuning, μ-cuDNN (Oyama et al.)."""
