"""Outcome verifiers and reward terms. A pod is only a Protocol here."""
