"""Reports for people: the same tables as a terminal, Markdown and one self-contained HTML page."""
