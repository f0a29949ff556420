"""Claims on Assumption 1 and Theorem 1: the first integrals of the joint flow."""

from __future__ import annotations

import functools

import numpy as np

from joma.theory._block import Block
from joma.theory._charts import JointChart
from joma.theory.claims._registry import Kind, claim
from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Task
from joma.theory.tasks import class_distributions, random_gradients, small_start
from joma.theory.trajectory import Trajectory

ACTIVATIONS = ("linear", "gelu", "silu", "relu", "leaky_relu")


@functools.cache
def _paths(attention: str, settings: tuple[tuple[float, float], ...] = ((1.0, 1.0),)) -> tuple[Trajectory, ...]:
    """Joint flows of random tasks with every activation at every (rate ratio, temperature)."""
    rng = np.random.default_rng(1)
    out = []
    for ratio, temperature in settings:
        for activation in ACTIVATIONS:
            task = random_gradients(rng, samples=20, tokens=8, nodes=4)
            start = small_start(task, rng, 0.5)
            flow = JointFlow(task, attention, activation, mlp_lr=1.0, attention_lr=ratio, temperature=temperature)
            z0 = start.z0 + 1.0 if attention == "linear" else start.z0 - temperature  # off the fixed point; no blow-up
            out.append(flow.integrate(4.0, start.v0, start.xi0, z0, times=41))
    return tuple(out)


def _drift(path: Trajectory, value: Array) -> float:
    return float(np.abs(value - value[0]).max() / max(1.0, np.abs(path.z).max()))


def _square(path: Trajectory) -> Array:
    return (path.v**2).sum(axis=2)


