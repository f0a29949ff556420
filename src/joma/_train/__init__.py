"""The training lab: the paper's models, loops that can be resumed to the bit, sweeps."""
