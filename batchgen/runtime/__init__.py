"""Run a policy: scheduling, the Steps of a sweep, memory, and what becomes of the logits."""
