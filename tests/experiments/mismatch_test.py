"""The study's table is of its results, and its README shows that table."""

from composer_jax.telemetry import writer
from experiments.studies.mismatch import analyze


def test_table_and_readme_are_those_of_the_results():
  rows = writer.read(analyze.ROOT / 'results')
  assert len(rows) == 8 and all(r['sampled_tokens'] >= 10_000 for r in rows)
  table = (analyze.ROOT / 'table.md').read_text()
  assert table == analyze.table(analyze.ordered(rows))
  assert table in (analyze.ROOT / 'README.md').read_text()
