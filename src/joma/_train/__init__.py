"""Training the paper's models: corpora, tokenisers, the position in the data."""
