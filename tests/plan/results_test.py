"""Kept results of compiled programs: their sums, and what memory counts."""

import json

import pytest

from benchmarks import programs as benchmark
from composer_jax.plan import programs

LINES = [*map(json.loads, benchmark._RESULTS.read_text().splitlines())]


def name_of(line):
  return line['case'].partition(': ')[2]


@pytest.mark.parametrize('line', LINES, ids=name_of)
def test_lines_add_up(line):
  assert name_of(line) in benchmark.names()
  terms = line['terms']
  assert sum(terms.values()) == pytest.approx(line['ours'], abs=0.1)
  assert line['largest'] == max(terms, key=lambda name: terms[name])
  assert line['met'] == (line['ours'] <= line['limit'])


def test_counted_memory_is_the_compilers_within_a_tenth():
  both = {
    name_of(line): line['counted'] / line['ours']
    for line in LINES
    if line['counted']
  }
  assert both
  assert all(0.9 <= ratio <= 1.1 for ratio in both.values()), both


@pytest.mark.slow
def test_kept_counts_are_those_of_today():
  for line in LINES:
    if line['counted'] is None:
      continue
    task = benchmark.task_of(name_of(line))
    today = benchmark.need_of(task).total / 2**30
    assert today == pytest.approx(line['counted'], abs=0.01)


def test_the_table_has_a_row_for_each_program():
  rows = benchmark.table(LINES).splitlines()
  assert len(rows) == len(LINES) + 2
  for line, row in zip(LINES, rows[2:], strict=True):
    assert row.count('|') == 8
    assert name_of(line).rpartition('-')[2] in programs.NAMES
    assert ('**no**' in row) == (not line['met'])
