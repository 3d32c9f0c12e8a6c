"""Everything sensitive: how weights are used, per-sample gradients as factors, their norms, the clipped sum."""
