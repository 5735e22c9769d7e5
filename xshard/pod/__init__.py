"""Several processes: find one another, agree, watch, stop."""
