"""An engine whose words a test gives, with a real tokenizer and the chat template of a model family."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.engines.answers import RequestRefused
from rollout.engines.bodies import BadRequest
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.engines.embedded.protocol import TokenizeBody
from rollout.engines.embedded.text import TextTokenizer
from rollout.origin import Sampling

MARKS = [
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>"),
    *(
        "<|observation|>",
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|call|>",
        "<|return|>",
    ),
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|tool_response>", "<tool_response|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|observation|>"),
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
GLM45 = (
    "[gMASK]<sop>{% for tool in tools or [] %}<|system|>\n{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% elif m.role == 'assistant' %}"
    "<|assistant|>\n<think></think>{{ '\n' + m.content if m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' + c.function.name }}\n{% for name, value in c.function.arguments | items %}"
    "<arg_key>{{ name }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HARMONY = (  # a result of a tool is refused unless it follows a call
    "{% for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{% endfor %}"
    "{% set last = namespace(call=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if last.call is none %}{{ raise_exception('no previous assistant message with a tool call') }}"
    "{% endif %}<|start|>functions.{{ last.call }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% set last.call = call.name %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary "
    "json<|message|>{{ call.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA4 = (  # results of tools stand in the turn of their calls, and the model goes on with it
    "{% macro value(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v | dictsort %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for w in v %}{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ 'null' if v is none else v | tojson }}{% endif %}{% endmacro %}"
    "<bos>{% for tool in tools or [] %}<|turn>system\n{{ tool | tojson }}<turn|>\n{% endfor %}"
    "{% set seen = namespace(is_open=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% elif m.tool_calls %}{{ '' if seen.is_open else '<|turn>model\n' }}{% for c in m.tool_calls %}"
    "<|tool_call>call:{{ c.function.name }}{{ value(c.function.arguments) }}<tool_call|>{% endfor %}"
    "{% set seen.is_open = false %}{% for r in messages[loop.index:] if r.role == 'tool' %}"
    "{% set seen.is_open = true %}<|tool_response>response:{% for c in m.tool_calls %}"
    "{{ c.function.name if c.id == r.tool_call_id }}{% endfor %}{{ '{value:' + value(r.content) + '}' }}"
    "<tool_response|>{% endfor %}{{ '' if seen.is_open else '<|tool_response>' }}"
    "{% set seen.is_open = true %}"
    "{% else %}{{ '' if seen.is_open and m.role == 'assistant' else '<|turn>' + m.role + '\n' }}"
    "{{ m.content }}<turn|>\n{% set seen.is_open = false %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not seen.is_open %}<|turn>model\n{% endif %}"
).replace("m.role + '\n'", "{'assistant': 'model'}.get(m.role, m.role) + '\n'")
LFM2 = (
    _SYSTEM + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
    "<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for name, value in c.function.arguments | items %}{{ name }}="
    '{{ "\'" + value + "\'" if value is string else value | tojson if value is mapping else value }}'
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>"
    "{% endif %}<|im_end|>\n{% endfor %}" + _ASK
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
        self.texts = TextTokenizer(directory)
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
