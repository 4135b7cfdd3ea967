"""The functions that users call: here variants meet backends."""
