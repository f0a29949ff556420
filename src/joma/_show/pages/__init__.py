"""The page: one self-contained HTML file from what runs, exhibits and claims wrote."""

from joma._extras import require

require("report", "a page")
