"""The training lab: corpora, the paper's models, loops that can be resumed to the bit, sweeps."""
