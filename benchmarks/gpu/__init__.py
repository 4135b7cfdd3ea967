"""What runs on a GPU machine: stages of checks, tests and timings, and kernels compiled before."""
