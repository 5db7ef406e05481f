"""From dense to collaborative, and back."""
