"""The README's findings, from what `docs/results.md` says of the exhibits, the registry of claims and the stored forecasts.

Each sentence names its scope. Numbers are never typed here: they are those of the verdicts that the results show.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from marks import between

from joma.paper.claims import Kind, claims
from joma.paper.claims.roots import counts_in_words
from joma.paper.exhibits.runner import _NAMED, _PREDICATES
from joma.paper.records import FOLDER

DOCS = Path(__file__).parents[1]
_CLAIM = re.compile(r"^## (\S+): (.+)$", flags=re.M)
_ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", flags=re.M)


def rows(results: str) -> dict[str, dict[str, str]]:
    """Return the verdict, the deciding number and what both rest on, by exhibit."""
    by_id = {}
    for id, cells in _ROW.findall(results):
        _statement, _papers_number, verdict, measured, rests_on, *_ = cells.split(" | ")
        by_id[id] = {"verdict": verdict, "measured": measured, "rests": rests_on.partition(",")[0]}
    return by_id


def conclusion(results: str, claims_page: str) -> str:
    """Return the last line of `make reproduce` without its time, from the verdicts that both pages show."""
    verdicts = {id: row["verdict"] for id, row in rows(results).items()}
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


def bullets(results: str) -> str:
    """Return the five findings as Markdown."""
    shown = rows(results)
    kinds = Counter(claim.kind for claim in claims())
    stored = (FOLDER / "foresight.json").read_text(encoding="utf-8")
    forecast = json.loads(stored)["foresight.json"]["pooled"]

    def number(id: str) -> str:
        return f"{shown[id]['measured']}; {shown[id]['verdict']}, {shown[id]['rests']}"

    top_layer = f"{forecast['top layer, nats']:.2f}"
    top_layer_guess = f"{forecast['top layer, nats, same step']:.2f}"
    loss = f"{forecast['validation loss']:.2f}"
    loss_guess = f"{forecast['validation loss, same step']:.2f}"
    lines = [
        "**Attention can be thrown away, exactly**, where it is linear or exponential, with free logits, frozen orthonormal "
        f"embeddings and plain gradient descent: its logits follow from the MLP weights ({number('folding')}). "
        "Under softmax no such function exists ([why](docs/laws.md)), but it conserves sums of its own "
        f"({number('softmax')}).",
        f"**Much of the paper holds.** Of its statements, {kinds[Kind.PRINTED]} hold as printed; "
        f"{counts_in_words(claims())}; {kinds[Kind.UNSAID]} need a condition left unsaid "
        "([errata](docs/errata.md)).",
        "**The paper's language models dip and bounce** on WikiText-2, with Adam and up to two layers "
        f"({number('fig6')}).",
        "**Attention comes back where weights have large finite targets.** Under the paper's fixed gradients only nonlinear "
        "nodes can have them, and only from a large bias; from a small start nonlinear nodes end on a committee of tokens, "
        "linear ones on a single token ([more](docs/theory.md)).",
        "**Steps are the wrong clock.** Over τ = Σ learning rate, entropies at small rates are nearly one curve under Adam. "
        "The authors' runs of 29,000 steps, predicted from ours of 2,900: the top layer's entropy is off by "
        f"{top_layer} nats, the validation loss by {loss} (guessing by step: {top_layer_guess}, {loss_guess}; "
        "[how well](docs/foresight.md)).",
    ]
    return "\n".join(f"- {line}" for line in lines)


def filled(readme: str) -> str:
    """Return the README with its findings and the last line of `make reproduce` as the pages have them."""
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    claims_page = (DOCS / "claims.md").read_text(encoding="utf-8")
    last_line = f"```text\n{conclusion(results, claims_page)}; …\n```"
    readme = between(readme, "conclusion", last_line)
    return between(readme, "found", bullets(results))
