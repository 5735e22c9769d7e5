"""What every other part stands on, and what imports only errors."""
