"""Scripts that make the published figures; run one with `python -m examples.benchmarks.NAME`."""
