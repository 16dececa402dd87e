"""Who is in flight, where KV has capacity, and how a sweep is cut. No tensors, no torch."""
