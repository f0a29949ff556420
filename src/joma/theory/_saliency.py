"""Saliency on a text (Section 3.1): which context tokens tell what comes after a query token.

For a query token m every place where m occurs is a sample: x_l is the frequency of token l in the ``window`` tokens
before it, the target y is the token after it, and g_k = 1[y = k] − π_k. Then

    Δ_lk = E_{q=m}[g_k x_l] = P(l|m) · E_{l,q=m}[g_k]      frequency × discriminancy (a vector over k)

π is P(k|m) ("query": the bias ξ, which sees m alone, has been learned, as it soon is), so that a token that says
nothing about y has Δ = 0; or 1/K ("uniform": the very first step, all outputs equal).

Few occurrences look discriminative by chance. If x_l and y were independent, ‖Δ_l‖² would have mean τ_l tr Σ and
variance 2 τ_l² tr Σ² (τ_l = Var x_l / N, Σ = diag π − π πᵀ), about those of a χ² with ν = (tr Σ)²/tr Σ² degrees of
freedom. ``score`` is where ‖Δ_l‖² lies in that distribution, in standard deviations of a normal one (Wilson and
Hilferty's cube root).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from joma._suggest import did_you_mean, unknown_name
from joma.theory.setting import Array

if TYPE_CHECKING:
    import pandas as pd

DISTINCT, COMMON = 4.0, 2.0  # scores


def saliency(
    tokens: Sequence[Hashable] | NDArray[Any],
    query: Hashable,
    *,
    window: int = 32,
    min_count: int = 10,
    baseline: Literal["query", "uniform"] = "query",
) -> pd.DataFrame:
    """The context tokens of ``query`` by saliency Δ, the largest first.

    Arguments:
        tokens: a text, as words or as an integer array.
        query: the query token.
        window: how many tokens before the query are its context.
        min_count: leave out context tokens that occur less often than that.
        baseline: π, see above.

    Returns:
        a frame with ``token``, ``count`` (in contexts), ``frequency`` P(l|m), ``discriminancy`` ‖E_l[g]‖₂, ``saliency``
        ‖Δ_l‖₂ = their product, ``favours`` (the next token k with the largest Δ_lk), ``lift`` (that Δ_lk), ``score``,
        and ``kind``: "distinct" (score > 4), "common" (score ≤ 2: Δ ≈ 0 as far as the text can tell), or "between".

    >>> text = "red apple is sweet green apple is sour".split() * 50
    >>> frame = saliency(text, "is", window=2)
    >>> (
    ...     frame[["token", "favours", "kind"]].iloc[0].tolist(),
    ...     frame.kind.iloc[-1],
    ...     frame.token.iloc[-1],
    ... )
    (['red', 'sweet', 'distinct'], 'common', 'apple')
    """
    import pandas as pd

    if int(window) != window or window < 1:
        raise ValueError(f"window must be a positive number of tokens, got {window!r}")
    if baseline not in ("query", "uniform"):
        raise ValueError(unknown_name(baseline, ("query", "uniform"), "baseline"))
    code, names = _encode(tokens)
    matches = np.flatnonzero(names == query)
    if not matches.size:
        hint = did_you_mean(query, [str(name) for name in names[:2000]])
        raise ValueError(
            f"unknown query token {query!r}.{hint} It is not among the {len(names)} different tokens of the text."
        )
    at = np.flatnonzero(code == matches[0])
    at = at[(at > 0) & (at + 1 < len(code))]  # with a context and a target
    if len(at) < 2:
        raise ValueError(
            f"query {query!r} has {len(at)} place(s) with a context and a next token; at least 2 are needed"
        )
    N, V = len(at), len(names)

    place = at[:, None] - np.arange(1, window + 1)  # (N, window)
    inside = place >= 0
    length = inside.sum(axis=1)
    rows = np.repeat(np.arange(N), length)
    x = sparse.csr_array(
        (np.repeat(1.0 / length, length), (rows, code[place[inside]])), shape=(N, V)
    )  # sums doubles
    y = code[at + 1]
    pi = np.bincount(y, minlength=V) / N
    target = sparse.csr_array((np.ones(N), (np.arange(N), y)), shape=(N, V))

    frequency = np.asarray(x.sum(axis=0)) / N  # (V,)
    joint: Any = sparse.csr_array(x.T @ target) / N  # (V, V), sparse: E[x_l 1[y = k]]
    joint.sort_indices()
    l = np.repeat(np.arange(V), np.diff(joint.indptr))

    def square(pi: Array) -> tuple[Array, Array]:
        """Δ_lk where l and k are seen together, and ‖Δ_l‖² (V,) = Σ_k (J_lk − f_l π_k)² over all k."""
        expected = frequency[l] * pi[joint.indices]
        delta = joint.data - expected
        unseen = np.maximum(frequency**2 * (pi @ pi) - np.bincount(l, expected**2, V), 0.0)
        return delta, np.asarray(np.bincount(l, delta**2, V) + unseen, dtype=np.float64)

    delta, squared = square(pi)
    centred = squared  # what chance is measured by
    if baseline == "uniform":
        delta, squared = square(np.where(pi > 0, 1.0 / np.count_nonzero(pi), 0.0))

    best = np.full(V, -1)
    order = np.lexsort(
        (-joint.indices, delta, l)
    )  # the last of each l has the largest Δ; the first word among equals
    best[l[order]] = order
    count = np.bincount(code[place[inside]], minlength=V)
    keep = np.flatnonzero(count >= max(min_count, 1))

    variance = np.asarray(x.multiply(x).sum(axis=0)) / N - frequency**2
    tau = np.maximum(variance, 0.0)[keep] / N
    p2, p3 = float(pi @ pi), float(pi**2 @ pi)
    mean, freedom = tau * (1 - p2), (1 - p2) ** 2 / max(p2 - 2 * p3 + p2**2, 1e-300)
    tell = (
        mean > 1e-24 * frequency[keep] ** 2
    )  # not one next token only, nor a token in all contexts alike
    root = np.cbrt(centred[keep] / np.where(tell, mean, 1.0))
    score = np.where(tell, (root - 1) * np.sqrt(4.5 * freedom) + np.sqrt(2 / (9 * freedom)), 0.0)
    size = np.sqrt(squared[keep])
    frame = pd.DataFrame(
        {
            "token": names[keep],
            "count": count[keep],
            "frequency": frequency[keep],
            "discriminancy": size / frequency[keep],
            "saliency": size,
            "favours": names[joint.indices[best[keep]]],
            "lift": delta[best[keep]],
            "score": score,
            "kind": np.select(
                [score > DISTINCT, score <= COMMON], ["distinct", "common"], "between"
            ),
        }
    )
    return frame.sort_values("saliency", ascending=False, kind="stable", ignore_index=True)


def _encode(tokens: Sequence[Hashable] | NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Numbers 0 … V − 1 (N,) and what they stand for (V,)."""
    import pandas as pd

    if isinstance(tokens, str):
        raise ValueError(
            "tokens must be a sequence of tokens, got one string; split it into words first"
        )
    array = (
        tokens
        if isinstance(tokens, np.ndarray)
        else np.asarray(pd.Series(list(tokens), dtype=object))
    )
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"tokens must be one sequence with at least one token, got shape {array.shape}"
        )
    if array.dtype.kind not in "iuOUS":
        raise ValueError(f"tokens must be words or integers, got an array of {array.dtype}")
    code, names = pd.factorize(array)
    return code.astype(np.int64), np.asarray(names)
