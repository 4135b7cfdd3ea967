"""What the command lines of evals and benchmarks share."""
