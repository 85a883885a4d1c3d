"""Evaluation of policies on held-out tasks and panels, with confidence intervals."""
