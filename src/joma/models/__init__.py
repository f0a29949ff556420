"""The structure of Transformers: which matrices a model has, and in which block."""
