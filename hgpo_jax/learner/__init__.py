"""Updates of a policy: losses, batches, packing, critics, and the table of methods."""
