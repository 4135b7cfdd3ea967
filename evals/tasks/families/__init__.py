"""Models and metrics shared by several tasks."""
