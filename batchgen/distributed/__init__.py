"""Several processes that run one model: how they are started, find and follow one another, and end together."""
