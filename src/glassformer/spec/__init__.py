"""Descriptions of models, tasks and runs as frozen values, with the standard library alone."""
