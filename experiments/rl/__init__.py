"""An actor-critic that learns to catch a ball, in environments that are part of the
state.
"""
