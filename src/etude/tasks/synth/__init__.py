"""A generated family of small Python repositories with tests that really run, in eight categories of the report."""

from etude.tasks.synth.generate import corpus, generate

__all__ = ["corpus", "generate"]
