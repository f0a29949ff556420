"""Claims on Assumption 1, on Theorem 1 under linear and exp attention, and on Eqn. 60."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from joma.paper.claims._integrals import logit_part, weight_coefficient
from joma.paper.claims._registry import Kind, Variant, claim, drift, largest
from joma.theory._block import Block
from joma.theory._charts import JointChart
from joma.theory.flows import JointFlow
from joma.theory.invariants import cumulative
from joma.theory.setting import Array, Task
from joma.theory.tasks import Start, class_distributions, random_gradients, small_start
from joma.theory.trajectory import Trajectory

ACTIVATIONS = ("linear", "gelu", "silu", "relu", "leaky_relu")
NEXT_TOKEN = {"next token": "Σ v² of token l + 1 in the place of token l"}


@functools.cache
def _paths(
    attention: str, settings: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
) -> tuple[Trajectory, ...]:
    """Joint flows of random tasks with every activation at every (rate ratio, temperature)."""
    rng = np.random.default_rng(1)
    paths = []
    for ratio, temperature in settings:
        for activation in ACTIVATIONS:
            task = random_gradients(rng, samples=20, tokens=8, nodes=4)
            start = small_start(task, rng, 0.5)
            flow = JointFlow(
                task, attention, activation, mlp_lr=1.0, attention_lr=ratio, temperature=temperature
            )
            # z = 0 is a fixed point of linear attention; exp attention could blow up from there.
            if attention == "linear":
                z0 = start.z0 + 1.0
            else:
                z0 = start.z0 - temperature
            paths.append(flow.integrate(4.0, start.v0, start.xi0, z0, times=41))
    return tuple(paths)


def _square(path: Trajectory, variant: Variant) -> Array:
    """Σ_k v_k², (T, M), as the variant has it."""
    square = variant.factor("Σ v²") * (path.v**2).sum(axis=2)
    return variant.shift("next token", square, axis=1)


@claim(
    "A1.per_hidden_loss",
    source="Appendix A.1, Eqn. 9",
    statement=(
        "Under Assumption 1 the dynamics is gradient ascent on E[Σ_k g_k h_k], per hidden node."
    ),
    tolerance=1e-7,
    measures=(
        "largest deviation of Eqn. 2 from central differences of E[Σ g h], relative to the largest "
        "gradient (at least 0.1), three attentions, five activations, random states"
    ),
    control="Eqn. 2 without the factor φ′",
    terms=("v̇", "ξ̇", "ż"),
)
def a1_per_hidden_loss(variant: Variant) -> Iterator[float]:
    """Compare the field with differences of the objective at random states."""
    rng = np.random.default_rng(0)
    chart = JointChart((5, 3), (3,), (5,))
    for attention in ("linear", "exp", "softmax"):
        for activation in ACTIVATIONS:
            task = random_gradients(rng, samples=9, tokens=5, nodes=3)
            block = JointFlow(task, attention, activation, temperature=0.7).block
            state = rng.standard_normal(5 * 3 + 3 + 5)
            differences = _objective_differences(block, chart, state)
            field = _field(block, chart, state, variant)
            yield largest(field - differences) / max(0.1, largest(differences))


def _field(block: Block, chart: JointChart, state: Array, variant: Variant) -> Array:
    """Eqn. 2, as the variant has it."""
    v, xi, z = chart.unpack(state)
    b, a = block.forward(v, xi, z)
    gates = block.activation.derivative(a)
    if variant == "control":
        gates = np.ones_like(a)
    velocity = block.velocity(v, b, block.forces(a, gates))
    return chart.pack(
        variant.factor("v̇") * velocity.v,
        variant.factor("ξ̇") * velocity.xi,
        variant.factor("ż") * velocity.z,
    )


def _objective_differences(block: Block, chart: JointChart, state: Array) -> Array:
    """Central differences of E[Σ g h] along each coordinate of the state."""
    weight = block.p[:, None] * block.samples.g

    def objective(at: Array) -> float:
        _, a = block.forward(*chart.unpack(at))
        return float((weight * block.activation.phi(a)).sum())

    h = 1e-5
    return np.array(
        [
            (objective(state + step) - objective(state - step)) / (2 * h)
            for step in h * np.eye(len(state))
        ]
    )


@claim(
    "A1.layerwise",
    root="layerwise",
    kind=Kind.WRONG,
    source="Assumption 1 and the note after it",
    statement=(
        "E[g x] remains constant during training; this is true for layer-wise training (other "
        "layers fixed)."
    ),
    tolerance=1e-12,
    measures=(
        "largest ‖E[g x](t) − E[g x](0)‖/‖E[g x](0)‖ up to t = 200 while one layer is trained and "
        "what is above it is fixed: softmax cross-entropy and squared loss (printed); a loss "
        "linear in the layer's outputs (corrected)"
    ),
    correction=(
        "it is true if the loss is linear in the layer's outputs h. Otherwise g = −∂L/∂h moves "
        "with h although every other layer is fixed"
    ),
    counterexample=(
        "class distributions of Figure 2, one layer trained: E[g x] moves by 91 % until t = 5 "
        "under squared loss and by 18 % until t = 200 under cross-entropy"
    ),
    control="the linear loss with a quadratic term of 1 %",
    derivation=(
        r"$g=-\partial L/\partial h$ is a function of this layer's own $h$: fixing the others "
        r"fixes that function, not its value. It is constant in $h$ iff $L$ is linear in $h$. To "
        r"first order $\dot g=-\nabla^2L\,\dot h$."
    ),
    paper_formula=r"$\mathbb E[g_{h_k}x]$ is constant in layer-wise training",
    corrected_formula=(
        r"$\mathbb E[g_{h_k}x]$ is constant in layer-wise training with a loss that is linear in "
        r"$h$"
    ),
    mutants={"quadratic loss of 0.1 %": "the linear loss with a quadratic term of 0.1 %"},
)
def a1_layerwise(variant: Variant) -> Iterator[float]:
    """Measure how far E[g x] moves along the flow of one layer."""
    rng = np.random.default_rng(12)
    task = class_distributions(rng, smooth=True)
    x = task.x
    y = task.g
    start = small_start(task, rng)
    if variant == "printed":
        yield _moved_mean(Task.classification(x, y), start)
        yield _moved_mean(Task.regression(x, y), start)
        return
    curvature = variant.choose(0.0, {"control": 0.01, "quadratic loss of 0.1 %": 0.001})
    if curvature == 0:
        yield _moved_mean(Task(x, y - 1 / task.nodes), start)
    else:
        # A squared loss at a small rate towards far targets: linear with a small quadratic term.
        target = (y - 1 / task.nodes) / curvature
        yield _moved_mean(Task.regression(x, target), start, rate=curvature)


def _moved_mean(task: Task, start: Start, rate: float = 1.0) -> float:
    """The largest change of E[g x] until t = 200, relative to its start."""
    flow = JointFlow(task, "softmax", "linear", mlp_lr=rate, attention_lr=rate)
    path = flow.integrate(200.0, *start, times=9, rtol=1e-9, atol=1e-11)
    gradients = [task.gradient(path.preactivation(n)) for n in range(len(path.t))]
    means = np.stack([task.x.T @ (task.p[:, None] * g) for g in gradients])  # (T, M, K)
    changes = np.linalg.norm(means - means[0], axis=(1, 2))
    return float(changes.max() / np.linalg.norm(means[0]))


@claim(
    "T1.linear",
    source="Theorem 1",
    statement="Linear attention: z²(t) = Σ_k v_k²(t) + c.",
    tolerance=1e-9,
    measures="drift of z² − Σ v² over five activations, relative to max(1, max|z|)",
    control="z² − 2 Σ v²",
    terms=("Σ v²",),
    mutants=NEXT_TOKEN,
)
def t1_linear(variant: Variant) -> Iterator[float]:
    """Measure the drift of the printed invariant along joint flows."""
    factor = variant.choose(1.0, {"control": 2.0})
    for path in _paths("linear"):
        yield drift(path.z**2 - factor * _square(path, variant), path.z)


@claim(
    "T1.exp",
    source="Theorem 1",
    statement="Exp attention: z(t) = ½ Σ_k v_k²(t) + c.",
    tolerance=1e-9,
    measures="drift of z − ½ Σ v² over five activations, relative to max(1, max|z|)",
    control="z − Σ v²",
    terms=("Σ v²",),
    mutants=NEXT_TOKEN,
)
def t1_exp(variant: Variant) -> Iterator[float]:
    """Measure the drift of the printed invariant along joint flows."""
    factor = variant.choose(0.5, {"control": 1.0})
    for path in _paths("exp"):
        yield drift(path.z - factor * _square(path, variant), path.z)


_RATES = tuple((ratio, temperature) for ratio in (0.1, 1.0, 3.0) for temperature in (0.5, 2.0))


@claim(
    "T1.rates",
    kind=Kind.EXTENSION,
    source="Theorem 1, for unequal rates and any temperature",
    statement=(
        "With r = attention_lr / mlp_lr and temperature T: z² = r Σ v² + c (linear attention), z = "
        "(r/2T) Σ v² + c (exp). The paper has r = T = 1."
    ),
    tolerance=1e-9,
    measures=(
        "largest drift over rate ratios 0.1, 1, 3, temperatures 0.5, 2, five activations, linear "
        "and exp attention"
    ),
    control="1/r in the place of r",
    derivation=(
        "exp: ż = (η_z/T) Σ v_k ∘ E[s_k b] = (r/T) Σ v_k ∘ v̇_k. Linear: z ∘ ż = r Σ v_k ∘ v̇_k, "
        "both sides hold E[s_k x] ∘ z/T."
    ),
    paper_formula=r"$z_m=\tfrac12\sum_k v_k^2+c,\quad z_m^2=\sum_k v_k^2+c$",
    corrected_formula=(
        r"$z_m=\tfrac{r}{2T}\sum_k v_k^2+c,\quad z_m^2=r\sum_k v_k^2+c,\quad r=\eta_z/\eta_w$"
    ),
    terms=("Σ v²",),
    mutants={
        "r = 1": "the ratio of the rates left out",
        "T = 1": "the temperature left out",
        "T in the linear one": "z² = (r/T) Σ v²",
        **NEXT_TOKEN,
    },
)
def t1_rates(variant: Variant) -> Iterator[float]:
    """Measure the drift with the rates put in, and put in upside down."""
    for attention in ("linear", "exp"):
        for path in _paths(attention, _RATES):
            r = path.flow.ratio
            T = path.flow.attention.temperature
            r = variant.choose(r, {"control": 1 / r, "r = 1": 1.0})
            factor = weight_coefficient(attention, r, T)
            if attention == "linear" and variant.has("T in the linear one"):
                factor = r / T
            if attention == "exp" and variant.has("T = 1"):
                factor = r / 2
            value = logit_part(attention, path.z) - factor * _square(path, variant)
            yield drift(value, path.z)


@claim(
    "T1.zero_init",
    source="Theorem 1, last sentence",
    statement="Under zero initialisation (w = 0, z = 0) the constant c is 0.",
    tolerance=1e-9,
    measures=(
        "largest |z − ½ Σ v²| (exp) and |z² − Σ v²| (linear) over the flow from zero, three "
        "activations, three draws"
    ),
    remark=(
        "Under linear attention w = z = 0 is a fixed point of (v, z) (v̇ ∝ z, ż ∝ v; only ξ moves): "
        "c = 0 is true there, and nothing happens. Start with z ≠ 0"
    ),
    control="a start with v(0) ≠ 0",
    derivation=(
        r"$c=z^2(0)-\sum_kv_k^2(0)=0$ and $c=z(0)-\tfrac12\sum_kv_k^2(0)=0$. Linear attention has "
        r"$\dot v_k=z\circ\mathbb E[g_kh_k'x]$ and $\dot z=\sum_k v_k\circ\mathbb E[g_kh_k'x]$, "
        r"which vanish at $v=z=0$."
    ),
    terms=("Σ v²",),
    mutants={"z(0) = 0.01": "a start with z(0) = 0.01", **NEXT_TOKEN},
)
def t1_zero_init(variant: Variant) -> Iterator[float]:
    """Measure c along flows from zero."""
    rng = np.random.default_rng(5)
    for activation in ("linear", "gelu", "silu"):
        for _ in range(3):
            task = random_gradients(rng, samples=20, tokens=8, nodes=4)
            v0 = None
            if variant == "control":
                v0 = rng.standard_normal((8, 4))
            z0 = None
            if variant.has("z(0) = 0.01"):
                z0 = np.full(8, 0.01)
            for attention in ("exp", "linear"):
                path = JointFlow(task, attention, activation).integrate(3.0, v0, z0=z0, times=7)
                square = weight_coefficient(attention) * _square(path, variant)
                yield largest(logit_part(attention, path.z) - square)


@claim(
    "T1.descent_law",
    kind=Kind.EXTENSION,
    source="Theorem 1, for gradient descent",
    statement=(
        "A step of gradient descent changes the exp invariant by exactly −(r/2T) Σ Δv², the linear "
        "one by Δz² − r Σ Δv², and leaves the softmax sum Σ_l z_l as it is."
    ),
    tolerance=1e-12,
    measures=(
        "largest deviation of the measured drift from the law over 400 steps, relative to max(1, "
        "max|z|)"
    ),
    control="the law with the opposite sign",
    derivation=(
        "z⁺ − z = (r/T) Σ v ∘ Δv, and (v + Δv)² − v² = 2 v ∘ Δv + Δv²: the terms linear in the "
        "step cancel."
    ),
    paper_formula=r"$z=\tfrac12\sum_kv_k^2+c$ along the gradient flow",
    corrected_formula=(
        r"$\Delta\big(z-\tfrac r{2T}\sum_kv_k^2\big)=-\tfrac r{2T}\sum_k(\Delta v_k)^2$ per step "
        r"of gradient descent"
    ),
    terms=("Δv² (exp)", "Δz²", "Δv² (linear)"),
    mutants={"one token missing": "Σ_l z_l without its first token"},
)
def t1_descent_law(variant: Variant) -> Iterator[float]:
    """Compare the measured drift of gradient descent with its exact law."""
    sign = variant.choose(1.0, {"control": -1.0})
    for path in _descents():
        attention = path.flow.attention.kind
        if attention == "softmax":
            z = path.z
            if variant.has("one token missing"):
                z = path.z[:, 1:]
            yield drift(z.sum(axis=1), path.z)
            continue
        factor = weight_coefficient(attention, path.flow.ratio, path.flow.attention.temperature)
        value = logit_part(attention, path.z) - factor * (path.v**2).sum(axis=2)
        v_steps = (np.diff(path.v, axis=0) ** 2).sum(axis=2)
        z_steps = np.diff(path.z, axis=0) ** 2
        if attention == "exp":
            steps = -variant.factor("Δv² (exp)") * factor * v_steps
        else:
            of_v = variant.factor("Δv² (linear)") * factor * v_steps
            steps = variant.factor("Δz²") * z_steps - of_v
        off = value - value[0] - sign * cumulative(steps)
        yield largest(off) / max(1.0, largest(path.z))


@functools.cache
def _descents() -> tuple[Trajectory, ...]:
    rng = np.random.default_rng(6)
    paths = []
    for attention in ("linear", "exp", "softmax"):
        for activation in ("relu", "gelu"):
            task = random_gradients(rng, samples=20, tokens=8, nodes=4)
            start = small_start(task, rng, 0.5)
            flow = JointFlow(task, attention, activation, attention_lr=3.0, temperature=0.8)
            paths.append(flow.descend(400, 0.005, *start))
    return tuple(paths)


@claim(
    "E60",
    source="Eqn. 60",
    statement="w(t) = w(0) + U_C[v(t) − v(0)] + u_m ξ(t), with ξ(t) = ∫₀ᵗ E[g h′].",
    tolerance=1e-10,
    measures=(
        "largest deviation of w(t) along the flow of w itself in d = 12 dimensions, relative to "
        "the way of w; three attentions, two activations, orthonormal embeddings"
    ),
    remark=(
        "ξ here starts at 0, also where u_mᵀw(0) ≠ 0: it is what w gains along u_m. It needs U_C "
        "orthonormal and orthogonal to u_m, as Section 2 assumes"
    ),
    control="embeddings at an angle: u₁ᵀu₂ = 0.3",
    terms=("U_C Δv", "u_m ξ"),
    mutants={"v(0) left out": "U_C v(t) in the place of U_C[v(t) − v(0)]"},
)
def e60(variant: Variant) -> Iterator[float]:
    """Compare the weights along the flow with the sum of their parts."""
    for U, path in _weight_paths(variant == "control"):
        assert path.w is not None
        v = path.v
        if not variant.has("v(0) left out"):
            v = path.v - path.v[0]
        query = U[:, -1:, None].transpose(2, 0, 1)  # (1, d, 1)
        bias = variant.factor("u_m ξ") * query * (path.xi - path.xi[0])[:, None, :]  # (T, d, K)
        rebuilt = path.w[0] + variant.factor("U_C Δv") * (U[:, :-1] @ v) + bias
        yield largest(rebuilt - path.w) / largest(path.w - path.w[0])


@functools.cache
def _weight_paths(tilted: bool) -> tuple[tuple[Array, Trajectory], ...]:
    """Flows of the weights w themselves, with the embeddings (d, M + 1)."""
    rng = np.random.default_rng(13)
    paths = []
    for attention in ("linear", "exp", "softmax"):
        for activation in ("gelu", "silu"):
            task = random_gradients(rng, samples=12, tokens=5, nodes=3)
            U = np.linalg.qr(rng.standard_normal((12, 6)))[0]
            if tilted:
                U[:, 1] = 0.3 * U[:, 0] + np.sqrt(1 - 0.09) * U[:, 1]
            w0 = 0.5 * rng.standard_normal((12, 3))
            z0 = 0.5 * rng.standard_normal(5)
            flow = JointFlow(task, attention, activation, embedding=U)
            paths.append((U, flow.integrate(1.5, w0=w0, z0=z0, times=4)))
    return tuple(paths)
