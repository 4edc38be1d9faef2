"""From a model, devices and a request to plans that explain themselves. Converts and downloads nothing."""
