"""``python -m joma``."""

from joma.cli import main

if __name__ == "__main__":
    main()
