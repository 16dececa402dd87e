"""The engine: it turns requests into completions or scores with a loaded model."""
