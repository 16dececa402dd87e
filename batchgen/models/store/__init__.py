"""The weight store: batchgen's own format of weights, which docs/weight_store.md describes."""
