"""The records that cross a border between services. Read this file first.

A :class:`Task` is handed to an agent, which works in a pod and samples from the inference service. What it
did is a :class:`Rollout`: a chain of :class:`Segment` objects (one generation context each) that ends in an
:class:`Outcome` and, when verified, a :class:`RewardBreakdown`. The rollouts of one task form a
:class:`RolloutGroup`, the unit the trainer consumes.

All records are frozen. Those that travel over HTTP or rest on disk are pydantic models, so that
``model_dump_json`` / ``model_validate_json`` are their wire form. No torch here.
"""

from __future__ import annotations

import base64
from enum import StrEnum
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

PolicyVersion = int
"""The trainer step whose weights sampled, published, loaded, evaluated or saved something; the base is 0."""


class Record(BaseModel):
    """Base of all wire records: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


# --------------------------------------------------------------------------------------- arrays on the wire


def _array_to_wire(array: NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii"),
    }


def _array_from_wire(value: Any) -> Any:
    if isinstance(value, dict):
        raw = base64.b64decode(value["data"])
        return np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    return value


WireArray = Annotated[
    NDArray[Any], BeforeValidator(_array_from_wire), PlainSerializer(_array_to_wire, when_used="json")
]
"""A numpy array that travels in JSON as ``{dtype, shape, data: base64}``."""


# ------------------------------------------------------------------------------------------------- messages


class ToolCall(Record):
    """One call of a tool, as the model wrote it and the codec parsed it.

    Example: ``ToolCall(name="edit", arguments={"path": "lib.py", "change": "    return a - b\\n====\\n    return a + b"})``.
    """

    name: str
    arguments: dict[str, str] = Field(default_factory=dict)
    error: str | None = None
    """Why the call is malformed (unknown tool, missing argument), or None. A malformed call is the model's
    fault: it is answered with this text and counted, never discarded."""


class Message(Record):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    """Visible text: instruction, tool output, or the assistant's words beside its call."""
    thinking: str = ""
    """Private reasoning of the assistant; counted apart in :class:`Effort`."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant message, in order. An assistant message without calls ends the rollout."""


# ----------------------------------------------------------------------------------------------------- tasks


class Category(StrEnum):
    """Task categories of the Composer 2 report (its Fig. 3)."""

    ITERATE = "iterate"
    DEBUGGING = "debugging"
    NEW_FEATURE = "new_feature"
    REFACTOR = "refactor"
    UNDERSTAND = "understand"
    DOCUMENTATION = "documentation"
    TESTING = "testing"
    CODE_REVIEW = "code_review"
    OPTIMISE = "optimise"
    DEVOPS = "devops"
    MIGRATION = "migration"


class TestsVerifier(Record):
    """Reward 1 when ``command`` exits 0 in a fork of the final workspace with ``files`` written over it."""

    __test__ = False  # not a pytest class
    kind: Literal["tests"] = "tests"
    command: str
    """Shell command, run in the workspace."""
    files: dict[str, str] = Field(default_factory=dict)
    """Hidden or pristine test files, path -> content; they overwrite what the agent left there."""


class MutantsVerifier(Record):
    """Reward 1 when the agent's test passes on the code as it is and fails on every mutant.

    Used for the "testing" category: the agent writes tests, so they are judged by what they catch.
    """

    kind: Literal["mutants"] = "mutants"
    command: str
    """Shell command that runs the agent's tests in the workspace; exit 0 = pass."""
    path: str
    """The file that is replaced by each mutant."""
    original: str
    """Its pristine content (restored first, so that the agent cannot win by changing the code)."""
    mutants: tuple[str, ...]
    """Faulty contents of ``path``; each has to make ``command`` fail."""


class AnswerVerifier(Record):
    """Reward 1 when the final message, stripped and case-folded, equals one of ``accepted``."""

    kind: Literal["answer"] = "answer"
    accepted: tuple[str, ...]
    unchanged: bool = True
    """Also require that the workspace was not edited (a question must not change files)."""


