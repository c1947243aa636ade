"""A tiny random causal language model and a tiny tokenizer, for the tests of scores."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 320
CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "a bird sang in the tree while the cat slept under the table",
    "Question: which animal sings? Answer: the bird sings in the tree",
]


def tiny_llama(seed=0, longest=64, **changes):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        initializer_range=0.3,  # likelihoods that differ
        bos_token_id=0,
        eos_token_id=1,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer(adds_bos=False):
    """Byte-level BPE of a few merges: every text has tokens, and words have several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