@claim(
    "A1.per_hidden_loss",
    source="Appendix A.1, Eqn. 9",
    statement="Under Assumption 1 the dynamics is gradient ascent on E[Σ_k g_k h_k], per hidden node.",
    tolerance=1e-7,
    measures="largest deviation of Eqn. 2 from central differences of E[Σ g h], relative to the largest gradient (at least 0.1)",
    control="Eqn. 2 without the factor φ′",
)
def a1_per_hidden_loss(variant: str) -> float:
    """Compare the field with differences of the objective at random states."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for attention in ("linear", "exp", "softmax"):
        for activation in ACTIVATIONS:
            task = random_gradients(rng, samples=9, tokens=5, nodes=3)
            flow = JointFlow(task, attention, activation, temperature=0.7)
            y = rng.standard_normal(5 * 3 + 3 + 5)
            block, chart = flow.block, JointChart((5, 3), (3,), (5,))
            v, xi, z = chart.unpack(y)
            b, a = block.forward(v, xi, z)
            gates = np.ones_like(a) if variant == "control" else block.activation.derivative(a)
            field = chart.tangent(block.velocity(v, b, block.forces(a, gates)))

            def objective(y: Array, block: Block = block, chart: JointChart = chart) -> float:
                _, a = block.forward(*chart.unpack(y))
                return float((block.p[:, None] * block.samples.g * block.activation.phi(a)).sum())

            h = 1e-5
            differences = np.array([(objective(y + h * e) - objective(y - h * e)) / (2 * h) for e in np.eye(len(y))])
            worst = max(worst, float(np.abs(field - differences).max() / max(0.1, np.abs(differences).max())))
    return worst


@claim(
    "T1.linear",
    source="Theorem 1",
    statement="Linear attention: z²(t) = Σ_k v_k²(t) + c.",
    tolerance=1e-9,
    measures="drift of z² − Σ v² over five activations, relative to max(1, max|z|)",
    control="z² − 2 Σ v²",
)
def t1_linear(variant: str) -> float:
    """Drift of the printed invariant along joint flows."""
    factor = 2.0 if variant == "control" else 1.0
    return max(_drift(p, p.z**2 - factor * _square(p)) for p in _paths("linear"))


@claim(
    "T1.exp",
    source="Theorem 1",
    statement="Exp attention: z(t) = ½ Σ_k v_k²(t) + c.",
    tolerance=1e-9,
    measures="drift of z − ½ Σ v² over five activations, relative to max(1, max|z|)",
    control="z − Σ v²",
)
def t1_exp(variant: str) -> float:
    """Drift of the printed invariant along joint flows."""
    factor = 1.0 if variant == "control" else 0.5
    return max(_drift(p, p.z - factor * _square(p)) for p in _paths("exp"))


def _no_second_order(d: Array, rng: np.random.Generator, nodes: int, mean: Array) -> Task:
    """A task at z = 0 with E[g_k b bᵀ] = b̄ E[g_k bᵀ] for each node: samples b̄, b̄ ± d, b̄ ± √2 d with gradients
    c_k, e_k, −e_k/2 make the first and second moments of (b − b̄) under g vanish."""
    x = np.stack([mean, mean + d, mean - d, mean + np.sqrt(2) * d, mean - np.sqrt(2) * d])
    c, e = rng.standard_normal(nodes), rng.standard_normal(nodes)
    return Task(x, np.stack([c, e, e, -e / 2, -e / 2]))


@claim(
    "T1.softmax",
    kind=Kind.UNSAID,
    source="Theorem 1, Eqn. 18",
    statement="Softmax attention: with b̄ constant and E[Σ_k g h′ b bᵀ] = b̄ E[Σ_k g h′ b]ᵀ, "
    "z(t) = ½ Σ_k (v_k² − ‖v_k‖² b̄) + c.",
    tolerance=1e-9,
    measures="‖ẑ − z‖ / max(1, ‖z‖) at the end, on a task that fulfils the summed hypothesis exactly",
    condition="the hypothesis for each node k and b̄ constant. But E[diag b − b bᵀ] is a graph Laplacian, so a constant "
    "b̄ forces ż = 0: the exact case is one in which attention does not learn. What is exact for every softmax "
    "flow is Σ_l z_l = const; Eqn. 18 itself is an approximation that predicts the pattern of z (see Figure 2)",
    control="Eqn. 18 with a plus sign, as the main text is often read",
    derivation="ḃ̄ = E[diag b − b bᵀ] ż/T. The kernel of the Laplacian holds only vectors constant on connected sets "
    "of tokens; ż is orthogonal to them since 1ᵀ(diag b − b bᵀ) = 0. So ḃ̄ = 0 implies ż = 0.",
    paper_formula=r"$z_m(t)=\tfrac12\sum_k v_k^2(t)-\|v_k(t)\|_2^2\,\bar b_m+c$",
    corrected_formula=r"$\mathbf 1^\top z_m(t)=\text{const}$",
)
def t1_softmax(variant: str) -> float:
    """Distance of Eqn. 18 from the softmax flow."""
    rng = np.random.default_rng(3)
    if variant == "printed":  # cross-entropy, linear nodes: Σ_k g_k = 0, so the summed hypothesis reads 0 = 0
        task = class_distributions(rng, smooth=True)
        start = small_start(task, rng)
        path = JointFlow(task, "softmax", "linear").integrate(50.0, *start, times=11)
    else:
        d = 0.1 * (np.array([1.0, -1.0, 0.5, -0.5]))
        task = _no_second_order(d, rng, nodes=2, mean=np.full(4, 0.25))
        path = JointFlow(task, "softmax", "linear").integrate(5.0, times=11)
    invariant = path.invariant()
    z_hat = invariant.z_hat
    if variant == "control":
        assert invariant.z1 is not None
        assert invariant.z2 is not None
        z_hat = invariant.z1 - invariant.z2 + path.z[0] - (invariant.z1 - invariant.z2)[0]
    return float(np.linalg.norm(z_hat[-1] - path.z[-1]) / max(1.0, float(np.linalg.norm(path.z[-1]))))


@claim(
    "T1.softmax_hypothesis",
    kind=Kind.WRONG,
    source="Theorem 1 and Eqn. 17",
    statement="If E[Σ_k g h′ b bᵀ] = b̄ E[Σ_k g h′ b]ᵀ, then ż = Σ_k (v̇_k ∘ v_k − b̄ v̇_kᵀ v_k).",
    tolerance=1e-10,
    measures="relative error of Eqn. 17 at a random state (and of v̇_k = b̄ ξ̇_k for the corrected statement)",
    correction="The hypothesis must hold for each k, since each term meets its own v_k. Multiplied by 1 (Σ b = 1) it "
    "then forces v̇_k = b̄ ξ̇_k: all nodes move along the one direction b̄",
    control="Eqn. 17 with + b̄ v̇ᵀv on the same task",
    derivation="ż = Σ_k (diag E[g_k h′ b] − E[g_k h′ b bᵀ]) v_k. Cross-entropy with linear nodes has Σ_k g_k = 0, so "
    "the summed hypothesis holds as 0 = 0, yet Σ_k E[g_k b bᵀ] v_k ≠ b̄ Σ_k v̇_kᵀ v_k.",
    paper_formula=r"$\mathbb E[\textstyle\sum_k g_{h_k}h_k' bb^\top]=\bar b_m\,\mathbb E[\textstyle\sum_k g_{h_k}h_k' b]$",
    corrected_formula=r"$\mathbb E[g_{h_k}h_k' bb^\top]=\bar b_m\,\mathbb E[g_{h_k}h_k' b]^\top\ \forall k"
    r"\;\Rightarrow\;\dot v_k=\bar b_m\dot\xi_k$",
)
def t1_softmax_hypothesis(variant: str) -> float:
    """Eqn. 17 against the true ż where the hypothesis holds, summed or node by node."""
    rng = np.random.default_rng(4)
    if variant == "printed":
        task = class_distributions(rng, smooth=True)
    else:
        mean = np.array([0.4, 0.3, 0.2, 0.1])
        task = _no_second_order(0.05 * np.array([1.0, -1.0, 0.5, -0.5]), rng, nodes=3, mean=mean)
    flow = JointFlow(task, "softmax", "linear")
    v, xi = rng.standard_normal((task.tokens, task.nodes)), rng.standard_normal(task.nodes)
    b, a = flow.block.forward(v, xi, np.zeros(task.tokens))
    velocity = flow.block.velocity(v, b, flow.block.forces(a, np.ones_like(a)))
    b_bar = flow.block.p @ b
    vv = velocity.v * v
    sign = 1.0 if variant == "control" else -1.0
    error = np.abs(vv.sum(axis=1) + sign * b_bar * vv.sum() - velocity.z).max() / np.abs(velocity.z).max()
    if variant == "corrected":
        error = max(error, np.abs(velocity.v - np.outer(b_bar, velocity.xi)).max() / np.abs(velocity.v).max())
    return float(error)


_RATES = tuple((ratio, temperature) for ratio in (0.1, 1.0, 3.0) for temperature in (0.5, 2.0))


@claim(
    "T1.rates",
    kind=Kind.EXTENSION,
    source="Theorem 1 with the slides' remark",
    statement="The first integrals hold for any learning rates of MLP and attention.",
    tolerance=1e-9,
    measures="largest drift over rate ratios 0.1, 1, 3, temperatures 0.5, 2, five activations, linear and exp attention",
    correction="With r = attention_lr / mlp_lr and temperature T: z² = r Σ v² + c (linear), z = (r/2T) Σ v² + c (exp)",
    control="1/r in the place of r",
    derivation="exp: ż = (η_z/T) Σ v_k ∘ E[s_k b] = (r/T) Σ v_k ∘ v̇_k. Linear: z ∘ ż = r Σ v_k ∘ v̇_k, both sides hold E[s_k x] ∘ z/T.",
    paper_formula=r"$z_m=\tfrac12\sum_k v_k^2+c,\quad z_m^2=\sum_k v_k^2+c$",
    corrected_formula=r"$z_m=\tfrac{r}{2T}\sum_k v_k^2+c,\quad z_m^2=r\sum_k v_k^2+c,\quad r=\eta_z/\eta_w$",
)
def t1_rates(variant: str) -> float:
    """Drift with the rates left out, put in, and put in upside down."""
    worst = 0.0
    for attention in ("linear", "exp"):
        for p in _paths(attention, _RATES):
            r, T = p.flow.ratio, p.flow.attention.temperature
            if variant == "printed":
                r, T = 1.0, 1.0
            elif variant == "control":
                r = 1 / r
            value = p.z**2 - r * _square(p) if attention == "linear" else p.z - r / (2 * T) * _square(p)
            worst = max(worst, _drift(p, value))
    return worst


@claim(
    "T1.zero_init",
    kind=Kind.UNSAID,
    source="Theorem 1, last sentence",
    statement="Under zero initialisation (w = 0, z = 0) the constant c is 0.",
    tolerance=1e-9,
    measures="largest |c| over the trajectory for an attention that moves; 1 for one that does not move at all",
    condition="exp or softmax attention. Under linear attention w = z = 0 is a fixed point for (v, z) (ẇ ∝ z, ż ∝ v; only "
    "ξ moves), so there is nothing for the invariant to say: start with z ≠ 0",
    control="a start with v(0) ≠ 0",
    paper_formula=r"$w_k(0)=0,\ z_m(0)=0\;\Rightarrow\; c=0$ for linear, exp and softmax attention",
    corrected_formula=r"the same for exp and softmax; for linear attention $w_k=0,\ z_m=0$ is a fixed point",
    derivation=r"Linear attention has $b=z\circ x$: $\dot v_k=z\circ\mathbb E[g_kh_k'x]$ and $\dot z=\sum_k v_k\circ\mathbb E[g_kh_k'x]$. "
    r"Both vanish at $v=z=0$ and stay there.",
)
def t1_zero_init(variant: str) -> float:
    """|z − fold(v)| from zero start, and whether anything moves."""
    rng = np.random.default_rng(5)
    task = random_gradients(rng, samples=20, tokens=8, nodes=4)
    worst = 0.0
    for attention in ("exp",) if variant in ("condition", "control") else ("exp", "linear"):
        v0 = rng.standard_normal((8, 4)) if variant == "control" else None
        path = JointFlow(task, attention, "gelu").integrate(4.0, v0, times=11)
        if np.abs(path.z[-1] - path.z[0]).max() == 0:
            return 1.0
        worst = max(worst, float(np.abs(path.invariant().value).max()))
    return worst


@claim(
    "T1.descent_law",
    kind=Kind.EXTENSION,
    source="Theorem 1, for gradient descent (joma)",
    statement="A step of gradient descent changes the exp invariant by exactly −(r/2T) Σ Δv², the linear one by Δz² − r Σ Δv², "
    "and leaves the softmax sum Σ_l z_l as it is.",
    tolerance=1e-12,
    measures="largest deviation of the measured drift from the law over 400 steps, relative to max(1, max|z|)",
    control="the law with the opposite sign",
    derivation="z⁺ − z = (r/T) Σ v ∘ Δv, and (v + Δv)² − v² = 2 v ∘ Δv + Δv²: the terms linear in the step cancel.",
)
def t1_descent_law(variant: str) -> float:
    """Measured drift of gradient descent against its exact law."""
    rng = np.random.default_rng(6)
    worst = 0.0
    for attention in ("linear", "exp", "softmax"):
        for activation in ("relu", "gelu"):
            task = random_gradients(rng, samples=20, tokens=8, nodes=4)
            start = small_start(task, rng, 0.5)
            flow = JointFlow(task, attention, activation, attention_lr=3.0, temperature=0.8)
            invariant = flow.descend(400, 0.005, *start).invariant()
            if invariant.law is None:
                assert invariant.sum_drift is not None
                worst = max(worst, float(invariant.sum_drift.max()))
            else:
                law = -invariant.law if variant == "control" else invariant.law
                worst = max(worst, float(np.abs(invariant.value - invariant.value[0] - law).max() / invariant.scale))
    return worst
