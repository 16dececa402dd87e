"""Measures a machine into a HardwareProfile; profiles that ship with the package."""
