"""Claims on Theorem 3: the flow near a critical point of two isotropic components."""

from __future__ import annotations

import numpy as np

from joma.theory.claims._registry import Kind, claim
from joma.theory.claims.isotropic import NORMS, critical_point
from joma.theory.isotropic import Mixture, linearise
from joma.theory.setting import Array


def _differentiated(mixture: Mixture, v: Array, xi: float) -> Array:
    """−∂v̇/∂v with ξ held, by central differences."""
    h = 1e-5 * float(np.linalg.norm(v))
    columns = [(mixture.field(v + h * e, xi)[0] - mixture.field(v - h * e, xi)[0]) / (2 * h) for e in np.eye(len(v))]
    return -np.stack(columns, axis=1)


@claim(
    "T3.form",
    kind=Kind.WRONG,
    source="Theorem 3, Eqns. 5 and 72-74",
    statement="Near μ, v̇ = C(μ)(μ − v) with C = s_μ{β₁I + β₂μμᵀ}, β₁ = s_μ a₊‖x̄₊‖θ₁(r₊)/‖μ‖², "
    "β₂ = s_μ a₊‖x̄₊‖(ξ*θ₁′(r₊) − 2θ₁(r₊))/‖μ‖⁴.",
    tolerance=1e-7,
    measures="relative error of C against differences of the field with ξ held, at critical points with s_μ = ±1 (Student-t, ν = 3, "
    "a = 0.4, −0.6 and 0.6, −0.4), ‖μ‖ = 0.5, 1, 2",
    correction="C = β₁I + β₂μμᵀ with β₁ = s_μ a₊‖x̄₊‖θ₁(ρ₊)/‖μ‖ and, along μ, β₁ + β₂‖μ‖² = −[a₊θ₁′(ρ₊) − a₋θ₁′(ρ₋)]ξ*²/‖μ‖³. s_μ is counted "
    "twice in the theorem, and the printed β's follow from the uncorrected Lemma 2: they give β₁ + β₂‖μ‖² ∝ ξ*θ₁′ − θ₁ < 0 whenever ξ* ≤ 0, "
    "so that C could never be positive definite where A.4 says the critical points are",
    control="the corrected form with the sign along μ reversed",
    paper_formula=r"$C=s_\mu\{\beta_1I+\beta_2\mu\mu^\top\},\ \beta_1=s_\mu\frac{a_+\|\bar x_+\|}{\|\mu\|^2}\theta_1(r_+^*),\ "
    r"\beta_2=s_\mu\frac{a_+\|\bar x_+\|}{\|\mu\|^4}\big(\xi^*\theta_1'(r_+^*)-2\theta_1(r_+^*)\big)$",
    corrected_formula=r"$C=\beta_1I+\beta_2\mu\mu^\top,\ \beta_1=s_\mu\frac{a_+\|\bar x_+\|}{\|\mu\|}\theta_1(\rho_+),\ "
    r"\beta_1+\beta_2\|\mu\|^2=-\frac{\xi^{*2}}{\|\mu\|^3}\big(a_+\theta_1'(\rho_+)-a_-\theta_1'(\rho_-)\big)$",
    derivation=r"$\partial\rho_\pm/\partial v=-\xi^*\mu/\|\mu\|^3$ at $v=\mu\parallel\bar x_+$, $\bar x_-=0$, and "
    r"$\theta_2'=-\rho\theta_1'$: along $\mu$ the terms add up to $(a_+\theta_1'(\rho_+)-a_-\theta_1'(\rho_-))\xi^{*2}/\|\mu\|^3$. Across it only "
    r"$\hat v$ turns, with the factor $a_+\theta_2(\rho_+)-a_-\theta_2(\rho_-)=-s_\mu a_+\|\bar x_+\|\theta_1(\rho_+)$.",
)
def t3_form(variant: str) -> float:
    """The statement's C against differences."""
    worst = 0.0
    for a in ((0.4, -0.6), (0.6, -0.4)):
        for norm in NORMS:
            mixture, mu, xi = critical_point(norm, a)
            about = linearise(mixture, mu, xi)
            printed = variant == "printed"
            C = about.s_mu * about.matrix(about.printed) if printed else about.matrix(about.corrected)
            if variant == "control":
                C = C - 2 * np.outer(mu, mu) * float(mu @ C @ mu) / norm**4
            true = _differentiated(mixture, mu, xi)
            worst = max(worst, float(np.linalg.norm(C - true) / np.linalg.norm(true)))
    return worst


@claim(
    "T3.stability",
    kind=Kind.WRONG,
    source="Theorem 3, last sentence",
    statement="If C(μ) is positive definite, μ is a stable critical point: by Eqn. 5 the flow returns to it.",
    tolerance=1e-3,
    measures="distance from (μ, ξ*) left at the end of the flow, as a share of a perturbation of 1 % (eight directions; the corrected "
    "statement: distance from the ray, and from μ with ξ held)",
    correction="the ray {c(μ, ξ*)} attracts if C is positive definite; along it the flow is neutral, since (v, ξ) is a null vector of the "
    "Jacobian, and it comes back to another point of the ray: μ is stable, but not asymptotically. With ξ held at ξ*, as the proof does, it returns to μ",
    control="the ray of a = (0.6, −0.4), where C is negative definite",
    paper_formula=r"$C(\mu)\succ0\;\Rightarrow\;\mu$ is a stable critical point",
    corrected_formula=r"$C(\mu)\succ0\;\Rightarrow\;$ the ray $\{c(\mu,\xi^*):c>0\}$ attracts; $\mu$ itself only with $\xi=\xi^*$ held",
    derivation=r"The field is 0-homogeneous, so $J(\mu,\xi^*)^\top=0$ in the direction of the ray. Its other eigenvalues are $-\beta_1$ on $\mu^\perp$ and "
    r"$\frac{\kappa}{\|\mu\|}(1+\xi^{*2}/\|\mu\|^2)$, $\kappa=a_+\theta_1'(\rho_+)-a_-\theta_1'(\rho_-)$; $C\succ0$ iff $\beta_1>0$, $\kappa<0$ and $\xi^*\ne0$.",
)
def t3_stability(variant: str) -> float:
    """Perturb a critical point and follow the flow."""
    mixture, mu, xi = critical_point(1.0, (0.6, -0.4) if variant == "control" else (0.4, -0.6))
    about = linearise(mixture, mu, xi)
    if about.definite != (variant != "control"):
        raise ArithmeticError("C has not the definiteness that this check is about")
    rng, ray = np.random.default_rng(0), about.null
    worst = 0.0
    for _ in range(8):
        push = rng.standard_normal(4)
        push *= 0.01 / np.linalg.norm(push)
        path = mixture.integrate(600.0, mu + push[:3], xi + push[3], times=2)
        end = np.append(path.v[-1], path.xi[-1])
        if variant == "printed":
            worst = max(worst, float(np.linalg.norm(end - np.append(mu, xi)) / 0.01))
            continue
        worst = max(worst, float(np.linalg.norm(end - (end @ ray) * ray) / 0.01))
        if variant == "corrected":
            held = mixture.integrate(2000.0, mu + push[:3], xi, times=2, freeze_xi=True)
            worst = max(worst, float(np.linalg.norm(held.v[-1] - mu) / 0.01))
    return worst
