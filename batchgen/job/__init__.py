"""A job: its options, its plan, its run and its report."""
