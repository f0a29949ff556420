"""Foresight: runs on the optimiser's clock τ = Σ lr, and forecasts of runs that have not been made."""
