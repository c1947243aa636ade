"""The studies of the paper's models, at their true sizes with random weights."""

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from mmpreproj.language.arms import count_parameters, make_arm, on_model
from mmpreproj.language.config import StudyConfig
from mmpreproj.training.config import read_config

SIZES = {
    "probe_pythia160m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "probe_pythia410m": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
}


@pytest.fixture(scope="module", params=["probe_pythia160m", pytest.param("probe_pythia410m", marks=pytest.mark.slow)])
def study(request):
    """A shipped study, and a model of the size that it names."""
    sizes = SIZES[request.param]
    width = sizes["hidden_size"]
    config = GPTNeoXConfig(**sizes, intermediate_size=4 * width, vocab_size=50304, rotary_pct=0.25)
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
        model.gpt_neox.rotary_emb = type(model.gpt_neox.rotary_emb)(config)  # its frequencies are no parameters
    return read_config(request.param, kind=StudyConfig), model


def test_every_arm_goes_onto_the_papers_model(study):
    config, model = study
    width, depth = model.config.hidden_size, model.config.num_hidden_layers
    tokens = torch.arange(12)[None]
    counts = {}
    for name in config.arms:
        with on_model(model, make_arm(name, model, config)) as wrapped, torch.no_grad():
            assert wrapped(tokens).logits.isfinite().all()
            counts[name] = count_parameters(wrapped)
    hidden = 5 * width // 4
    assert counts["pre_projection"] == depth * 2 * width * hidden
    assert counts["skip"] == depth * width**2
    assert counts["pre_projection+skip"] == counts["pre_projection"] + counts["skip"]
    assert counts["lora"] == depth * 8 * (width + 3 * width)  # query_key_value alone
    assert counts["pre_projection+skip+lora"] == counts["pre_projection+skip"] + counts["lora"]
    assert counts["lora_matched"] == pytest.approx(counts["pre_projection+skip"], rel=0.01)
    assert counts["base"] == 0
