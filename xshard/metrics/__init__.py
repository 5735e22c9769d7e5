"""The numbers of a run: rows, writers, clock, terminal."""
