"""A model's specification, its source folder and its LoRA adapters."""
