"""Where numbers go: rows, writers, clock, terminal."""
