"""A run's files on a disk, which are written durably and read within bounds of size and
depth.
"""
