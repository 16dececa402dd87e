"""What a model is: its configuration, files, tokenizer, weights and the pieces of its layers."""
