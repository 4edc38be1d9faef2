"""Speculative decoding: drafters propose tokens, and the engine verifies several in one forward."""
