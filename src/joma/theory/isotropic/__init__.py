"""Isotropic mixtures: the nonlinear dynamics without attention (Section 4, Appendices A.3 and A.4), corrected."""

from joma.theory.isotropic.critical import (
    Continuum,
    CriticalRay,
    CriticalRays,
    critical_points,
    critical_rays,
)
from joma.theory.isotropic.families import ExpNorm, Gaussian, Laplace, StudentT, UniformBall
from joma.theory.isotropic.linear import Fate, Linearisation, fate, linearise
from joma.theory.isotropic.mixture import Mixture, Path, Thetas, expectation
from joma.theory.isotropic.radial import Density, Radial

__all__ = [
    "Continuum",
    "CriticalRay",
    "CriticalRays",
    "Density",
    "ExpNorm",
    "Fate",
    "Gaussian",
    "Laplace",
    "Linearisation",
    "Mixture",
    "Path",
    "Radial",
    "StudentT",
    "Thetas",
    "UniformBall",
    "critical_points",
    "critical_rays",
    "expectation",
    "fate",
    "linearise",
]
