"""The parts of `train_head`: the target's own outputs with its hidden states, the head, and its training."""
