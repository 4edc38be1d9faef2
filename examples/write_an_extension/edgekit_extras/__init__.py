"""A command, a drafter, a scorer and a quantisation method for edgekit, each behind an entry point."""
