"""Mutation testing: small faults, drawn from the package's syntax trees by a seed, and
which test finds each.
"""
