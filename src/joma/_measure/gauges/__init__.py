"""Gauges: pure functions of tensors, and the registry of their names.

    registry.py     Which gauges are there? The one table of names, and `joma.gauge`.
    kinds.py        What does a gauge receive, when does it run, what do its values look like?
    builtin.py      The gauges that joma brings.

Attention:

    attention.py    How is the entropy exact without an attention matrix?
    kernels.py      Which fused kernel does a device have?
    tiles.py        What if the kernel cannot be used? Rows of scores, a tile at a time.
    masks.py        Which keys does a mask hide, and which bias does it add?
    sinks.py        How does a learned sink change the statistics?
    logits.py       How large is the largest logit, and what does each key receive?

Weights and states:

    rank.py         Stable rank, effective rank, spectral norm.
    gram.py         Products with WᵀW for matrices that do not fit the cache.
    embedding.py    How orthogonal are the rows of an embedding?
    stream.py       The residual stream, hidden neurons, routers.
    assumptions.py  Do the premises of the theory hold for a block?
"""
