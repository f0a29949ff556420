"""report.html: the exhibits in order with figure, verdict and settings, then the table of claims."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._run import Run, write_atomic

if TYPE_CHECKING:
    from joma._exhibits import Exhibit
    from joma.theory.claims import Result

STYLE = """
:root { --ink: #1f2328; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --box: #f6f8fa; --link: #0550ae; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0d1117; --box: #161b22; --link: #79c0ff; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 2rem 1rem; max-width: 62rem; }
h1 { font-size: 1.9rem; margin: 0 0 .3rem; } h2 { margin: 2.6rem 0 .4rem; font-size: 1.3rem; } a { color: var(--link); }
.lead, .rule, footer { color: var(--soft); } figure { margin: 1rem 0; background: #fff; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; }
figure svg { display: block; max-width: 100%; height: auto; margin: auto; }
.badge { display: inline-block; padding: .05rem .55rem; border-radius: 1rem; font-size: .85rem; font-weight: 600; color: #fff; white-space: nowrap; }
.holds { background: #1a7f37; } .corrected, .under { background: #9a6700; } .fails, .error { background: #cf222e; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; } th, td { text-align: left; vertical-align: top; padding: .45rem .6rem; border-bottom: 1px solid var(--line); }
#claims td:nth-child(3) { min-width: 20rem; width: 50%; } .scroll { overflow-x: auto; } pre { background: var(--box); padding: .6rem .8rem; border-radius: 6px; overflow-x: auto; } td.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
"""
BADGE = {
    "holds": "holds",
    "holds as corrected": "corrected",
    "holds under": "under",
    "fails": "fails",
    "error": "error",
}


def _badge(verdict: str) -> str:
    return f'<span class="badge {BADGE[verdict]}">{verdict}</span>'


def _exhibit(exhibit: Exhibit, folder: Path, preset: str, seed: int) -> str:
    e = html.escape
    complaint = folder.with_name(f"{exhibit.id}.error.txt")  # what went wrong, then the traceback
    if complaint.exists():
        error = complaint.read_text().splitlines()[0]
        return f'<section id="{exhibit.id}"><h2>{e(exhibit.title)}</h2><p>{_badge("error")} {e(error)}</p></section>'
    if not (folder / "verdict.json").exists():
        return f'<section id="{exhibit.id}"><h2>{e(exhibit.title)}</h2><p>{_badge("error")} not made in this run</p></section>'
    verdict = json.loads((folder / "verdict.json").read_text())
    info = Run(folder).info
    svg = (folder / "figure.svg").read_text()
    return f"""<section id="{exhibit.id}">
<h2>{e(exhibit.title)}</h2>
<p>{e(exhibit.statement)}</p>
<p>{_badge(verdict["verdict"])} {e(verdict["summary"])}</p>
<figure role="img" aria-label="{e(exhibit.title)}: {e(verdict["summary"])}">{svg}</figure>
<p class="rule">Rule: {e(verdict["rule"])}.</p>
<details><summary>Settings and numbers</summary>
<pre>joma reproduce {exhibit.id} --preset {e(preset)} --seed {seed}</pre>
<pre>{e(json.dumps({"settings": info["config"]["settings"], "numbers": verdict["numbers"]}, indent=2, ensure_ascii=False))}</pre></details>
</section>"""


def _claims(results: list[Result]) -> str:
    e = html.escape

    def row(r: Result) -> str:
        control = "rejected" if r.control_rejected else "NOT REJECTED"
        value = "–" if r.value is None else f"{r.value:.2g}"
        return (
            f"<tr><td class=n>{e(r.id)}</td><td>{_badge(r.verdict)}</td><td>{e(r.statement)}"
            + (f"<br><em>{'Corrected' if r.verdict != 'holds under' else 'Under'}: {e(r.note)}</em>" if r.note else "")
            + f"</td><td class=n>{value} / {r.tolerance:.2g}</td><td>{e(r.control)}: {control}</td></tr>"
        )

    return f"""<section id="claims"><h2>Claims</h2>
<p class="lead">Every check must also reject its control, a deliberately wrong variant of the statement.</p>
<div class="scroll"><table><thead><tr><th>claim</th><th>verdict</th><th>statement</th><th>error / tolerance</th><th>control</th></tr></thead>
<tbody>{"".join(row(r) for r in results)}</tbody></table></div></section>"""


def write_report(
    out: Path,
    exhibits: Iterable[Exhibit],
    claims: list[Any] | None,
    *,
    preset: str,
    seed: int,
    path: Path | None = None,
) -> Path:
    """Write the page atomically (to ``out/report.html`` by default) and return its path."""
    from joma import __version__

    page = path or out / "report.html"
    sections = [_exhibit(exhibit, out / exhibit.id, preset, seed) for exhibit in exhibits]
    body = "\n".join(sections + ([_claims(claims)] if claims is not None else []))
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>JoMA, reproduced</title><style>{STYLE}</style></head><body>
<h1>JoMA, reproduced</h1>
<p class="lead">Tian, Wang, Zhang, Chen and Du: <em>JoMA: Demystifying Multilayer Transformers via Joint Dynamics of MLP and
Attention</em>, ICLR 2024. What the paper says and what was measured, with joma {__version__}, preset {html.escape(preset)}, seed {seed}.</p>
{body}
<footer><p>Made by <code>joma reproduce</code>.</p></footer></body></html>
"""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text)
    return page
