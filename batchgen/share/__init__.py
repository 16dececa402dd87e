"""Several workers on one output: files in a common directory record which worker has which rows."""
