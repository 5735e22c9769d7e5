"""How well a run uses its devices."""
