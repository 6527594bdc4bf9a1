"""Optimizers to compare with that no package ships, or ships with a deviation from the paper; each in its own file."""
