"""Other libraries' versions of the work in xformer/benchmarks, each run as it is fastest."""
