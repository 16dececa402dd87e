"""Weights and KV over the tiers, and what passes between them."""
