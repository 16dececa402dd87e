"""A reader for each format; each makes a `Source`."""
