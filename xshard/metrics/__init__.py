"""The metrics of a run: rows, their writers, the clock and the terminal."""
