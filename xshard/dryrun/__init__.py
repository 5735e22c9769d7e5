"""Compiles a training step for a pod that is not there: `python -m xshard.dryrun`."""
