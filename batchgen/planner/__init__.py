"""Choose a policy for a model, a machine and a workload. It measures nothing and needs no torch."""
