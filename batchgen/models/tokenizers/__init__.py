"""Text to tokens and back: tokenizers, chat templates, and thoughts before an answer."""
