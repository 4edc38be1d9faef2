"""Other engines on the same integers: their files, written from neutral weights, and the programs that run them."""
