"""Several processes (ranks) that run one model: how they start, connect, exchange tensors, and end together."""
