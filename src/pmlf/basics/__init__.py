"""What every other package builds on: argument checks, what a batch is, files that are whole or absent."""
