"""Specs, jobs and collectors for tests, built as the mains build them."""

import dataclasses

from composer_jax import wiring
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import stages


def changed(spec, section, **fields):
  """Returns the spec with fields of a system's section replaced."""
  new = dataclasses.replace(spec.systems[section], **fields)
  return dataclasses.replace(spec, systems={**spec.systems, section: new})


def job(spec, workdir, writer, command=()):
  level = spec.systems['sandbox'].level
  systems = wiring.systems_of(spec)
  return jobs.Job(spec, systems, workdir, command, writer, level)


def open_run(spec, workdir, command=(), write_report=None):
  systems = wiring.systems_of(spec)
  if write_report is not None:
    systems = dataclasses.replace(systems, write_report=write_report)
  return jobs.open_run(spec, systems, workdir, list(command))


def collector(spec, tokenizer, runner, **options):
  systems = wiring.systems_of(spec)
  return stages.collector_of(spec, systems, tokenizer, runner, **options)


def tasks(spec, tokenizer, **options):
  return wiring.systems_of(spec).family.tasks(tokenizer, **options)
