"""Features of handwritten digits, learned without labels, and a linear classifier on
them.
"""
