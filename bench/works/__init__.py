"""Works of ours that `xformer bench` does not have, beside those in xformer/benchmarks."""
