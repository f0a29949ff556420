"""The regimes in which linear and nonlinear nodes are compared: inputs, gradients and starts of flows.

MixtureRegime   fixed gradients: Theorem 3's two isotropic components, with attention put back
LabelRegime     cross-entropy: contexts of few tokens, with class labels

Inputs and starts depend on the seed and the regime, never on the activation, so that flows of different
activations can be compared in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import expit, softmax

from joma.paper.labs.ensemble import Ensemble, integrate_all
from joma.theory.isotropic import Gaussian, Mixture, Radial, StudentT
from joma.theory.isotropic.mixture import Thetas
from joma.theory.setting import Activation, Array, Task
from joma.theory.tasks import Start, small_start

TOKENS = 10
FAMILIES: dict[str, Radial] = {"Gaussian": Gaussian(TOKENS), "Student-t": StudentT(TOKENS, nu=3)}
SEPARATION = 1.0  # of the two centres: D
DRAWS = 60  # samples of each component
CONTEXT_TOKENS = 12
CONTEXT_LENGTH = 4
CONTEXTS = 88
CLASSES = 4
# The logits of the labels are this times the mean of the tokens' directions: labels that are far from
# certain, and linear nodes whose weights have finite targets of that size.
LABEL_SCALE = 8.0
# Informativeness of unequal tokens, from least to largest, before it is scaled to a mean square of 1.
UNEQUAL_RANGE = (0.2, 5.0)
SOFTPLUS = Activation("softplus", lambda a: np.logaddexp(0.0, a), expit)
Seeds = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class MixtureRegime:
    """One node under fixed gradients and exp attention, on draws from two isotropic components.

    Attributes:
        inputs: the law of both components, a key of `FAMILIES`.
        ratio: a₋/a₊, the weight of the component at 0 over that of the component at x̄₊; they sum to 1.
        bias: ξ(0).
        holds_bias: True if ξ stays as it is, as in the proof of Theorem 3.
    """

    inputs: str
    ratio: float
    bias: float
    holds_bias: bool

    @property
    def has_target(self) -> bool:
        """True if a₊F(D) < a₋F(0): with ξ > 0 held, v has a finite target along x̄₊ (S4.finite_target)."""
        thetas = Thetas(FAMILIES[self.inputs])
        return bool(thetas.F(SEPARATION) < self.ratio * thetas.F(0.0))

    @property
    def labels(self) -> dict[str, str]:
        """Columns that name the regime in a table."""
        trained = "held" if self.holds_bias else "trained"
        return {
            "inputs": self.inputs,
            "ratio": f"{self.ratio:.2g}",
            "bias": f"{self.bias:g}",
            "xi": trained,
        }

    def draw(self, seed: tuple[int, int]) -> tuple[Task, Start]:
        """Return the samples of one seed, and a start with a small v and uniform attention."""
        rng = np.random.default_rng(seed)
        centre = rng.standard_normal(TOKENS)
        centre *= SEPARATION / np.linalg.norm(centre)
        centres = np.stack([centre, np.zeros(TOKENS)])  # (2, M)
        weights = np.array([1.0, -self.ratio]) / (1 + self.ratio)
        task = Mixture(FAMILIES[self.inputs], centres, weights).task(DRAWS, rng)
        v0 = 0.01 * rng.standard_normal((TOKENS, 1))
        return task, Start(v0, np.array([self.bias]), np.zeros(TOKENS))

    def flows(self, activation: str | Activation, seeds: Seeds, times: Array) -> Ensemble:
        """Integrate one flow per seed."""
        tasks, starts = zip(*map(self.draw, seeds), strict=True)
        return integrate_all(
            tasks,
            starts,
            times,
            attention="exp",
            activation=activation,
            bias_lr=0.0 if self.holds_bias else 1.0,
        )


@dataclass(frozen=True)
class LabelRegime:
    """Nodes that are the logits of classes, under cross-entropy, on contexts of four tokens.

    Attributes:
        is_certain: True if each context has one label; False if it has the distribution that the label is drawn from.
        zipf: exponent of the tokens' frequencies; 0 for equal ones.
        is_equal: True if all tokens say equally much about the label.
        rate: learning rate of attention over that of the weights, r.
        attention: "exp" or "softmax".
    """

    is_certain: bool
    zipf: float
    is_equal: bool
    rate: float
    attention: str

    @property
    def labels(self) -> dict[str, str]:
        """Columns that name the regime in a table."""
        return {
            "labels": "certain" if self.is_certain else "uncertain",
            "zipf": f"{self.zipf:g}",
            "informativeness": "equal" if self.is_equal else "unequal",
            "rate": f"{self.rate:g}",
            "attention": self.attention,
        }

    def draw(self, seed: tuple[int, int]) -> tuple[Task, Start]:
        """Return the contexts of one seed with their labels, and a small start."""
        rng = np.random.default_rng(seed)
        frequency = np.arange(1.0, CONTEXT_TOKENS + 1) ** -self.zipf
        frequency /= frequency.sum()
        tokens = rng.choice(CONTEXT_TOKENS, size=(CONTEXTS, CONTEXT_LENGTH), p=frequency)
        one_hot = np.eye(CONTEXT_TOKENS)[tokens]  # (contexts, length, tokens)
        x = one_hot.mean(axis=1)
        directions = rng.standard_normal((CONTEXT_TOKENS, CLASSES))
        directions -= directions.mean(axis=1, keepdims=True)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        spread = rng.permutation(np.geomspace(*UNEQUAL_RANGE, CONTEXT_TOKENS))
        informativeness = np.ones(CONTEXT_TOKENS) if self.is_equal else spread
        informativeness = informativeness / np.sqrt((informativeness**2).mean())
        logits = LABEL_SCALE * x @ (informativeness[:, None] * directions)
        y = softmax(logits, axis=1)
        if self.is_certain:
            y = np.eye(CLASSES)[y.argmax(axis=1)]
        task = Task.classification(x, y)
        return task, small_start(task, rng)

    def flows(self, activation: str | Activation, seeds: Seeds, times: Array) -> Ensemble:
        """Integrate one flow per seed."""
        tasks, starts = zip(*map(self.draw, seeds), strict=True)
        return integrate_all(
            tasks,
            starts,
            times,
            attention=self.attention,
            activation=activation,
            attention_lr=self.rate,
        )
