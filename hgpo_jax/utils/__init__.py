"""Helpers that know nothing of the method: errors, files, progress, processes."""
