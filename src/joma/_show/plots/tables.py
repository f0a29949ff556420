"""Tables as text: Markdown for pages, LaTeX for papers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column on the left, the others on the right.

    >>> print(markdown("Losses.", ["", "loss"], [["ours", "1.50"]]), end="")
    Losses.
    <BLANKLINE>
    |  | loss |
    |---|--:|
    | ours | 1.50 |
    """
    lines = [caption, "", _cells(header), "|---|" + "--:|" * (len(header) - 1), *map(_cells, rows)]
    return "\n".join(lines) + "\n"


def _cells(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def latex(caption: str, headers: Sequence[Sequence[str]], rows: Iterable[Sequence[str]]) -> str:
    """The caption is a comment above the ``tabular``; all cells of the rows are formulas.

    >>> print(latex("Losses.", [["", "loss"]], [["a", "1"]]), end="")
    % Losses.
    \\begin{tabular}{lc}
    \\hline
     & loss \\\\
    \\hline
    $a$ & $1$ \\\\
    \\hline
    \\end{tabular}
    """
    body = [" & ".join(f"${cell}$" for cell in row) + r" \\" for row in rows]
    head = [" & ".join(header) + r" \\" for header in headers]
    columns = "l" + "c" * (len(headers[-1]) - 1)
    lines = [
        rf"\begin{{tabular}}{{{columns}}}",
        r"\hline",
        *head,
        r"\hline",
        *body,
        r"\hline",
        r"\end{tabular}",
    ]
    return "\n".join([f"% {caption}", *lines]) + "\n"
