"""Runs as data (`spec`) and what carries them out (`runner`)."""
