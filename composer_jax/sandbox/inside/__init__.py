"""What runs inside a sandbox: it imports nothing but its own folder."""
