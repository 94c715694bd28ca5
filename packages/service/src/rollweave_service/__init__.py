"""Rollouts as a service: the HTTP API, its clients, and adapters to other trainers.

The public interface is the names of `__all__`, and what the pages in docs/ and the
examples import from the modules of `adapters`; every other name may change between
versions.
"""

from rollweave_service.client import RolloutClient, Rollouts
from rollweave_service.messages import EngineRequest, MemberStatus, RolloutRequest

__all__ = ["EngineRequest", "MemberStatus", "RolloutClient", "RolloutRequest", "Rollouts"]
