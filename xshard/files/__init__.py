"""A run's files on a disk: written durably, and read within bounds."""
