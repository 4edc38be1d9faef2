"""Hands a model over to a server of another project: a plan, the weights, the server's own files and a smoke test.

Runs no server itself.
"""
