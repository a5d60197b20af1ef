"""Sandboxes of this machine: namespaces, cgroups and plain processes."""
