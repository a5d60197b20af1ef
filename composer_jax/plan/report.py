"""Tables as text for people and as JSON for programs."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """A title and rows of str, int, float, None, or a tuple of those."""

  title: str
  columns: tuple[str, ...]
  rows: list[tuple[Any, ...]]

  def to_json(self) -> dict[str, Any]:
    rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
    return {'title': self.title, 'rows': rows}

  def to_text(self) -> str:
    """Returns the table with words aligned left and numbers right."""
    cells = [self.columns, *([_text(v) for v in row] for row in self.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [
      any(isinstance(v, int | float) for v in column)
      for column in zip(*self.rows, strict=True)
    ]
    lines = [
      '  '.join(
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(row, widths, numeric, strict=True)
      ).rstrip()
      for row in cells
    ]
    rule = '-' * max(map(len, lines))
    return '\n'.join([self.title, rule, lines[0], rule, *lines[1:]])


def _text(value: Any) -> str:
  if isinstance(value, tuple):
    # Without separators of thousands: commas separate the items.
    return ', '.join('-' if v is None else str(v) for v in value)
  if value is None:
    return '-'
  if isinstance(value, int):
    return f'{value:,}'
  return f'{value:.4g}' if isinstance(value, float) else str(value)
