"""θ-adaptive batch size (Lee et al.)."""
