"""Measurements of artifacts on this machine: speed, memory, quality, parity, and their reports."""
