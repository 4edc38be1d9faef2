"""What an artifact does on this machine, as numbers that can be trusted: speed, quality, parity, and their reports."""
