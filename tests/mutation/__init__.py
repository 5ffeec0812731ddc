"""Mutants: small faults that are put into lines of the library that have changed, for the tests to find."""
