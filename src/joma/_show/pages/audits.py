"""The part of a page about an audit: its faults, what to do about them, and what could not be judged."""

from __future__ import annotations

from joma._runs import Run
from joma._show.pages.render import render


def faults_table(run: Run) -> str:
    """Return the count of faults and their table, or a line that says that the audit has not ended."""
    from joma._checkpoints.audit.audit import read_audit

    audit = read_audit(run.path)
    is_judged = run.info.get("faults") is not None
    return render("faults.html", audit=audit, count=len(audit.checkpoints()), is_judged=is_judged)
