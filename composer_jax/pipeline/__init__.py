"""The asynchronous loop: buffer, controller and workers."""
