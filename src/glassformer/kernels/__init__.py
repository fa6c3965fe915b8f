"""Matrix products of few rows and of small integers: torch's routines and a C file of our own."""
