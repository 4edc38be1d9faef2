"""The executorch target."""
