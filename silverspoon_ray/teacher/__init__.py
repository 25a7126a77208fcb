"""The teacher, wherever it runs."""
