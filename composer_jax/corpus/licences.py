"""Names licences from metadata, licence texts and SPDX lines."""

import email
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

UNKNOWN = 'unknown'
_FILE_NAME = re.compile('LICEN[CS]E|COPYING', re.I)
_TEXTS = (
  ('Apache-2.0', r'Apache License\s+Version 2\.0'),
  ('MPL-2.0', r'Mozilla Public License,? (Version|v\.) 2\.0'),
  ('AGPL-3.0', r'GNU AFFERO GENERAL PUBLIC LICENSE'),
  ('LGPL', r'GNU LESSER GENERAL PUBLIC LICENSE'),
  ('GPL', r'GNU GENERAL PUBLIC LICENSE'),
  ('PSF-2.0', r'PYTHON SOFTWARE FOUNDATION LICENSE'),
  ('BSD-3-Clause', r'Neither the names? of'),
  ('BSD-2-Clause', r'Redistributions in binary form must reproduce'),
  ('MIT', r'Permission is hereby granted, free of charge'),
  ('ISC', r'Permission to use, copy, modify, and(/or)? distribute'),
  ('Unlicense', r'released into the public domain'),
)


def of_metadata(metadata: Any) -> str:
  """Reads core metadata: the expression, else a classifier, else the field."""
  expression = metadata.get('License-Expression')
  if expression:
    return expression.strip()
  classifiers = [
    c.split(' :: ')[-1]
    for c in metadata.get_all('Classifier') or ()
    if c.startswith('License ::') and not c.endswith('OSI Approved')
  ]
  if classifiers:
    return ' AND '.join(sorted(classifiers))
  field = (metadata.get('License') or '').strip()
  if field and '\n' not in field and len(field) < 60:
    return UNKNOWN if field.upper() == 'UNKNOWN' else field
  return of_text(field)


def of_text(text: str) -> str:
  text = re.sub(r'\s+', ' ', text)
  for name, pattern in _TEXTS:
    if re.search(pattern, text, re.I):
      return name
  return UNKNOWN


def of_file(text: str) -> str | None:
  """Returns the licence on a file's SPDX line; None without such a line."""
  match = re.search(
    r'SPDX-License-Identifier:[ \t]*([\w.+-]+(?: (?:AND|OR|WITH) [\w.+-]+)*)',
    text[:2000],
  )
  return match[1] if match else None


def of_folder(folder: str | os.PathLike) -> str:
  """Reads the first licence file of a folder."""
  for path in sorted(pathlib.Path(folder).iterdir()):
    if _FILE_NAME.match(path.name) and path.is_file():
      return of_text(path.read_bytes().decode('utf-8', 'replace'))
  return UNKNOWN


def of_sdist(files: Mapping[str, bytes]) -> str:
  """Reads the metadata of an sdist, else the text of its licence files."""
  licence = of_metadata(email.message_from_bytes(files.get('PKG-INFO', b'')))
  for path in sorted(files):
    if licence == UNKNOWN and _FILE_NAME.match(path):
      licence = of_text(files[path].decode('utf-8', 'replace'))
  return licence
