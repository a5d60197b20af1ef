"""Packages that the study trains on, and packages that it never shows."""

# Suites of seconds, and functions whose values can be compared from outside.
TRAINING = (
  *('boltons', 'humanize', 'inflection', 'itsdangerous', 'jsonpointer'),
  *('packageurl-python', 'parse', 'rfc3986', 'schema', 'sqlparse', 'tinydb'),
)
HELD_OUT = ('cachetools', 'semver', 'simpleeval', 'validators', 'webcolors')
