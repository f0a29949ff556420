"""The picture of the data flow in docs/architecture.md, as an SVG that is readable on light and dark pages."""

from __future__ import annotations

from html import escape

W, H = 196, 58  # of a box
COLUMNS, ROWS = [20, 262, 504, 746], [56 + 84 * n for n in range(6)]
KINDS = {
    "given": ("#eef2f7", "#5b6b7f"),
    "code": ("#dbe9f8", "#1f5fa8"),
    "folder": ("#fdebd8", "#b3541e"),
}
# name -> column, row, kind, title, what it is
BOXES = {
    "task": (0, 0, "given", "task", "contexts x, gradients g"),
    "model": (0, 1, "given", "model in training", "yours, or the paper's (_train)"),
    "checkpoints": (0, 3, "given", "checkpoints", "a folder, or the hub"),
    "paper": (0, 5, "given", "the paper", "its numbered statements"),
    "theory": (1, 0, "code", "theory", "flow → trajectory"),
    "watch": (1, 1, "code", "_measure/watch", "gauges on each step"),
    "scan": (1, 2, "code", "_checkpoints", "gauges on each checkpoint"),
    "superpose": (1, 3, "code", "_inspect.superpose", "what fires each neuron"),
    "geometry": (1, 4, "code", "_inspect.geometry", "cosines between tokens"),
    "claims": (1, 5, "code", "paper/claims", "check, control → verdict"),
    "logger": (2, 0, "given", "your logger", "W&B, TensorBoard, print"),
    "run": (2, 2, "folder", "run folder (_runs)", "run.json, metrics.jsonl"),
    "frame": (2, 4, "given", "pandas", "long tables: frame()"),
    "exhibits": (3, 2, "code", "paper, _show/plots", "draw and judge"),
    "report": (3, 5, "code", "_show/pages", "one HTML page"),
}
ARROWS = [
    ("task", "theory"), ("model", "watch"), ("checkpoints", "scan"), ("checkpoints", "superpose"), ("checkpoints", "geometry"),
    ("paper", "claims"), ("theory", "run"), ("watch", "run"), ("scan", "run"), ("superpose", "run"), ("geometry", "frame"),
    ("watch", "logger"), ("run", "frame"), ("run", "exhibits"), ("run", "report"), ("exhibits", "report"), ("claims", "report"),
]  # fmt: skip


def _arrow(a: str, b: str) -> str:
    (ca, ra, *_), (cb, rb, *_) = BOXES[a], BOXES[b]
    x, y, X, Y = COLUMNS[ca], ROWS[ra], COLUMNS[cb], ROWS[rb]
    if ca == cb:  # downwards
        return f"M{x + W / 2} {y + H} V{Y - 7}"
    up = 0 if ra == rb else 13 if ra > rb else -13  # several arrows end at one box
    start = y + H / 2 + (-12 if b == "logger" else 0)
    return (
        f"M{x + W} {start} C{x + W + 24} {start} {X - 26} {Y + H / 2 + up} {X - 7} {Y + H / 2 + up}"
    )


def svg() -> str:
    """The whole picture."""
    width, height = COLUMNS[-1] + W + 20, ROWS[-1] + H + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif">',
        "<title>Data flow of joma: from tasks, models, checkpoints and the paper to run folders, exhibits and the report</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#5b6b7f"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    heads = ["what you give", "what measures", "what is kept", "what shows it"]
    parts += [
        f'<text x="{x}" y="34" font-size="14" fill="#5b6b7f">{head}</text>'
        for x, head in zip(COLUMNS, heads, strict=True)
    ]
    for a, b in ARROWS:
        parts.append(
            f'<path d="{_arrow(a, b)}" fill="none" stroke="#5b6b7f" stroke-width="1.6" marker-end="url(#head)"/>'
        )
    for column, row, kind, title, what in BOXES.values():
        fill, stroke = KINDS[kind]
        x, y = COLUMNS[column], ROWS[row]
        parts.append(
            f'<rect x="{x}" y="{y}" width="{W}" height="{H}" rx="6" fill="{fill}" stroke="{stroke}" stroke-width="1.4"/>'
        )
        parts.append(
            f'<text x="{x + 12}" y="{y + 25}" font-size="14.5" font-weight="600" fill="#1b2430">{escape(title)}</text>'
        )
        parts.append(
            f'<text x="{x + 12}" y="{y + 44}" font-size="12" fill="#3b4754">{escape(what)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
