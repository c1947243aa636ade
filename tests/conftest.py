"""Small real models and inputs that every test may use; nothing here needs a network."""

import copy
import gc
import io
import os
import pickle
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so before everything else

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn

import mmpreproj

torch.set_num_threads(1)  # tiny models: more threads only wait for each other
# Shells start jobs in the background with this signal ignored, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

STYLES = ("sd3", "sd35")


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.fixture(autouse=True, scope="session")
def imports_and_tests_kept() -> Iterator[None]:
    """Keep what was imported and collected out of every garbage collection: runs ask for one, and it is half a second.

    Hundreds of thousands of objects would be looked at each time, and none of them goes before the end.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test choose its precision, which accelerate keeps for a whole process; on the CPU everywhere."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def same_attention_backend() -> Iterator[None]:
    """Put back what `set_attention_backend` chooses for the whole process."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry.set_active_backend(before)


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    """`"sd3"`, or `"sd35"`: dual attention in the first block and RMS-normed queries and keys."""
    return request.param


@pytest.fixture
def make_transformer() -> Callable[..., SD3Transformer2DModel]:
    """Build a tiny SD3 transformer in eval mode: width 32, two blocks, the same weights for the same seed."""

    def make(style: str = "sd3", *, seed: int = 0, **overrides: Any) -> SD3Transformer2DModel:
        config: dict[str, Any] = {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 20,
            "pos_embed_max_size": 8,
        }
        if style == "sd35":
            config |= {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return SD3Transformer2DModel(**(config | overrides)).eval()

    return make


@pytest.fixture
def transformer(make_transformer: Callable[..., SD3Transformer2DModel], style: str) -> SD3Transformer2DModel:
    """A tiny transformer, once in each style."""
    return make_transformer(style)


@pytest.fixture
def make_inputs() -> Callable[..., dict[str, Tensor]]:
    """Build a batch of two for the tiny transformers: 8×8 latents, five text tokens."""

    def make(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = {
            "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
            "encoder_hidden_states": torch.randn(2, 5, 24, generator=generator),
            "pooled_projections": torch.randn(2, 20, generator=generator),
            "timestep": torch.tensor([100.0, 700.0]),
        }
        return {key: value.to(dtype) for key, value in inputs.items()}

    return make


@pytest.fixture
def predict(make_inputs: Callable[..., dict[str, Tensor]]) -> Callable[[nn.Module], Tensor]:
    """Run a tiny transformer on the fixed batch in its own dtype, without gradients."""

    def run(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(**make_inputs(next(model.parameters()).dtype), return_dict=False)[0]

    return run


@pytest.fixture
def shake() -> Callable[..., None]:
    """Set an adapter's weights to a size at which each of its terms matters."""

    def randomise(model: nn.Module, *, std: float = 0.2, seed: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in mmpreproj.parameters(model):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    return randomise


@pytest.fixture(params=[copy.deepcopy, through_pickle, through_torch_save], ids=["deepcopy", "pickle", "torch.save"])
def duplicate(request: pytest.FixtureRequest) -> Callable[[nn.Module], nn.Module]:
    """Copy a model whole, in each way there is."""
    return request.param


class Snapshot:
    """Everything of a model that patching must not leave changed: values, identities, flags and hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {key: value.clone() for key, value in model.state_dict().items()}
        self.buffers = {key: value.clone() for key, value in model.named_buffers()}
        self.structure = {
            "keys": list(model.state_dict()),
            "parameters": [(key, id(value), value.requires_grad) for key, value in model.named_parameters()],
            "buffers": [(key, id(value)) for key, value in model.named_buffers()],
            "modules": [(path, id(module), module.training) for path, module in model.named_modules()],
            "hooks": {path: self._hooks(module) for path, module in model.named_modules()},
        }

    @staticmethod
    def _hooks(module: nn.Module) -> dict[str, Any]:
        names = ("_forward_pre_hooks", "_forward_hooks")
        flags = (*(f"{name}_with_kwargs" for name in names), "_forward_hooks_always_called")
        backward = ("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
        return {name: dict(getattr(module, name)) for name in (*names, *flags, *backward)}

    def check(self, model: nn.Module) -> None:
        """Fail unless the model is as it was, bit for bit."""
        now = Snapshot(model)
        for part, expected in self.structure.items():
            assert now.structure[part] == expected, part
        for expected, found in ((self.values, now.values), (self.buffers, now.buffers)):
            assert all(torch.equal(value, found[key]) for key, value in expected.items())


@pytest.fixture
def snapshot() -> type[Snapshot]:
    """Record a model with `before = snapshot(model)`; later compare with `before.check(model)`."""
    return Snapshot
