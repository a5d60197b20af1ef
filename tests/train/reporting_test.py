"""What a line says of speed."""

import types

import jax

from composer_jax.train import reporting


def test_a_device_of_unknown_peak_has_a_speed_and_no_mfu(monkeypatch):
  def read(platform, device_kind):
    device = types.SimpleNamespace(platform=platform, device_kind=device_kind)
    monkeypatch.setattr(jax, 'devices', lambda: [device])
    speed = reporting.Speed(1e6)
    speed.add(10)
    assert speed.read() == {}
    speed.add(10)
    return speed.read()

  assert read('gpu', 'NVIDIA L40S').keys() == {'tokens_per_s'}
  for device in (('gpu', 'NVIDIA L4'), ('cpu', 'cpu')):
    found = read(*device)
    assert found['tokens_per_s'] > 0 and found['mfu'] > 0
