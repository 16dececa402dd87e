"""The output side of a job: part files of finished rows, the final file, and the run directory for resuming.

Imports lead one way: run_directory -> part_writer, join -> parts, formats -> row_map, row_result, manifest.
"""
