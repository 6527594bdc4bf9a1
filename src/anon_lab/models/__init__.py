"""The networks that the tasks train, and the one that judges images."""
