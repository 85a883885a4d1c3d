"""Checks of an environment, by inspecting it and by playing it."""
