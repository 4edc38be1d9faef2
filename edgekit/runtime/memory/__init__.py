"""Memory of a runtime: admission, budget, footprint and report."""
