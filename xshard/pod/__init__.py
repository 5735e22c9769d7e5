"""Runs in several processes: how they find one another, agree on requests, watch one
another, and stop.
"""
