"""What is measured on a model: gauges, the events of its passes, watches and charges."""
