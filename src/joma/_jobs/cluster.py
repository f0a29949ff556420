"""A Ray cluster: joined, or started on this machine for as long as it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Ray's module, with the cluster at ``address`` joined, or with one started here without."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("engine='ray' needs Ray: pip install 'joma[ray]'") from error

    started = not ray.is_initialized()
    if started:
        options = {"address": address} if address else {"include_dashboard": False}
        ray.init(log_to_driver=False, **options)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


@contextmanager
def ray_backend(address: str | None) -> Iterator[None]:
    """joblib on a Ray cluster, as `cluster` finds or starts it."""
    from joblib import parallel_backend

    with cluster(address):
        from ray.util.joblib import register_ray

        register_ray()
        with parallel_backend("ray"):
            yield
