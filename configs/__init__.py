"""One file a run: what it reproduces, its cost, its expected score, its command."""
