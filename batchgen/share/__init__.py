"""Any number of workers on one output: who has which rows, told by files in a common directory."""
