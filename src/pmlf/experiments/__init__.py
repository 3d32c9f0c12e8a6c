"""Runs as data (`spec`), what carries them out (`runner`) and what a terminal shows of them (`display`)."""
