"""What every package says: errors, units, requests, hardware, plans."""
