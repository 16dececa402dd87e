"""What a model is: its configuration, files, tokenizer, weights and the parts of its layers."""
