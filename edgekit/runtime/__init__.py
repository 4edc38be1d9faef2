"""The runtime: one API over every engine. `edgekit.open` opens an artifact."""
