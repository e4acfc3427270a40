"""Self-summary (spec 4.6): when the context is full, the model itself writes what the next context starts from.

The request is appended to the *live* context, so that its prefix cache is reused, and the summary is sampled there like any
other message: its tokens are trained with the reward of the whole chain. The next segment opens with prompt, task, summary
and carried state (number of summaries, turns used, files edited).
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.agents.chain import Chain
from etude.agents.prompt import SUMMARY_REQUEST, reopening
from etude.base.records import Message, Task, Turn

_REQUEST = Message(role="user", content=SUMMARY_REQUEST)


def window(chain: Chain) -> int:
    """Tokens that no context of the chain ever exceeds: its budget, the request, and the longest summary."""
    return chain.config.context_budget + len(chain.codec.render_message(_REQUEST)) + chain.config.max_summary + 2


async def summarise(chain: Chain, task: Task, *, limit: int, edited: Sequence[str]) -> None:
    """Have the model sum up the live context in at most ``limit`` tokens and start the next one. Raises InferenceFault.

    A summary is no turn, but reasoning in it counts as reasoning: otherwise it would be a place to think for free.
    """
    chain.show([_REQUEST])
    sampled = await chain.sample(limit)
    chain.costs["thinking_tokens"] += chain.codec.counts(sampled.tokens).thinking
    chain.turns.append(Turn(message=sampled.message, segment=len(chain.segments), is_summary=True))
    messages = reopening(
        task,
        summary_text(sampled.message),
        summaries=chain.num_summaries,
        turns=chain.costs["turns"],
        edited=edited,
    )
    await chain.next_segment(messages)


def summary_text(message: Message) -> str:
    """The words of a summary; one that was written as a call is taken as text all the same."""
    called = [" ".join((call.name, *call.arguments.values())) for call in message.calls]
    return " ".join(part for part in (message.content.strip(), *called) if part)
