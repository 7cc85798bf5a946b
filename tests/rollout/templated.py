"""An engine whose words a test gives, with a real tokenizer and the chat template of a model family."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.engines.bodies import BadRequest
from rollout.engines.client import Completion, EngineClient, RequestRefused, Sampling
from rollout.engines.embedded.protocol import TokenizeBody
from rollout.engines.embedded.text import Texts

MARKS = [
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>"),
]
_SYSTEM = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
_RESULT = (
    "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% else %}"
)
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN3 = (  # the reasoning of earlier turns is dropped, the last turn gets an empty one
    _SYSTEM + "{% for m in messages %}" + _RESULT + "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    + _ASK
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
QWEN35 = (
    _SYSTEM
    + "{% for m in messages %}"
    + _RESULT
    + "<|im_start|>{{ m.role }}\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ c.function.name }}>\n{% for name, value in c.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    + _ASK
    + "{% if add_generation_prompt %}<think>\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if loop.first %}{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('only single tool-calls') }}"
    '{% endif %}{% set call = m.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": '
    "{{ call.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (  # tools come before the last user's message
    "<s>{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == last.user %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('call IDs must have length 9') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}CALLS</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL3 = _MISTRAL.replace(
    "CALLS",
    '[TOOL_CALLS][{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
    '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]',
)
MISTRAL11 = _MISTRAL.replace(
    "CALLS",
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}",
)
PYTHONIC = QWEN35.replace("<tool_call>\n<function={{ c.function.name }}>", "{{ c.function.name }}()")


def make_tokenizer(template: str, *texts: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the merges that the templates' own text invites."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=MARKS, show_progress=False
    )
    raw.train_from_iterator([*texts, QWEN3, LLAMA3] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, chat_template=template, clean_up_tokenization_spaces=False
    )


class TemplatedClient(EngineClient):
    """Says one line after the other, special tokens included, and tokenises as the embedded engine does."""

    def __init__(self, directory: Path, template: str, *lines: str) -> None:
        super().__init__("http://127.0.0.1:1")
        self.tokenizer = make_tokenizer(template)
        self.tokenizer.save_pretrained(directory)
        self.texts = Texts(directory)
        self.lines = list(lines)

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        ids = self.tokenizer.encode(self.lines.pop(0), add_special_tokens=False)
        said = ids[: sampling.max_tokens]
        text = str(self.tokenizer.decode(said, skip_special_tokens=True))
        reason = "stop" if len(said) == len(ids) else "length"
        return [Completion(list(prompt), said, [-0.5] * len(said), text, reason)]

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        try:
            return self.texts.tokenize(TokenizeBody.model_validate(body))
        except BadRequest as error:
            raise RequestRefused(f"400: {error}") from error

    async def detokenize(self, token_ids: Any) -> str:
        return self.texts.detokenize(token_ids)
