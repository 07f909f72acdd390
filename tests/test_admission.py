"""vllm_hooks.admission: which attempt at a call a request becomes. (Restores: test_capture_resume.py; retries:
test_session.py.)"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from recovery.calls import CallTable
from recovery.model import Request
from recovery.resume import StopRules
from vllm_hooks.admission import Admission

REQUEST = Request(rollout="a", prompt_token_ids=np.array([1, 2], np.int32), sampling={"temperature": 0.0})


def admitted(known: Any) -> Any:
    ledger: Any = SimpleNamespace(get=lambda call_id: known)
    return asyncio.run(Admission(CallTable(), ledger, [], lambda call_ids: {}).admit(REQUEST, StopRules((), 4096)))


def test_a_new_call_is_its_first_attempt() -> None:
    assert admitted(None).attempt == 0


def test_one_that_was_forgotten_and_is_open_in_the_ledger_still_is_another_attempt() -> None:
    """Records of the attempt that the ledger has would be rejected, each of them: its answer would be in no store."""
    call = admitted(SimpleNamespace(ended=None, attempt=3))
    assert call.attempt == 4 and len(call.transcript_ids) == 0
