"""Tokenizers, chat templates, and the separation of reasoning from the answer."""
