"""The steps that make the demo pair: corpus, tokens, training, evaluation, and folders in Hugging Face layout."""
