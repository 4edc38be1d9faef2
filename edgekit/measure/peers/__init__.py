"""Other engines on the same integers: files that they can read, written from neutral weights, and how they are run."""
