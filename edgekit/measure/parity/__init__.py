"""Parity checks between an artifact and its model."""
