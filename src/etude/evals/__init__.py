"""Evaluation: suites, statistics and the records of a result."""
