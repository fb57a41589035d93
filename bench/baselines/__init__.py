"""Plain versions to compare with."""
