"""Shared by all suites: cases, timing, correctness, memory, reports."""
