"""Scripts that train the bundled models; run one with `python -m examples.training.NAME`."""
