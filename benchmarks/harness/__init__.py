"""Code that all suites share: cases, timing, correctness, memory, reports."""
