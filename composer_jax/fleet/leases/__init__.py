"""Groups and leases in the store that carries bundles."""
