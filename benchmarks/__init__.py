"""What the README quotes, measured side by side with peers."""
