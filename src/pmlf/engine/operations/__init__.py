"""Per-sample gradients taken at operations: wherever a weight meets a value that was computed from the samples."""
