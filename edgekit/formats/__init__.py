"""File formats: safetensors and packed integers."""
