"""Commands that run experiments, tabulate them, and score models."""
