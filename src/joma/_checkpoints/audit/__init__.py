"""`joma.audit`: check that a series of checkpoints is what its names say."""
