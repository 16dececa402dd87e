"""Values and errors that every package uses: requests, hardware, workloads, plans."""
