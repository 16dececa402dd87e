"""Run a policy: scheduling, the Steps of a sweep, memory, sampler and scorer."""
