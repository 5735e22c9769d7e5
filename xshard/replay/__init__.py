"""Tools that trace differences and non-finite values in a run's log to their causes."""
