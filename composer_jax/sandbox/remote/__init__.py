"""Sandboxes elsewhere: their protocol, micro VMs and Ray actors."""
