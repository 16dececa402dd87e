"""The work of each kind of Step, in modules by what it moves or computes; `handlers` is the table."""
