"""The one place that draws: a frame in, an Altair figure out, saved as SVG, PDF and PNG without a browser."""

from joma._show.plots.style import Chart, save, specification

__all__ = ["Chart", "save", "specification"]
