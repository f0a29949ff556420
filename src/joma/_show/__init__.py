"""Pictures (plots) and HTML pages (pages) of what was measured."""
