"""A Hugging Face directory: `config.json` and its keys, and which files have which tensors."""
