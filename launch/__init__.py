"""Starts runs on this machine, on a cluster or in a cloud. `python -m launch --help`
lists the commands and flags.
"""
