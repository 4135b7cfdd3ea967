"""Code that the command lines of evals and benchmarks share."""
