"""A run's files on a disk: written to last, read within bounds."""
