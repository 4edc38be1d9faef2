"""Device profiles: the catalogue, loading by name, and detection of this machine."""
