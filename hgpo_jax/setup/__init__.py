"""From a configuration to everything that a command works with; its checks and the memory plan."""
