"""Everything about the paper: claims, exhibits, the experiments behind them, and recorded runs."""
