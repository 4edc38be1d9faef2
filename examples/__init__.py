"""Examples to copy; `benchmarks` and `training` hold the scripts behind published figures and the bundled models."""
