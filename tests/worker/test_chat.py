"""Conversations become tokens and labels as transformers' own path and TRL's do it, whatever the template's style."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.bundled import austen_llama
from sparsebp_cli.source.column import as_rows
from sparsebp_cli.source.conversation import Conversation, read_conversations
from sparsebp_cli.worker import chat_template
from sparsebp_cli.worker.chat import mark_tokens, write_chats
from sparsebp_cli.worker.chat_encoding import CHAT_CUT, NOTHING_TRAINED, TRAINED_CUT_OFF
from sparsebp_cli.worker.data import IGNORED
from sparsebp_cli.worker.encoding import EncodedSplit
from sparsebp_cli.worker.format import encode

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<a>' }}{% generation %}{{ m.content + '</a>' }}"
    "{% endgeneration %}{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven, I think."},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(austen_llama())
    return found


def talk(messages: Sequence[dict[str, Any]], weights: Sequence[float] = ()) -> Conversation:
    return Conversation("row 1", messages, weights or [1.0] * len(messages))


def trained(
    template: str, messages: Sequence[dict[str, Any]], train_on: Any = "assistant", **weights: Any
) -> list[str]:
    written = write_chats([talk(messages, **weights)], template, {"bos_token": "<s>", "eos_token": "</s>"}, train_on)[0]
    return [written.text[begin:end] for begin, end, weight in written.spans if weight]


def make(rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any) -> EncodedSplit:
    section = DatasetSection(name="x", **({"format": "chat", "max_seq_length": 512} | options))
    return encode(as_rows(rows, "rows, row"), section, tokenizer)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_ids_and_masks_equal_those_of_transformers_for_every_template_with_marks(
    tokenizer: PreTrainedTokenizerBase, step: int
) -> None:
    compared = 0
    for file in sorted(TEMPLATES.glob("*_training.jinja"))[::step]:
        template = file.read_text()
        # Those that write today's date get another one here, which is the point of a fixed clock.
        if not chat_template.marks_generation(template) or "strftime_now" in template:
            continue
        for messages in (TALK, [SYSTEM, *TALK]):
            options = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
            try:
                wanted = tokenizer.apply_chat_template(messages, **options)
            except Exception:  # a template that takes no system message, or no plain text
                with pytest.raises(DataError, match="the chat template refuses"):
                    trained(template, messages)
                continue
            found = make([{"messages": messages}], tokenizer, chat_template=template, max_seq_length=4096)
            if not any(wanted["assistant_masks"]):
                continue
            example = found.examples[0]
            assert example.input_ids.tolist() == wanted["input_ids"], file.name
            assert (example.labels != IGNORED).astype(int).tolist() == wanted["assistant_masks"], file.name
            compared += 1
    assert compared >= 30 // step


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["Four.<|im_end|>\n", "Seven, I think.<|im_end|>\n"]),
        ((TEMPLATES / "llama3.jinja").read_text(), ["Four.<|eot_id|>", "Seven, I think.<|eot_id|>"]),
        ((TEMPLATES / "gemma.jinja").read_text(), ["Four.<end_of_turn>\n", "Seven, I think.<end_of_turn>\n"]),
        (MISTRAL, ["Four.</s>", "Seven, I think.</s>"]),
        (ZEPHYR, ["Four.</s>\n", "Seven, I think.</s>\n"]),
    ],
    ids=["ChatML", "Llama 3", "Gemma", "Mistral", "Zephyr"],
)
def test_without_marks_what_follows_a_prefix_is_trained(template: str, ends: list[str]) -> None:
    assert trained(template, TALK) == ends
    assert trained(template, TALK, "last") == ends[1:]
    assert trained(template, TALK, weights=[1, 0, 1, 1]) == ends[1:]
    assert "".join(trained(template, TALK, "all")) == write_all(template)


def write_all(template: str) -> str:
    written = write_chats([talk(TALK)], template, {"bos_token": "<s>", "eos_token": "</s>"}, "last")
    return written[0].text


def test_a_refusal_of_the_template_names_the_row_and_its_words() -> None:
    for template, words in (
        ((TEMPLATES / "gemma.jinja").read_text(), "System role not supported"),
        (MISTRAL, "Only user"),
    ):
        with pytest.raises(DataError, match=f"row 1: the chat template refuses the messages: {words}"):
            trained(template, [SYSTEM, *TALK])


def test_a_template_that_strips_earlier_reasoning_is_refused_but_for_the_last() -> None:
    strips = (TEMPLATES / "qwen3.jinja").read_text()
    thinks = [
        dict(m, content=f"<think>\nhm\n</think>\n\n{m['content']}") if m["role"] == "assistant" else m for m in TALK
    ]
    with pytest.raises(
        DataError, match=r"row 1, message 1: the chat template does not show which text to train: .*train_on"
    ):
        trained(strips, thinks)
    assert trained(strips, thinks, "last") == ["<think>\nhm\n</think>\n\nSeven, I think.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(10**9) %}a{% endfor %}", "the chat template refuses the messages: Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too much time or memory"),
        (
            "{{ 10 ** (10 ** 9) }}",
            "too much time or memory|needs more than|refuses",
        ),  # one call, which no signal of Python interrupts
        ("{{ 'a' * 3000000000 }}", "needs more than .* MiB of memory"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages: access to attribute '__class__'"),
        ("{% for m in messages %}", "the chat template is broken: line 1: "),
    ],
)
def test_a_hostile_template_ends_in_one_sentence(template: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    with pytest.raises(DataError, match=reason) as caught:
        trained(template, TALK)
    assert "\n" not in str(caught.value)


WORDS = st.text(st.sampled_from("abé\n <|>{}🙂"), max_size=12)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": WORDS}),
    min_size=1,
    max_size=6,
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(MESSAGES, st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=6, max_size=6)), max_size=25))
def test_random_conversations_have_the_spans_written_out_by_hand(
    cases: list[tuple[list[dict[str, Any]], list[float]]],
) -> None:
    talks = [talk(messages, weights[: len(messages)]) for messages, weights in cases]
    for template, begins, end in ((CHATML, "<|im_start|>{}\n", "<|im_end|>\n"), (MARKED, "<{}>", "")):
        for one, written in zip(talks, write_chats(talks, template, {}, "assistant"), strict=True):
            text, spans = "", []
            for message, weight in zip(one.messages, one.weights, strict=True):
                role = str(message["role"])
                header = "<a>" if template is MARKED and role == "assistant" else begins.format(role)
                tail = "</a>" if template is MARKED and role == "assistant" else end
                text += header
                if role == "assistant":
                    spans.append((len(text), len(text) + len(str(message["content"]) + tail), weight))
                text += str(message["content"]) + tail
            assert (written.text, list(written.spans)) == (text, spans)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of SFTConfig's own defaults
def test_prompts_and_completions_of_messages_equal_the_data_path_of_trl(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = [
        {"prompt": [SYSTEM, TALK[0]], "completion": [TALK[1]]},
        {"prompt": TALK[:3], "completion": [TALK[3]]},
        {"prompt": [TALK[2]], "completion": [TALK[1], TALK[0], TALK[3]]},
    ]
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    own = AutoTokenizer.from_pretrained(austen_llama(), chat_template=CHATML)
    options = trl.SFTConfig(output_dir=str(tmp_path), max_length=512, report_to=[], use_cpu=True, dataset_num_proc=None)
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config), options, train_dataset=Dataset.from_list(rows), processing_class=own
    )
    found = make(rows, tokenizer, format="completion", chat_template=CHATML, max_seq_length=512).examples
    wanted = trainer.train_dataset
    assert len(found) == len(wanted) == 3
    for example, row in zip(found, wanted, strict=True):
        assert example.input_ids.tolist() == row["input_ids"]
        assert example.labels.tolist() == row["labels"]


def test_rows_without_anything_trained_and_cut_ones_are_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    long = {"role": "user", "content": "word " * 300}
    rows = [{"messages": TALK}, {"messages": TALK[:1]}, {"messages": [long, TALK[1]]}, {"messages": [*TALK, long]}]
    found = make(rows, tokenizer, chat_template=CHATML, max_seq_length=256)
    assert found.dropped == {NOTHING_TRAINED: 1, TRAINED_CUT_OFF: 1}
    assert (found.cut, [example.document for example in found.examples]) == ({CHAT_CUT: 1}, [0, 3])


def test_messages_weights_become_weights_of_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    weighed = [dict(message, weight=weight) for message, weight in zip(TALK, (1, 0, 1, 1), strict=True)]
    example = make([{"messages": weighed}], tokenizer, chat_template=CHATML).examples[0]
    last = make([{"messages": TALK}], tokenizer, chat_template=CHATML, train_on="last").examples[0]
    assert example.labels.tolist() == last.labels.tolist()
    assert not example.columns
    weighed = [dict(message, weight=weight) for message, weight in zip(TALK, (1, 0.5, 1, -2), strict=True)]
    example = make([{"messages": weighed}], tokenizer, chat_template=CHATML).examples[0]
    assert set(example.columns["loss_weight"].tolist()) == {0.0, 0.5, -2.0}


def test_other_names_are_read_by_the_mapping_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names[str(m["role"])], "value": m["content"]} for m in TALK]
    mapping = {"messages": "conversations", "role": "from", "content": "value", "user": "human", "assistant": "gpt"}
    wanted = read_conversations(as_rows([{"messages": TALK}], "f, row"), {})[0].messages
    assert read_conversations(as_rows([{"conversations": shared}], "f, row"), mapping)[0].messages == wanted
    alpaca = [
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    columns = {"user": ["instruction", "input"], "assistant": "output"}
    found = [one.messages for one in read_conversations(as_rows(alpaca, "f, row"), columns)]
    assert [[m["content"] for m in one] for one in found] == [["Add.\n\n2 2", "4"], ["Say hi.", "hi"]]
    for rows, words in (
        ([{"conversations": shared}], "no column 'messages'.*format: chat, columns: {messages: conversations, role"),
        (
            alpaca,
            r"to read these columns, give dataset.format: chat, columns: {user: \[instruction, input\], assistant: out",
        ),
        (
            [{"messages": shared}],
            "row 1: column 'messages', message 0: needs the key 'role', got from, value; to read such messages, give",
        ),
        ([{"messages": [{"role": "human", "content": "x"}]}], "unknown role 'human'.*user: human"),
        ([{"messages": "hello"}], "row 1: column 'messages' must contain a list of messages, got 'hello'"),
        ([{"messages": [{"role": "user"}]}], "row 1: column 'messages', message 0: 'content' is missing"),
        ([{"messages": TALK, "tools": "{"}], "column 'tools': not JSON"),
    ):
        with pytest.raises(DataError, match=words):
            make(rows, tokenizer, chat_template=CHATML)


def test_tools_and_their_results_reach_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    messages = [TALK[0], call, {"role": "tool", "content": "4"}, TALK[1]]
    template = (TEMPLATES / "qwen2_5.jinja").read_text()
    for tools in ([tool], json.dumps([tool])):
        example = make(
            [{"messages": messages, "tools": tools}], tokenizer, chat_template=template, max_seq_length=2048
        ).examples[0]
        wanted = tokenizer.apply_chat_template(messages, tools=[tool], chat_template=template, return_dict=True)
        assert example.input_ids.tolist() == wanted["input_ids"]
        assert "<tool_call>" in tokenizer.decode(example.input_ids[example.labels != IGNORED])


def test_a_tokenizer_without_a_template_needs_one(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"the tokenizer has no chat template: give dataset\.chat_template"):
        make([{"messages": TALK}], tokenizer)


def test_a_token_that_overlaps_two_spans_belongs_to_the_first() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (5, 9)]
    assert mark_tokens(offsets, [(1, 3, 1.0), (4, 9, 2.0)]).tolist() == [1.0, 1.0, 2.0, 2.0]
