"""Integrals over the distances r from x to the end of the support, for many x at once.

The double-exponential rule (Takahasi and Mori) takes all x together and is exact to rounding for densities that are
smooth inside their support, whatever their tails and edges; for others there is an adaptive rule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from scipy.integrate import quad

from joma.theory.setting import Array

Density = Callable[[Array], Array]
Kernel = Callable[[Array, Array, Array], Array]  # of x, r − x and r

_T = np.arange(-6.1, 6.1, 1 / 32)
_PANEL = 1024  # x at a time


def smooth(density: Density, kernel: Kernel, x: Array, end: float) -> Array:
    """∫_x^end p₀(r) k(x, r − x, r) dr by the double-exponential rule."""
    flat = np.asarray(x, float).ravel()
    out = np.zeros(len(flat))
    for first in range(0, len(flat), _PANEL):
        part = flat[first : first + _PANEL, None]
        with np.errstate(all="ignore"):
            if np.isinf(end):
                step = np.exp(np.pi / 2 * np.sinh(_T))[None, :]
                weight = step * (np.pi / 2 * np.cosh(_T))
            else:
                share = 1 / (1 + np.exp(-np.pi * np.sinh(_T)))
                rest = 1 / (1 + np.exp(np.pi * np.sinh(_T)))
                step = np.maximum(end - part, 0.0) * share
                weight = step * rest * (np.pi * np.cosh(_T))
            r = part + step
            terms = density(r) * kernel(part, step, r) * weight
        out[first : first + _PANEL] = np.where(np.isfinite(terms), terms, 0.0).sum(axis=1) / 32
    return out.reshape(np.shape(x))


def adaptive(density: Density, kernel: Kernel, x: Array, end: float) -> Array:
    """The same by adaptive Gauss-Kronrod in pieces, one x after the other."""

    def one(x: float) -> float:
        if x >= end:
            return 0.0

        def f(r: float) -> float:
            where = np.asarray(r)
            value = float(density(where) * kernel(np.asarray(x), np.asarray(r - x), where))
            return value if np.isfinite(value) else 0.0  # p₀ = 0 where the kernel overflows

        edges = np.unique(np.minimum(x + np.array([0.0, 0.25, 1.0, 3.0, 10.0]), end))
        total = sum(_quad(f, a, b) for a, b in pairwise(edges))
        far = float(edges[-1])  # beyond, r = far · t: algebraic tails begin at 1 whatever the units
        return total + (far * _quad(lambda t: f(far * t), 1.0, end / far) if far < end else 0.0)

    with np.errstate(all="ignore"):
        return np.vectorize(one, otypes=[float])(x)


def _quad(f: Callable[[float], float], low: float, high: float) -> float:
    return float(quad(f, low, high, limit=200, epsabs=0, epsrel=1e-12, full_output=1)[0])
