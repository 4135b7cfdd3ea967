"""The commands that measure attention."""
