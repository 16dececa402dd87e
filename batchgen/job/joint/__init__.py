"""Several jobs whose rows make one output."""
