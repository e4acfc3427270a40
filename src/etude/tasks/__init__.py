"""The task format, the generated family of tasks, and their checks."""
