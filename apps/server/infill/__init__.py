"""Filling in the middle of a text: the layouts of code models, and `/infill`."""
