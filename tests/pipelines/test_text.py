"""Generic text encoding: lengths, padding, pooling, and what is refused."""

import logging

import pytest
import torch
from torch import nn

from mmpreproj.pipelines.text import encode_text, negative_prompts


def encode(bert, prompts, length=8):
    with torch.no_grad():
        return encode_text(*bert, prompts, max_sequence_length=length, device="cpu")


def test_length_is_the_smaller_of_the_limit_and_the_tokenizers_own(make_bert):
    assert encode(make_bert(length=8), ["red apple"], 16)[0].shape == (1, 8, 24)
    assert encode(make_bert(length=8), ["red apple"], 5)[0].shape == (1, 5, 24)


def test_padding_is_zero_and_the_pooled_embedding_is_the_mean_of_the_rest(make_bert):
    embeds, pooled = encode(make_bert(), ["red apple", "green"])
    for row, tokens in enumerate((4, 3)):  # words, and one special token at each end
        assert embeds[row, tokens:].abs().max() == 0
        assert embeds[row, :tokens].abs().min() > 0
        torch.testing.assert_close(pooled[row], embeds[row, :tokens].mean(dim=0))


def test_padding_does_not_change_what_a_prompt_means(make_bert):
    (short, pooled_short), (long, pooled_long) = (encode(make_bert(), ["red apple"], n) for n in (4, 8))
    torch.testing.assert_close(long[:, :4], short)
    torch.testing.assert_close(pooled_long, pooled_short)


def test_a_prompt_does_not_depend_on_its_batch(make_bert):
    together, apart = encode(make_bert(), ["red apple", "green tree heart"]), encode(make_bert(), ["red apple"])
    torch.testing.assert_close(together[0][:1], apart[0])


def test_embeddings_come_in_the_encoders_dtype(make_bert):
    encoder, tokenizer = make_bert()
    embeds, pooled = encode((encoder.bfloat16(), tokenizer), ["red apple"])
    assert embeds.dtype == pooled.dtype == torch.bfloat16


def test_the_text_that_is_cut_off_is_named(make_bert, caplog):
    with caplog.at_level(logging.WARNING):
        encode(make_bert(), ["red apple", "red apple green tree"], 4)
    assert len(caplog.records) == 1 and "'green tree'" in caplog.text and "4 tokens" in caplog.text


def test_a_prompt_that_just_fits_is_no_warning(make_bert, caplog):
    with caplog.at_level(logging.WARNING):
        encode(make_bert(), ["red apple"], 4)
    assert not caplog.records


def test_length_is_kept_with_the_tokenizer(make_bert, tmp_path):
    encoder, tokenizer = make_bert(length=6)
    tokenizer.save_pretrained(tmp_path)
    assert encode((encoder, type(tokenizer).from_pretrained(tmp_path)), ["red"], 16)[0].shape[1] == 6


@pytest.mark.parametrize("prompts", ["red apple", [], None, 3])
def test_prompts_that_are_no_list_are_refused(make_bert, prompts):
    with pytest.raises(TypeError, match="prompts must be a non-empty list of strings"):
        encode(make_bert(), prompts)


def test_a_prompt_that_is_no_string_is_named(make_bert):
    with pytest.raises(TypeError, match="prompt 1 must be a string; got 3"):
        encode(make_bert(), ["red", 3])


def test_a_length_of_zero_is_refused(make_bert):
    with pytest.raises(ValueError, match="must be at least 1; got 0"):
        encode(make_bert(), ["red"], 0)


def test_a_length_beyond_the_encoders_positions_is_refused(make_bert):
    with pytest.raises(ValueError, match=r"padded to 40 tokens, but BertModel has 32 positions"):
        encode(make_bert(length=64), ["red"], 40)


def test_a_tokenizer_that_cannot_pad_is_refused(make_bert):
    encoder, tokenizer = make_bert()
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="no pad token"):
        encode((encoder, tokenizer), ["red"])


def test_an_encoder_without_hidden_states_is_refused(make_bert):
    class Wordless(nn.Module):
        def forward(self, input_ids, attention_mask):
            return input_ids

    with pytest.raises(TypeError, match="Wordless gives no last_hidden_state"):
        encode((Wordless(), make_bert()[1]), ["red"])


def test_negative_prompts_are_one_a_prompt():
    assert negative_prompts(None, prompt=["a", "b"], batch_size=2) == ["", ""]
    assert negative_prompts("x", prompt=["a", "b"], batch_size=2) == ["x", "x"]
    assert negative_prompts(["x", "y"], prompt=["a", "b"], batch_size=2) == ["x", "y"]


def test_negative_prompts_of_another_kind_or_number_are_refused():
    with pytest.raises(ValueError, match="3 entries for 2 prompts"):
        negative_prompts(["x", "y", "z"], prompt=["a", "b"], batch_size=2)
    with pytest.raises(TypeError, match="a string like prompt"):
        negative_prompts(["x"], prompt="a", batch_size=1)
    with pytest.raises(TypeError, match="a string or a list of strings"):
        negative_prompts(3, prompt=["a"], batch_size=1)
