"""Runs in several processes: how they find one another, agree on notices, watch one
another, and stop.
"""
