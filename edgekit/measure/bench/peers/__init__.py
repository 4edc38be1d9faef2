"""Other engines on the same integers: files for them, written from neutral weights, and the programs that run them."""
