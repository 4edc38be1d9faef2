"""Device profiles that list the numpy target."""
