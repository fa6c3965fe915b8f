"""The work of each verb, in a module of the same name."""
