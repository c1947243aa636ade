"""Remember which transformer a pipeline loaded its adapter onto, and notice when another one stands in its place."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import nn

from mmpreproj.patching.lookup import is_patched, unwrap


class AdapterOrigin:
    """The folder of a pipeline's adapter and, held weakly, the transformer that it was loaded onto.

    A copied or pickled pipeline remembers its own copy of the transformer.
    """

    def __init__(self, transformer: nn.Module | None, folder: Path) -> None:
        self.folder = folder
        self._transformer = None if transformer is None else weakref.ref(unwrap(transformer))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by the transformer itself, which stands in the pipeline's copy as well."""
        return type(self), (self._transformer and self._transformer(), self.folder)

    def check(self, transformer: nn.Module) -> None:
        """Refuse a transformer that is another object and carries no adapter.

        Taking the adapter off the transformer that it was loaded onto is deliberate, and no error.

        Raises:
            ValueError: naming the adapter's folder and the ways out.
        """
        bare = unwrap(transformer)
        if is_patched(bare) or (self._transformer is not None and bare is self._transformer()):
            return
        raise ValueError(
            f"this pipeline was loaded with the adapter in {self.folder}, but the {type(bare).__name__} that is its "
            "transformer now was put in afterwards and carries none. Put it on with mmpreproj.load(pipe.transformer, "
            f"{str(self.folder)!r}) or, to go on without it, make the pipeline anew: "
            "PreProjSD3Pipeline(**pipe.components)"
        )
