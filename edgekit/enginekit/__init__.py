"""Code shared by the engines of all targets."""
