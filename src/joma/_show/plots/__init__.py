"""The one place that draws: a frame in, an Altair figure out, saved as SVG, PDF and PNG without a browser."""

from joma._extras import require

require("report", "a figure")

from joma._show.plots.style import (
    Chart,
    Drawing,
    drawing,
    save,
    specification,
    stored_drawing,
    write,
)

__all__ = ["Chart", "Drawing", "drawing", "save", "specification", "stored_drawing", "write"]
