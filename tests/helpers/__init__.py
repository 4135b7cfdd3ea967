"""Code shared by several test files."""
