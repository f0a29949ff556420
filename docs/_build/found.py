"""The README's findings, from the results of exhibits, the registry of claims and the stored forecasts (`facts`).

Each sentence names its scope. Results are never typed here: they are fields.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import facts
from marks import between

from joma.paper.claims import claims
from joma.paper.exhibits.judgement import render
from joma.paper.exhibits.runner import _NAMED, _PREDICATES

DOCS = Path(__file__).parents[1]
_CLAIM = re.compile(r"^## (\S+): (.+)$", flags=re.M)
_BASIS = "{{{id}.measured}}; {{{id}.verdict}}, {{{id}.rests}}"
# What the second finding names.
HOLD_AS_PRINTED = ("T1.linear", "T1.exp", "T4.ratio", "T5")
# Templates: fields name numbers and verdicts of exhibits.
FINDINGS = (
    "**Attention can be thrown away, exactly**, where it is linear or exponential, with free logits, frozen orthonormal "
    f"embeddings and plain gradient descent: its logits follow from the MLP weights ({_BASIS.format(id='folding')}). Under "
    "softmax no such function exists ([why](docs/laws.md)), but it conserves sums of its own "
    f"({_BASIS.format(id='softmax')}).",
    "**Much of the paper holds**: Theorem 1 under linear and exp attention, Theorem 4's ratio, Theorem 5. Of its statements, "
    "{claims.printed} hold as printed and {claims.unsaid} need a condition left unsaid. By root cause, {claims.by root} "
    "([errata](docs/errata.md)).",
    "**{fig6.message}** (the paper's language model on WikiText-2, up to two layers, Adam; "
    f"{_BASIS.format(id='fig6')}).",
    "**{table1.message}** (Table 1, the correlation of the best hidden node with a latent; "
    f"{_BASIS.format(id='table1')}; [more](docs/table1.md)).",
    "**Attention comes back where weights have large finite targets.** Under the paper's fixed gradients only nonlinear nodes "
    "can have them, and only from a large bias: the abstract's contrast ({contrast.all groups.nonlinear only} of "
    "{contrast.all groups.regimes} regimes; {contrast.verdict}, recorded). From a small start nonlinear nodes end on a "
    "committee of tokens, linear ones on one. A loss with a finite minimum gives targets to linear nodes, too; in language "
    "models both come back ([more](docs/theory.md)).",
    "**Steps are the wrong clock.** Over τ = Σ learning rate, entropies at small rates are nearly one curve under Adam. The "
    "authors' runs of 29,000 steps, predicted from ours of 2,900: the top layer's entropy is off by "
    "{foresight.top layer, nats:.2f} nats, the validation loss by {foresight.validation loss:.2f}. Their own other seeds would "
    "be off by {foresight.top layer, nats, the target's other seeds:.2f} and "
    "{foresight.validation loss, the target's other seeds:.2f}, a guess by step by "
    "{foresight.top layer, nats, same step:.2f} and {foresight.validation loss, same step:.2f} ([how "
    "well](docs/foresight.md)).",
)


def conclusion(claims_page: str) -> str:
    """Return the last line of `make reproduce` without its time."""
    verdicts = facts.verdicts()
    checked = dict(_CLAIM.findall(claims_page))
    verdicts |= {claim.id: checked[claim.id] for claim in claims() if claim.id in checked}
    counts = Counter(verdicts.values())
    parts = []
    for verdict, (singular, plural) in _PREDICATES.items():
        if not counts[verdict]:
            continue
        part = f"{counts[verdict]} {singular if counts[verdict] == 1 else plural}"
        if verdict in _NAMED:
            part += f" ({', '.join(id for id, one in verdicts.items() if one == verdict)})"
        parts.append(part)
    return f"{len(verdicts)} statements: {'; '.join(parts)}"


def bullets() -> str:
    """Return the findings as Markdown."""
    return "\n".join(f"- {render(line, facts.facts())}" for line in FINDINGS)


def filled(readme: str) -> str:
    """Return the README with its findings and the last line of `make reproduce`."""
    claims_page = (DOCS / "claims.md").read_text(encoding="utf-8")
    last_line = f"```text\n{conclusion(claims_page)}; …\n```"
    readme = between(readme, "conclusion", last_line)
    return between(readme, "found", bullets())
