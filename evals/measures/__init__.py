"""What is measured on attention."""
