"""From logits to text: sampling, stopping, tokenizer, chat template, tool calls."""
