"""Traces of chosen steps, and of the memory of devices that ran out of it."""
