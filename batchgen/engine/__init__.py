"""The engine: requests in, completions or scores out."""
