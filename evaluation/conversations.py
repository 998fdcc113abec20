"""Conversations of the user's turns and the target's own answers, recorded as texts: one a turn.

A second turn's prompt holds the first answer, so texts are written turn by turn, all prompts of a turn together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.sampling import SamplingParameters
from evaluation.prompts import Prompt
from evaluation.texts import Request, TargetText, write_texts
from modeling.chat import ChatFormat
from modeling.target import TargetRunner

FIRST_SEED = 1000


@dataclass(frozen=True)
class Writer:
    """The target, and the limits of its answers. `batch_size`: answers that are written together."""

    runner: TargetRunner
    chat: ChatFormat
    first_decoder_layer: int
    max_tokens: int
    max_prompt_tokens: int
    batch_size: int = 8

    def write(self, prompts: Sequence[Prompt], temperature: float, first_number: int = 0) -> list["Conversation"]:
        """Answer all turns of all prompts. The seed of a prompt is its number, so it does not depend on the others."""
        found = [Conversation(prompt, first_number + index, []) for index, prompt in enumerate(prompts)]
        for turn in range(max((len(prompt.turns) for prompt in prompts), default=0)):
            going = [
                (conversation, token_ids)
                for conversation in found
                if turn < len(conversation.prompt.turns) and len(conversation.texts) == turn
                if len(token_ids := self._prompt(conversation)) <= self.max_prompt_tokens
            ]
            requests = [
                Request(token_ids, SamplingParameters(temperature, seed=FIRST_SEED + conversation.number))
                for conversation, token_ids in going
            ]
            written = write_texts(
                self.runner,
                requests,
                self.max_tokens,
                self.chat.stop_token_ids,
                self.first_decoder_layer,
                self.batch_size,
            )
            for (conversation, _), text in zip(going, written, strict=True):
                conversation.texts.append(text)
        return found

    def _prompt(self, conversation: "Conversation") -> list[int]:
        answers = [self.chat.decode(text.response_token_ids) for text in conversation.texts]
        said = [part for pair in zip(conversation.prompt.turns, answers, strict=False) for part in pair]
        return self.chat.encode(conversation.prompt.turns[len(answers)], said)


@dataclass(frozen=True)
class Conversation:
    """A prompt and its texts, one a turn; fewer where a turn's prompt became too long."""

    prompt: Prompt
    number: int
    texts: list[TargetText]