Verifier = Annotated[TestsVerifier | MutantsVerifier | AnswerVerifier, Field(discriminator="kind")]


class Limits(Record):
    """What one rollout may use."""

    max_turns: int = 8
    """Assistant messages, summaries not counted."""
    max_sampled_tokens: int = 512
    """Tokens sampled in the whole chain."""
    wall_seconds: float = 120.0
    """From pod creation to the end of verification."""


class Task(Record):
    """A unit of work for the agent. Never trained on twice in a run."""

    id: str
    """Unique and stable: a digest of the content. Example: ``"debugging-3f9a12c4"``."""
    category: Category
    instruction: str
    """What the user asks, verbatim."""
    files: dict[str, str]
    """The workspace the agent starts from, path -> content."""
    verifier: Verifier
    solution: tuple[Message, ...] = ()
    """Assistant messages of a reference solution. Used to check the task; never shown to the model in RL."""
    test_command: str = ""
    """What the ``run`` tool does without arguments."""
    limits: Limits = Limits()
    template: str = ""
    """Template instance this task came from. Held-out tasks share none with training tasks."""
    tags: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------- sampling and rollouts


class SamplingParams(Record):
    """How to sample one completion."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class Completion(Record):
    """What the inference service returns for one token-level request."""

    tokens: tuple[int, ...]
    """Sampled token ids, the stop token included when one was sampled."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each sampled token under the *untempered* distribution of the version that
    sampled it; same length as ``tokens``."""
    versions: tuple[PolicyVersion, ...]
    """Policy version that sampled each token; same length as ``tokens``."""
    experts: WireArray | None = None
    """int16 ``[positions, moe_layers, k]``: routed experts chosen at each context position from
    ``experts_start`` on, up to and excluding the last sampled token (which has not been fed)."""
    experts_start: int = 0
    stop_reason: Literal["stop", "length", "cancelled"]
    cached_tokens: int = 0
    """Prompt positions that were served from the prefix cache."""


class Segment(Record):
    """One generation context: the exact tokens the model saw and wrote, never re-tokenised from text.

    Example with three prompt tokens, two sampled tokens, a tool result of two tokens and one more sample::

        tokens   = (5, 6, 7,   8, 9,   1, 2,   4)
        sampled  = (0, 0, 0,   1, 1,   0, 0,   1)
        logprobs = (.,  .,  .,  -0.1, -0.2, ., ., -0.3)   # 0.0 where not sampled
    """

    tokens: WireArray
    """int32 ``[T]``."""
    sampled: WireArray
    """bool ``[T]``: True for the tokens that the model sampled (the only ones that are trained)."""
    logprobs: WireArray
    """float32 ``[T]``: behaviour logprob (natural log, untempered) of sampled tokens, else 0."""
    versions: WireArray
    """int32 ``[T]``: policy version that sampled the token, else -1."""
    experts: WireArray | None = None
    """int16 ``[T, moe_layers, k]``: experts used when the position was first fed; -1 where unknown (the last
    token of a segment is never fed)."""
    end: Literal["stop", "budget", "summary"]
    """Why it ended: the agent finished, a limit was hit, or a summary opened the next segment."""

    @model_validator(mode="after")
    def _same_length(self) -> Segment:
        length = len(self.tokens)
        for name in ("sampled", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"segment: {name} has {len(getattr(self, name))} entries for {length} tokens")
        if self.experts is not None and len(self.experts) != length:
            raise ValueError(f"segment: experts cover {len(self.experts)} of {length} tokens")
        return self


class Effort(Record):
    """The six inputs of the concave length penalty (spec 4.3); all are counts."""

    thinking_tokens: int = 0
    call_tokens: int = 0
    """Sampled tokens inside tool calls."""
    output_tokens: int = 0
    """Tokens of tool results read by the model."""
    message_tokens: int = 0
    """Sampled tokens of the final message."""
    calls: int = 0
    turns: int = 0


class Outcome(StrEnum):
    """How a rollout ended. Only ``COMPLETED`` and ``MODEL_FAULT`` can reach the gradient."""

    COMPLETED = "completed"
    """The agent finished by itself; the verifier decides."""
    MODEL_FAULT = "model_fault"
    """A real zero: ran out of turns, tokens or time by its own doing."""
    ENVIRONMENT_FAULT = "environment_fault"
    INFERENCE_FAULT = "inference_fault"
    VERIFIER_FAULT = "verifier_fault"
    CANCELLED = "cancelled"

    @property
    def trainable(self) -> bool:
        return self in (Outcome.COMPLETED, Outcome.MODEL_FAULT)


class RewardBreakdown(Record):
    """Named terms; the total is their sum."""

    terms: dict[str, float]
    """Example: ``{"outcome": 1.0, "length": -0.12, "broken_calls": -0.05}``."""

    @property
    def total(self) -> float:
        return float(sum(self.terms.values()))


class Turn(Record):
    """One assistant message and what the tools answered, for people and reports (text, not tokens)."""

    message: Message
    results: tuple[Message, ...] = ()
    segment: int = 0
    """Index of the segment it happened in."""
    is_summary: bool = False


class Rollout(Record):
    """One attempt at a task."""

    id: str
    task_id: str
    category: Category
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    effort: Effort
    outcome: Outcome
    detail: str = ""
    """One line on a fault or limit; empty when there is nothing to say."""
    passed: bool | None = None
    """The verifier's verdict; None when it could not give one."""
    reward: RewardBreakdown | None = None
    verifier_output: str = ""
    events: tuple[str, ...] = ()
    """Names of behaviours noticed by the harness, e.g. ``"malformed_call"``; repeated once per occurrence."""
    snapshot: str | None = None
    """Id of the snapshot of its pod, where one was kept."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall seconds by component: ``inference``, ``tools``, ``verify``, ``total``."""

    @property
    def sampled_tokens(self) -> int:
        return int(sum(int(segment.sampled.sum()) for segment in self.segments))

    @property
    def oldest_version(self) -> PolicyVersion:
        """Version of the oldest sampled token (staleness is counted from it); -1 when nothing was sampled."""
        versions = [int(s.versions[s.sampled].min()) for s in self.segments if s.sampled.any()]
        return min(versions) if versions else -1


