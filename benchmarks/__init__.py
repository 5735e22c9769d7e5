"""Benchmarks: the figures that the README quotes, measured side by side with peers."""
