"""The page of a plan shows every table, escapes texts and asks for nothing."""

import re

from composer_jax.plan import report
from composer_jax.report import document


def test_the_page_has_all_tables_and_no_script():
  memory = report.Table(
    title='rl on 8 cpu; bytes of one device',
    columns=('what', 'value', 'remark'),
    rows=[
      ('tokens', 8, ''),
      ('GiB of masters', 1.5, 'held'),
      ('GiB all', 3.0, ''),
    ],
  )
  last = report.Table(
    title='Programs; <b>GiB</b>', columns=('program', 'GiB'), rows=[('rl', 3.0)]
  )
  asked = {
    'what': 'compile',
    'topology': 'cpu:8',
    'program': ['rl'],
    'mesh': '',
  }
  page = document.render('plan.html', tables=[memory, last], asked=asked)
  assert '<script' not in page and not re.search(r'(src|href)=', page)
  assert '&lt;b&gt;GiB&lt;/b&gt;' in page and '<b>' not in page
  # The overview comes first; a bar for each size, of the largest.
  assert page.index('Programs;') < page.index('rl on 8 cpu')
  assert re.findall(r'width: ([\d.]+)%"', page) == ['50.0', '100.0']
  assert page.count('GiB of masters') == 1 and '>tokens<' in page
  assert 'program rl' in page and 'mesh ' not in page.partition('Programs')[0]
