"""The one place that draws: a frame in, an Altair figure out, saved as SVG and PNG without a browser."""

from joma._figures.style import Chart, save

__all__ = ["Chart", "save"]
