"""A provider of environments for Harbor's own runner: boxes without Docker.

  harbor run -p FOLDER -a oracle --ek bases=python:3.* \\
      --env composer_jax.tasks.harbor.provider:BoxEnvironmentProvider

It runs where Harbor does (Python 3.12) and needs no privileges, no images and
no network. Commands start in a fresh process tree and none outlives its call:
agents that keep a program running between calls do not work here, and neither
does what is written to /tmp.
"""

import asyncio
import contextlib
import fnmatch
import pathlib
import shlex
from typing import Any

from harbor.environments import base as harbor
from harbor.environments import capabilities as harbor_capabilities

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandboxes
from composer_jax.tasks.harbor import folders, prepared, verifier

_DAY_S = 24 * 3600.0
_KEEP = (*verifier.KEEP, 'tests/.keep', 'solution/.keep')


class BoxEnvironmentProvider(harbor.BaseEnvironment):
  """Implements the nine methods of Harbor's `BaseEnvironment` by a box."""

  def __init__(self, *args: Any, bases: str = '', **kwargs: Any):
    """Reads the task's environment; bases are patterns apart by commas."""
    self._bases = tuple(part for part in bases.split(',') if part)
    self._sandbox: base.Sandbox | None = None
    self._box: base.Box | None = None
    super().__init__(*args, **kwargs)

  @staticmethod
  def type() -> str:
    return 'composer_jax_box'

  @property
  def capabilities(self) -> harbor_capabilities.EnvironmentCapabilities:
    return harbor_capabilities.EnvironmentCapabilities(disable_internet=True)

  @classmethod
  def resource_capabilities(cls) -> Any:
    return harbor_capabilities.EnvironmentResourceCapabilities(
      memory_limit=True, cpu_limit=True
    )

  def _validate_definition(self) -> None:
    """Raises folders.TaskRefused for what needs more than a box."""
    config = self.task_env_config
    asks = 'network_mode' in config.model_fields_set
    if asks and config.network_mode.value != 'no-network':
      raise folders.TaskRefused(
        'network', 'The task asks for the network, which no box has.'
      )
    if config.healthcheck or config.mcp_servers:
      raise folders.TaskRefused(
        'service',
        'The task needs a service, and in a box none goes on running.',
      )
    table = {'docker_image': config.docker_image, 'workdir': config.workdir}
    self._place = prepared.read(
      pathlib.Path(self.environment_dir), table, self._bases
    )

  async def start(self, force_build: bool) -> None:
    await asyncio.to_thread(self._open)

  def _open(self) -> None:
    memory_mb = self.task_env_config.memory_mb or 2048
    cores = self.task_env_config.cpus or 1
    limits = base.Limits(
      wall_s=_DAY_S,
      cpu_s=_DAY_S * cores,
      memory_bytes=memory_mb << 20,
      processes=512,
      file_bytes=1 << 30,
      output_bytes=16 << 20,
    )
    tops = {*self._place.root_folders, 'installed-agent', 'runtime'}
    self._folders = tuple(sorted(tops))
    self._sandbox = sandboxes.open_sandbox(
      'auto', limits, packages=self._place.packages, folders=self._folders
    )
    contents = {**self._place.files, **dict.fromkeys(_KEEP, b'')}
    self._box = self._sandbox.open('', contents)

  async def stop(self, delete: bool) -> None:
    with contextlib.ExitStack() as stack:
      if self._sandbox is not None:
        stack.callback(self._sandbox.close)
      if self._box is not None:
        stack.callback(self._box.close)
    self._sandbox = self._box = None

  def _path(self, path: str) -> tuple[base.Box, str]:
    """Returns the box, and an absolute path relative to its workspace."""
    assert self._box is not None, 'the environment was not started'
    parts = folders.inside(str(path), 'path')
    if parts[0] == 'work':
      parts = parts[1:]
    elif parts[0] not in self._folders:
      raise ValueError(
        f'/{parts[0]} does not last in a box; use one of '
        f'{", ".join(f"/{name}" for name in self._folders)}.'
      )
    return self._box, '/'.join(parts)

  async def upload_file(
    self, source_path: pathlib.Path | str, target_path: str
  ) -> None:
    box, path = self._path(target_path)
    data = folders.read_bytes(pathlib.Path(source_path))
    await asyncio.to_thread(box.write, path, data)

  async def upload_dir(
    self, source_dir: pathlib.Path | str, target_dir: str
  ) -> None:
    contents = folders.read_tree(pathlib.Path(source_dir))
    for name, data in contents.items():
      box, path = self._path(f'{target_dir}/{name}')
      await asyncio.to_thread(box.write, path, data)

  async def download_file(
    self, source_path: str, target_path: pathlib.Path | str
  ) -> None:
    box, path = self._path(source_path)
    data = await asyncio.to_thread(box.read, path, folders.MAX_FILE)
    target = pathlib.Path(target_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)

  async def download_dir(
    self, source_dir: str, target_dir: pathlib.Path | str
  ) -> None:
    await self.download_dir_with_exclusions(
      source_dir=source_dir, target_dir=target_dir, exclude=[]
    )

  async def download_dir_with_exclusions(
    self, *, source_dir: str, target_dir: pathlib.Path | str, exclude: list[str]
  ) -> None:
    """Harbor's own packs an archive in /tmp, which does not last here."""
    box, folder = self._path(source_dir)
    pathlib.Path(target_dir).mkdir(parents=True, exist_ok=True)
    for path in await asyncio.to_thread(box.files, folder):
      name = path.removeprefix(f'{folder}/')
      # Patterns are tar's: of the whole name, or of one part of it.
      if not any(
        fnmatch.fnmatchcase(part, pattern)
        for pattern in exclude
        for part in (name, *name.split('/'))
      ):
        # No path that a box lists holds '..'.
        target = pathlib.Path(target_dir, name)
        await self.download_file(f'/work/{path}', target)

  async def exec(
    self,
    command: str,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    timeout_sec: int | None = None,
    user: str | int | None = None,
  ) -> harbor.ExecResult:
    """Runs a command as the box's only user, whoever is asked for."""
    assert self._box is not None, 'the environment was not started'
    place = cwd or '/' + '/'.join(self._place.workdir)
    folder = self._path(place)[1]
    script = f'mkdir -p {shlex.quote(folder)} && cd {shlex.quote(folder)}'
    variables = {**self._place.environment, **(self._merge_env(env) or {})}
    result = await asyncio.to_thread(
      self._box.run,
      base.Command(
        argv=('/bin/bash', '-c', f'{script} && eval "$1"', 'bash', command),
        environment=variables,
        wall_s=float(timeout_sec or _DAY_S),
      ),
    )
    if result.status == 'infrastructure':
      raise base.SandboxLost(result.error)
    if result.status == 'timeout':
      raise RuntimeError(f'Command timed out after {timeout_sec} seconds')
    code = 137 if result.exit_code is None else result.exit_code
    return harbor.ExecResult(stdout=result.output, stderr='', return_code=code)
