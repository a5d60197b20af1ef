"""A flag that would have no effect is refused, in one line."""

import pytest

from tests import programs


@pytest.mark.parametrize(
  'command, message',
  [
    (
      'delta apply --store=s --out=o --key=k --tier=fast --source=x',
      'apply does not take --source, --tier; it takes --key, --out, --run,',
    ),
    ('serve --store=http://host', '--store and --on_swap need --follow; add'),
    ('serve --on_swap=keep', '--store and --on_swap need --follow; add'),
    ('serve --lend --follow', '--lend follows the RL in --store'),
    ('serve --lend --store=x', 'must name the store of a run and a copy'),
    ('serve --key=x', '--key needs --lend; add it'),
    ('fleet --store=x --ray=auto', 'must name the store of a run and a copy'),
    ('fleet --store=x --refill_s=0', 'flag --refill_s=0: 0.0 is not number >='),
    ('serve --stage=sft --follow', "of stage rl, not of 'sft'; leave out"),
    # Of a main whose default config is its own.
    ('live --config.live.steps=0', '--config.live.steps must be an integer of'),
    (
      'plan --transport=a2a --libtpu=folder',
      '--transport, --libtpu can be set with --what=compile alone; --what is '
      "'params'.",
    ),
    (
      'studies.first_loop.run --arms=main,mian',
      "--arms=['main', 'mian']: must be some of main, no_hints, flawless, ",
    ),
    ('studies.hint.run --arms=hnt', "--arms=['hnt']: must be some of hint, "),
  ],
)
def test_flags_without_effect_are_refused(command, message):
  main, *flags = command.split()
  done = programs.run(f'experiments.{main}', *flags)
  assert (done.returncode, done.stdout) == (1, '')
  assert done.stderr.startswith('error: ') and message in done.stderr
  assert done.stderr.count('\n') == 1
