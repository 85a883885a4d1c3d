"""Training runs: folders, checkpoints, signals, several processes, metrics and warnings."""
