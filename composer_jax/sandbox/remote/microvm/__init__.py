"""A sandbox in a machine of its own: QEMU and what it boots."""
