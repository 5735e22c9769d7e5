"""The parts of a run around its steps.

They are the checks before the first step, saving, resuming, roll-backs, and the end.
"""
