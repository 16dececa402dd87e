"""A model: its configuration, files, tokenizer, weights, and the parts of its layers."""
