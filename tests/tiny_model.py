"""A tiny random Llama with a byte-level tokenizer, saved the way a real model is: for collection
tests that need the real loading code and no download."""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def save_tiny_model(folder: Path, *, context_tokens: int = 512, seed: int = 16) -> Path:
    """Write model and tokenizer into ``folder`` and return it. Same seed, same weights.

    With seed 16 greedy rows end after 1 to 40 tokens, some at the cap.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", "<think>", "</think>", *alphabet]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<think>", "</think>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context_tokens,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.6,  # wide enough that greedy decoding does not stick to one token
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
