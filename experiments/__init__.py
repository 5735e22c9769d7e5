"""One folder an experiment."""
