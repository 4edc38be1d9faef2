"""Units, files, parsing, child processes and stores, used by every other folder."""
