"""A sweep as Steps, and what carries them out: threads, a device's streams, the simulator."""
