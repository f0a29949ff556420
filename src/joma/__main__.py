"""``python -m joma``."""

from joma.cli import main

main()
