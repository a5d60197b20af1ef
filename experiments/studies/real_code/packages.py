"""Packages that the study trains on, and packages that it never shows."""

# Suites of seconds, and functions whose values can be compared from outside.
TRAINING = (
  *('boltons', 'humanize', 'inflection', 'itsdangerous', 'jsonpointer'),
  *('more-itertools', 'packageurl-python', 'parse', 'rfc3986', 'schema'),
  *('sqlparse', 'tinydb', 'tomlkit', 'toolz', 'voluptuous', 'webencodings'),
  *('xmltodict',),
)
HELD_OUT = (
  *('cachetools', 'isodate', 'semver', 'simpleeval', 'tabulate'),
  *('validators', 'webcolors'),
)
