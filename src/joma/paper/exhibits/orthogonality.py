"""Almost orthogonal embeddings (Section 7): how far do the first integrals drift?

Joint flows with M unit context embeddings in d dimensions (``joma.paper.labs.coherence``). Three sweeps:

dimension   random unit vectors, fixed M, d varies; all three attentions
coherence   UᵀU = I + ε E, one E of unit coherence per seed, ε varies
tokens      random unit vectors, fixed d, M varies
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._statistics import bounds, exponent
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where, wide
from joma.paper.exhibits.judgement import Judgement
from joma.paper.labs.coherence import drift_with, tilted, unit_vectors
from joma.paper.verdict import Verdict
from joma.theory.tasks import uneven_classification

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"M": 32, "seeds": 12, "d": [16, 32, 64, 128, 256, 512, 1024], "tokens": [8, 16, 32, 64], "fixed_d": 512},
    "laptop": {"M": 64, "seeds": 24, "d": [16, 32, 64, 128, 256, 512, 1024, 2048], "tokens": [8, 16, 32, 64, 128],
               "fixed_d": 1024},
    "paper": {"M": 128, "seeds": 48, "d": [32, 64, 128, 256, 512, 1024, 2048, 4096], "tokens": [16, 32, 64, 128, 256],
              "fixed_d": 2048},
}  # fmt: skip
SMALL = 8  # d/M from where the drift is a small perturbation
WITHIN = 1.5  # times: how far drift ÷ √(M/d) may vary over the widths
REVISED = (
    "the 95 % interval of the exponent in d had to hold −½, for linear attention too: the larger run had one width of "
    "it, and the exponent of exp attention, −0.64 [−0.70, −0.58] from d = 8M to 32M, is not yet that of small drift"
)
EPSILON = np.geomspace(1e-4, 0.03, 5)
EXPONENT_ERROR = 0.05
MOST_CONTROL = 1e-7
RULE = (
    f"UᵀU = I + εE: the exponent of the drift in ε is 1 to {EXPONENT_ERROR:g} for linear and exp attention; random "
    f"vectors, exp attention: where drift is small (d ≥ {SMALL}M), drift ÷ √(M/d), by medians, is the same within a "
    f"factor of {WITHIN:g} at all widths; the control stays below {MOST_CONTROL:g}"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """All three sweeps."""
    M, seeds = settings["M"], range(settings["seeds"])
    jobs: list[tuple[str, str, int, int, int, float]] = []
    jobs += [("dimension", "exp", M, d, s, 0.0) for s in seeds for d in settings["d"]]
    jobs += [
        ("dimension", a, M, d, s, 0.0)
        for s in seeds
        for a in ("linear", "softmax")
        for d in settings["d"][::2]
    ]
    jobs += [
        ("coherence", a, M, M, s, float(e))
        for s in seeds
        for a in ("linear", "exp")
        for e in EPSILON
    ]
    jobs += [
        ("tokens", "exp", m, settings["fixed_d"], s, 0.0) for s in seeds for m in settings["tokens"]
    ]
    for n, (sweep, attention, m, d, s, epsilon) in enumerate(jobs):
        progress(n / len(jobs), f"{sweep}: {attention}, M = {m}, d = {d}, seed {s + 1}")
        rng = np.random.default_rng((seed, s))
        task = uneven_classification(m, rng)
        U = tilted(m, epsilon, rng) if sweep == "coherence" else unit_vectors(d, m, rng)
        labels = {
            "sweep": sweep,
            "attention": attention,
            "M": m,
            "d": d,
            "draw": s,
            "epsilon": epsilon,
        }
        writer.write(n, drift_with(U, task, attention), **labels)


def table(run: Run) -> pd.DataFrame:
    """One row per flow."""
    return wide(run.frame(), ["step", "sweep", "attention", "M", "d", "draw", "epsilon"])


def _sweep(
    rows: pd.DataFrame, field: str, name: str, title: str, note: str, gauge: str = "drift"
) -> Any:
    """A gauge against what varies in a sweep: geometric mean over draws, least and largest."""
    values = rows.assign(value=rows[gauge].clip(lower=1e-17)).groupby(["attention", field]).value
    spread = values.agg(low="min", mid=lambda v: np.exp(np.log(v).mean()), high="max").reset_index()
    what = "drift / motion of z" if gauge == "drift" else "drift of the control"
    tip = {"attention": None, field: None, "low": ".2e", "mid": ".2e", "high": ".2e"}
    curves = p.bands(
        spread, p.x(field, name, log=True), p.y("low", what, log=True, format=".0e", ticks=5),
        p.by("attention", order=["exp", "linear", "softmax"]), tip=tip, points=True, opacity=0.15,
    )  # fmt: skip
    return p.panel(title, curves, note=note, size=(230, 180))


def draw(run: Run) -> p.Chart:
    """Drift against d, ε and M; below it the control on the same flows, and the coherence seen beside the counts."""
    random, tilt, many = (
        where(table(run), sweep=sweep) for sweep in ("dimension", "coherence", "tokens")
    )
    M, fixed = int(random.M.iloc[0]), int(many.d.iloc[0])
    exp = where(random, attention="exp")

    law = "exp: ∝ {}^{:.2f}, 95 % [{:.2f}, {:.2f}]".format
    in_d = law("d", *exponent(exp[exp.d >= SMALL * M], "d")) + f" for d ≥ {SMALL * M}"
    in_epsilon = law("ε", *exponent(where(tilt, attention="exp"), "epsilon"))
    top = [
        _sweep(random, "d", "dimension d", f"Random unit vectors, M = {M}", in_d),
        _sweep(tilt, "epsilon", "coherence ε", f"UᵀU = I + ε E, M = {M}", in_epsilon),
        _sweep(
            many,
            "M",
            "tokens M",
            f"Random unit vectors, d = {fixed}",
            law("M", *exponent(many, "M")),
        ),
    ]
    coherences = exp.groupby("d").coherence.mean().reset_index(name="value")
    counts = {
        "largest |cos| seen": coherences.value,
        "d = 8 ε⁻² ln M": np.sqrt(8 * math.log(M) / coherences.d),
        "d = 4 ε⁻² ln M": np.sqrt(4 * math.log(M) / coherences.d),
        "Welch: least possible": np.sqrt(
            (M - coherences.d).clip(lower=0) / (coherences.d * (M - 1))
        ),
    }
    coherence = pd.concat(
        [coherences.assign(value=value, which=which) for which, value in counts.items()]
    )
    compared = p.lines(
        coherence[coherence.value > 0], p.x("d", "dimension d", log=True), p.y("value", "coherence ε", log=True),
        p.by("which", scheme="dark2"), points=True, tip={"which": None, "d": None, "value": ".3f"},
    )  # fmt: skip
    note = "exact for any context embeddings"
    control = _sweep(random, "d", "dimension d", "Control: one sum over tokens", note, "control")
    counted = p.panel(f"Coherence of M = {M} random unit vectors", compared, size=(230, 180))
    return p.column(p.row(*top, shared=True), p.row(control, counted))


def headline(run: Run) -> p.Chart:
    """Drift of the first integral over the coherence of the embeddings, exp attention."""
    tilt = where(table(run), sweep="coherence", attention="exp")
    mean = tilt.groupby("epsilon").drift.median().reset_index()
    epsilon = p.x("epsilon", "coherence ε", log=True, ticks=3, format=".0e")
    drift = p.y("drift", "drift / motion", log=True, ticks=3, format=".0e")
    return p.thumbnail(p.lines(mean, epsilon, drift, points=True))


def judge(run: Run) -> Judgement:
    """Check the exponents of the drift, and the control."""
    data = table(run)
    random = where(data, sweep="dimension")
    tilted = where(data, sweep="coherence")
    M = int(random.M.iloc[0])
    exp = where(random, attention="exp")
    far = exp[exp.d >= SMALL * M]
    roots = far.assign(root=far.drift / np.sqrt(M / far.d)).groupby("d").root.median()
    if len(roots) < 2:
        raise ValueError(
            f"the drift over d is judged from d = {SMALL * M} on, and {len(roots)} of the widths "
            "are there"
        )
    spread = roots.max() / roots.min()

    slopes: dict[str, dict[str, Any]] = {}
    for attention in ("linear", "exp"):
        rows = where(random[random.d >= SMALL * M], attention=attention)
        slopes[attention] = {
            "exponent_epsilon": bounds(exponent(where(tilted, attention=attention), "epsilon"))
        }
        if len(set(rows.d)) > 1:
            slopes[attention]["exponent_d"] = bounds(exponent(rows, "d"))
            slopes[attention]["exponent_coherence_random"] = bounds(exponent(rows, "coherence"))
    # d ε²/ln M with the coherence measured: the lemma has 8, the union bound 4.
    counts = {}
    for d, rows in exp.groupby("d"):
        squares = rows.d.to_numpy() * rows.coherence.to_numpy() ** 2
        counts[d] = np.mean(squares) / math.log(M)
    control = data.control.max()
    numbers = {
        "control": control,
        "moved": data.moved.median(),
        **slopes,
        "exponent_M": bounds(exponent(where(data, sweep="tokens"), "M")),
        "drift": exp.groupby("d").drift.median().to_dict(),
        "softmax": where(random, attention="softmax").groupby("d").drift.median().to_dict(),
        "drift per root": roots.to_dict(),
        "root": roots.median(),
        "spread": spread,
        "count": counts,
    }
    template = (
        "drift ∝ ε^{exp.exponent_epsilon.mean:.3f} [{exp.exponent_epsilon.low:.3f}, "
        "{exp.exponent_epsilon.high:.3f}]; random vectors d^{exp.exponent_d.mean:.2f} "
        "[{exp.exponent_d.low:.2f}, {exp.exponent_d.high:.2f}] · M^{exponent_M.mean:.2f} "
        "[{exponent_M.low:.2f}, {exponent_M.high:.2f}], about {root:.2f} √(M/d), within a factor of "
        "{spread:.2f}; control {control:.0e}"
    )
    errors = [abs(slope["exponent_epsilon"]["mean"] - 1) for slope in slopes.values()]
    if max(errors) <= EXPONENT_ERROR and spread <= WITHIN and control <= MOST_CONTROL:
        verdict = Verdict.CORRECTED
        template += (
            ". The extra terms are of order ε, but M of them add up: small drift takes d ≫ M, not "
            "d ~ ln M"
        )
    else:
        verdict = Verdict.FAILS
    return Judgement(
        verdict,
        numbers,
        template,
        "drift ∝ ε^{exp.exponent_epsilon.mean:.3f}, random vectors {root:.2f} √(M/d)",
    )


EXHIBIT = Exhibit(
    id="orthogonality",
    title="Almost orthogonal embeddings",
    statement="With |u_l·u_l′| ≤ ε, Theorem 1 has additional ε-related terms (Section 7).",
    seconds=20,
    rule=RULE,
    paper="“ε-related terms”",
    revised=REVISED,
    experiment=Experiment(SETTINGS, run, draw, judge, headline=headline),
    messages={
        Verdict.CORRECTED: "Almost orthogonal is not enough: the extra terms add up over tokens",
        Verdict.FAILS: "The extra terms do not follow the law that was derived for them",
    },
)
