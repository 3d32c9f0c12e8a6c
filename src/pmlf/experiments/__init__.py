"""Runs as data (`spec`), their execution (`runner`) and their results."""
