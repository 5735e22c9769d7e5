"""Samples of what an experiment has trained, while it trains and at its end."""
