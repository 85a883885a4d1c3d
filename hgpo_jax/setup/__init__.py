"""Everything that a command needs, built from a configuration; its checks and the memory plan."""
