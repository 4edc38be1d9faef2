"""Sealed artifacts, and the export that writes them."""
