"""One API over every engine. `edgekit.open` is the door."""
