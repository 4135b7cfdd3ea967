"""Result rows: their fields, their files, and statistics over seeds."""
