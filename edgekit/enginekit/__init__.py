"""Code that the engines of all targets share."""
