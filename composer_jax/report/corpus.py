"""The report's section about the corpus, from its manifest."""

import collections

from composer_jax.report import html, run_data


def corpus(run: run_data.RunData) -> html.Markup:
  """Sums the manifest up: what was kept of which package, what was not."""
  title = 'Corpus'
  if not run.manifest:
    return html.section(title, html.not_yet('Manifest'))
  documents = [d for d in run.manifest['documents'] if isinstance(d, dict)]
  dropped = [d for d in run.manifest['dropped'] if isinstance(d, dict)]
  packages: dict[tuple[str, str], list[int]] = {}
  licences: collections.Counter = collections.Counter()
  for d in documents:
    key = (str(d.get('package', '?')), str(d.get('split', '')))
    size = run_data.number(d.get('num_bytes')) or 0
    total = packages.setdefault(key, [0, 0])
    total[0] += 1
    total[1] += int(size)
    licences[str(d.get('licence') or 'unknown')] += 1
  largest = sorted(packages.items(), key=lambda kv: -kv[1][1])
  num_bytes = sum(v[1] for v in packages.values())
  reasons = collections.Counter(str(d.get('reason', '?')) for d in dropped)
  rows = [[name, split, *total] for (name, split), total in largest]
  head = ('package', 'split', 'files', 'bytes')
  columns = html.element(
    'div',
    html.element(
      'div',
      html.element('h3', 'Licences of the files kept'),
      html.table([[k, v] for k, v in licences.most_common(12)]),
    ),
    html.element(
      'div',
      html.element('h3', 'Files dropped, by reason'),
      html.table([[k, v] for k, v in reasons.most_common()]),
    ),
    class_='columns',
  )
  return html.section(
    title,
    columns,
    html.element('h3', 'Packages'),
    html.table(rows[:12], head),
    html.details(f'All {len(rows)} packages', html.table(rows, head)),
    note=(
      f'{len(documents):,} files kept, {num_bytes / 1e6:.1f} MB, from '
      f'{len({name for name, _ in packages})} packages; '
      f'{len(dropped):,} files dropped.'
    ),
  )
