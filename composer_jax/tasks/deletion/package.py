"""Makes tasks of a package: deletes tested features and proves each deletion.

A task is kept only if the package still imports, the tests of the feature
fail, others pass, the original passes all of them, and no copy of the deleted
code is left in what the agent sees. All code of the package runs in the
sandbox; a package that resists in whatever way is refused by name, and so the
making of a set goes on.

Everything but seconds is a function of the package, the options and the seed.
"""

from collections.abc import Callable
from typing import Any

from composer_jax.sandbox import base
from composer_jax.tasks.deletion import baseline, proof, workspace
from composer_jax.tasks.deletion import candidates as deletion_candidates
from composer_jax.tasks.repository import task_set

VALID = 'valid'


def make(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  options: workspace.Options,
  ledger: Any,
  save: Callable[[task_set.RepositoryTask], None],
  progress: Callable[[str], None],
) -> dict[str, Any]:
  """Makes the tasks of a package.

  Args:
    sandbox: with images of the set's folder.
    ledger: what is known of candidates, a `factory.CandidateLog`.
    save: called with each task before the ledger knows of it.
    progress: called with a line now and then.

  Returns:
    Facts of the package: tests, and what became of candidates by tier.

  Raises:
    sdists.Refused: there can be no task; see `baseline`.
  """
  found = baseline.baseline(sandbox, work, options)
  progress(
    f'{len(found.stable)} tests, {len(found.unstable)} unstable, '
    f'{len(found.hashed)} that depend on hashes, '
    f'{len(found.failing)} that never pass, {found.seconds:.1f} s a run'
  )
  results: dict[str, dict[str, int]] = {}
  for tier in task_set.TIERS:
    wanted = options.wanted(tier)
    counts: dict[str, int] = {}
    candidates = deletion_candidates.candidates(
      work.texts,
      found.mapped,
      tier,
      max_share=options.max_share,
      seed=f'{options.seed}/{work.pin.normal_name}',
    )
    for candidate in candidates[: round(wanted * options.tries)]:
      if counts.get(VALID, 0) >= wanted:
        break
      result = ledger.get(candidate.key)
      if result is None:
        result = VALID
        try:
          save(proof.attempt(sandbox, work, found, candidate, options))
        except proof.Rejected as rejected:
          result = rejected.args[0]
        ledger.add(candidate.key, result)
      counts[result] = counts.get(result, 0) + 1
    results[tier] = counts
    tried = sum(counts.values())
    progress(f'{tier}: {counts.get(VALID, 0)} of {tried} tried, {counts}')
  return {
    'tests': len(found.stable),
    'unstable': len(found.unstable),
    'hashed': len(found.hashed),
    'failing': len(found.failing),
    'dropped_files': len(work.dropped),
    'candidates': results,
  }
