"""What a training step asks of a pod that is not there: `python -m xshard.dryrun`."""
