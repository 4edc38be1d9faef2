"""Prepares a model for another project's server: a plan, the weights, the server's own files and a smoke test.

It does not run the server.
"""
