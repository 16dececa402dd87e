"""Measuring of a machine into a HardwareProfile, and the profiles that ship with the package."""
