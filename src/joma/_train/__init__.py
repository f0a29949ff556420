"""Training: data, models and loops of the paper's experiments (Section 6)."""
