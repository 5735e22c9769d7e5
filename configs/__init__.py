"""One file per run, with the result that it reproduces, its cost, its expected score
and its command.
"""
