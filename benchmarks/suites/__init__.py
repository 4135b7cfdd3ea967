"""What is timed."""
