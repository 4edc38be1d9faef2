"""A command, a drafter and a scorer for edgekit, each behind an entry point."""
