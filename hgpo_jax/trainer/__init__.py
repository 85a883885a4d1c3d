"""What keeps a run alive: its folder, checkpoints, signals, several processes, metrics and warnings."""
