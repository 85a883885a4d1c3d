"""Rollouts: a policy and environments in, Episodes out."""
