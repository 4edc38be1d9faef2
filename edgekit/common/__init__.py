"""Units, files, parsing, child processes and stores, used by all other packages."""