class RolloutGroup(Record):
    """All rollouts of one task that train together."""

    task_id: str
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]
    """One per rollout (chain): every sampled token of every segment of the chain gets it."""

    @property
    def oldest_version(self) -> PolicyVersion:
        return min(rollout.oldest_version for rollout in self.rollouts)


# ---------------------------------------------------------------------------------------------------- weights


class WeightFile(Record):
    """One immutable object of a weight version."""

    key: str
    """Key in the object store; content-addressed."""
    sha256: str
    num_bytes: int


class WeightManifest(Record):
    """How to rebuild one policy version. Written last, so that a manifest proves its files exist."""

    version: PolicyVersion
    parent: PolicyVersion | None
    """Version the delta applies to; None for a base."""
    files: tuple[WeightFile, ...]
    content_hash: str
    """Hash of the whole rebuilt state; an engine reports the hash of what it holds."""
    num_tensors: int
    changed_fraction: float
    """Share of stored elements that differ from the parent, 1.0 for a base."""
    epoch: int = 0
    """Fencing epoch of the writer: a manifest of an older epoch than one seen is refused."""


# ----------------------------------------------------------------------------------------------------- pods


class PodLimits(Record):
    """Resource limits of a pod."""

    memory_mb: int = 256
    processes: int = 64
    disk_mb: int = 64
    cpu_seconds: float = 20.0
    """Per command."""
    output_bytes: int = 65536
    """Kept of stdout and stderr together per command; the rest is dropped and ``truncated`` is set."""


class ExecResult(Record):
    """What a command in a pod did."""

    exit_code: int
    """128 + signal when it was killed; 124 when it exceeded its wall limit."""
    output: str
    """stdout and stderr interleaved, decoded as UTF-8 with replacement."""
    seconds: float
    truncated: bool = False
    timed_out: bool = False
