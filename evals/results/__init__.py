"""Rows of results: what one holds, where they are kept, estimates over their seeds."""
