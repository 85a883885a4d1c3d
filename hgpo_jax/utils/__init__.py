"""Helpers that are independent of the method: errors, files, progress, processes."""
