"""A report page on one or several runs: `python -m xshard.report runs/digits`."""
