"""Evaluation of quality against a reference."""
