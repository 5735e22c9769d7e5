"""MLflow, to which a run sends its rows."""
