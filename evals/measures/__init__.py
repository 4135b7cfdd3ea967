"""What is measured on attention, and what a machine does to it."""
