"""Makes tasks by deleting tested features of packages."""
