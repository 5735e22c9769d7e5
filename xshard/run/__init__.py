"""The parts of a run around its steps: checks before the first step, saving, resuming,
roll-backs, and the end.
"""
