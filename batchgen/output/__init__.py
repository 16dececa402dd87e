"""Finished rows into atomic parts, parts into the final file, and the run directory that makes a job resumable.

Imports lead one way: run_directory -> part_writer, join -> parts, formats -> row_map, row_result, manifest.
"""
