"""What every other package builds on: argument checks, batches, and files that are written whole or not at all."""
