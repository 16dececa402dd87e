"""A local endpoint for OpenAI's batches, and for chats that are gathered into batches."""
