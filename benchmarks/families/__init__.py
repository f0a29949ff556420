"""Public model libraries under a watch, against brute force: ``make families`` writes docs/watch-families.md."""
