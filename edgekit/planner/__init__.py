"""Turn a model, devices and a request into plans with their reasons. Nothing is converted."""
