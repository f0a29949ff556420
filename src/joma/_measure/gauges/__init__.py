"""Gauges: pure functions of tensors, and the registry of their names.

    registry.py     Which gauges are there? The one table of names, and `joma.gauge`.
    kinds.py        What does a gauge receive, when does it run, what do its values look like?
    builtin.py      The gauges that joma brings.

Attention:

    attention.py         How is the entropy exact without an attention matrix?
    attention_inputs.py  Which arguments are refused?
    head_group.py        How are some heads measured by one call of a kernel, and when not?
    kernels.py           Which fused kernel does a device have?
    scores.py            How are scores computed so that they fit the cache, a tile at a time?
    tiles.py             What are the statistics of rows of scores?
    masks.py             Which keys does a mask hide, and which bias does it add?
    sinks.py             How does a learned sink change the statistics?
    logits.py            How large is the largest logit, and what does each key receive?

Weights and states:

    rank.py         Stable rank, effective rank, spectral norm.
    gram.py         Products with WᵀW for matrices that do not fit the cache.
    embedding.py    How orthogonal are the rows of an embedding?
    stream.py       The residual stream, hidden neurons, routers.
    assumptions.py  Do the premises of the theory hold for a block?
"""
