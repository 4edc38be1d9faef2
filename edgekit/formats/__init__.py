"""File formats: safetensors, GGUF, packed integers, and content-defined chunks."""
