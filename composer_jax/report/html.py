"""HTML building blocks of the report: no script, no file beside the page.

Everything that enters through these functions is escaped, because much of it
was written by a policy. A content security policy forbids scripts and requests
besides, should an escape ever be forgotten.
"""

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any


class Markup(str):
  """Text that is HTML already; any other text is escaped by `markup`."""

  __slots__ = ()


def markup(value: Any) -> Markup:
  """Returns the value as HTML."""
  if isinstance(value, Markup):
    return value
  return Markup(html.escape(str(value)))


def join(parts: Iterable[Any], separator: str = '') -> Markup:
  return Markup(separator.join(markup(p) for p in parts))


def element(tag: str, *content: Any, **attributes: str) -> Markup:
  """Returns an element; `class_` stands for the attribute `class`."""
  text = ''.join(
    f' {name.rstrip("_")}="{html.escape(str(value))}"'
    for name, value in attributes.items()
  )
  return Markup(f'<{tag}{text}>{join(content)}</{tag}>')


def table(
  rows: Sequence[Sequence[Any]], head: Sequence[Any] = (), *, class_: str = ''
) -> Markup:
  """Returns a table; numbers are aligned to the right."""

  def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

  def cell(value: Any) -> Markup:
    if not is_number(value):
      return element('td', value)
    text = f'{value:,}' if isinstance(value, int) else f'{value:.4g}'
    return element('td', text, class_='number')

  lines = [element('tr', *[cell(value) for value in row]) for row in rows]
  first = rows[0] if rows else [None] * len(head)
  kinds = ['number' if is_number(value) else 'text' for value in first]
  names = zip(head, kinds, strict=True) if head else ()
  top = element('tr', *[element('th', h, class_=k) for h, k in names])
  return element(
    'div',
    element('table', element('thead', top), element('tbody', *lines)),
    class_=f'scroll {class_}'.strip(),
  )


def pairs(values: dict[str, Any]) -> Markup:
  """Returns a table of names and values."""
  return table(
    [(element('b', k), v) for k, v in values.items()], class_='pairs'
  )


def titled(title: str, *content: Any) -> Markup:
  """Returns a part of a section."""
  return element('div', element('h3', title), *content)


def notes(texts: Iterable[str], kind: str = 'note') -> Markup:
  return join(element('p', text, class_=kind) for text in texts)


def details(summary: Any, *content: Any, is_open: bool = False) -> Markup:
  flag = ' open' if is_open else ''
  inner = element('summary', summary) + join(content)
  return Markup(f'<details{flag}>{inner}</details>')


def image(svg: str, alt: str) -> Markup:
  """Returns an SVG as an image, in which nothing of it can run."""
  data = base64.b64encode(svg.encode()).decode()
  return Markup(
    f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'
  )


def not_yet(what: str) -> Markup:
  return element('p', f'{what}: not yet.', class_='absent')


def chip(text: Any, kind: str = '') -> Markup:
  return element('span', text, class_=f'chip {kind}'.strip())


def section(title: str, *content: Any, note: str = '') -> Markup:
  heading = element('h2', title)
  words = element('p', note, class_='note') if note else ''
  return element('section', heading, words, *content)


def document(title: str, *content: Any) -> str:
  """Returns the whole page."""
  policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head>\n'
    f'<body><main>{join(content, chr(10))}</main></body></html>\n'
  )


STYLE = """
:root { --ink: #1c2733; --soft: #5d6b7a; --line: #e3e8ee; --blue: #2563b0;
  --green: #1d7a4f; --red: #b3372f; --amber: #9a6200; --ground: #f5f7fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans',
  sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 27px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 18px 0 6px; color: var(--soft);
  font-weight: 600; }
section, header { background: #fff; border: 1px solid var(--line);
  border-radius: 10px; padding: 20px 22px; margin: 0 0 16px; }
p { margin: 6px 0; }
.note, .absent, .sub { color: var(--soft); font-size: 13.5px; max-width: 78ch; }
.absent { font-style: italic; }
.grid { display: grid; gap: 14px 18px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
.grid.two {
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.grid > div { min-width: 0; }
.grid img { width: 100%; height: auto; display: block; }
.columns { display: grid; gap: 4px 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
.scroll { overflow-x: auto; margin-top: 8px; }
table { border-collapse: collapse; font-size: 13.5px;
  min-width: min(100%, 380px); }
.pairs table { width: 100%; }
th, td { text-align: left; padding: 4px 14px 4px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.pairs td:first-child { width: 1%; white-space: nowrap; }
.pairs b { font-weight: 500; color: var(--soft); }
.pairs td { overflow-wrap: anywhere; }
.chips { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 12px; }
.chip { display: inline-block; padding: 1px 10px; border-radius: 99px;
  background: #edf1f5; color: #3b4a59; font-size: 12.5px; font-weight: 500; }
.good { background: #dff3e8; color: var(--green); }
.bad { background: #fae3e1; color: var(--red); }
.warn { background: #fdf0d9; color: var(--amber); }
.cards { display: grid; gap: 14px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 240px), 1fr)); }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.card .value { font-size: 30px; font-weight: 650; letter-spacing: -0.02em;
  line-height: 1.25; }
.bar { position: relative; height: 10px; border-radius: 5px; margin: 8px 0;
  background: #edf1f5; }
.bar i { position: absolute; top: 0; bottom: 0; border-radius: 5px;
  background: #b9d0ee; }
.bar em { position: absolute; top: -3px; bottom: -3px; width: 3px;
  margin-left: -1px; background: var(--blue); border-radius: 2px; }
details { border: 1px solid var(--line); border-radius: 8px; margin: 8px 0;
  padding: 0 14px; }
details[open] { padding-bottom: 12px; }
summary { cursor: pointer; padding: 8px 0; font-size: 13.5px; }
summary .chip { margin-left: 6px; }
.turn { margin: 10px 0 0; border-left: 3px solid #d5dce4; padding-left: 12px; }
.turn.call { border-color: var(--blue); }
.turn.user { border-color: var(--amber); }
.turn .role { font-size: 12px; font-weight: 600; color: var(--soft); }
.turn pre { margin: 2px 0 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono',
  monospace; max-height: 420px; overflow-y: auto; }
.problem { border-left: 3px solid var(--red); padding-left: 12px;
  color: var(--red); font-size: 13.5px; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""
